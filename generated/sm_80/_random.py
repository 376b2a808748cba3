"""Random numbers that modules give to their ops.

They come from PyTorch's own generator of the input's device, so that they draw anew when a captured
graph is replayed, and come again when an activation checkpoint computes a part a second time.
"""

from __future__ import annotations

import torch
from torch import Tensor


def drawn(like: Tensor, count: int, *, training: bool = True) -> Tensor:
    """[count] int64 of 63 random bits each on the device of `like`.

    Outside training nothing is drawn: zeros, of which an op in evaluation makes no use.
    """
    if not training:
        return torch.zeros(count, dtype=torch.int64, device=like.device)
    return torch.randint(2**63 - 1, (count,), dtype=torch.int64, device=like.device)
