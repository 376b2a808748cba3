"""Dot products of rows with vectors of their groups on the CPU: ragged sizes, nothing given."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from .quantize_harness import Buffer, Kernels, Long, Pointer, address, compile_for_cpu

HEADER = """
#include "fusegen/reduce/group_row_dot.cuh"

extern "C" int run_group_row_dot(int half, const fusegen::GroupRowDotArguments* in,
                                 fusegen::Stream* stream, const char** call) {
  const fusegen::Status status = half ? fusegen::launch_group_row_dot<__half>(*in, *stream)
                                      : fusegen::launch_group_row_dot<__nv_bfloat16>(*in, *stream);
  *call = status.call;
  return status.code;
}
"""
ROWS = 100
SPLITS = {
    "one group": [100],
    "ragged, empty, rows past them": [0, 13, 0, 50, 20],
    "more than a warp scans at once": [1] * 40 + [0] * 30 + [25] + [3] * 3,
    "a group ends where a scan does": [2] * 32 + [36],
    "out of range": [-5, 60, 2**62, 7],
    "no rows in any": [0, 0],
}


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("input", Pointer),
        ("vectors", Pointer),
        ("add", Pointer),
        ("output", Pointer),
        ("group_sizes", Pointer),
        ("tokens", Long),
        ("groups", Long),
        ("n", Long),
    ]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    folder = tmp_path_factory.mktemp("group_row_dot")
    header = folder / "group_row_dot_kernels.h"
    header.write_text(HEADER)
    return Kernels(compile_for_cpu(str(header), folder), "cpu")


def _expected(
    a: Tensor, b: Tensor | None, splits: Sequence[int], add: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Results in float64, and the sums of magnitudes that bound their errors."""
    dots = torch.zeros(ROWS, dtype=torch.float64) if add is None else add.double()
    bound, start = dots.abs(), 0
    for group, size in enumerate(splits):
        end = min(start + max(size, 0), ROWS)
        if b is not None:
            terms = a[start:end].double() * b[group].double()
            dots[start:end] += terms.sum(1)
            bound[start:end] += terms.abs().sum(1)
        start = end
    return dots, bound


@pytest.mark.parametrize("columns", (8, 264, 1032))
def test_one_vector_for_all_rows(kernels: Kernels, columns: int) -> None:
    rng = torch.Generator().manual_seed(columns)
    a = torch.randn(ROWS, columns, generator=rng).bfloat16()
    b = torch.randn(1, columns, generator=rng).bfloat16()
    output = Buffer(4 * ROWS, "cpu")
    arguments = _Arguments(address(a), address(b), None, address(output), None, ROWS, 1, columns)
    kernels.call("run_group_row_dot", 0, arguments)
    wanted, bound = _expected(a, b, [ROWS], None)
    assert ((output.floats().double() - wanted).abs() <= 1e-6 * bound).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bfloat16", "float16"))
@pytest.mark.parametrize("columns", (8, 264, 1032))
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("given", ("both", "bias", "add", "neither"))
def test_against_float64(
    kernels: Kernels, given: str, splits: list[int], columns: int, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(columns)
    a = torch.randn(ROWS, columns, generator=rng).to(dtype)
    a[min(sum(max(size, 0) for size in splits), ROWS) :] = torch.nan  # rows that no group has
    b = torch.randn(len(splits), columns, generator=rng).to(dtype)
    vectors = b if given in ("both", "bias") else None
    add = torch.randn(ROWS, generator=rng) if given in ("both", "add") else None
    sizes, output = torch.tensor(splits), Buffer(4 * ROWS, "cpu")
    arguments = _Arguments(
        address(a), address(vectors), address(add), address(output), address(sizes),
        ROWS, len(splits), columns,
    )  # fmt: skip
    kernels.call("run_group_row_dot", int(dtype == torch.float16), arguments)
    wanted, bound = _expected(a, vectors, splits, add)
    assert ((output.floats().double() - wanted).abs() <= 1e-6 * bound).all()
