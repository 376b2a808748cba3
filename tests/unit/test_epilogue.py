"""Plans in which the kernel of a GEMM goes on with what it gives: its epilogue."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from drawn_chains import SPECS

from fusegen.checks.load import load
from fusegen.emit.launcher.program import launcher_context
from fusegen.emit.reference.cell import reference_context
from fusegen.emit.text.explain import explain
from fusegen.ir.kernel import Store
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.shapes import Const, mul
from fusegen.ir.step import Access, Step
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.verify import verify_pass
from fusegen.publish.paths import builtin_specs
from fusegen.spec.fusion import MERGES
from fusegen.spec.load import SpecSet
from fusegen.steps import is_gemm
from fusegen.steps.gemm_pointwise import AUX
from fusegen.steps.gemm_pointwise import epilogue as epilogue_of

RECIPES = ("bf16", "fp8_block", "fp8_current", "fp8_delayed", "fp8_rowwise", "mxfp8", "nvfp4")
CODES = ("fp8_block", "fp8_delayed", "mxfp8")
"""Recipes under which an activation leaves codes for the next GEMM, and no tensor."""
ARCHS = ("sm_80", "sm_90a")
EPILOGUES = {kind for parts, kind in MERGES.items() if "quantize" not in parts}
ACTIVATED = "linear_bias_activation"
FIRED = {
    "linear_residual": {"linear_bias_add"},
    "norm_mlp": {"linear_bias_add"},
    "scaled_residual": {"linear_scale_add", "linear_scale"},
    "split_linear": {"linear_add"},
    "linear_around": {"linear_bias_add", "linear_add"},
    "grouped_around": {"grouped_linear_bias_add", "grouped_linear_add"},
    "linear_activation": {ACTIVATED},
    "linear_activation_srelu": {ACTIVATED},
    "grouped_activation": {"grouped_linear_bias_activation"},
    "three_readers": {ACTIVATED},
}
"""Fusions of GEMMs that apply to a module, whatever the recipe."""
SCALED = "grouped_linear_bias_scaled_activation"
CROWDED = ("fp8_rowwise", "sm_80")
"""Where the scales of rows leave no registers for tiles that an epilogue reads."""
GATED_IN = {
    "linear_activation_swiglu": ACTIVATED,
    "grouped_mlp": SCALED,
}
"""Modules whose GEMMs are gated, where a family has that, and the fusion that does it."""
HEAD = """edition: 2
module: {name}
class: Toy
summary: toy
dims: {{T: tokens, H: hidden}}
inputs:
  x: {{shape: [T..., H], role: input}}
