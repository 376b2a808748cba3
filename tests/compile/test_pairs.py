"""Largest magnitudes of packed pairs, as hardware without an instruction for them finds them.

benchmarks/kernels compares that on a GPU with what the instruction gives, on all operands.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from .quantize_harness import compile_for_cpu

HEADER = """
#include "fusegen/quantize/pairs.cuh"

namespace {

template <class Element, bool kNan>
uint32_t larger(uint32_t a, uint32_t b) {
  using namespace fusegen::quantizing;
  return larger_magnitude<Element, kNan>(comparable<Element>(a), comparable<Element>(b));
}

template <class Element>
uint32_t amax(uint32_t a, uint32_t b) {
  return fusegen::quantizing::amax_of<Element>(larger<Element, false>(a, b));
}

}  // namespace

extern "C" void larger_magnitudes(int half, int nan, const uint32_t* a, const uint32_t* b,
                                  uint32_t* out, long count) {
  const auto run = half ? nan ? &larger<__half, true> : &larger<__half, false>
                   : nan ? &larger<__nv_bfloat16, true> : &larger<__nv_bfloat16, false>;
  for (long i = 0; i < count; ++i) out[i] = run(a[i], b[i]);
}

extern "C" void amaxes(int half, const uint32_t* a, const uint32_t* b, uint32_t* out, long count) {
  const auto run = half ? &amax<__half> : &amax<__nv_bfloat16>;
  for (long i = 0; i < count; ++i) out[i] = run(a[i], b[i]);
}
"""
DTYPES = pytest.mark.parametrize(
    "dtype", (torch.bfloat16, torch.float16), ids=("bfloat16", "float16")
)
MAGNITUDE = 0x7FFF
NAN = 0x7FFF  # what maxima give


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("pairs")
    header = folder / "pair_functions.h"
    header.write_text(HEADER)
    return ctypes.CDLL(str(compile_for_cpu(str(header), folder, architectures="800")))


def _operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Bits of every pair of special values, then of random ones, with every sign; int16 [2n]."""
    largest = torch.finfo(dtype).max
    values = torch.tensor([0.0, largest, torch.inf, torch.nan, 1.0, 2.0**-24], dtype=dtype)
    bits = values.view(torch.int16)
    bits = torch.cat((bits, bits[3:4] + 1))  # NaN with another payload
    bits = torch.cat((bits, bits | -0x8000))
    special = torch.cartesian_prod(bits, bits)
    rng = torch.Generator().manual_seed(5)
    drawn = torch.randint(-0x8000, 0x8000, (100_000, 2), generator=rng).to(torch.int16)
    a, b = torch.cat((special, drawn)).T.contiguous()
    return a, b


def _wanted(a: Tensor, b: Tensor, dtype: torch.dtype, nan: bool) -> Tensor:
    """Bits of the larger magnitude; NaN of two, or of either if `nan`."""
    first, second = ((bits & MAGNITUDE).view(dtype).float() for bits in (a, b))
    # torch.fmax would drop quiet NaN only.
    larger = torch.where(first.isnan() | (first < second), second, first)
    is_nan = first.isnan() | second.isnan() if nan else larger.isnan()
    return torch.where(is_nan, NAN, larger.to(dtype).view(torch.int16)).to(torch.int16)


def _called(function: object, a: Tensor, b: Tensor, *chosen: int) -> Tensor:
    out = torch.empty_like(a)
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (a, b, out)]
    function(*chosen, *pointers, ctypes.c_long(a.numel() // 2))  # type: ignore[operator]
    return out


@DTYPES
@pytest.mark.parametrize("nan", (False, True), ids=("drops NaN", "keeps NaN"))
def test_larger_magnitude(library: ctypes.CDLL, dtype: torch.dtype, nan: bool) -> None:
    a, b = _operands(dtype)
    found = _called(library.larger_magnitudes, a, b, int(dtype == torch.float16), int(nan))
    assert torch.equal(found & MAGNITUDE, _wanted(a, b, dtype, nan))


@DTYPES
def test_the_amax_of_nan_is_zero(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    a, b = _operands(dtype)
    found = _called(library.amaxes, a, b, int(dtype == torch.float16))
    wanted = _wanted(a, b, dtype, nan=False)
    assert torch.equal(found, torch.where(wanted == NAN, 0, wanted))
