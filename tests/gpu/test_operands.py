"""Operands as callers hand them over: NaN past the groups, odd addresses, strides, subsets."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import gpu_support as support
import pytest
import torch
from gpu_support import Case, Operands
from torch import Tensor

CASE = Case("operands", 700, 136, 200, tuple(support.dirichlet(6, 650)))

Make = Callable[[torch.dtype], tuple[Operands, Tensor]]


def _linear(dtype: torch.dtype) -> tuple[Operands, Tensor]:
    operands = {
        "x": support.randn((CASE.tokens, CASE.k), dtype, 1),
        "weight": support.randn((CASE.n, CASE.k), dtype, 2, CASE.k**-0.5),
        "bias": support.randn((CASE.n,), dtype, 3),
    }
    return operands, support.randn((CASE.tokens, CASE.n), dtype, 9)


def _grouped_linear(dtype: torch.dtype) -> tuple[Operands, Tensor]:
    return (
        support.grouped_linear_operands(CASE, dtype),
        support.randn((CASE.tokens, CASE.n), dtype, 9),
    )


def _grouped_mlp(dtype: torch.dtype) -> tuple[Operands, Tensor]:
    return (
        support.grouped_mlp_operands(CASE, dtype),
        support.randn((CASE.tokens, CASE.k), dtype, 9),
    )


MAKERS: dict[str, Make] = {
    "linear": _linear,
    "grouped_linear": _grouped_linear,
    "grouped_mlp": _grouped_mlp,
}
GROUPED = ("grouped_linear", "grouped_mlp")


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("name", GROUPED)
def test_nan_past_the_groups_goes_nowhere(
    bundle: ModuleType, name: str, dtype: torch.dtype
) -> None:
    function = support.function_of(bundle, name)
    operands, dy = MAKERS[name](dtype)
    clean = support.forward_backward(function, operands, dy)
    used = sum(CASE.splits)
    dy[used:] = float("nan")
    for key in ("x", "probs"):
        if key in operands:
            operands[key][used:] = float("nan")
    support.assert_same(support.forward_backward(function, operands, dy), clean)


@pytest.mark.parametrize("layout", [support.misaligned, support.strided])
@pytest.mark.parametrize("name", list(MAKERS))
def test_layout_of_operands(
    bundle: ModuleType, name: str, layout: Callable[[Tensor], Tensor]
) -> None:
    function = support.function_of(bundle, name)
    operands, dy = MAKERS[name](torch.bfloat16)
    expected = support.forward_backward(function, operands, dy)
    others = {key: layout(value) for key, value in operands.items()}
    got = support.forward_backward(function, others, layout(dy))
    support.assert_same(got, expected)


def test_transposed_weight_and_expanded_gradient(bundle: ModuleType) -> None:
    function = support.function_of(bundle, "grouped_linear")
    operands, dy = MAKERS["grouped_linear"](torch.bfloat16)
    row = dy[:1].clone()
    expected = support.forward_backward(function, operands, row.expand_as(dy).contiguous())
    operands["weight"] = operands["weight"].transpose(1, 2).contiguous().transpose(1, 2)
    support.assert_same(support.forward_backward(function, operands, row.expand_as(dy)), expected)


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("name", list(MAKERS))
def test_each_gradient_alone_has_the_same_bits(
    bundle: ModuleType, name: str, dtype: torch.dtype
) -> None:
    function = support.function_of(bundle, name)
    operands, dy = MAKERS[name](dtype)
    together = support.forward_backward(function, operands, dy)
    for key in support.floating(operands):
        leaf = operands[key].detach().requires_grad_()
        y = function(**{**operands, key: leaf})
        (gradient,) = torch.autograd.grad(y, leaf, dy)
        support.assert_same(
            {"y": y.detach(), key: gradient}, {"y": together["y"], key: together[key]}
        )


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("name", list(MAKERS))
def test_without_bias(bundle: ModuleType, name: str, dtype: torch.dtype) -> None:
    """No bias and a bias of zeros are the same bits, for every gradient that both have."""
    function = support.function_of(bundle, name)
    operands, dy = MAKERS[name](dtype)
    biases = [key for key in operands if key.endswith("bias")]
    zero = {key: torch.zeros_like(operands[key]) for key in biases}
    expected = support.forward_backward(function, {**operands, **zero}, dy)
    bare = {key: value for key, value in operands.items() if key not in biases}
    got = support.forward_backward(function, bare, dy)
    support.assert_same(got, {key: expected[key] for key in got})


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("name", list(MAKERS))
def test_repeats_bit_for_bit(bundle: ModuleType, name: str, dtype: torch.dtype) -> None:
    function = support.function_of(bundle, name)
    operands, dy = MAKERS[name](dtype)
    first = support.forward_backward(function, operands, dy)
    for _ in range(20):
        support.assert_same(support.forward_backward(function, operands, dy), first)


@pytest.mark.parametrize("name", list(MAKERS))
def test_operands_are_left_as_they_were(bundle: ModuleType, name: str) -> None:
    operands, dy = MAKERS[name](torch.bfloat16)
    before = {key: value.clone() for key, value in operands.items()} | {"dy": dy.clone()}
    support.forward_backward(support.function_of(bundle, name), operands, dy)
    support.assert_same({**operands, "dy": dy}, before)
