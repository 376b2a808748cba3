"""Chains: what is read several times, what several outputs are, and what drawn chains become."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
from drawn_chains import SPECS, draw_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from fusegen.checks.load import load
from fusegen.checks.modules import check_module
from fusegen.emit.launcher.memory import shared_memory, workspace_lines
from fusegen.emit.python.conditions import Conditions
from fusegen.emit.text.explain import explain
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.shapes import Shape
from fusegen.ir.step import AttributeRef, Step
from fusegen.ir.text import parse, text
from fusegen.math import joint_backward, to_math
from fusegen.math import parse as parse_expression
from fusegen.options.cached_input import CACHE_QUANTIZED
from fusegen.options.input_format import QUANTIZED_INPUT
from fusegen.options.output_format import QUANTIZED_OUTPUT
from fusegen.options.save import RECOMPUTE
from fusegen.options.tensor_parallel import PARALLEL
from fusegen.passes.draft import NotPossible
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.verify import verify_pass
from fusegen.publish.paths import builtin_specs
from fusegen.spec.kinds import SpecKind
from fusegen.spec.load import SpecSet, parse_spec
from fusegen.spec.module import ModuleSpec
from fusegen.spec.offers import refusal, words_of
from fusegen.steps.add import MOST_OPERANDS, slots
from fusegen.steps.verify import VerifyError
from fusegen.steps.verify_directions import verify_plan

RECIPES = ("bf16", "fp8_block", "fp8_current", "fp8_delayed", "fp8_rowwise", "mxfp8", "nvfp4")
ARCHS = ("cpu", "sm_90a")


@cache
def specs() -> SpecSet:
    return load([builtin_specs(), SPECS])


def plan_of(module: str, recipe: str = "bf16", arch: str = "cpu") -> ModulePlan:
    return resolve_module(specs(), Cell(module, recipe), arch, observe=verify_pass)


def with_module(tmp_path: Path, content: str) -> SpecSet:
    """The specs and one more module, which is right."""
    path = tmp_path / "drawn.yaml"
    path.write_text(content)
    module, source = parse_spec(SpecKind.MODULES, path, path.name)
    assert isinstance(module, ModuleSpec)
    found = [*check_module(module, specs(), source, complete=True)]
    assert not found, (content, found)
    sources = {**specs().sources, (SpecKind.MODULES, module.name): source}
    modules = {**specs().modules, module.name: module}
    return replace(specs(), modules=modules, sources=sources)


def shown(steps: tuple[Step, ...]) -> list[str]:
    return [f"{s.primitive}: {', '.join(s.reads)} -> {', '.join(s.writes)}" for s in steps]


def test_a_residual_adds_the_gradients_of_both_ways() -> None:
    plan = plan_of("residual_mlp")
    assert shown(plan.forward.steps)[-1] == "pointwise: z, x -> y"
    assert shown(plan.backward.steps) == [
        # The gradients of z and, by way of the sum, of x are dy itself: nothing computes them.
        "gemm: dy, fc2_weight -> da",
        "gemm: dy, a -> dfc2_weight",
        "column_sum: dy -> dfc2_bias",
        "pointwise_grad: da, h -> dh",
        "gemm: dh, fc1_weight -> dx_partial_2",
        "add: dy, dx_partial_2 -> dx",
        "gemm: dh, x -> dfc1_weight",
        "column_sum: dh -> dfc1_bias",
    ]
    (add,) = [step for step in plan.backward.steps if step.primitive == "add"]
    assert add.when == ("need_dx",)


def test_a_further_name_of_a_tensor_takes_no_step() -> None:
    plan = plan_of("aliases")
    assert shown(plan.forward.steps) == [
        "pointwise: x -> before",  # returned beside x's own memory, which is the caller's
        "gemm: x, fc1_weight, fc1_bias -> features",  # what the op called h lies in the output
        "pointwise: features -> act_y",
        "gemm: act_y, fc2_weight, fc2_bias -> fc2_y",
        "pointwise: fc2_y, x -> y",
    ]
    adds = [step for step in shown(plan.backward.steps) if step.startswith("add")]
    assert adds == [
        "add: dfeatures, dfeatures_partial_1 -> dfeatures_total",
        "add: dy, dx_partial_2, dbefore -> dx",
    ]
    kernels = {step.kernels for step in plan_of("aliases", arch="sm_90a").forward.steps}
    assert "pointwise_make_extra_output_without_y_forward" in kernels


NAMED_TWICE = """edition: 2
module: drawn
class: Drawn
summary: one tensor under three names, of which two are returned
dims: {T: tokens, H: hidden}
inputs: {x: {shape: [T, H]}}
outputs: [first, second]
chain:
  - {op: gelu, as: act, out: h, dims: {D: H}}
  - {op: identity, as: one, out: first, dims: {D: H}}
  - {op: identity, as: two, out: second, with: {x: h}, dims: {D: H}}
