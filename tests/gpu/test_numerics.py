"""Results and gradients against float64, over all and for every group by itself."""

from __future__ import annotations

from types import ModuleType

import gpu_support as support
import pytest
import torch
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
    """Every result, in all and per group; rows past the groups and empty groups exactly zero."""
    rows = support.bounds(case.splits, case.tokens)
    experts = [(group, group + 1) for group, (start, end) in enumerate(rows) if end > start]
    used = rows[-1][1]
    for key, value in expected.items():
        error = support.relative_error(got[key], value)
        assert error <= tolerance, f"{name} {key}: {error}"
        pieces = rows if key in PER_TOKEN else experts
        error = support.worst_group(got[key], value, pieces)
        assert error <= tolerance, f"{name} {key}: {error} in one group"
        if key in PER_TOKEN:
            assert not got[key][used:].any(), f"{name} {key}: rows past the groups"
        else:
            empty = [group for group, (start, end) in enumerate(rows) if end <= start]
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
    tolerance = support.CHAIN_TOLERANCE[dtype]
    for key, value in expected.items():
        error = support.relative_error(got[key], value)
        assert error <= tolerance, f"{key}: {error}"
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
        error = support.relative_error(got[key], value)
        assert error <= support.TOLERANCE[dtype], f"{key}: {error}"


@pytest.mark.parametrize("name", ["linear", "grouped_linear"])
def test_bias_is_added_before_the_rounding(bundle: ModuleType, name: str) -> None:
    """256.75 + 0.5 is 258 if rounded once, 256 if the product is rounded first."""
    x = torch.ones(64, 8, dtype=torch.bfloat16, device=support.DEVICE)
    weight = torch.full((1, 8, 8), 32.0, dtype=torch.bfloat16, device=support.DEVICE)
    weight[..., 0] = 32.75
    bias = torch.full((1, 8), 0.5, dtype=torch.bfloat16, device=support.DEVICE)
    function = support.function_of(bundle, name)
    if name == "linear":
        y = function(x, weight[0], bias[0])
    else:
        y = function(x, weight, support.splits_tensor([64]), bias)
    assert bool((y == 258).all())
