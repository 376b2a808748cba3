"""Sums over the rows of groups, bit for bit: one order of additions on every architecture.

Here on the CPU as code for sm_80, which has no clusters; benchmarks/kernels runs the same tests on
a GPU, as its own code and as that for sm_80.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from .quantize_harness import Buffer, Kernels, Long, Pointer, address, compile_for_cpu

ROWS = 1100
COLUMNS, LANE_ROWS, MOST_PARTS, TEAMS = 64, 32, 8, 4 * 132
# Sizes of groups, and columns: as many parts as there are places for, and fewer.
CASES = {
    "8 parts": ([ROWS], 72),
    "8 parts of 132 teams short of one": ([700, 0, 300, -5, 2**40], 26 * COLUMNS - 8),
    "4 parts": ([5] * 66 + [ROWS], 2 * COLUMNS),
    "2 parts": ([1] * 133 + [0] * 20 + [900], COLUMNS + 8),
    "1 part": ([2] * 528, 8),
    "no rows in any": ([0, 0], 128),
}


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("input", Pointer),
        ("output", Pointer),
        ("group_sizes", Pointer),
        ("tokens", Long),
        ("groups", Long),
        ("n", Long),
        ("scales", Pointer),
    ]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    folder = tmp_path_factory.mktemp("group_sum")
    library = compile_for_cpu("group_sum_kernels.cuh", folder, architectures="800")
    return Kernels(library, "cpu")


def _parts(groups: int, columns: int) -> int:
    """Into how many parts the rows of a group are dealt."""
    teams, parts = groups * -(-columns // COLUMNS), 1
    while parts < MOST_PARTS and parts * teams < TEAMS:
        parts *= 2
    return parts


def _in_order(rows: Tensor, parts: int) -> Tensor:
    """The sum of fp32 rows [T, N] in the order that the header of group_sum.cuh states."""
    turns = -(-rows.shape[0] // (LANE_ROWS * parts))
    padding = turns * LANE_ROWS * parts - rows.shape[0]
    # Sums start as +0, which no number of zeros behind the last row changes.
    rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
    sums = torch.zeros(parts, LANE_ROWS, rows.shape[1])
    for turn in rows.view(turns, *sums.shape):
        sums += turn
    of_parts = torch.zeros(parts, rows.shape[1])
    for row in range(LANE_ROWS):
        of_parts += sums[:, row]
    total = of_parts[0]
    for part in range(1, parts):
        total = total + of_parts[part]
    return total


def _expected(x: Tensor, splits: Sequence[int] | None, scales: Tensor | None) -> Tensor:
    sizes = [x.shape[0]] if splits is None else splits
    parts, start, results = _parts(len(sizes), x.shape[1]), 0, list[Tensor]()
    for size in sizes:
        end = min(start + max(size, 0), x.shape[0])
        rows = x[start:end].float()
        results.append(_in_order(rows if scales is None else scales[start:end, None] * rows, parts))
        start = end
    return torch.stack(results)


@pytest.mark.parametrize("wide", (False, True), ids=("narrow", "wide"))
@pytest.mark.parametrize("scaled", (False, True), ids=("plain", "scaled"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bfloat16", "float16"))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dense", (False, True), ids=("groups", "dense"))
def test_order_of_additions(
    kernels: Kernels, dense: bool, case: str, dtype: torch.dtype, scaled: bool, wide: bool
) -> None:
    sizes, columns = CASES[case]
    splits = None if dense else sizes
    rng = torch.Generator().manual_seed(columns)
    exponents = torch.randint(-6, 6, (ROWS, columns), generator=rng)
    x = (torch.randn(ROWS, columns, generator=rng) * exponents.float().exp2()).to(dtype)
    scales = torch.rand(ROWS, generator=rng) if scaled else None
    given = [
        None if each is None else each.to(kernels.device)
        for each in (x, None if splits is None else torch.tensor(splits), scales)
    ]
    groups = 1 if splits is None else len(splits)
    output = Buffer(groups * columns * (4 if wide else 2), kernels.device)
    arguments = _Arguments(
        address(given[0]), address(output), address(given[1]), ROWS, groups, columns,
        address(given[2]),
    )  # fmt: skip
    kernels.call("run_group_sum", int(dtype == torch.float16), int(wide), arguments)
    wanted = _expected(x, splits, scales).to(torch.float32 if wide else dtype)
    found = output.bytes().view(wanted.dtype).view_as(wanted)
    assert torch.equal(found, wanted)


def test_cases_reach_every_number_of_parts() -> None:
    assert {_parts(len(splits), columns) for splits, columns in CASES.values()} == {1, 2, 4, 8}
