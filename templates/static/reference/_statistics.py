"""Statistics of a quantised copy: what it lost of the tensor that it was made from.

A copy of a transform is compared with the transformed tensor, as it was quantised.  Sums are taken
in float64, every result is rounded to fp32 once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _quantize as quantized

_TOP = {"e4m3": 28.0, "e5m2": 14.0, "e2m1": 6.0}
"""Largest value of each format, in halves of the step that leads to it."""


class Statistics(NamedTuple):
    """Of one copy, all zero before the first call that makes it.

    Attributes:
        amax: largest magnitude of the tensor; NaN counts for nothing.
        nonzero: how many of its elements are not zero.
        underflow: how many of these are zero in the copy.
        saturation: how many elements the format's largest value stands for although they are
            further above it than half a step, as far as it rounds down otherwise.
        relative_error: root of the sum of (copy - tensor)^2 over that of tensor^2; 0 for a tensor
            of zeros, NaN where an element is NaN or infinite.
    """

    amax: float
    nonzero: float
    underflow: float
    saturation: float
    relative_error: float


def measure(x: Tensor, copy: quantized.Operand, *, group_sizes: Tensor | None = None) -> Tensor:
    """fp32 [5], the fields of ``Statistics``; rows past the last group count for nothing.

    Args:
        x: the tensor, bf16 or fp16, ``[R, C]`` or a stack ``[E, R, C]``.
        copy: of it.
        group_sizes: int64 ``[E]``, where its rows are in groups.
    """
    q = copy.quantization
    source, _ = quantized._values(x, q, copy.columnwise, group_sizes)
    decoded, rows = quantized._read(copy, group_sizes)
    if q.tensor_scale:
        decode = quantized._quotient(1.0, quantized._tensor_encode(copy.amax))
        decoded = decoded * decode[rows.group].unsqueeze(1)
    lost = source.abs() - decoded.abs()
    largest = quantized._read_codes(copy, group_sizes)[0].abs() == quantized.MAX[q.format]
    numbers = (
        _amax(source),
        (source != 0).sum(),
        ((source != 0) & (decoded == 0)).sum(),
        (largest & (lost * _TOP[q.format] > decoded.abs())).sum(),
        _relative_error(decoded.double(), source.double()),
    )
    return torch.stack([number.float() for number in numbers])


def read(buffers: dict[str, Tensor]) -> dict[str, Statistics]:
    """Statistics by the name of the copy, in one transfer from the device."""
    numbers = torch.stack(list(buffers.values())).tolist()
    return {name: Statistics(*each) for name, each in zip(buffers, numbers, strict=True)}


def _amax(values: Tensor) -> Tensor:
    magnitudes = torch.where(values.isnan(), 0.0, values.abs()).flatten()
    return torch.cat((magnitudes, magnitudes.new_zeros(1))).amax()


def _relative_error(decoded: Tensor, source: Tensor) -> Tensor:
    error, total = (each.square().sum() for each in (decoded - source, source))
    return torch.where(total == 0, 0.0, error / total).sqrt()
