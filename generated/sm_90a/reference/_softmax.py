"""Softmax over the last dimension, of scaled and masked rows, and its gradient, in plain PyTorch.

A row of which nothing is left, or that is -inf throughout, gives zeros, never NaN: nothing is
attended to.  Its gradient is zero, too, because that reads y alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _steps as steps


def _softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """The softmax of [..., N], rounded to `dtype`; the maximum has no part in the gradient."""
    largest = scores.detach().amax(dim=-1, keepdim=True)
    exponentials = torch.exp(scores - largest.masked_fill(largest == -torch.inf, 0.0))
    total = exponentials.sum(dim=-1, keepdim=True)
    return (exponentials / total.masked_fill(total == 0.0, 1.0)).to(dtype)


def forward_rows(a: Tensor, scale: float) -> Tensor:
    """softmax(scale * a) of [..., N]."""
    return _softmax(steps.wide(a) * scale, a.dtype)


def forward_causal(a: Tensor, scale: float) -> Tensor:
    """The same of [..., S, N], where row s has columns up to s + N - S: the last row has all."""
    queries, columns = a.shape[-2:]
    row = torch.arange(queries, device=a.device).unsqueeze(-1)
    column = torch.arange(columns, device=a.device)
    left_out = column > row + (columns - queries)
    return _softmax((steps.wide(a) * scale).masked_fill(left_out, -torch.inf), a.dtype)


def forward_masked(a: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same of [T, H, S, N], without what mask [T, S, N] is not 0 for."""
    left_out = (mask != 0).unsqueeze(1)
    return _softmax((steps.wide(a) * scale).masked_fill(left_out, -torch.inf), a.dtype)


def forward_biased(a: Tensor, bias: Tensor, scale: float) -> Tensor:
    """softmax(scale * a + bias) of [T, H, S, N], bias [T, S, N]."""
    return _softmax(steps.wide(a) * scale + steps.wide(bias).unsqueeze(1), a.dtype)


def backward(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Gradients a [..., N] of the softmax b [..., N] -> those of what was scaled."""
    dy, y = steps.wide(a), steps.wide(b)
    dot = (dy * y).sum(dim=-1, keepdim=True)
    return (scale * (y * (dy - dot))).to(b.dtype)
