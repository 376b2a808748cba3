"""Plans whose last bias is scaled by rows: readers of the scales, and their gradient."""

from __future__ import annotations

import pytest
from plans import SPECS

from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.step import Step
from fusegen.passes.draft import NotPossible
from fusegen.passes.pipeline import resolve_module
from fusegen.spec.offers import modules_with

SCALED = "scaled_bias"
MLPS = tuple(name for name in SPECS.modules if name.startswith("grouped_mlp"))
LAYERS = tuple(name for name in SPECS.modules if "moe_layer" in name)
every_arch = pytest.mark.parametrize("arch", ("cpu", "sm_90a"))
every_recipe = pytest.mark.parametrize("recipe", SPECS.recipes)


def plan_of(module: str, recipe: str, arch: str, *options: str) -> ModulePlan:
    return resolve_module(SPECS, Cell(module, recipe, options), arch)


def readers(plan: ModulePlan, slot: str) -> list[Step]:
    return [step for step in plan.steps if step.input(slot)]


def dot(plan: ModulePlan) -> Step:
    (found,) = [s for s in plan.backward.steps if s.primitive == "group_row_dot"]
    return found


def test_the_modules_with_a_grouped_bias_offer_it() -> None:
    offering = {*modules_with(SCALED, SPECS)}
    assert offering == {"grouped_linear", *MLPS, *LAYERS}


@every_arch
@every_recipe
@pytest.mark.parametrize("module", MLPS)
def test_fc2_alone_is_scaled_by_the_router(module: str, recipe: str, arch: str) -> None:
    plan = plan_of(module, recipe, arch, SCALED)
    (gemm,) = readers(plan, "add_scales")
    assert (gemm.item, gemm.input("add"), gemm.input("add_scales")) == (
        "fc2",
        "fc2_bias",
        "probs",
    )
    (bias,) = [s for s in readers(plan, "scales") if s.primitive == "group_sum"]
    assert (bias.input("a"), bias.input("scales"), bias.out) == ("dy", "probs", "dfc2_bias")
    assert plan.inputs == plan_of(module, recipe, arch).inputs


@every_arch
@every_recipe
def test_the_scales_gradient_is_a_sum_of_two(recipe: str, arch: str) -> None:
    plan = plan_of("grouped_mlp", recipe, arch, SCALED)
    step = dot(plan)
    assert {o.slot: o.buffer for o in step.inputs} == {
        "a": "dy",
        "b": "fc2_bias",
        "groups": "split_sizes",
        "add": "act_dprobs",
    }
    assert (step.out, step.when) == ("dprobs", ("need_dprobs",))
    steps = plan.backward.steps
    (writer,) = [each for each in steps if "act_dprobs" in each.writes]
    assert steps.index(writer) < steps.index(step)
    assert "fc2_bias" in {result.buffer for result in plan.saved}


@every_arch
def test_a_single_layer_has_one_more_input(arch: str) -> None:
    plan = plan_of("grouped_linear", "bf16", arch, SCALED)
    assert plan.inputs == ("x", "split_sizes", "scales")
    assert "scales" in plan.differentiated
    assert dot(plan).input("add") is None


def test_without_it_no_gemm_reads_scales() -> None:
    kernels = plan_of("grouped_mlp", "fp8_block", "sm_90a").kernel_sets
    assert not any(SCALED in each.name for each in kernels)
    scaled = plan_of("grouped_mlp", "fp8_block", "sm_90a", SCALED).kernel_sets
    (gemm,) = [each for each in scaled if SCALED in each.name]
    assert "_fprop_" in gemm.name


def test_refused_where_no_gemm_adds_a_bias() -> None:
    with pytest.raises(NotPossible, match="offers no option 'scaled_bias'"):
        plan_of("swiglu", "bf16", "cpu", SCALED)
