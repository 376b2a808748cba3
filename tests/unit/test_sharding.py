"""Ways to split modules over ranks, as the plans give them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from fusegen.checks.load import load
from fusegen.emit.python.sharding import sharding_context
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan, Sharding
from fusegen.ir.shapes import Split, parse_expr, split
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.sharding import module_shardings, undivided
from fusegen.publish.paths import builtin_specs
from fusegen.spec.load import SpecSet
from fusegen.steps import BY_NAME
from fusegen.steps.sums import COLUMN_SUM

ARCHS = ("cpu", "sm_90a")


@cache
def specs() -> SpecSet:
    return load([builtin_specs()])


def plan(cell: str, arch: str = "cpu") -> ModulePlan:
    return resolve_module(specs(), Cell.parse(cell), arch)


def ways(cell: str, arch: str = "cpu") -> dict[str, int]:
    """Dimension -> unit, of what holds with gradients."""
    return {way.symbol: way.unit for way in plan(cell, arch).shardings if way.gradients}


def way(cell: str, symbol: str) -> Sharding:
    return next(way for way in plan(cell).shardings if way.symbol == symbol and way.gradients)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("K", (1, 1, True)),
        ("2 * K", (2, 1, True)),
        ("ceildiv(K, 128)", ("1/128", 128, True)),
        ("ceildiv(2 * K, 128)", ("1/64", 64, True)),
        ("align(K, 16)", (1, 16, True)),
        ("align(ceildiv(K, 16), 4)", ("1/16", 64, True)),
        ("K // 32 + 1", ("1/32", 32, False)),
        ("N", (0, 1, False)),
        ("7", (0, 1, False)),
        ("K + N", (1, 1, False)),
    ],
)
def test_expressions_split_where_no_quotient_is_rounded(
    text: str, expected: tuple[object, int, bool]
) -> None:
    found = split(parse_expr(text), "K")
    assert isinstance(found, Split)
    assert (str(found.slope), found.unit, found.proportional) == (str(expected[0]), *expected[1:])


def test_products_of_a_dimension_with_another_are_not_linear() -> None:
    assert split(parse_expr("K * N"), "K") is None


@pytest.mark.parametrize(
    ("cell", "cpu", "hopper"),
    [
        ("linear__bf16", {"T": 1, "K": 1, "N": 1}, {"T": 1, "K": 8, "N": 8}),
        ("linear__fp8_block", {"T": 128, "K": 128, "N": 128}, None),
        ("linear__mxfp8", {"T": 32, "K": 32, "N": 32}, None),
        ("linear__fp8_rowwise", {}, None),
        ("linear__fp8_current", {}, None),
        ("linear__fp8_delayed", {}, None),
        ("linear__nvfp4", {}, None),
        ("grouped_linear__bf16", {"K": 1, "N": 1}, {"K": 8, "N": 8}),
        ("grouped_linear__fp8_block", {"K": 128, "N": 128}, None),
        ("grouped_linear__mxfp8", {"K": 32, "N": 32}, None),
        ("grouped_linear__fp8_rowwise", {}, None),
        ("grouped_mlp__bf16", {}, None),
        ("grouped_mlp_srelu__bf16", {"F": 1}, {"F": 8}),
        ("grouped_mlp_srelu__fp8_block", {"F": 128}, None),
        ("swiglu__bf16", {"T": 1}, {"T": 1}),
        ("layer_norm__bf16", {"T": 1}, {"T": 1}),
        ("l2_normalization__bf16", {"T": 1}, {"T": 1}),
    ],
)
def test_what_may_be_split(cell: str, cpu: dict[str, int], hopper: dict[str, int] | None) -> None:
    assert ways(cell) == cpu
    assert ways(cell, "sm_90a") == (cpu if hopper is None else hopper)


def test_a_split_contraction_leaves_summands() -> None:
    """y and the bias it adds along K, dx along N, what sums tokens along T."""
    assert set(way("linear__fp8_block", "K").partial) == {"y", "bias"}
    assert set(way("linear__fp8_block", "N").partial) == {"dx"}
    assert set(way("linear__fp8_block", "T").partial) == {"dweight", "dbias"}


@pytest.mark.parametrize("arch", ARCHS)
def test_gradients_of_a_norms_weights_are_summands_along_its_rows(arch: str) -> None:
    """What kernels leave of them before they are added up is nobody's result."""
    (along,) = plan("layer_norm__bf16", arch).shardings
    assert set(along.partial) == {"dweight", "dbias"}
    assert (along.axis("mean"), along.axis("rstd"), along.axis("weight")) == (0, 0, None)


def test_saved_copies_lie_as_their_dimensions_say() -> None:
    along = way("grouped_linear__mxfp8", "N")
    assert along.axis("weight") == 1
    assert along.axis("weight_columnwise") == 2  # transposed
    assert along.axis("weight_columnwise_scale") == 1  # in logical order
    assert along.axis("x_columnwise") is None


def test_both_gemms_of_an_mlp_are_split_together() -> None:
    along = way("grouped_mlp_srelu__mxfp8", "F")
    assert (along.axis("fc1_weight"), along.axis("fc2_weight"), along.axis("h")) == (1, 2, 1)
    assert set(along.partial) == {"y", "fc2_bias", "dx", "dprobs"}


@pytest.mark.parametrize("arch", ARCHS)
def test_scales_of_rows_allow_columns_without_gradients(arch: str) -> None:
    """The backward's copies have one scale along the split dimension; the forward's do not."""
    found = plan("grouped_linear__fp8_rowwise", arch).shardings
    assert [(way.symbol, way.gradients) for way in found] == [("N", False)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
def test_a_stack_of_weights_is_quantised_by_experts(arch: str, recipe: str) -> None:
    stack = next(
        each
        for each in plan(f"quantize__{recipe}", arch).conversions
        if each.program.name == "weight_stack"
    )
    along = next(way for way in stack.shardings if way.symbol == "E")
    assert along.unit == 1
    assert all(along.axis(result.buffer) == 0 for result in stack.program.results)


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_in_groups_and_groups_are_never_split(arch: str) -> None:
    for recipe in specs().recipes:
        for module in ("grouped_linear", "grouped_mlp", "grouped_mlp_srelu"):
            for each in plan(f"{module}__{recipe}", arch).shardings:
                assert each.symbol not in "TE"


@pytest.mark.parametrize(
    ("independent", "symbols"), [((), {"K"}), (("N",), {"N", "K"}), (("T", "N"), {"N", "K"})]
)
def test_kinds_say_along_which_dimensions_their_steps_split(
    independent: tuple[str, ...], symbols: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along T a column sum leaves a partial sum, which is no shard of its result."""
    kind = replace(COLUMN_SUM, traits=frozenset(), independent=independent)
    monkeypatch.setitem(BY_NAME, kind.name, kind)
    found = module_shardings(plan("linear__bf16"))
    assert {way.symbol for way in found if way.gradients} == symbols


def test_a_cell_that_cannot_be_split_names_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replace(plan("linear__bf16"), shardings=())
    assert undivided(whole) == ()
    assert sharding_context(whole).summary[0].startswith("None: scales span")
    monkeypatch.setitem(BY_NAME, COLUMN_SUM.name, replace(COLUMN_SUM, traits=frozenset()))
    assert undivided(whole) == ("column_sum",)
    assert sharding_context(whole).summary == (
        "None: column_sum cannot be split along any dimension.",
    )
