"""Plans in which one kernel computes an expression and quantises what it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import SPECS

from fusegen.emit.launcher.program import launcher_context
from fusegen.emit.reference.cell import reference_context
from fusegen.ir.naming import Cell, need
from fusegen.ir.plan import ModulePlan
from fusegen.ir.step import Step
from fusegen.options import OPTIONS
from fusegen.passes.pipeline import resolve_module
from fusegen.spec.load import SpecSet
from fusegen.steps import copies_memory, made_copies, sums_rows
from fusegen.steps.pointwise_quantize import ROW_PARTIALS

APART = replace(SPECS, fusions={})


def only(*fusions: str) -> SpecSet:
    """The specs with these fusions alone."""
    return replace(SPECS, fusions={name: SPECS.fusions[name] for name in fusions})


MODULES = tuple(name for name in SPECS.modules if name.startswith("grouped_mlp"))
# Of these no tensor is read for its amaxes before it is quantised.
MERGING = ("fp8_block", "fp8_delayed", "mxfp8")
APART_ALWAYS = ("bf16", "fp8_current", "fp8_rowwise", "nvfp4")
AGAIN, ONE = "recompute_activations", "one_backward_call"
ORDER = [word for each in OPTIONS for word in each.words]


def plan_of(
    recipe: str,
    *options: str,
    module: str = "grouped_mlp",
    arch: str = "sm_90a",
    of: SpecSet = SPECS,
) -> ModulePlan:
    return resolve_module(of, Cell(module, recipe, options), arch)


MERGED = {"pointwise_quantize", "pointwise_grad_quantize"}
MAKING_COPIES = {
    name
    for name, fusion in SPECS.fusions.items()
    if MERGED & {step.step for step in (*fusion.rewrite.forward, *fusion.rewrite.backward)}
}


def merged(plan: ModulePlan) -> list[Step]:
    return [step for step in plan.steps if step.primitive in MERGED]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("recipe", MERGING)
def test_both_directions_merge(module: str, recipe: str) -> None:
    plan = plan_of(recipe, module=module)
    forward = ("pointwise_quantize", "activation_quantize")
    if recipe == "fp8_delayed" and "srelu" not in module:  # of halves, by scales that are known
        forward = ("grouped_gemm_pointwise_quantize", "grouped_linear_activation_codes")
    backward = ("pointwise_grad_quantize", "activation_gradient_quantize")
    found = [step for step in plan.steps if step.rule and made_copies(step)]
    assert [(step.primitive, step.rule) for step in found] == [forward, backward]
    assert {"a", "dh"}.isdisjoint((*plan.forward.workspace, *plan.backward.workspace))
    used = {step.kernels for step in plan.steps if not copies_memory(step)}
    assert used == {kernels.name for kernels in plan.kernel_sets}
    for _, rule in (forward, backward):
        assert any(source.endswith(f"{rule}.yaml") for source in plan.sources)


@pytest.mark.parametrize("option", [(), ("reduced_amax",), ("cached_weights",), ("delayed_wgrad",)])
@pytest.mark.parametrize("recipe", MERGING)
def test_the_parts_are_the_steps_that_they_were(recipe: str, option: tuple[str, ...]) -> None:
    if option == ("reduced_amax",) and recipe != "fp8_delayed":
        option = ()
    option += () if option == ("delayed_wgrad",) else (ONE,)
    option = tuple(sorted(option, key=ORDER.index))
    plan, apart = plan_of(recipe, *option), plan_of(recipe, *option, of=APART)
    assert merged(plan) and not merged(apart)
    for one, other in zip(plan.unmerged.ops, apart.unmerged.ops, strict=True):
        assert one[1] == other[1]
    assert (plan.saved, plan.states, plan.shardings) == (apart.saved, apart.states, apart.shardings)
    assert reference_context(plan) == reference_context(apart)


@pytest.mark.parametrize("recipe", MERGING)
def test_an_activation_that_is_made_again_merges_again(recipe: str) -> None:
    plan = plan_of(recipe, AGAIN)
    again = [step for step in plan.steps if step.rule and made_copies(step)]
    behind = "grouped_linear_activation_codes"  # a product, where scales are known before
    rules = (
        behind if recipe == "fp8_delayed" else "activation_quantize",
        "recomputed_activation_quantize",
        "activation_gradient_quantize",
    )
    assert sorted(str(step.rule) for step in again) == sorted(rules)
    forward, backward, _ = sorted(again, key=lambda step: rules.index(str(step.rule)))
    assert [copy.orientation.value for copy in made_copies(forward)] == ["rowwise"]
    assert [copy.orientation.value for copy in made_copies(backward)] == ["columnwise"]
    assert backward.when == (need("fc2_weight"),)


@pytest.mark.parametrize("module", ("mlp", "mlp_swiglu", "norm_mlp_srelu"))
@pytest.mark.parametrize("recipe", MERGING)
def test_a_gradient_the_one_of_its_bias_and_its_copies_are_one_pass(
    module: str, recipe: str
) -> None:
    plan = plan_of(recipe, module=module)
    (step,) = (s for s in merged(plan) if s.rule == "activation_gradient_quantize")
    assert [part.primitive for part in step.parts] == ["pointwise_grad", "quantize"]
    assert "dfc1_bias" in step.writes
    assert "dh" not in (*plan.backward.workspace, *(n for s in plan.steps for n in s.reads))
    assert not any(sums_rows(each) for each in plan.steps)
    alone = [f for f in SPECS.fusions if f != step.rule]
    apart = plan_of(recipe, module=module, of=only(*alone))
    writer = next(s for s in apart.backward.steps if "dfc1_bias" in s.writes)
    assert writer.primitive == "quantize" and "dh" in writer.reads


@pytest.mark.parametrize("recipe", APART_ALWAYS)
def test_nothing_merges_without_copies_or_where_an_amax_comes_first(recipe: str) -> None:
    alone = only(*(name for name in SPECS.fusions if name not in MAKING_COPIES))
    for options in ((), (AGAIN,)):
        plan, apart = plan_of(recipe, *options), plan_of(recipe, *options, of=alone)
        assert not merged(plan) and plan == replace(apart, rewrites=plan.rewrites)


def test_every_recipe_merges_or_stays() -> None:
    assert sorted(SPECS.recipes) == sorted((*MERGING, *APART_ALWAYS))


def test_nothing_merges_without_kernels() -> None:
    assert not merged(plan_of("fp8_block", arch="cpu"))
    without = replace(SPECS.archs["sm_90a"], kernels={
        name: family
        for name, family in SPECS.archs["sm_90a"].kernels.items()
        if not MERGED.intersection(family.implements)
    })  # fmt: skip
    specs = replace(SPECS, archs={**SPECS.archs, "sm_90a": without})
    assert plan_of("fp8_block", of=specs) == plan_of("fp8_block", of=APART)


def test_a_tensor_that_others_read_stays() -> None:
    """Statistics compare with it, and a backward in high precision multiplies it."""
    assert not merged(plan_of("fp8_block", "debug"))
    assert not merged(plan_of("fp8_block", "high_precision_backward"))


@pytest.mark.parametrize("recipe", MERGING)
def test_each_result_is_written_under_its_own_flags(recipe: str) -> None:
    *forward, step = merged(plan_of(recipe))
    assert len(forward) == (recipe != "fp8_delayed")  # whose product gives the activation's codes
    first, second = step.parts
    assert step.when == first.when != second.when
    for part in step.parts:
        for name in set(part.writes) & set(step.writes):
            assert (step.wanted(name) or step.when) == (part.wanted(name) or part.when)
    (scratch,) = [o.buffer for o in step.outputs if o.slot == ROW_PARTIALS]
    assert step.wanted(scratch) == step.wanted("dprobs") == (need("probs"),)


def test_the_launcher_says_when_only_the_sum_is_wanted() -> None:
    plan = plan_of("fp8_block", ONE)
    context = launcher_context(plan, SPECS.archs["sm_90a"], "namespace")
    forward, backward = (
        next(step for step in program.steps if "_quantize:" in step.comment)
        for program in context.programs
    )
    assert not any("quantizes" in line for line in forward.lines)
    asked = " || ".join(map(need, ("x", "fc1_weight", "fc1_bias")))
    named = context.programs[1].conditions
    assert f"const bool need_dh_row_sums = {asked};" in (line.strip() for line in named)
    assert "  arguments.quantizes = need_dh_row_sums;" in backward.lines
    assert (
        "  arguments.expression.results = {nullptr, nullptr, writable(dprobs)};" in backward.lines
    )
    assert not any(".input" in line for line in (*forward.lines, *backward.lines))
