"""Fusions around norms: where they apply, where not and why, and that nothing else changes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from plans import SPECS

from fusegen.checks.load import load
from fusegen.emit.launcher.program import launcher_context
from fusegen.ir.naming import Cell, need
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import Program
from fusegen.ir.step import Step
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.verify import verify_pass
from fusegen.publish.paths import builtin_specs, builtin_templates
from fusegen.spec.load import SpecSet
from fusegen.steps import copies_memory
from fusegen.steps.norm import ADDED, TOTAL
from fusegen.steps.norm_quantize import STATISTICS

ARCHS = ("cpu", "sm_80", "sm_90a")
KINDS = {"rms_norm": "rms", "layer_norm": "layer", "l2_normalization": "l2"}

every_arch = pytest.mark.parametrize("arch", ARCHS)
every_norm = pytest.mark.parametrize("norm", KINDS)
every_recipe = pytest.mark.parametrize("recipe", SPECS.recipes)


def without(specs: SpecSet, *names: str) -> SpecSet:
    """Specs as ``--no-fusion`` leaves them."""
    kept = {name: fusion for name, fusion in specs.fusions.items() if name not in names}
    return replace(specs, fusions=kept)


def plan_of(
    module: str, recipe: str, arch: str, *options: str, specs: SpecSet = SPECS
) -> ModulePlan:
    return resolve_module(specs, Cell(module, recipe, options), arch, observe=verify_pass)


def said(plan: ModulePlan, rule: str) -> list[str]:
    """Why a rule does not apply; empty strings where it does."""
    return [each.reason for each in plan.rewrites if each.rule == rule]


def with_module(folder: Path, text: str) -> SpecSet:
    """The built-in specs and the module ``toy``."""
    (folder / "modules").mkdir()
    head = "edition: 2\nmodule: toy\nclass: Toy\nsummary: toy\n"
    (folder / "modules" / "toy.yaml").write_text(head + text, encoding="utf-8")
    return load([builtin_specs(), folder])


# ---- a norm writes what its consumer reads, quantised

LINEAR = """\
dims: {{T: tokens, H: hidden, F: wide}}
inputs: {{x: {{shape: [T..., H], role: input}}}}
chain:
  - {{op: {norm}, as: norm, out: n, dims: {{D: H}}}}
  - {{op: linear, as: fc, dims: {{K: H, N: F}}}}
