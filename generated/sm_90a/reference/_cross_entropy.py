"""The cross entropy of rows of logits with a target each, and its gradient, in plain PyTorch.

A row whose target is `ignore_index` has loss 0 and no gradient, whatever its logits are.  Any other
target that is no column makes loss and gradient of its row NaN: no device need be waited for to say
so, and no sum over the rows hides it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _steps as steps


def forward(
    a: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Logits a [T, V] and targets [T] -> losses [T], and log(sum(exp(a))) [T].

    A loss is that of the target, with a part `label_smoothing` of it spread over all columns, and
    `z_loss` times the square of the second result, which is 0, too, where the target is ignored.
    """
    x, is_column = steps.wide(a), _is_column(targets, a)
    largest = x.detach().amax(dim=-1, keepdim=True)
    shift = largest.masked_fill(largest == -torch.inf, 0.0)
    lse = shift.squeeze(-1) + torch.exp(x - shift).sum(dim=-1).log()
    hit = x.gather(-1, targets.where(is_column, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1.0 - label_smoothing) * hit.masked_fill(~is_column, torch.nan)
    if label_smoothing:
        loss = loss - label_smoothing * x.mean(dim=-1)
    if z_loss:
        loss = loss + z_loss * lse.square()
    ignored = targets == ignore_index
    return loss.masked_fill(ignored, 0.0), lse.masked_fill(ignored, 0.0)


def backward(
    a: Tensor,
    b: Tensor,
    targets: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Gradients a [T] of the losses of logits b [T, V], whose forward gave lse [T] -> [T, V]."""
    dloss = steps.per_row(a.masked_fill(~_is_column(targets, b), torch.nan))
    factor = 1.0 + 2.0 * z_loss * steps.per_row(lse)
    columns = torch.arange(b.shape[-1], device=b.device)
    hit = (columns == targets.unsqueeze(-1)) * (1.0 - label_smoothing)
    smoothed = label_smoothing / b.shape[-1]
    probabilities = torch.exp(steps.wide(b) - steps.per_row(lse))
    dx = dloss * (factor * probabilities - smoothed - hit)
    return dx.masked_fill((targets == ignore_index).unsqueeze(-1), 0.0).to(b.dtype)


def _is_column(targets: Tensor, logits: Tensor) -> Tensor:
    return (targets >= 0) & (targets < logits.shape[-1])
