"""Gradients of weights that are added in fp32: the plain kernels' sums, added to what was there."""

from __future__ import annotations

import random
from types import ModuleType

import bundles
import gpu_support as support
import pytest
import selection
import torch
from conftest import FOLDERS
from gpu_support import Case
from programs import Programs
from test_graphs import capture

CHOICE = "__add_to_main_grad"
CELLS = [
    cell
    for folder in FOLDERS
    for cell in bundles.cells_of(folder, "grouped_linear", choices=True)
    if cell.endswith(CHOICE)
]
# Old values of short groups' tiles are loaded, to those of long ones TMA adds; empty ones keep
# theirs. Such groups follow each other in every order.
CASES = (
    Case("short", 700, 136, 200, (130, 0, 33, 530, 7)),
    Case("mixed", 5003, 264, 392, (40, 2600, 0, 700, 1300, 263, 100)),
    Case("mixed_wide", 8192, 1544, 264, (40, 5000, 0, 700, 1300, 1052, 100)),
)
REPLAYS = 50


def check(bundle: ModuleType, cell: str, case: Case, dtype: torch.dtype) -> None:
    programs = Programs(bundle, cell)
    tensors, dy = programs.step(case, dtype)
    before = support.randn(tensors["weight"].shape, torch.float32, 5)
    gradient = programs.add_gradient(torch.zeros_like(before), tensors, dy)
    added = programs.add_gradient(before.clone(), tensors, dy)
    assert torch.equal(added, before + gradient)
    plain = Programs(bundle, cell.removesuffix(CHOICE))
    assert torch.equal(gradient.to(dtype), plain.gradient("weight", tensors, dy))
    for group, size in enumerate(case.splits):
        assert gradient[group].any() == (size > 0), group


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("cell", CELLS)
def test_sums_of_any_groups(bundle: ModuleType, cell: str, case: Case, dtype: torch.dtype) -> None:
    check(bundle, cell, case, dtype)


@pytest.mark.parametrize("cell", CELLS)
def test_every_kernel_adds(bundle: ModuleType, cell: str) -> None:
    plan = Programs(bundle, cell).module.GroupedLinear.describe()
    rules = selection.gemm_rules(plan, "wgrad")
    for point, sizes in selection.reach_every_point("wgrad", rules).items():
        splits = support.dirichlet(sizes.groups, sizes.tokens, 1.0)
        case = Case(point, sizes.tokens, sizes.k, sizes.n, tuple(splits))
        check(bundle, cell, case, torch.bfloat16)


@pytest.mark.parametrize("cell", CELLS)
def test_replays_follow_new_split_sizes(bundle: ModuleType, cell: str) -> None:
    """Every replay adds what an eager call adds, to the sums of all before."""
    programs = Programs(bundle, cell)
    case = CASES[1]
    tensors, dy = programs.step(case, torch.bfloat16)
    splits = tensors["split_sizes"]

    total = support.randn(tensors["weight"].shape, torch.float32, 5)
    expected = total.clone()
    graph, _ = capture(lambda: {"total": programs.add_gradient(total, tensors, dy)})
    total.copy_(expected)
    rng = random.Random(0)
    for _ in range(REPLAYS):
        cuts = sorted(rng.randrange(case.tokens + 1) for _ in range(case.groups))
        ends = torch.tensor(cuts)
        splits.copy_(ends.diff(prepend=ends.new_zeros(1)))
        graph.replay()
        assert torch.equal(total, programs.add_gradient(expected, tensors, dy))