"""
MERGING = ("fp8_block", "fp8_delayed", "mxfp8")
"""Recipes of which no tensor is read for its amaxes before it is quantised."""

every_gpu = pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))


def merged(program: Program) -> list[Step]:
    return [step for step in program.steps if step.primitive == "norm_quantize"]


@every_gpu
@every_norm
@pytest.mark.parametrize("recipe", MERGING)
def test_a_norm_writes_both_copies(norm: str, recipe: str, arch: str, tmp_path: Path) -> None:
    specs = with_module(tmp_path, LINEAR.format(norm=norm))
    plan = plan_of("toy", recipe, arch, specs=specs)
    (step,) = merged(plan.forward)
    assert (step.parts[0].kind, step.rule) == (KINDS[norm], "norm_quantize")
    assert [copy.orientation.value for copy in step.copies] == ["rowwise", "columnwise"]
    assert {o.slot for o in step.outputs} >= {"rstd", STATISTICS}
    assert "n" not in step.writes and "n" not in plan.forward.workspace
    assert f"n_{STATISTICS}" in plan.forward.workspace
    apart = plan_of("toy", recipe, arch, specs=without(specs, "norm_quantize"))
    assert not merged(apart.forward)
    for one, other in zip(plan.unmerged.ops, apart.unmerged.ops, strict=True):
        assert [part.writes for part in one[1].steps] == [part.writes for part in other[1].steps]
    assert (plan.saved, plan.states) == (apart.saved, apart.states)
    used = {step.kernels for step in plan.steps if not copies_memory(step)}
    assert used == {each.name for each in plan.kernel_sets}


@pytest.mark.parametrize("recipe", MERGING)
def test_each_statistic_is_written_under_its_own_flags(recipe: str) -> None:
    plan = plan_of("layer_norm_linear", recipe, "sm_90a")
    (step,) = merged(plan.forward)
    wanted = (need("x"), need("norm_weight"), need("norm_bias"))
    for name in ("norm_mean", "norm_rstd"):
        assert step.wanted(name) == wanted
    assert step.when == step.wanted(f"a_{STATISTICS}") == ()


@pytest.mark.parametrize("recipe", MERGING)
def test_a_norm_that_is_made_again_writes_its_copy_again(recipe: str) -> None:
    plan = plan_of("norm_mlp", recipe, "sm_90a", "recompute_activations")
    (forward,), (backward,) = merged(plan.forward), merged(plan.backward)
    assert [copy.orientation.value for copy in forward.copies] == ["rowwise"]
    assert [copy.orientation.value for copy in backward.copies] == ["columnwise"]
    assert backward.rule == "recomputed_norm_quantize"
    norm, quantize = backward.parts
    assert {*quantize.when} < {*norm.when} == {*backward.when}
    context = launcher_context(plan, SPECS.archs["sm_90a"], "namespace")
    steps = (step for program in context.programs[1:] for step in program.steps)
    lines = [step.lines for step in steps if "norm_quantize" in step.comment]
    assert "  arguments.quantizes = need_dfc1_weight;" in lines[0]


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("bf16", "the forward has no quantize"),
        ("fp8_current", "recipe 'fp8_current' needs an amax first"),
        ("fp8_rowwise", "recipe 'fp8_rowwise' needs an amax first"),
        ("nvfp4", "recipe 'nvfp4' needs an amax first"),
    ],
)
def test_nothing_merges_without_copies_or_where_an_amax_comes_first(
    recipe: str, reason: str
) -> None:
    plan = plan_of("norm_mlp", recipe, "sm_90a")
    assert not merged(plan.forward)
    assert {*said(plan, "norm_quantize")} == {reason}


def test_every_recipe_merges_or_says_why_not() -> None:
    others = {"bf16", "fp8_current", "fp8_rowwise", "nvfp4"}
    assert {*SPECS.recipes} == {*MERGING} | others


def test_a_norm_that_others_read_stays(tmp_path: Path) -> None:
    """The module returns it, another step reads it, or its statistics compare with it."""
    chain = LINEAR.format(norm="rms_norm")
    returned = chain.replace("chain:", "outputs: [y, n]\nchain:")
    plan = plan_of("toy", "mxfp8", "sm_90a", specs=with_module(tmp_path, returned))
    assert not merged(plan.forward)
    assert said(plan, "norm_quantize") == ["n is a result of the forward"]
    plan = plan_of("norm_mlp", "mxfp8", "sm_90a", "high_precision_backward")
    assert said(plan, "norm_quantize") == [
        "n is read by fc1: gemm wgrad -> dfc1_weight of the backward, too"
    ]
    plan = plan_of("norm_mlp", "mxfp8", "sm_90a", "debug")
    assert not merged(plan.forward)


def test_words_of_bands_are_those_that_the_kernel_counts_in() -> None:
    """Two statistics for each row, and a word for each tile of rows that a copy can have."""
    room = builtin_templates() / "static" / "csrc" / "fusegen" / "quantize"
    text = (room / "places.cuh").read_text(encoding="utf-8")
    (tile,) = re.findall(r"kTileRows = (\d+);", text)
    plan = plan_of("rms_norm_linear", "mxfp8", "sm_90a")
    (words,) = plan.buffer(f"a_{STATISTICS}").shape.dims
    assert str(words) == f"2 * T + (T // {tile} + 1)"


def test_nothing_merges_without_kernels() -> None:
    plan = plan_of("norm_mlp", "mxfp8", "cpu")
    assert said(plan, "norm_quantize") == ["cpu has no kernels"]
    arch = SPECS.archs["sm_90a"]
    kept = {name: each for name, each in arch.kernels.items() if name != "norm_quantize"}
    specs = replace(SPECS, archs={**SPECS.archs, "sm_90a": replace(arch, kernels=kept)})
    plan = plan_of("norm_mlp", "mxfp8", "sm_90a", specs=specs)
    (reason,) = said(plan, "norm_quantize")
    assert reason.startswith("sm_90a has no kernels for norm_quantize of e4m3")


# ---- a norm adds the residual that comes before it

STREAM = """\
dims: {{T: tokens, H: hidden}}
inputs: {{x: {{shape: [T..., H], role: input}}, e: {{shape: [T..., H]}}}}
outputs: [z, h]
chain:
  - {{op: add_extra_input, as: sum, out: h, with: {{extra: e}}, dims: {{D: H}}}}
  - {{op: {norm}, as: norm, out: n, dims: {{D: H}}}}
  - {{op: linear, as: fc, out: z, dims: {{K: H, N: H}}}}