"""


def test_one_tensor_is_returned_once_and_copied_for_the_other_output(tmp_path: Path) -> None:
    found = with_module(tmp_path, NAMED_TWICE)
    plan = resolve_module(found, Cell("drawn", "bf16"), "cpu", observe=verify_pass)
    assert shown(plan.forward.steps) == ["pointwise: x -> first", "pointwise: first -> second"]
    assert shown(plan.backward.steps) == [
        "add: dfirst, dsecond -> dfirst_total",
        "pointwise_grad: dfirst_total, x -> dx",
    ]


def test_other_dimensions_are_the_same_memory_and_saved_once() -> None:
    plan = plan_of("joined_heads", arch="sm_90a")
    assert shared_memory(plan, plan.forward) == {"joined": "x", "fc_y": "y"}
    assert shared_memory(plan, plan.backward) == {"dfc_y": "dy", "joined": "x", "djoined": "dx"}
    assert [each.buffer for each in plan.saved] == ["x", "fc_weight"]
    told = " ".join("\n".join(explain(plan)).split())
    assert "2 T 4 D bytes memory of x" in told and "reshape: x -> joined the same memory" in told
    plan = plan_of("heads", arch="sm_90a")
    assert shared_memory(plan, plan.forward) == {"heads": "fc1_y", "joined": "a"}
    assert {"joined", "heads"}.isdisjoint(each.buffer for each in plan.saved)
    again = [step.out for step in plan.backward.steps if step.primitive == "reshape"]
    assert {"joined", "heads"} <= {*again}


CUT = """edition: 2
module: drawn
class: Drawn
summary: an input in other dimensions, and nothing else
dims: {T: tokens, D: head_dim}
inputs: {x: {shape: [T, 4 * D]}}
chain:
  - {op: reshape, as: cut, shape: [T, 4, D]}
"""


def test_an_input_in_other_dimensions_is_copied(tmp_path: Path) -> None:
    plan = resolve_module(with_module(tmp_path, CUT), Cell("drawn", "bf16"), "sm_90a")
    assert shown(plan.forward.steps) == ["reshape: x -> y"]
    for program in (plan.forward, plan.backward):
        assert not shared_memory(plan, program)


TWICE = """edition: 2
module: drawn
class: Drawn
summary: a tensor in other dimensions for an op, and in others for the caller
dims: {T: tokens, H: hidden, D: head_dim}
inputs: {x: {shape: [T, H], role: input}}
outputs: [y, split]
chain:
  - {op: linear, as: fc, out: h, dims: {K: H, N: 4 * D}}
  - {op: reshape, as: cut, out: v, shape: [4 * T, D]}
  - {op: constant_scale, as: scale, out: y, dims: {T: 4 * T}}
  - {op: reshape, as: show, out: split, with: {x: h}, shape: [T, 4, D]}
