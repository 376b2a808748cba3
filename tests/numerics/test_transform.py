"""The random Hadamard transform where its sums come near the end of float32."""

from __future__ import annotations

import math

import pytest
import torch
from subject import quantization, reference
from torch import Tensor

LARGEST = torch.finfo(torch.bfloat16).max
# What rounds to infinity in bf16.
OVERFLOW = (2.0 - 2.0**-8) * 2.0**127


def _signs() -> Tensor:
    """[16, 65536]: every pattern of signs of a run."""
    bits = torch.arange(16).unsqueeze(1)
    return 1.0 - 2.0 * (torch.arange(2**16) >> bits & 1).double()


def _hadamard() -> Tensor:
    """[16, 16], with the signs of its columns, divided by 4."""
    index = torch.arange(16)
    odd = torch.tensor([[bin(i & j).count("1") % 2 for j in index.tolist()] for i in index])
    return (1.0 - 2.0 * odd.double()) * reference._signs(torch.device("cpu")).T.double() / 4


@pytest.mark.parametrize("magnitude", [LARGEST, 2.0**127, 1.5 * 2.0**125, 2.0**124, 1.0, 2.0**-130])
def test_every_pattern_of_signs(magnitude: float) -> None:
    """As in float64 wherever bf16 has the result; an overflow is infinite, and never NaN alone."""
    x = (_signs() * magnitude).bfloat16()
    wanted = _hadamard() @ x.double()
    got, _ = reference._transform(x.float(), reference._rows(tuple(x.shape), None, x.device))
    overflows = wanted.abs() >= OVERFLOW
    columns = overflows.any(0)
    assert torch.equal(got.isinf().any(0), columns)
    held = got[:, ~columns]
    assert torch.equal(held.double(), wanted[:, ~columns].bfloat16().double())


def test_an_overflow_reaches_the_amax() -> None:
    """As for a value that was infinite before, its group's amax is, and the gradient of its weight
    shows it; other groups do not."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[16:32, 5] = LARGEST * reference._signs(torch.device("cpu")).flatten().bfloat16()
    splits = torch.tensor([32, 32])
    q = quantization("nvfp4", "input")
    _, columnwise = reference.quantize(x, q, columnwise=True, group_sizes=splits)
    assert math.isinf(columnwise.amax[0])
    assert columnwise.amax[1].isfinite()
    dy = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    other = reference.quantize(dy, q, columnwise=True, group_sizes=splits)[1]
    dw = reference.grouped_gemm_wgrad(other, columnwise, splits, torch.bfloat16)
    assert not dw[0].isfinite().any()
    assert dw[1].isfinite().all()


@pytest.mark.parametrize("magnitude", [2.0**124, 2.0**126])
def test_large_values_are_quantised_as_well_as_others(magnitude: float) -> None:
    """Sums of 16 may be 16 times as large, results 4 times: both need no more than there is."""
    x = torch.rand(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16() - 0.5
    q = quantization("nvfp4", "input")
    ordinary = reference.quantize(x, q, columnwise=True, group_sizes=torch.tensor([40, 24]))[1]
    large = reference.quantize(
        (x.float() * magnitude).bfloat16(), q, columnwise=True, group_sizes=torch.tensor([40, 24])
    )[1]
    same = ordinary.data.view(torch.uint8) == large.data.view(torch.uint8)
    assert same.double().mean() > 0.99  # the scale of a group is rounded, not a power of 2
    assert torch.equal(ordinary.amax * magnitude, large.amax)
