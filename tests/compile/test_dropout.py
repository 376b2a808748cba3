"""Dropout and its gradient on the CPU, bit for bit what the reference does."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .launches import RUN
from .quantize_harness import (
    Buffer,
    Float,
    Kernels,
    Long,
    Pointer,
    address,
    compile_for_cpu,
    reference_of,
)

HEADER = f"""
#include "fusegen/dropout/dropout.cuh"
#include "fusegen/dropout/dropout_grad.cuh"
{RUN}
FUSEGEN_RUN(dropout, DropoutArguments)
FUSEGEN_RUN(dropout_grad, DropoutGradArguments)
extern "C" unsigned kept_bits(long vector, long seed, long offset, unsigned threshold) {{
  return fusegen::dropout::kept_bits(vector, seed, offset, threshold);
}}
"""
DTYPES = (torch.bfloat16, torch.float16)
# One vector; fewer than a block has, in rows of several vectors; a block, and one vector more.
SHAPES = ((1, 8), (3, 40), (4, 2048), (1, 8200), (41, 1032))
STATE = torch.tensor([0x123456789ABCDEF, 0x7EDCBA9876543210])


class _Dropout(ctypes.Structure):
    _fields_ = [
        ("x", Pointer),
        ("random", Pointer),
        ("y", Pointer),
        ("mask", Pointer),
        ("p", Float),
        ("rows", Long),
        ("columns", Long),
    ]


class _Grad(ctypes.Structure):
    _fields_ = [
        ("dy", Pointer),
        ("mask", Pointer),
        ("dx", Pointer),
        ("p", Float),
        ("rows", Long),
        ("columns", Long),
    ]


reference = reference_of("_dropout")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dropout")
    header = folder / "dropout_kernels.h"
    header.write_text(HEADER)
    return compile_for_cpu(str(header), folder)


@pytest.fixture(scope="module")
def kernels(library: Path) -> Kernels:
    return Kernels(library, "cpu")


def dropout(
    kernels: Kernels, x: Tensor, p: float, state: Tensor = STATE, *, masked: bool = True
) -> tuple[Tensor, Tensor | None]:
    output, mask = Buffer(2 * x.numel(), "cpu"), Buffer(x.numel() // 8, "cpu")
    arguments = _Dropout(
        address(x), address(state), address(output), address(mask) if masked else None, p, *x.shape
    )
    kernels.call("run_dropout", int(x.dtype == torch.float16), arguments)
    bits = mask.bytes().view(len(x), -1) if masked else None
    return output.bytes().view(x.dtype).view_as(x), bits


def gradient(kernels: Kernels, dy: Tensor, mask: Tensor, p: float) -> Tensor:
    output = Buffer(2 * dy.numel(), "cpu")
    arguments = _Grad(address(dy), address(mask), address(output), p, *dy.shape)
    kernels.call("run_dropout_grad", int(dy.dtype == torch.float16), arguments)
    return output.bytes().view(dy.dtype).view_as(dy)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", (0.0, 1e-9, 0.1, 0.5, 0.999999, 1.0))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_have_the_bits_of_the_reference(
    kernels: Kernels, shape: tuple[int, int], p: float, dtype: torch.dtype
) -> None:
    x, dy = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    y, mask = dropout(kernels, x, p)
    wanted, bits = reference.forward(x, STATE, p)
    assert mask is not None
    assert torch.equal(mask, bits)
    assert torch.equal(y, wanted)
    assert torch.equal(gradient(kernels, dy, mask, p), reference.backward(dy, bits, p))
    alone, _ = dropout(kernels, x, p, masked=False)
    assert torch.equal(alone, y)


@pytest.mark.parametrize("index", (0, 1), ids=("seed", "offset"))
@pytest.mark.parametrize("bit", (0, 31, 32, 62))
def test_every_bit_of_the_state_counts(kernels: Kernels, index: int, bit: int) -> None:
    x = torch.ones(4, 512, dtype=torch.bfloat16)
    other = STATE.clone()
    other[index] ^= 1 << bit
    (first, _), (second, _) = dropout(kernels, x, 0.5), dropout(kernels, x, 0.5, other)
    assert not torch.equal(first, second)
    assert torch.equal(second, reference.forward(x, other, 0.5)[0])


def test_places_past_the_first_2_31_elements_have_numbers_of_their_own(library: Path) -> None:
    kept_bits = ctypes.CDLL(str(library)).kept_bits
    kept_bits.argtypes = (Long, Long, Long, ctypes.c_uint)
    kept_bits.restype = ctypes.c_uint

    def drawn(first: int) -> list[int]:
        return [kept_bits(first + i, 1, 2, 1 << 30) for i in range(16)]

    starts = (0, 2**28, 2**31, 2**32, 2**40)
    assert len({tuple(drawn(start)) for start in starts}) == len(starts)


@pytest.mark.parametrize("value", (torch.nan, torch.inf, -torch.inf))
def test_what_is_zeroed_is_zero_whatever_it_was(kernels: Kernels, value: float) -> None:
    x = torch.full((2, 512), value, dtype=torch.bfloat16)
    y, mask = dropout(kernels, x, 0.5)
    assert mask is not None
    kept = (mask.unsqueeze(-1) >> torch.arange(8) & 1).flatten(1).bool()
    assert not y[~kept].any()
    assert torch.equal(y[kept].isnan(), x[kept].isnan()) and not y[kept].isfinite().any()
    assert not gradient(kernels, x, torch.zeros_like(mask), 0.5).any()


@pytest.mark.parametrize("p", (-0.1, 1.1, float("nan")))
def test_a_probability_that_is_none_is_refused(kernels: Kernels, p: float) -> None:
    with pytest.raises(AssertionError, match="p from 0 to 1"):
        dropout(kernels, torch.ones(1, 8, dtype=torch.bfloat16), p)
