"""What a GEMM makes of its result on the way to memory is what PyTorch makes of it afterwards."""

from __future__ import annotations

from types import ModuleType

import gpu_support as support
import pytest
import torch
from bundles import load_cell

RECIPES = ("bf16", "fp8_block")
SIZES = (
    (1, 8, 8),
    (7, 264, 520),
    (700, 136, 200),
    # Every tile that rules choose: more rows, columns and K than they ask for.
    (4224, 1536, 328),
    (6400, 1288, 1032),
    (6200, 264, 6400),
)
"""Rows, columns and contraction of the GEMM of the forward."""


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_a_residual_is_added_as_by_a_kernel_of_its_own(
    bundle: ModuleType, size: tuple[int, int, int], recipe: str, dtype: torch.dtype
) -> None:
    rows, columns, k = size
    x = support.randn((rows, k), dtype, 1)
    weight = support.randn((columns, k), dtype, 2, k**-0.5)
    bias = support.randn((columns,), dtype, 3)
    residual = support.randn((rows, columns), dtype, 4)
    apart = load_cell(bundle, f"linear__{recipe}").linear
    fused = load_cell(bundle, f"linear_residual__{recipe}").linear_residual
    wanted = apart(x=x, weight=weight, bias=bias) + residual
    got = fused(x=x, residual=residual, fc_weight=weight, fc_bias=bias)
    assert torch.equal(support.bytes_of(got), support.bytes_of(wanted))
    # Nothing beside the tensor that is added is read.
    same = fused(x=x, residual=support.guarded(residual), fc_weight=weight, fc_bias=bias)
    assert torch.equal(support.bytes_of(same), support.bytes_of(wanted))


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_an_activation_is_that_of_a_kernel_of_its_own(
    bundle: ModuleType, size: tuple[int, int, int], recipe: str, dtype: torch.dtype
) -> None:
    """So is what it reads, which the GEMM writes, too, if a gradient asks for it."""
    rows, columns, k = size
    x = support.randn((rows, k), dtype, 1)
    weight = support.randn((columns, k), dtype, 2, k**-0.5)
    bias = support.randn((columns,), dtype, 3)
    h = load_cell(bundle, f"linear__{recipe}").linear(x=x, weight=weight, bias=bias)
    wanted = load_cell(bundle, "gelu__bf16").gelu(x=h)
    forward = support.op_of(bundle, f"linear_activation__{recipe}_forward")
    for asked in (True, False):
        y, kept, *_ = forward(x, weight, bias, asked, asked, asked)
        assert torch.equal(support.bytes_of(y), support.bytes_of(wanted))
        assert (kept is None) != asked
        assert kept is None or torch.equal(support.bytes_of(kept), support.bytes_of(h))
