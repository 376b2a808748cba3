"""Tensors in fp32, such as sums, in 16 bits, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def narrow(a: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in fp32, rounded once to the type of what it stands for."""
    return a.to(dtype)
