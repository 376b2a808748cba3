"""Dropout and its gradient, in plain PyTorch.

Random numbers are Philox4x32-10 of seed, offset and the place of an element alone: each call gives
those of four elements of a row, whose elements count up to the next multiple of 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _quantize as quantized
from . import _steps as steps

_BITS = 8  # of a byte of the mask; also the elements of 16 bytes
_WORD = 0xFFFFFFFF


def _fp32(p: float) -> Tensor:
    """p as kernels have it."""
    return torch.tensor(p, dtype=torch.float32)


def _scaled(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """x / (1 - p) where an element is kept, rounded once; 0 elsewhere, whatever it is."""
    left = 1.0 - _fp32(p)
    scale = (1.0 / left).item() if left > 0.0 else 0.0
    return torch.where(kept, steps.wide(x) * scale, 0.0).to(x.dtype)


def _words(count: int, random: Tensor) -> Tensor:
    """[4 * count] int64, words of 32 bits of the first so many calls; random is [seed, offset]."""
    seed, offset = random.unbind()
    call = torch.arange(count, device=random.device)
    low, high = ((offset >> shift & _WORD).expand_as(call) for shift in (0, 32))
    counter = (call & _WORD, call >> 32 & _WORD, low, high)
    return quantized.philox(counter, (seed & _WORD, seed >> 32 & _WORD)).flatten()


def _padded(columns: int) -> int:
    """Bytes that have the bits of a row."""
    return -(-columns // _BITS)


def forward(a: Tensor, random: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Elements are zeroed with probability p, others divided by 1 - p.

    Args:
        a: [..., D].
        random: int64 [seed, offset].
        p: rounded to a multiple of 2^-31, downwards.

    Returns:
        [..., D]; and [..., ceil(D / 8)] uint8, of which bit i of a byte says whether its element i
        is kept.
    """
    *rows, columns = a.shape
    across = _padded(columns)
    count = a.numel() // max(columns, 1) * across * _BITS
    threshold = int((_fp32(p) * 2**31).item())
    kept = (_words(count // 4, random) >> 1 >= threshold).view(*rows, across * _BITS)
    bits = kept.unflatten(-1, (across, _BITS)).to(torch.uint8)
    bits = bits.masked_fill(_beyond(columns, kept.device), 0)
    mask = (bits << torch.arange(_BITS, device=a.device)).sum(-1).to(torch.uint8)
    return _scaled(a, kept[..., :columns], p), mask


def _beyond(columns: int, device: torch.device) -> Tensor:
    """[ceil(D / 8), 8]: whether a bit is of no element."""
    return (torch.arange(_padded(columns) * _BITS, device=device) >= columns).view(-1, _BITS)


def backward(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    """The gradient [..., D] of what was given to `forward`, of the mask that it left."""
    bits = mask.unsqueeze(-1) >> torch.arange(_BITS, device=mask.device, dtype=torch.uint8) & 1
    return _scaled(grad, bits.flatten(-2)[..., : grad.shape[-1]].bool(), p)