"""


def test_addresses_of_shared_memory_stand_behind_those_they_come_from(tmp_path: Path) -> None:
    plan = resolve_module(with_module(tmp_path, TWICE), Cell("drawn", "bf16"), "sm_90a")
    assert shared_memory(plan, plan.forward) == {"v": "h", "h": "split"}
    assert workspace_lines(plan, plan.forward, Conditions()) == [
        "void* const h = writable(split);",
        "const void* const v = pointer(h);",
    ]


def test_other_dimensions_of_more_elements_are_a_fault() -> None:
    shown_plan = text(plan_of("joined_heads"))
    assert "shape=[T..., 2, D]" in shown_plan
    broken = parse(shown_plan.replace("shape=[T..., 2, D]", "shape=[T..., 3, D]"))
    assert isinstance(broken, ModulePlan)
    with pytest.raises(VerifyError, match=r"y is \[T..., 3, D\], but of the elements of fc_y"):
        verify_plan(broken)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (["T", "8 * D"], ["8 * T", "D"], True),
        (["T...", "2 * (4 * D)"], ["T...", "8", "D"], True),
        (["T", "H"], ["T", "8", "D"], False),
        (["T", "8 * D"], ["T", "4", "D"], False),
        (["T", "D + D"], ["T", "2", "D"], False),
    ],
)
def test_numbers_of_elements_are_equal_where_factors_say_so(
    one: list[str | int], other: list[str | int], same: bool
) -> None:
    assert Shape.parse(one).holds_as_many_as(Shape.parse(other)) is same


def test_three_readers_are_added_in_one_step() -> None:
    plan = plan_of("three_readers")
    (add,) = [step for step in plan.backward.steps if step.primitive == "add"]
    assert add.reads == ("dy", "dh_partial_2", "dh_partial_3"), "the last reader first"
    assert add.pointwise is not None and add.pointwise.cuda == ("const float out = a + b + c;",)
    assert str(add.flops) == "2 * T * F"


def test_an_output_that_is_read_as_well_adds_the_callers_gradient_first() -> None:
    plan = plan_of("with_hidden")
    assert plan.outputs == plan.exact_outputs == ("y", "h")
    assert [result.buffer for result in plan.forward.results] == ["y", "h", "a"]
    assert [argument.buffer for argument in plan.backward.arguments][:2] == ["dy", "dh"]
    (add,) = [step for step in plan.backward.steps if step.primitive == "add"]
    assert (add.reads, add.writes) == (("dh", "dh_partial_1"), ("dh_total",))
    readers = [step.primitive for step in plan.backward.steps if "dh_total" in step.reads]
    assert readers == ["gemm", "gemm", "column_sum"]
    assert "h" in {each.buffer for each in plan.saved}, "the caller has it, and the backward"


def test_gradients_of_scales_per_row_are_added_in_their_own_type() -> None:
    plan = plan_of("weighted_twice", arch="sm_90a")
    (add,) = [step for step in plan.backward.steps if step.primitive == "add"]
    assert add.kernels == "pointwise_add_2_float32_float32_float32"
    assert add.writes == ("dprobs",)


def test_what_all_rows_share_gets_a_sum_over_columns() -> None:
    steps = plan_of("scale_columns").backward.steps
    assert shown(steps) == [
        "pointwise_grad: dy, x, scale -> dx, dscale_terms",
        "column_sum: dscale_terms -> dscale",
        "column_sum: dy -> dshift",  # its terms are dy, so that nothing writes them
    ]
    assert [step.when for step in steps][1:] == [("need_dscale",), ("need_dshift",)]


def test_attributes_reach_steps_as_scalars_or_values() -> None:
    plan = plan_of("signed_linear")
    act = next(step for step in plan.forward.steps if step.pointwise)
    assert act.attributes == (("eps", AttributeRef("act_eps")), ("gain", 2.0))
    assert [(each.name, each.default) for each in plan.attributes] == [("act_eps", 0.125)]


HALF_USED = """edition: 2
module: drawn
class: Drawn
summary: one of two results has no gradient, as only a constant is made of it
dims: {T: tokens, H: hidden}
inputs: {x: {shape: [T, H]}}
chain:
  - {op: fork, as: fork, out: {open: o, closed: c}, dims: {D: H}}
  - {op: masked, as: act, with: {mask: c}, dims: {D: H}}
"""
MASKED = """edition: 2
op: masked
summary: x where the mask, a constant, is not 0
dims: {T: rows, D: width}
inputs:
  x: {shape: [T..., D]}
  mask: {shape: [T..., D], differentiable: false}
outputs: {y: {shape: [T..., D]}}
pointwise: {y: x * sign_of}
"""


def test_a_result_without_a_gradient_adds_nothing(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    masked = MASKED.replace("sign_of", "mask")
    (tmp_path / "ops" / "masked.yaml").write_text(masked)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "drawn.yaml").write_text(HALF_USED)
    plan = resolve_module(load([builtin_specs(), SPECS, tmp_path]), Cell("drawn", "bf16"), "sm_90a")
    assert shown(plan.backward.steps) == [
        "pointwise_grad: dy, c -> do",
        "pointwise_grad: do, x, fork_scale -> dx, dfork_scale_terms",
        "column_sum: dfork_scale_terms -> dfork_scale",
    ]
    assert plan.backward.steps[1].kernels == "pointwise_fork_without_closed_backward"


DOUBLED = """
edition: 2
module: drawn
class: Drawn
summary: a tensor added to itself before a norm
dims: {T: tokens, H: hidden}
inputs:
  x: {shape: [T..., H], role: input}
outputs: [y]
chain:
  - {op: residual, as: twice, out: h, with: {x: x, residual: x}, dims: {D: H}}
  - {op: l2_normalization, as: norm, out: y, with: {x: h}, dims: {D: H}}
"""
READ_BEHIND = """
edition: 2
module: drawn
class: Drawn
summary: an output of a grouped GEMM that an activation scaled by rows reads, too
dims: {T: tokens, E: groups, H: hidden}
inputs:
  x: {shape: [T, H], role: input}
  split_sizes: {shape: [E], dtype: int64}
  probs: {shape: [T], dtype: float32}
