"""Products with a weight in fp32, of which 16-bit GEMMs multiply three parts, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

_PARTS, _SCALE = 3, 2.0**11


def split(a: Tensor, *, like: Tensor) -> Tensor:
    """Weight a [N, K] in fp32 -> its parts [3 N, K] in the type of `like`, one below the other.

    Each is what is left of the weight, rounded; what is left then is multiplied by 2^11.
    """
    parts, left = [], a
    for _ in range(_PARTS):
        parts.append(left.to(like.dtype))
        left = (left - parts[-1].float()) * _SCALE
    return torch.cat(parts)


def add(a: Tensor, *, add: Tensor | None = None) -> Tensor:
    """Products a [T, 3 N] with the parts -> those with the weight [T, N], and a bias `add` [N]."""
    first, second, third = a.chunk(_PARTS, dim=-1)
    total = (third / _SCALE + second) / _SCALE + first
    return total if add is None else total + add.float()