"""


def norms(plan: ModulePlan) -> list[Step]:
    kinds = {"norm", "add_norm"}
    return [s for s in plan.unmerged.forward.steps if s.primitive in kinds]


@every_arch
@every_recipe
@pytest.mark.parametrize("norm", ("rms_norm", "layer_norm"))
def test_a_norm_adds_the_residual_before_it(
    norm: str, recipe: str, arch: str, tmp_path: Path
) -> None:
    specs = with_module(tmp_path, STREAM.format(norm=norm))
    plan = plan_of("toy", recipe, arch, specs=specs)
    (step,) = norms(plan)
    assert (step.primitive, step.kind) == ("add_norm", KINDS[norm])
    assert step.rule == f"residual_{norm}"
    assert (step.input("a"), step.input(ADDED)) == ("x", "e")
    assert {o.slot: o.buffer for o in step.outputs}.items() >= {"out": "n", TOTAL: "h"}.items()
    apart = plan_of("toy", recipe, arch, specs=without(specs, f"residual_{norm}"))
    (alone,) = norms(apart)
    assert (alone.primitive, alone.input("a")) == ("norm", "h")
    assert step.attributes == alone.attributes != ()
    assert (plan.saved, plan.backward) == (apart.saved, apart.backward)


def test_a_backward_that_makes_the_norm_again_has_the_sum(tmp_path: Path) -> None:
    """It is the caller's anyway; the terms would have to be saved."""
    specs = with_module(tmp_path, STREAM.format(norm="rms_norm"))
    plan = plan_of("toy", "bf16", "sm_90a", "recompute_activations", specs=specs)
    assert said(plan, "residual_rms_norm") == ["the choice of save is not save_activations"]
    assert [step.primitive for step in norms(plan)] == ["norm"]


def test_a_module_without_the_choice_saves_activations(tmp_path: Path) -> None:
    """As one that has it does by default."""
    chain = "without: [save]\n" + STREAM.format(norm="rms_norm")
    plan = plan_of("toy", "bf16", "sm_90a", specs=with_module(tmp_path, chain))
    assert said(plan, "residual_rms_norm") == [""]


def test_another_sum_before_a_norm_stays(tmp_path: Path) -> None:
    """The pattern names the op, whose expression the norm's kernel has."""
    chain = STREAM.format(norm="rms_norm").replace("e: {", "p: {").replace("extra: e", "scales: p")
    chain = chain.replace("p: {shape: [T..., H]}", "p: {shape: [T], dtype: float32}")
    chain = chain.replace("T...", "T").replace("op: add_extra_input", "op: scaled_srelu")
    plan = plan_of("toy", "bf16", "sm_90a", specs=with_module(tmp_path, chain))
    assert [step.primitive for step in norms(plan)] == ["norm"]
    assert said(plan, "residual_rms_norm") == [
        "no step of the forward is pointwise of op 'add_extra_input' with 2 operands and 1 result"
    ]


@every_arch
@pytest.mark.parametrize("module", ("residual_rms_norm", "residual_layer_norm"))
def test_the_stream_goes_through_once_in_each_direction(module: str, arch: str) -> None:
    """One step each reads what it is made of, and gives the sum and the norm, or its gradient."""
    plan = plan_of(module, "bf16", arch)
    assert plan.outputs == ("y", "h")
    assert [step.primitive for step in plan.forward.steps] == ["add_norm"]
    (step,) = plan.backward.steps
    assert step.primitive == "norm_grad"
    assert dict(plan.gradients)["x"] == dict(plan.gradients)["residual"] == step.out
    assert "h" in {each.buffer for each in plan.saved}
    assert not {"x", "residual"} & {each.buffer for each in plan.saved}


# ---- the gradient of a norm adds what else its input was read for

