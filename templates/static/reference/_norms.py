"""Norms of rows, and their gradients, in plain PyTorch.

Statistics and all arithmetic are in fp32, and every result is rounded once; float64 stays float64.
With `zero_centered_gamma` rows are multiplied by the weight plus 1.  What sums up rows has no order
of its own here, as sums of `_steps.column_sum` have none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _steps as steps


def norm_rms(
    a: Tensor, weight: Tensor | None = None, *, eps: float, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """a [..., D] times rstd times weight [D] -> [..., D], and rstd [...] of the mean square."""
    x = steps.wide(a)
    rstd = torch.rsqrt(x.square().mean(dim=-1) + eps)
    y = _scaled(x * rstd.unsqueeze(-1), weight, zero_centered_gamma)
    return y.to(a.dtype), rstd


def norm_layer(
    a: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """a [..., D] less mean, times rstd times weight [D], plus bias [D] -> [..., D], mean, rstd.

    The variance is that of deviations from the mean, which loses nothing to a large mean.
    """
    x = steps.wide(a)
    mean = x.mean(dim=-1)
    deviations = x - mean.unsqueeze(-1)
    rstd = torch.rsqrt(deviations.square().mean(dim=-1) + eps)
    y = _scaled(deviations * rstd.unsqueeze(-1), weight, zero_centered_gamma)
    y = y if bias is None else y + steps.wide(bias)
    return y.to(a.dtype), mean, rstd


def norm_l2(a: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """a [..., D] times rstd -> [..., D], and rstd [...] of the sum of squares."""
    x = steps.wide(a)
    rstd = torch.rsqrt(x.square().sum(dim=-1) + eps)
    return (x * rstd.unsqueeze(-1)).to(a.dtype), rstd


def add_norm_rms(
    a: Tensor,
    add: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of a plus add [..., D], its rstd [...], and the sum, which is rounded before."""
    total = steps.add(a, add)
    y, rstd = norm_rms(total, weight, eps=eps, zero_centered_gamma=zero_centered_gamma)
    return y, rstd, total


def add_norm_layer(
    a: Tensor,
    add: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm of a plus add [..., D], its mean and rstd [...], and the sum, rounded before."""
    total = steps.add(a, add)
    y, mean, rstd = norm_layer(
        total, weight, bias, eps=eps, zero_centered_gamma=zero_centered_gamma
    )
    return y, mean, rstd, total


def norm_grad_rms(
    a: Tensor,
    grad: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    add: Tensor | None = None,
    *,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor]:
    """dx plus add [..., D], and dweight [D]."""
    normed = steps.wide(a) * rstd.unsqueeze(-1)
    dy = _scaled(steps.wide(grad), weight, zero_centered_gamma)
    dx = rstd.unsqueeze(-1) * (dy - normed * (dy * normed).mean(dim=-1, keepdim=True))
    dweight = steps.column_sum(steps.wide(grad) * normed).to(a.dtype)
    return _plus(dx.to(a.dtype), add), dweight


def norm_grad_layer(
    a: Tensor,
    grad: Tensor,
    rstd: Tensor,
    mean: Tensor,
    weight: Tensor | None = None,
    add: Tensor | None = None,
    *,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx plus add [..., D], dweight [D] and dbias [D]."""
    normed = (steps.wide(a) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    dy = _scaled(steps.wide(grad), weight, zero_centered_gamma)
    along = normed * (dy * normed).mean(dim=-1, keepdim=True)
    dx = rstd.unsqueeze(-1) * (dy - along - dy.mean(dim=-1, keepdim=True))
    dweight = steps.column_sum(steps.wide(grad) * normed).to(a.dtype)
    return _plus(dx.to(a.dtype), add), dweight, steps.column_sum(grad)


def norm_grad_l2(a: Tensor, grad: Tensor, rstd: Tensor, add: Tensor | None = None) -> Tensor:
    """dx plus add [..., D]."""
    normed, dy = steps.wide(a) * rstd.unsqueeze(-1), steps.wide(grad)
    dx = rstd.unsqueeze(-1) * (dy - normed * (dy * normed).sum(dim=-1, keepdim=True))
    return _plus(dx.to(a.dtype), add)


def _plus(x: Tensor, add: Tensor | None) -> Tensor:
    """x [..., D] and what is added to it, in fp32, rounded once more."""
    return x if add is None else steps.add(x, add)


def _scaled(x: Tensor, weight: Tensor | None, zero_centered: bool) -> Tensor:
    """x [..., D], widened, times the weight [D], to which 1 is added where it is zero-centred."""
    if weight is None:
        return x
    gamma = steps.wide(weight)
    return x * (gamma + 1 if zero_centered else gamma)
