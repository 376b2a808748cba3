"""More than 2^31 elements: offsets of 64 bits everywhere. References run in slices of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import gpu_support as support
import pytest
import torch
from gpu_support import Case
from torch import Tensor

MANY_TOKENS = 2**22 + 5
SLICE = 2**18
TOLERANCE = support.TOLERANCE[torch.bfloat16]
# The tensor cores cut sums off instead of rounding them, so that a long sum shrinks: over 2^22
# tokens, 2^18 instructions of 16, by 4.3e-3 (`torch._grouped_mm` too), less than this for each.
SHRINKS = 2.0**-25


class Error:
    """Relative Frobenius error over slices."""

    def __init__(self) -> None:
        self.missed = torch.zeros((), dtype=torch.float64, device="cuda")
        self.wanted = torch.zeros((), dtype=torch.float64, device="cuda")

    def add(self, got: Tensor, expected: Tensor) -> None:
        self.missed += (got.double() - expected).square().sum()
        self.wanted += expected.square().sum()

    def value(self) -> float:
        error = float(self.missed / self.wanted)
        return math.sqrt(error) if math.isfinite(error) else math.inf


def slices(case: Case) -> Iterator[tuple[int, int, int]]:
    """Group, first and last row of stretches that lie in one group."""
    for group, (start, end) in enumerate(support.bounds(case.splits, case.tokens)):
        for first in range(start, end, SLICE):
            yield group, first, min(first + SLICE, end)


def check(case: Case, got: dict[str, Tensor], operands: dict[str, Tensor], dy: Tensor) -> None:
    """y, dx, dweight and dbias of grouped_linear."""
    x, weight, bias = (operands[key] for key in ("x", "weight", "bias"))
    errors = {key: Error() for key in ("y", "x", "weight", "bias")}
    for group in range(case.groups):
        dweight = torch.zeros(case.n, case.k, dtype=torch.float64, device="cuda")
        dbias = torch.zeros(case.n, dtype=torch.float64, device="cuda")
        wide = weight[group].double()
        for at, first, last in slices(case):
            if at != group:
                continue
            rows, grads = x[first:last].double(), dy[first:last].double()
            errors["y"].add(got["y"][first:last], rows @ wide.T + bias[group].double())
            errors["x"].add(got["x"][first:last], grads @ wide)
            dweight += grads.T @ rows
            dbias += grads.sum(0)
        errors["weight"].add(got["weight"][group], dweight)
        errors["bias"].add(got["bias"][group], dbias)
    longest = max(last - first for first, last in support.bounds(case.splits, case.tokens))
    for key, error in errors.items():
        allowed = TOLERANCE + (longest / 16 * SHRINKS if key == "weight" else 0)
        assert error.value() <= allowed, f"{key}: {error.value()}"
    used = support.bounds(case.splits, case.tokens)[-1][1]
    assert not got["y"][used:].any() and not got["x"][used:].any()


CASES = [
    Case("many_tokens", MANY_TOKENS, 16, 8, (2**21 + 3, 0, 2**20 - 1, 2**20)),
    Case("y_past_2_31", MANY_TOKENS, 16, 520, (2**21 + 3, 0, 2**20 - 1, 2**20)),
    Case("x_past_2_31", MANY_TOKENS, 520, 8, (5, 2**22 - 9)),
    Case("weight_past_2_31", 2000, 2048, 2056, tuple(support.dirichlet(512, 2000, 1.0))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_grouped_linear(bundle: ModuleType, case: Case) -> None:
    torch.cuda.empty_cache()
    operands = {
        "x": support.randn((case.tokens, case.k), torch.bfloat16, 1),
        "weight": torch.empty(
            case.groups, case.n, case.k, dtype=torch.bfloat16, device="cuda"
        ).normal_(std=case.k**-0.5),
        "bias": support.randn((case.groups, case.n), torch.bfloat16, 3),
        "split_sizes": support.splits_tensor(case.splits),
    }
    dy = torch.empty(case.tokens, case.n, dtype=torch.bfloat16, device="cuda").normal_()
    got = support.forward_backward(support.function_of(bundle, "grouped_linear"), operands, dy)
    check(case, got, operands, dy)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return _silu(gate) * up


@pytest.mark.parametrize(
    ("name", "formula", "width"), [("silu", _silu, 2056), ("swiglu", _swiglu, 2056)]
)
def test_pointwise(
    bundle: ModuleType,
    folder: Path,
    name: str,
    formula: Callable[[Tensor], Tensor],
    width: int,
) -> None:
    """Rows at both ends and on both sides of element 2^31."""
    if not (folder / f"{name}__bf16.py").exists():
        pytest.skip(f"{folder.name} has no {name}")
    torch.cuda.empty_cache()
    tokens = 2**20 + 1
    x = torch.empty(tokens, width, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    y = support.function_of(bundle, name)(x)
    dy = torch.empty_like(y).normal_()
    (dx,) = torch.autograd.grad(y, x, dy)
    assert x.numel() > 2**31
    edge = 2**31 // width
    for first, last in ((0, 500), (edge - 500, edge + 500), (tokens - 500, tokens)):
        wide = x[first:last].detach().double().requires_grad_()
        expected = formula(wide)
        (gradient,) = torch.autograd.grad(expected, wide, dy[first:last].double())
        assert support.relative_error(y[first:last].detach(), expected.detach()) <= TOLERANCE
        assert support.relative_error(dx[first:last], gradient) <= TOLERANCE