RESIDUAL = """\
dims: {{T: tokens, H: hidden}}
inputs: {{x: {{shape: [T..., H], role: input}}}}
chain:
  - {{op: {norm}, as: norm, out: n, dims: {{D: H}}}}
  - {{op: linear, as: fc, out: z, dims: {{K: H, N: H}}}}
  - {{op: add_extra_input, as: sum, with: {{extra: x}}, dims: {{D: H}}}}
"""


def norm_gradients(plan: ModulePlan) -> list[Step]:
    return [step for step in plan.backward.steps if step.primitive == "norm_grad"]


def adds(plan: ModulePlan) -> list[Step]:
    return [step for step in plan.backward.steps if step.primitive == "add"]


@every_arch
@every_recipe
@every_norm
def test_the_gradient_of_a_norm_adds_that_of_the_residual(
    norm: str, recipe: str, arch: str, tmp_path: Path
) -> None:
    specs = with_module(tmp_path, RESIDUAL.format(norm=norm))
    plan = plan_of("toy", recipe, arch, specs=specs)
    (step,) = norm_gradients(plan)
    assert (step.kind, step.rule) == (KINDS[norm], f"add_{norm}")
    assert (step.input(ADDED), step.out) == ("dy", "dx")
    assert not adds(plan)
    apart = plan_of("toy", recipe, arch, specs=without(specs, f"add_{norm}"))
    (alone,) = norm_gradients(apart)
    assert [each.reads for each in adds(apart)] == [("dy", alone.out)]
    assert alone.input(ADDED) is None
    assert (plan.saved, plan.forward) == (apart.saved, apart.forward)
    assert step.flops != alone.flops


def test_operands_of_a_sum_may_stand_in_either_order(tmp_path: Path) -> None:
    """A norm that is the last reader gives the first term of the sum."""
    chain = """\
dims: {T: tokens, H: hidden}
inputs: {x: {shape: [T..., H], role: input}, e: {shape: [T..., H]}}
outputs: [s, n]
chain:
  - {op: add_extra_input, as: sum, out: s, with: {extra: e}, dims: {D: H}}
  - {op: rms_norm, as: norm, out: n, with: {x: x}, dims: {D: H}}
"""
    specs = with_module(tmp_path, chain)
    (sum_,) = adds(plan_of("toy", "bf16", "sm_90a", specs=without(specs, "add_rms_norm")))
    assert sum_.reads == ("dx_partial_1", "ds")
    plan = plan_of("toy", "bf16", "sm_90a", specs=specs)
    (step,) = norm_gradients(plan)
    assert (step.input(ADDED), step.out) == ("ds", "dx")
    assert not adds(plan)


def test_three_readers_are_added_up_at_once(tmp_path: Path) -> None:
    """Their sum is rounded once, not twice."""
    chain = RESIDUAL.format(norm="rms_norm").replace("chain:", "outputs: [y, a]\nchain:")
    chain += "  - {op: silu, as: act, out: a, with: {x: x}}\n"
    chain = chain.replace("as: sum", "as: sum, out: y")
    plan = plan_of("toy", "bf16", "sm_90a", specs=with_module(tmp_path, chain))
    assert [len(step.inputs) for step in adds(plan)] == [3]
    (reason,) = said(plan, "add_rms_norm")
    assert reason == (
        "no step of the backward is add with 2 operands and 1 result, connected as in the pattern"
    )


def test_no_other_step_runs_for_the_sake_of_a_weight(tmp_path: Path) -> None:
    """A GEMM gives what would be added, which the gradient of the norm's weight does not need."""
    chain = """\
dims: {T: tokens, H: hidden}
inputs: {x: {shape: [T..., H], role: input}}
outputs: [n, z]
chain:
  - {op: rms_norm, as: norm, out: n, dims: {D: H}}
  - {op: linear, as: fc, out: z, with: {x: x}, dims: {K: H, N: H}}
"""
    plan = plan_of("toy", "bf16", "sm_90a", specs=with_module(tmp_path, chain))
    assert said(plan, "add_rms_norm") == [
        "fc: gemm dgrad -> dx_partial_1 would run for need_dnorm_weight, too"
    ]
    (gemm,) = (step for step in plan.backward.steps if step.primitive == "gemm_pointwise")
    assert gemm.when == (need("x"),)
    assert adds(plan) == []
