"""GEMMs that gather rows of tokens: which do, and what is left of the step that did."""

from __future__ import annotations

import pytest

from fusegen.families.registry import known_family
from fusegen.families.wgmma import WgmmaConfig
from fusegen.ir.dtypes import DType
from fusegen.ir.kernel import GemmKind
from fusegen.ir.kernel_set import Variant
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.step import Step
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.folders import BUILTIN, load_specs

SPECS = load_specs(BUILTIN)


def plan_of(cell: str, arch: str = "sm_90a") -> ModulePlan:
    return resolve_module(SPECS, Cell.parse(cell), arch)


def gemms(plan: ModulePlan) -> dict[str, Step]:
    """GEMMs by their result."""
    return {step.out: step for step in plan.steps if step.kind in {k.value for k in GemmKind}}


def test_all_products_of_rows_gather_them() -> None:
    """x in the forward and for fc1's weight, dy for its own gradient and fc2's weight."""
    found = {name: step.kernels for name, step in gemms(plan_of("moe_layer__bf16")).items()}
    scaled = "gated_aux_pointwise_scaled_swiglu_forward"
    assert found == {
        "a": f"gemm_gather_sm90_fprop_gathered_a_{scaled}",
        "experts": "gemm_sm90_fprop",
        "da": "gemm_gather_sm90_dgrad_gathered_a",
        "drows": "gemm_sm90_dgrad",
        "dfc1_weight": "gemm_gather_sm90_wgrad_gathered_b",
        "dfc2_weight": "gemm_gather_sm90_wgrad_gathered_a",
    }


def test_rows_are_copied_for_the_sum_of_a_bias_alone() -> None:
    gathers = [s for s in plan_of("moe_layer__bf16").steps if s.primitive == "gather_rows"]
    assert [(step.out, step.when) for step in gathers] == [("dexperts", ("need_dfc2_bias",))]


def test_products_read_rows_that_are_written_where_that_is_chosen() -> None:
    plan, other = plan_of("moe_layer__bf16__written_rows"), plan_of("moe_layer__bf16")
    assert not any("gathered" in step.primitive for step in plan.steps)
    found = {name: step.kernels for name, step in gemms(plan).items()}
    gathered = {name: step.kernels for name, step in gemms(other).items()}
    assert found.keys() == gathered.keys() and all("gemm_sm90" in str(k) for k in found.values())
    gathers = [step.out for step in plan.steps if step.primitive == "gather_rows"]
    assert gathers == ["rows", "dexperts", "rows"]
    assert plan.saved == other.saved


def test_quantised_rows_are_never_written() -> None:
    with pytest.raises(Exception, match="recipe 'fp8_block' quantises rows where the tokens lie"):
        plan_of("moe_layer__fp8_block__written_rows")


def test_only_products_of_gathered_rows_have_the_choice() -> None:
    with pytest.raises(Exception, match="no GEMM reads rows that the op before it gathers"):
        plan_of("grouped_mlp__bf16__written_rows")


@pytest.mark.parametrize("cell", ("moe_layer__fp8_delayed", "moe_layer__mxfp8", "moe_layer__nvfp4"))
def test_codes_are_quantised_where_tokens_lie_instead(cell: str) -> None:
    assert not any("gathered" in step.primitive for step in plan_of(cell).steps)


@pytest.mark.parametrize("arch", ("cpu", "sm_80", "sm_89", "sm_100a", "sm_120a"))
def test_other_architectures_copy_rows(arch: str) -> None:
    plan = plan_of("moe_layer__bf16", arch)
    assert not any("gathered" in step.primitive for step in plan.steps)
    assert any(step.primitive == "gather_rows" for step in plan.steps)


def test_a_caller_gets_the_rows_that_it_asks_for() -> None:
    plan = plan_of("gather__bf16")
    assert [step.primitive for step in plan.forward.steps][-1] == "gather_rows"


def test_the_backward_needs_less_memory_without_rows() -> None:
    """Two tensors of T K H elements were there at once with gradients of weights."""
    written = {name for step in plan_of("moe_layer__bf16").steps for name in step.writes}
    assert {"rows", "rows_of_h"}.isdisjoint(written)
    kept = {result.buffer for result in plan_of("moe_layer__bf16").forward.results}
    copied = {result.buffer for result in plan_of("moe_layer__bf16", "sm_80").forward.results}
    assert kept == copied


def test_rows_of_a_tile_are_those_of_the_operand_that_is_gathered() -> None:
    """A gradient of weights whose second operand is gathered has the tile transposed."""
    family = known_family("gemm_gather_sm90")
    assert family and family.configured
    limits = SPECS.archs["sm_90a"].limits
    wide = WgmmaConfig.parse("cooperative_128x192x64_2x1")
    warps = {}
    for traits in ((), ("gathered_a",), ("gathered_b",)):
        variant = Variant((DType.IO,), (), traits)
        constants = family.configured.constants(wide, GemmKind.WGRAD, variant, limits)
        assert not [*family.configured.problems(wide, GemmKind.WGRAD, variant, limits)]
        warps[traits] = dict(constants)["math_warpgroups"]
    assert warps == {(): 2, ("gathered_a",): 2, ("gathered_b",): 3}
    turns = WgmmaConfig.parse("pingpong_128x192x64_2x1")
    gathered = Variant((DType.IO,), (), ("gathered_b",))
    problems = [*family.configured.problems(turns, GemmKind.WGRAD, gathered, limits)]
    assert problems == ["expected 64 or 128 rows in a pingpong tile"]
