"""The logarithm of the sum of each row's exponentials, and its gradient, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _steps as steps


def forward(a: Tensor) -> tuple[Tensor, Tensor]:
    """a [T, N] -> [T], rounded to the type of a, and [T] as it was computed."""
    lse = torch.logsumexp(steps.wide(a), dim=-1)
    return lse.to(a.dtype), lse


def backward(a: Tensor, b: Tensor, lse: Tensor) -> Tensor:
    """Gradients a [T] of the sums lse [T] of the rows of b [T, N] -> [T, N]."""
    dx = steps.per_row(a) * torch.exp(steps.wide(b) - steps.per_row(lse))
    return dx.to(b.dtype)
