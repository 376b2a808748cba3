"""Sums in fp32 as what they are sums for, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def narrow(a: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum in fp32, rounded once to the type of what it is the sum of."""
    return a.to(dtype)
