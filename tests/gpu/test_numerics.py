"""Results and gradients against float64, over all and for every row by itself."""

from __future__ import annotations

from types import ModuleType

import bundles
import gpu_support as support
import pytest
import selection
import torch
from bundles import DEVICE
from gpu_support import Case
from torch import Tensor

CASES = support.grouped_cases()
MLP_CASES = [case for case in CASES if case.work < 1e10]
PER_TOKEN = ("y", "x", "probs")


def check(
    name: str,
    case: Case,
    got: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float,
) -> None:
    """Every result, in all and per row; rows past the groups and empty groups exactly zero."""
    rows = support.bounds(case.splits, case.tokens)
    empty = [group for group, (start, end) in enumerate(rows) if end <= start]
    used = rows[-1][1]
    for key, value in expected.items():
        error = support.relative_error(got[key], value)
        assert error <= tolerance, f"{name} {key}: {error}"
        error = support.worst_row(got[key], value)
        assert error <= tolerance, f"{name} {key}: {error} in one row"
        if key in PER_TOKEN:
            assert not got[key][used:].any(), f"{name} {key}: rows past the groups"
        else:
            assert not got[key][empty].any(), f"{name} {key}: empty groups"


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_grouped_linear(bundle: ModuleType, case: Case, dtype: torch.dtype) -> None:
    operands = support.grouped_linear_operands(case, dtype)
    dy = support.guarded(support.randn((case.tokens, case.n), dtype, 9))
    got = support.forward_backward(support.function_of(bundle, "grouped_linear"), operands, dy)
    expected = support.exact("grouped_linear", operands, dy)
    check("grouped_linear", case, got, expected, support.TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("case", MLP_CASES, ids=lambda case: case.name)
def test_grouped_mlp(bundle: ModuleType, case: Case, dtype: torch.dtype) -> None:
    operands = support.grouped_mlp_operands(case, dtype)
    dy = support.guarded(support.randn((case.tokens, case.k), dtype, 9))
    got = support.forward_backward(support.function_of(bundle, "grouped_mlp"), operands, dy)
    expected = support.exact("grouped_mlp", operands, dy)
    scales = {"probs": float(support.summands_of_probs(operands, dy).norm())}
    for key, value in expected.items():
        error = support.relative_error(got[key], value, scales.get(key))
        assert error <= support.CHAIN_TOLERANCE[dtype], f"{key}: {error}"
    used = support.bounds(case.splits, case.tokens)[-1][1]
    for key in PER_TOKEN:
        assert not got[key][used:].any(), f"{key}: rows past the groups"


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("leading", [(0,), (1,), (7,), (4096,), (3, 5, 11), (2, 0, 4)], ids=str)
@pytest.mark.parametrize(("k", "n"), [(8, 1032), (24, 200), (72, 8), (136, 24), (1032, 136)])
def test_linear(
    bundle: ModuleType, leading: tuple[int, ...], k: int, n: int, dtype: torch.dtype
) -> None:
    operands = {
        "x": support.guarded(support.randn((*leading, k), dtype, 1)),
        "weight": support.guarded(support.randn((n, k), dtype, 2, k**-0.5)),
        "bias": support.guarded(support.randn((n,), dtype, 3)),
    }
    dy = support.guarded(support.randn((*leading, n), dtype, 9))
    got = support.forward_backward(support.function_of(bundle, "linear"), operands, dy)
    expected = support.exact("linear", operands, dy)
    for key, value in expected.items():
        error = max(support.relative_error(got[key], value), support.worst_row(got[key], value))
        assert error <= support.TOLERANCE[dtype], f"{key}: {error}"


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("kind", selection.KINDS)
def test_every_schedule(bundle: ModuleType, kind: str, dtype: torch.dtype) -> None:
    """All gradients at sizes that lead to each kernel of each kind."""
    plan = bundles.load_cell(bundle, "grouped_linear__bf16").GroupedLinear.describe()
    function = support.function_of(bundle, "grouped_linear")
    rules = selection.gemm_rules(plan, kind)
    for point, sizes in selection.reach_every_point(kind, rules).items():
        splits = support.dirichlet(sizes.groups, sizes.tokens - sizes.tokens // 10, 2.0)
        case = Case(point, sizes.tokens, sizes.k, sizes.n, tuple(splits))
        operands = support.grouped_linear_operands(case, dtype)
        dy = support.guarded(support.randn((case.tokens, case.n), dtype, 9))
        got = support.forward_backward(function, operands, dy)
        expected = support.exact("grouped_linear", operands, dy)
        check(f"{kind} {point}", case, got, expected, support.TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["linear", "grouped_linear"])
def test_bias_is_added_before_the_rounding(bundle: ModuleType, name: str) -> None:
    """256.75 + 0.5 is 258 if rounded once, 256 if the GEMM's result is."""
    x = torch.ones(64, 8, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.full((1, 8, 8), 32.0, dtype=torch.bfloat16, device=DEVICE)
    weight[..., 0] = 32.75
    bias = torch.full((1, 8), 0.5, dtype=torch.bfloat16, device=DEVICE)
    function = support.function_of(bundle, name)
    if name == "linear":
        y = function(x, weight[0], bias[0])
    else:
        y = function(x, weight, support.splits_tensor([64]), bias)
    assert bool((y == 258).all())
