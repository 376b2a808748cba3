"""Dequantisation, GEMMs of quantised operands, and what they cost against unquantised ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import normal
from subject import RECIPES, quantization, reference
from torch import Tensor

SIZES = [17, 0, 64, 1, 46]
T, K, N, E = 133, 48, 56, 5
STATE = torch.tensor([11, 0])
# Relative Frobenius error of one quantised copy of normal numbers.
ROUNDING = {"e4m3": 0.035, "e5m2": 0.07, "e2m1": 0.17}


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def quantized(x: Tensor, recipe: str, role: str, sizes: Tensor | None = None) -> Any:
    q = quantization(recipe, role)
    groups = x.shape[0] if x.dim() == 3 else 1 if sizes is None else len(sizes)
    scale = None
    if q.source == "history":
        amax = reference.group_amax(x, q, group_sizes=sizes)
        _, scale = reference.delayed_update(*reference.delayed_state(q, groups), amax, q)
    return reference.quantize(
        x, q, columnwise=True, group_sizes=sizes, scale=scale, rng_state=STATE
    )


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = normal((T, K), torch.bfloat16)
    w = normal((E, N, K), torch.bfloat16) * 0.1
    dy = normal((T, N), torch.bfloat16).flip(0) * 1e-3
    return x, w, dy, torch.tensor(SIZES)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_dequantized_tokens(recipe: str, role: str) -> None:
    x, _, _, sizes = operands()
    for operand in quantized(x, recipe, role, sizes):
        back = reference.dequantize(operand, group_sizes=sizes)
        limit = ROUNDING[operand.quantization.format]
        stochastic = operand.quantization.rounding == "stochastic"
        assert back.shape == x.shape
        assert relative(back[:128], x[:128]) < limit * (1.7 if stochastic else 1)
        assert (back[128:] == 0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_dequantized_weights(recipe: str) -> None:
    _, w, _, _ = operands()
    for operand in quantized(w, recipe, "weight"):
        back = reference.dequantize(operand)
        assert relative(back, w) < ROUNDING[operand.quantization.format]


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_gemms(recipe: str) -> None:
    """Against float64 GEMMs of the dequantised copies, group by group."""
    x, w, dy, sizes = operands()
    bias = normal((E, N), torch.bfloat16)
    xq, wq = quantized(x, recipe, "input", sizes), quantized(w, recipe, "weight")
    dq = quantized(dy, recipe, "grad_output", sizes)
    y = reference.grouped_gemm_fprop(xq.rowwise, wq.rowwise, sizes, torch.bfloat16, add=bias)
    dx = reference.grouped_gemm_dgrad(dq.rowwise, wq.columnwise, sizes, torch.bfloat16)
    dw = reference.grouped_gemm_wgrad(dq.columnwise, xq.columnwise, sizes, torch.float32)

    def exact(operand: Any, groups: Tensor | None) -> Tensor:
        return reference.dequantize(operand, group_sizes=groups).double()

    start = 0
    for group, size in enumerate(SIZES):
        own = slice(start, start + size)
        start += size
        if size == 0:
            assert (dw[group] == 0).all()
            continue
        fprop = exact(xq.rowwise, sizes)[own] @ exact(wq.rowwise, None)[group].T
        assert relative(y[own], fprop + bias[group].double()) < 4e-3
        dgrad = exact(dq.rowwise, sizes)[own] @ exact(wq.columnwise, None)[group]
        assert relative(dx[own], dgrad) < 4e-3
        if recipe != "nvfp4":
            columns = exact(dq.columnwise, sizes)[own], exact(xq.columnwise, sizes)[own]
            assert relative(dw[group], columns[0].T @ columns[1]) < 1e-5
    assert (y[128:] == 0).all() and (dx[128:] == 0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_group_is_a_dense_gemm(recipe: str) -> None:
    """Quantised alone, a group gives the bits it gives in company; scales never cross groups."""
    x, w, dy, sizes = operands()
    dy = dy.abs() + 1e-4
    role = "input" if recipe == "nvfp4" else "grad_output"  # random numbers tell groups apart
    xq, wq = quantized(x, recipe, "input", sizes), quantized(w, recipe, "weight")
    dq = quantized(dy, recipe, role, sizes)
    y = reference.grouped_gemm_fprop(xq.rowwise, wq.rowwise, sizes, torch.float32)
    dx = reference.grouped_gemm_dgrad(dq.rowwise, wq.columnwise, sizes, torch.float32)
    dw = reference.grouped_gemm_wgrad(dq.columnwise, xq.columnwise, sizes, torch.float32)
    own = slice(17, 81)
    xd, wd = quantized(x[own], recipe, "input"), quantized(w[2], recipe, "weight")
    dd = quantized(dy[own], recipe, role)
    torch.testing.assert_close(
        y[own], reference.gemm_fprop(xd.rowwise, wd.rowwise, torch.float32), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        dx[own],
        reference.gemm_dgrad(dd.rowwise, wd.columnwise, torch.float32),
        rtol=1e-5,
        atol=1e-5,
    )
    torch.testing.assert_close(
        dw[2],
        reference.gemm_wgrad(dd.columnwise, xd.columnwise, torch.float32),
        rtol=1e-5,
        atol=1e-5,
    )


def test_transformed_weight_gradient() -> None:
    """Blocks that the transform fills up count in the GEMM: nothing of a short group is lost.

    A block of 5 rows spreads over 16; dropping the last 11 would lose most of the gradient.
    """
    x, dy, sizes = normal((5, 16), torch.bfloat16), normal((5, 32), torch.bfloat16), [5]
    q = quantization("nvfp4", "input")
    groups = torch.tensor(sizes)
    dq = reference.quantize(dy, q, rowwise=False, columnwise=True, group_sizes=groups).columnwise
    xq = reference.quantize(x, q, rowwise=False, columnwise=True, group_sizes=groups).columnwise
    dw = reference.grouped_gemm_wgrad(dq, xq, groups, torch.float32)
    expected = dy.double().T @ x.double()
    assert relative(dw[0], expected) < 0.25
    wide = [reference._read(operand, groups)[0].double() for operand in (dq, xq)]
    exact = wide[0].T @ wide[1] * float(dq.amax * xq.amax) / (36 * 448**2)
    assert relative(dw[0], exact) < 1e-5


@pytest.mark.parametrize(
    ("recipe", "error"),
    [
        ("fp8_current", 0.06),
        ("fp8_delayed", 0.06),
        ("fp8_rowwise", 0.06),
        ("fp8_block", 0.06),
        ("mxfp8", 0.06),
        ("nvfp4", 0.28),
    ],
)
def test_cost_of_a_recipe(recipe: str, error: float) -> None:
    """The three GEMMs of a linear layer against float64 of unquantised operands."""
    x, w = normal((256, 256), torch.bfloat16), normal((192, 256), torch.bfloat16).flip(0)
    dy = normal((256, 192), torch.bfloat16).flip(1)
    xq, wq = quantized(x, recipe, "input"), quantized(w, recipe, "weight")
    dq = quantized(dy, recipe, "grad_output")
    y = reference.gemm_fprop(xq.rowwise, wq.rowwise, torch.bfloat16)
    dx = reference.gemm_dgrad(dq.rowwise, wq.columnwise, torch.bfloat16)
    dw = reference.gemm_wgrad(dq.columnwise, xq.columnwise, torch.bfloat16)
    x, w, dy = x.double(), w.double(), dy.double()
    for got, expected in ((y, x @ w.T), (dx, dy @ w), (dw, dy.T @ x)):
        assert 0.005 < relative(got, expected) < error


def test_untransposed_is_the_same_gemm() -> None:
    x, _, dy, sizes = operands()
    results = []
    for layout in (reference.Layout(), reference.Layout(transposed=False)):
        copies = [
            reference.quantize(
                tensor, quantization("mxfp8", role), rowwise=False, columnwise=True,
                group_sizes=sizes, layout=layout,
            ).columnwise
            for tensor, role in ((dy, "grad_output"), (x, "input"))
        ]  # fmt: skip
        results.append(reference.grouped_gemm_wgrad(*copies, sizes, torch.float32))
    assert torch.equal(*results)


def test_nothing_leaks_from_trailing_rows() -> None:
    x, w, dy, sizes = operands()
    x[128:], dy[128:] = torch.nan, torch.inf
    for recipe in RECIPES:
        xq, wq = quantized(x, recipe, "input", sizes), quantized(w, recipe, "weight")
        dq = quantized(dy, recipe, "grad_output", sizes)
        y = reference.grouped_gemm_fprop(xq.rowwise, wq.rowwise, sizes, torch.float32)
        dx = reference.grouped_gemm_dgrad(dq.rowwise, wq.columnwise, sizes, torch.float32)
        dw = reference.grouped_gemm_wgrad(dq.columnwise, xq.columnwise, sizes, torch.float32)
        assert (y[128:] == 0).all() and (dx[128:] == 0).all()
        assert all(result.isfinite().all() for result in (y, dx, dw))


def test_mismatched_operands_are_refused() -> None:
    x, w, _, _ = operands()
    xq, wq = quantized(x, "nvfp4", "input"), quantized(w[0], "nvfp4", "weight")
    plain = quantized(w[0], "mxfp8", "weight")
    with pytest.raises(ValueError, match="along another dimension"):
        reference.gemm_fprop(xq.columnwise, wq.rowwise, torch.float32)
    with pytest.raises(ValueError, match="transformed copy"):
        reference.gemm_wgrad(
            xq.columnwise, quantized(x, "nvfp4", "weight").columnwise, torch.float32
        )
    with pytest.raises(ValueError, match="tensor scale, or none"):
        reference.gemm_fprop(xq.rowwise, plain.rowwise, torch.float32)
    with pytest.raises(ValueError, match="comes with its amax"):
        reference.gemm_fprop(xq.rowwise._replace(amax=None), wq.rowwise, torch.float32)