outputs: [h, y]
chain:
  - {op: grouped_linear, as: fc, out: h, with: {x: x}, dims: {K: H, N: H}}
  - {op: scaled_srelu, as: act, out: y, with: {x: h, scales: probs}, dims: {D: H}}
"""


def test_a_gradient_added_to_itself_is_read_before_it_goes(tmp_path: Path) -> None:
    """No fusion takes one operand of the sum away and reads the other, which is the same."""
    found = with_module(tmp_path, DOUBLED)
    plan = resolve_module(found, Cell("drawn", "bf16"), "sm_90a", observe=verify_pass)
    assert shown(plan.backward.steps)[-1] == "add: dh -> dx"


def test_a_dot_product_of_rows_waits_for_their_sum(tmp_path: Path) -> None:
    """What the bias's scales get is of the whole gradient of the GEMM's result."""
    found = with_module(tmp_path, READ_BEHIND)
    plan = resolve_module(
        found, Cell("drawn", "bf16", ("scaled_bias",)), "sm_90a", observe=verify_pass
    )
    steps = shown(plan.backward.steps)
    (total,) = (i for i, step in enumerate(steps) if step.endswith("-> dh_total"))
    (dot,) = (i for i, step in enumerate(steps) if step.startswith("group_row_dot"))
    assert total < dot and "dh_total" in steps[dot]


def test_an_output_twice_is_refused(tmp_path: Path) -> None:
    """Where a recipe quantises nothing, `quantize` gives what it reads."""
    content = HALF_USED.partition("chain:")[0] + (
        "outputs: [h, q]\nchain:\n  - {op: linear, as: fc, out: h, dims: {K: H, N: H}}\n"
        "  - {op: quantize, as: q, out: q, dims: {K: H}}\n"
    )
    with pytest.raises(NotPossible, match="'h' is what another output or an input is"):
        resolve_module(with_module(tmp_path, content), Cell("drawn", "bf16"), "cpu")


def test_terms_of_several_results_are_added_in_their_order() -> None:
    texts = {"dopen": "x * scale", "dclosed": "square(x)"}
    named = tuple((name, parse_expression(each, ("x", "scale"))) for name, each in texts.items())
    program = joint_backward(named, ("x", "scale"))
    assert to_math(program) == "dx = scale * dopen + 2 * (x * dclosed); dscale = x * dopen"
    assert program.operands == ("x", "scale", "dopen", "dclosed")


def test_a_sum_has_as_many_operands_as_a_kernel_reads() -> None:
    assert slots(3) == ("a", "b", "c")
    for count in (1, MOST_OPERANDS + 1):
        with pytest.raises(ValueError, match=f"expected 2 to 8 operands, got {count}"):
            slots(count)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_chain_of_the_tests_is_planned(recipe: str, arch: str) -> None:
    for path in sorted((SPECS / "modules").iterdir()):
        plan = plan_of(path.stem, recipe, arch)
        assert parse(text(plan)) == plan


IF_THE_CHAIN_ALLOWS = {CACHE_QUANTIZED, QUANTIZED_INPUT, QUANTIZED_OUTPUT, *PARALLEL}
"""Options that what else reads a tensor, or gives it, may rule out."""


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(rng=st.randoms(use_true_random=False), recipe=st.sampled_from(RECIPES))
def test_drawn_chains_are_planned(
    tmp_path_factory: pytest.TempPathFactory, rng: Random, recipe: str
) -> None:
    """Every rule of the verifier holds after every pass, and text says all of the plan."""
    found = with_module(tmp_path_factory.mktemp("drawn"), draw_chain("drawn", rng))
    module = found.modules["drawn"]
    offered = (word for word in words_of(module, found.ops) if word != RECOMPUTE)
    words = [w for w in offered if not refusal((w,), module, found.recipes[recipe], found.ops)]
    options = (rng.choice(words),) if words and rng.random() < 0.5 else ()
    for arch in ARCHS:
        try:
            plan = resolve_module(found, Cell("drawn", recipe, options), arch, observe=verify_pass)
        except NotPossible:  # for a reason that lies in the chain, as what else reads a tensor
            assert {*options} <= IF_THE_CHAIN_ALLOWS
            plan = resolve_module(found, Cell("drawn", recipe), arch, observe=verify_pass)
        verify_plan(plan)
        assert parse(text(plan)) == plan
        results = [result.buffer for result in plan.forward.results]
        assert results[: len(plan.results)] == [*plan.results]
        assert [*plan.outputs] == [*module.outputs]
        assert {"x", *(p.buffer for p in plan.parameters)} <= {*plan.differentiated}