"""
LINEAR = "  - {op: linear, as: fc, out: h, dims: {K: H, N: H}}\n"


@cache
def specs() -> SpecSet:
    return load([builtin_specs(), SPECS])


@cache
def apart() -> SpecSet:
    """The specs without the fusions of GEMMs."""
    return without(specs(), SCALED, *(rule for rules in FIRED.values() for rule in rules))


def without(of: SpecSet, *left_out: str) -> SpecSet:
    """The specs without some fusions."""
    fusions = {name: fusion for name, fusion in of.fusions.items() if name not in left_out}
    return replace(of, fusions=fusions)


def plan_of(
    module: str,
    recipe: str = "bf16",
    arch: str = "sm_90a",
    *options: str,
    of: SpecSet | None = None,
) -> ModulePlan:
    cell = Cell(module, recipe, options)
    return resolve_module(of or specs(), cell, arch, observe=verify_pass)


def with_module(folder: Path, text: str, head: str = HEAD) -> SpecSet:
    (folder / "modules").mkdir()
    (folder / "modules" / "toy.yaml").write_text(head.format(name="toy") + text)
    return load([builtin_specs(), SPECS, folder])


def merged(plan: ModulePlan) -> list[Step]:
    return [step for step in plan.steps if step.primitive in EPILOGUES]


def reasons(plan: ModulePlan, rule: str) -> list[str]:
    return [each.reason for each in plan.rewrites if each.rule == rule]


def test_every_fusion_of_gemms_is_tried_here() -> None:
    known = {name for name, each in specs().fusions.items() if each.merges} - {*apart().fusions}
    assert known == {SCALED, *(rule for rules in FIRED.values() for rule in rules)}
    assert not merged(plan_of("linear_residual", of=apart()))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("module", FIRED)
def test_they_apply_under_every_recipe(module: str, recipe: str, arch: str) -> None:
    plan = plan_of(module, recipe, arch)
    activated = {ACTIVATED} if module == "norm_mlp" and recipe not in CODES else set()
    expected, crowded = FIRED[module] | activated, set[str]()
    if (recipe, arch) == CROWDED:
        crowded = {rule for rule in FIRED[module] if rule.endswith("_add")}
        expected -= crowded
        if module == "scaled_residual":
            expected.add(ACTIVATED)  # for want of the fusion that adds, too
    assert {step.rule for step in merged(plan)} == expected
    for rule in crowded:
        assert all("no thread has the registers" in reason for reason in reasons(plan, rule))
        assert reasons(plan, rule)
    for step in merged(plan):
        between = {name for part in step.parts[:-1] for name in part.writes} - {*step.writes}
        assert between.isdisjoint((*plan.forward.workspace, *plan.backward.workspace))
        assert between.isdisjoint(name for each in plan.steps for name in each.reads)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("module", FIRED)
def test_the_parts_are_the_steps_that_they_were(module: str, recipe: str) -> None:
    """So the reference is the same text, and so are flags, saved tensors and shards."""
    plan, other = plan_of(module, recipe), plan_of(module, recipe, of=apart())
    for one, two in zip(plan.unmerged.programs, other.unmerged.programs, strict=True):
        assert {*one.arguments} == {*two.arguments} and one.results == two.results
        assert {s.out: s for s in one.steps} == {s.out: s for s in two.steps}
    assert (plan.saved, plan.states, plan.shardings) == (other.saved, other.states, other.shardings)
    if module in ("linear_residual", "norm_mlp"):  # elsewhere steps have changed places
        assert reference_context(plan) == reference_context(other)


@pytest.mark.parametrize("module", FIRED)
def test_an_architecture_without_kernels_keeps_the_steps(module: str) -> None:
    plan = plan_of(module, arch="cpu")
    assert not merged(plan)
    for rule in FIRED[module]:
        assert {*reasons(plan, rule)} == {"cpu has no kernels"}


def test_kernels_are_named_by_store_and_expressions() -> None:
    forward, backward = merged(plan_of("scaled_residual"))
    assert forward.kernels == (
        "gemm_sm90_fprop_binary_pointwise_constant_scale_forward"
        "_pointwise_add_extra_input_forward_of_x"
    )
    assert backward.kernels == "gemm_sm90_dgrad_unary_pointwise_constant_scale_backward"
    assert [each.of for each in epilogue_of(forward)] == [(0,), (0,)]
    (step,) = merged(plan_of("split_linear", "fp8_current"))
    assert step.kernels == (
        "gemm_fp8_split_sm90_dgrad_e5m2_e4m3_tensor_split_128_binary_pointwise_add_2_of_a"
    )


def test_a_gradient_may_be_the_second_of_a_sum() -> None:
    """The one that comes in stands first; kernels read it, and add in the order of the sum."""
    step = merged(plan_of("linear_around"))[1]
    assert step.rule == "linear_add"
    assert [each.of for each in epilogue_of(step)] == [(1,)]
    assert step.input("other") == "dy"


def test_the_launcher_hands_over_what_expressions_read() -> None:
    plan = plan_of("scaled_residual")
    context = launcher_context(plan, specs().archs["sm_90a"], "namespace")
    lines = "\n".join(line for p in context.programs for s in p.steps for line in s.lines)
    scale = r"static_cast<float>\(\w+\)"
    assert re.search(rf"epilogue=\*/{{pointer\(residual_dense\), {{{scale}}}}}", lines)
    assert re.search(rf"epilogue=\*/{{nullptr, {{{scale}}}}}", lines)
    plain = launcher_context(plan_of("linear"), specs().archs["sm_90a"], "namespace")
    assert not any("epilogue" in li for p in plain.programs for s in p.steps for li in s.lines)


def test_explain_says_what_the_kernel_computes() -> None:
    plan = plan_of("linear_residual")
    text = " ".join(" ".join(explain(plan)).split())
    assert "1. gemm_pointwise fprop: x, fc_weight, fc_bias, residual -> y (y = x + extra)" in text
    assert "rule linear_bias_add" in text
    (place,) = (each.place for each in plan.rewrites if each.rule == "linear_bias_add")
    assert place == "forward: fc: gemm fprop -> fc_y, sum: pointwise -> y"


def test_without_a_fusion_its_steps_stay() -> None:
    plan = plan_of("linear_around", of=without(specs(), "linear_bias_add"))
    assert {step.rule for step in merged(plan)} == {"linear_add"}
    assert [step.primitive for step in plan.forward.steps] == ["gemm", "pointwise"]


# ---- results that others read, too


def aux_of(plan: ModulePlan) -> list[tuple[str, tuple[str, ...]]]:
    """What merged steps write of their GEMM's own results, and under which flags."""
    return [
        (each.buffer, step.wanted(each.buffer))
        for step in merged(plan)
        for each in step.outputs
        if each.slot == AUX
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gradient_asks_for_what_the_activation_reads(recipe: str) -> None:
    """A call without gradients writes the activation alone."""
    plan = plan_of("linear_activation", recipe)
    flags = plan.forward.flags
    assert flags == ("need_dx", "need_dfc_weight", "need_dfc_bias")
    assert aux_of(plan) == [("fc_y", flags)]
    assert [(each.buffer, each.when) for each in plan.forward.results[:2]] == [
        ("y", ()),
        ("fc_y", flags),
    ]
    assert "fc_y" not in plan.forward.workspace
    (step,) = merged(plan)
    assert step.kernels and "_unary_aux_pointwise_gelu_forward" in step.kernels


def test_some_gradients_ask_for_less() -> None:
    """That of the last weight reads the activation alone."""
    plan = plan_of("mlp", "bf16")
    assert aux_of(plan) == [("h", ("need_dx", "need_dfc1_weight", "need_dfc1_bias"))]


@pytest.mark.parametrize("module", ["with_hidden", "three_readers"])
def test_an_output_or_another_step_always_asks(module: str) -> None:
    assert aux_of(plan_of(module)) == [("h", ())]


def test_where_nothing_else_reads_it_there_is_one_result(tmp_path: Path) -> None:
    """The gradient of a constant scale reads nothing of the forward."""
    text = f"chain:\n{LINEAR}  - {{op: constant_scale, as: scale, dims: {{D: H}}}}\n"
    plan = plan_of("toy", of=with_module(tmp_path, text))
    assert [step.rule for step in merged(plan)] == [ACTIVATED]
    assert not aux_of(plan) and "h" not in plan.forward.gives
    kernels = merged(plan)[0].kernels
    assert kernels == "gemm_sm90_fprop_unary_pointwise_constant_scale_forward"


def test_the_launcher_gives_an_address_only_if_asked() -> None:
    context = launcher_context(plan_of("mlp"), specs().archs["sm_90a"], "namespace")
    lines = "\n".join(line for p in context.programs for s in p.steps for line in s.lines)
    asked = "need_dx || need_dfc1_weight || need_dfc1_bias"
    assert re.search(rf"epilogue=\*/{{nullptr, {{}}, (\w+|{re.escape(asked)}) \? ", lines), lines
    always = launcher_context(plan_of("with_hidden"), specs().archs["sm_90a"], "namespace")
    lines = "\n".join(line for p in always.programs for s in p.steps for line in s.lines)
    assert "epilogue=*/{nullptr, {}, writable(h)}" in lines


@pytest.mark.parametrize("recipe", CODES)
@pytest.mark.parametrize("module", ["mlp", "norm_mlp_srelu"])
def test_what_quantises_comes_first(module: str, recipe: str) -> None:
    """Codes of an activation are fewer bytes than the activation in 16 bits."""
    plan = plan_of(module, recipe)
    assert [step.rule for step in plan.forward.steps if step.primitive == "pointwise_quantize"]
    assert ACTIVATED not in {step.rule for step in merged(plan)}
    assert reasons(plan, ACTIVATED)
    assert {step.rule for step in merged(plan_of(module, recipe, of=only(ACTIVATED)))} == {
        ACTIVATED
    }


def only(*fusions: str) -> SpecSet:
    """The specs with some fusions alone."""
    return without(specs(), *({*specs().fusions} - {*fusions}))


def test_an_expression_of_two_tensors_is_no_activation() -> None:
    plan = plan_of("linear_residual", of=without(specs(), "linear_bias_add"))
    assert not merged(plan)
    (reason,) = reasons(plan, ACTIVATED)
    assert reason.startswith("no step of the forward is pointwise with 1 operand and 1 result")


def test_a_user_may_keep_what_a_residual_is_added_to(tmp_path: Path) -> None:
    """No kernel stores two tensors and reads another one beside the operands."""
    (tmp_path / "fusions").mkdir()
    text = (builtin_specs() / "fusions" / "linear_bias_add.yaml").read_text()
    text = text.replace("out: [y]}\n", "out: [y, h]}\n").replace("[y, h]", "[y]", 1)
    path = tmp_path / "fusions" / "kept.yaml"
    path.write_text(text.replace("fusion: linear_bias_add", "fusion: kept"))
    chain = (
        f"outputs: [y, h]\nchain:\n{LINEAR}"
        "  - {op: add_extra_input, as: sum, with: {extra: x}, dims: {D: H}}\n"
    )
    plan = plan_of("toy", of=with_module(tmp_path, chain))
    assert [step.primitive for step in plan.forward.steps] == ["gemm", "pointwise"]
    assert reasons(plan, "kept") == ["h is read elsewhere, and the expressions read x besides it"]


# ---- halves of rows


@pytest.mark.parametrize("module", GATED_IN)
@pytest.mark.parametrize(
    ("arch", "family"),
    [
        ("sm_80", "gemm_mma"),
        ("sm_89", "gemm_mma"),
        ("sm_90a", "gemm_sm90"),
        ("sm_100a", "gemm_tcgen05"),
        ("sm_120a", "gemm_mma"),
    ],
)
def test_a_gemm_of_16_bits_is_gated(module: str, arch: str, family: str) -> None:
    plan, other = plan_of(module, arch=arch), plan_of(module, arch=arch, of=apart())
    (step,) = merged(plan)
    assert step.rule == GATED_IN[module]
    assert step.kernels and step.kernels.startswith(f"{family}_fprop_gated_aux_pointwise_")
    (math,) = epilogue_of(step)
    accesses = [math.math.operands[index].access for index in math.of]
    assert math.gated and accesses == [Access.FIRST_HALF, Access.SECOND_HALF]
    assert (plan.saved, plan.states, plan.shardings) == (other.saved, other.states, other.shardings)
    assert reference_context(plan) == reference_context(other)


@pytest.mark.parametrize("module", GATED_IN)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_quantised_ones_are_not(module: str, arch: str) -> None:
    plan = plan_of(module, "fp8_current", arch)
    assert not merged(plan)
    (reason,) = reasons(plan, GATED_IN[module])
    of = "e4m3_e4m3_tensor_fast_gated_aux"
    assert re.match(rf"{arch} has no kernels for \w+_pointwise of {of};", reason)


def test_experts_without_scales_are_gated_too(tmp_path: Path) -> None:
    text = (
        "  split_sizes: {shape: [E], dtype: int64}\nchain:\n"
        "  - {op: grouped_linear, as: fc, out: h, dims: {K: H, N: 2 * H}}\n"
        "  - {op: geglu, as: act, dims: {D: H}}\n"
    )
    head = HEAD.replace("T: tokens,", "T: tokens, E: num_groups,").replace("[T..., H]", "[T, H]")
    plan = plan_of("toy", of=with_module(tmp_path, text, head))
    assert [step.rule for step in merged(plan)] == ["grouped_linear_bias_activation"]
    assert "gated_aux_pointwise_geglu" in str(merged(plan)[0].kernels)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120a"])
def test_an_expression_that_would_spill_beside_sums_has_a_kernel_of_its_own(arch: str) -> None:
    assert merged(plan_of("grouped_mlp_situglu"))
    plan = plan_of("grouped_mlp_situglu", arch=arch)
    assert not merged(plan)
    (reason,) = reasons(plan, "grouped_linear_bias_scaled_activation")
    assert "95 operations for each element behind a GEMM, gemm_mma has the registers" in reason


def test_its_result_is_half_as_wide_and_what_it_was_stays_whole() -> None:
    plan = plan_of("grouped_mlp")
    (step,) = merged(plan)
    assert step.input("other") == "probs"
    narrow, wide = (plan.buffer(each.buffer).shape.dims[-1] for each in step.outputs)
    assert mul(Const(2), narrow) == wide
    assert aux_of(plan) == [("h", ("need_dx", "need_dfc1_weight", "need_dprobs", "need_dfc1_bias"))]


def test_scales_of_rows_go_where_another_tensor_would() -> None:
    context = launcher_context(plan_of("grouped_mlp"), specs().archs["sm_90a"], "namespace")
    lines = "\n".join(line for p in context.programs for s in p.steps for line in s.lines)
    assert re.search(r"epilogue=\*/{pointer\(probs\w*\), {}, ", lines), lines


def test_halves_without_readers_are_not_kept(tmp_path: Path) -> None:
    """The gradient of a sum of halves reads nothing of the forward."""
    (tmp_path / "ops").mkdir()
    op = (builtin_specs() / "ops" / "swiglu.yaml").read_text().replace("op: swiglu", "op: summed")
    formula = "gate * sigmoid(gate) * up"
    assert formula in op
    (tmp_path / "ops" / "summed.yaml").write_text(op.replace(formula, "gate + up"))
    chain = (
        "chain:\n  - {op: linear, as: fc, out: h, dims: {K: H, N: 2 * H}}\n"
        "  - {op: summed, as: act, dims: {D: H}}\n"
    )
    plan = plan_of("toy", of=with_module(tmp_path, chain))
    (step,) = merged(plan)
    assert not aux_of(plan)
    assert step.kernels == "gemm_sm90_fprop_gated_pointwise_summed_forward"


def test_halves_that_alternate_stay() -> None:
    plan = plan_of("grouped_mlp", "bf16", "sm_90a", "interleaved_32")
    assert not merged(plan)
    assert reasons(plan, SCALED) == ["halves of h alternate in blocks of 32 columns"]


def test_nothing_follows_halves(tmp_path: Path) -> None:
    """No kernel has two expressions behind each other, the first of them of halves."""
    (tmp_path / "fusions").mkdir()
    text = (builtin_specs() / "fusions" / "linear_scale_add.yaml").read_text()
    text = text.replace("op: constant_scale, ", "")
    path = tmp_path / "fusions" / "two.yaml"
    path.write_text(text.replace("fusion: linear_scale_add", "fusion: two"))
    chain = (
        "chain:\n  - {op: linear, as: fc, out: h, dims: {K: H, N: 2 * H}}\n"
        "  - {op: swiglu, as: act, out: a, dims: {D: H}}\n"
        "  - {op: add_extra_input, as: sum, with: {extra: x}, dims: {D: H}}\n"
    )
    plan = plan_of("toy", of=with_module(tmp_path, chain))
    assert "another expression follows the one of halves of h" in reasons(plan, "two")
    assert [step.rule for step in merged(plan) if step.kind == "fprop"] == [ACTIVATED]


# ---- where they must not apply


def test_a_result_that_leaves_the_module_stays(tmp_path: Path) -> None:
    text = (
        f"outputs: [y, h]\nchain:\n{LINEAR}"
        "  - {op: add_extra_input, as: sum, with: {extra: x}, dims: {D: H}}\n"
    )
    plan = plan_of("toy", of=with_module(tmp_path, text))
    assert "h is a result of the forward" in reasons(plan, "linear_bias_add")


def test_a_result_that_others_read_stays(tmp_path: Path) -> None:
    text = (
        f"chain:\n{LINEAR}  - {{op: gelu, as: act, out: a, dims: {{D: H}}}}\n"
        "  - {op: add_extra_input, as: sum, with: {x: h, extra: a}, dims: {D: H}}\n"
    )
    of = without(with_module(tmp_path, text), ACTIVATED)
    plan = plan_of("toy", of=of)
    assert not merged(plan)
    assert any("h is read by act: pointwise" in each for each in reasons(plan, "linear_bias_add"))


def test_a_result_that_is_added_to_itself_stays(tmp_path: Path) -> None:
    text = (
        f"chain:\n{LINEAR}"
        "  - {op: add_extra_input, as: sum, with: {x: h, extra: h}, dims: {D: H}}\n"
    )
    plan = plan_of("toy", of=with_module(tmp_path, text))
    assert not any(is_gemm(step) and step.parts for step in plan.forward.steps)
    assert any("as several operands" in each for each in reasons(plan, "linear_bias_add"))


def test_a_sum_of_three_stays(tmp_path: Path) -> None:
    text = (
        "chain:\n  - {op: linear, as: one, out: a, dims: {K: H, N: H}}\n"
        "  - {op: linear, as: two, out: b, with: {x: x}, dims: {K: H, N: H}}\n"
        "  - {op: add_extra_input, as: pair, out: p, with: {x: a, extra: b}, dims: {D: H}}\n"
        "  - {op: add_extra_input, as: all, with: {extra: x}, dims: {D: H}}\n"
    )
    plan = plan_of("toy", of=with_module(tmp_path, text))
    found = reasons(plan, "linear_add")
    assert any("read more than one tensor besides" in each for each in found), found
    # Of the two GEMMs of the forward one adds what the other one gives.
    assert [step.rule for step in merged(plan)] == ["linear_bias_add"]


def test_a_bias_times_scales_stays() -> None:
    plan = plan_of("grouped_around", "bf16", "sm_90a", "scaled_bias")
    assert "h has a bias times scales of rows" in reasons(plan, "grouped_linear_bias_add")
    assert [step.rule for step in merged(plan)] == ["grouped_linear_add"]


@pytest.mark.parametrize("stores", [(Store.BINARY,), (Store.UNARY, Store.BINARY)])
def test_kernels_that_an_architecture_lacks(stores: tuple[Store, ...]) -> None:
    arch = specs().archs["sm_90a"]
    kernels = {
        name: replace(family, stores=tuple(s for s in family.stores if s not in stores))
        for name, family in arch.kernels.items()
    }
    of = replace(specs(), archs={**specs().archs, "sm_90a": replace(arch, kernels=kernels)})
    plan = plan_of("scaled_residual", of=of)
    left = {"linear_scale", ACTIVATED} if Store.UNARY not in stores else set()
    assert {step.rule for step in merged(plan)} == left
    (reason,) = reasons(plan, "linear_scale_add")
    assert reason.startswith("sm_90a has no kernels for gemm_pointwise of binary")
