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


HALVES = (
    # Halves narrower than a stored part; as wide as one and a bit; no multiple of any part.
    support.Case("narrow", 700, 136, 8, (300, 0, 111, 7, 250)),
    support.Case("one_part", 700, 264, 72, (0, 700, 0)),
    support.Case("odd", 1500, 264, 392, (300, 0, 111, 7, 482)),
    support.Case("out_of_range", 900, 136, 200, (100, -5, 300, -(2**62), 200, 0, -1, 77)),
    support.Case("all_empty", 300, 72, 136, (0,) * 5),
    # Every tile that rules choose, on groups that end within tiles.
    support.ragged("narrow_tiles", 7, 4000, 1032, 1544),
    support.ragged("pingpong", 9, 7000, 1032, 1544),
    support.ragged("cooperative", 5, 7000, 6152, 648),
)
"""Halves of n columns, contractions of k."""


@pytest.mark.parametrize("dtype", support.DTYPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("case", HALVES, ids=lambda case: case.name)
def test_a_gated_activation_is_that_of_a_kernel_of_its_own(
    bundle: ModuleType, case: support.Case, bias: bool, dtype: torch.dtype
) -> None:
    """So are the halves that it reads, which the GEMM writes, too, if a gradient asks for them."""
    given = support.grouped_mlp_operands(case, dtype, bias)
    x, splits, probs = given["x"], given["split_sizes"], given["probs"]
    apart = load_cell(bundle, "grouped_linear__bf16").grouped_linear
    own, second = given.get("fc1_bias"), given.get("fc2_bias")
    h = apart(x=x, weight=given["fc1_weight"], split_sizes=splits, bias=own)
    a = load_cell(bundle, "scaled_swiglu__bf16").scaled_swiglu(x=h, scales=probs)
    wanted = apart(x=a, weight=given["fc2_weight"], split_sizes=splits, bias=second)
    forward = support.op_of(bundle, "grouped_mlp__bf16_forward")
    operands = (x, given["fc1_weight"], given["fc2_weight"], splits, probs, own, second)
    asks_h, asks_a = (True, False, False, False, False), (False, False, True, False, False)
    for asked in (asks_h, asks_a, (True,) * 5, (False,) * 5):
        y, kept, gated = forward(*operands, *asked)
        assert torch.equal(support.bytes_of(y), support.bytes_of(wanted))
        for got, expected in ((kept, h), (gated, a)):
            assert got is None or torch.equal(support.bytes_of(got), support.bytes_of(expected))
        assert (kept is None, gated is None) == (not any(asked[:2]), not asked[2])


def test_nothing_is_read_of_rows_that_no_group_has(bundle: ModuleType) -> None:
    """Their scales may be anything."""
    case = support.Case("short", 700, 136, 200, (300, 0, 111))
    given = support.grouped_mlp_operands(case, torch.bfloat16)
    function = support.function_of(bundle, "grouped_mlp")
    wanted = function(**given)
    given["probs"][411:] = float("nan")
    assert torch.equal(support.bytes_of(function(**given)), support.bytes_of(wanted))
