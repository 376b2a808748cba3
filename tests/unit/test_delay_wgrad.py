"""Plans whose gradients of weights wait: what leaves the backward, and what is kept for it."""

from __future__ import annotations

import pytest
from plans import SPECS, Place, every, offered

from fusegen.emit.launcher.program import launcher_context
from fusegen.emit.python.cell import cell_context
from fusegen.emit.python.words import schema
from fusegen.emit.text.explain import explain
from fusegen.ir.dtypes import DType
from fusegen.ir.kernel import GemmKind
from fusegen.ir.naming import Cell, gradient, need
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import Program
from fusegen.ir.step import Step
from fusegen.passes.pipeline import resolve_module
from fusegen.spec.offers import modules_with
from fusegen.steps import decodes, is_gemm

DELAYED = "delayed_wgrad"
ARCHS = ("cpu", "sm_90a")
MODULES = modules_with(DELAYED, SPECS)
OTHERS = (
    (),
    ("add_to_main_grad",),
    ("write_main_grad",),
    ("cached_weights",),
    ("recompute_activations",),
    ("reduced_amax",),
    ("high_precision_backward",),
)


def options_of(others: tuple[str, ...], *, delayed: bool) -> tuple[str, ...]:
    """In the order of a module's spec, where the gradient's place comes first."""
    first = tuple(word for word in others if "main_grad" in word)
    return (*first, *((DELAYED,) if delayed else ()), *(w for w in others if w not in first))


def places(*, delayed: bool) -> list[Place]:
    """Every module, recipe and other choice that goes with it, with the option or without."""
    return [
        place
        for arch in ARCHS
        for module in MODULES
        for recipe in SPECS.recipes
        for others in OTHERS
        for place in offered((arch,), [Cell(module, recipe, options_of(others, delayed=delayed))])
    ]


PLACES = places(delayed=True)
every_pair = every(places(delayed=False), PLACES)


def wgrad_of(plan: ModulePlan) -> Program:
    assert plan.wgrad is not None
    return plan.wgrad


def gives_weight_gradient(step: Step) -> bool:
    return is_gemm(step) and GemmKind(step.kind) is GemmKind.WGRAD


def test_every_module_with_weights_offers_it() -> None:
    with_gemms = {
        name
        for name, module in SPECS.modules.items()
        if {"linear", "grouped_linear"} & {module.op, *(item.op for item in module.chain)}
        and "delay_wgrad" not in module.without
    }
    assert {*MODULES} == with_gemms and len(MODULES) > 6
    assert len(PLACES) > 500


def saved_in(plan: ModulePlan) -> set[str]:
    """What is saved, alone or in one tensor with others: wider ops join more."""
    parts = {each.buffer: each.parts for each in plan.joined}
    return {part for r in plan.saved for part in parts.get(r.buffer, (r.buffer,))}


@pytest.mark.slow
@every_pair
def test_steps_move_and_none_changes(plain: ModulePlan, plan: ModulePlan) -> None:
    """Both programs together run what the backward ran; their kernels are the same ones."""
    moved = wgrad_of(plan).steps
    assert plain.wgrad is None and plan.forward.steps == plain.forward.steps
    assert sorted(map(repr, (s.writes for s in (*plan.backward.steps, *moved)))) == sorted(
        repr(s.writes) for s in plain.backward.steps
    )
    assert all(step in plain.backward.steps for step in plan.backward.steps)
    assert plan.kernel_sets == plain.kernel_sets and saved_in(plan) == saved_in(plain)
    assert not any(gives_weight_gradient(step) for step in plan.backward.steps)
    assert all(gives_weight_gradient(s) or decodes(s) for s in moved)
    assert len(plan.delayed) == sum(map(gives_weight_gradient, moved))
    assert not any(name.endswith("bias") for name in plan.delayed)


@pytest.mark.slow
@every_pair
def test_what_it_reads_is_left_for_it(plain: ModulePlan, plan: ModulePlan) -> None:
    """The backward's own results and what was saved, under its flags; nothing else.

    But for a weight, where all of that is fp32 or codes: it tells the type of its gradient.
    """
    wgrad, gradients = wgrad_of(plan), {*map(gradient, plan.outputs)}
    written = {name for step in wgrad.steps for name in step.writes}
    read = {plan.tensor_with(name) for step in wgrad.steps for name in step.reads}
    read -= written | {*wgrad.mutated}
    first, *rest = (a for a in wgrad.arguments if not a.mutated)
    assert first.buffer in gradients and not first.optional
    own_type = plan.own_type_argument(wgrad)
    is_fp32 = plan.buffer(first.buffer).dtype is DType.FLOAT32
    tells = {own_type} & {*plan.delayed} if is_fp32 else set()
    tells |= {a.buffer for a in rest if a.buffer == "slot_row"}  # how many rows a token has
    assert {a.buffer for a in rest} == (read | tells) - {first.buffer}
    made = {name for step in plan.backward.steps for name in step.writes}
    assert plan.left_for_wgrad == read & made
    assert read - made - gradients <= {result.buffer for result in plan.saved}
    assert not read & {state.buffer for state in plan.states}
    for result in plan.backward.results:
        if result.buffer in plan.left_for_wgrad:
            assert result.when and {*result.when} <= {need(leaf) for leaf in plan.delayed}


@pytest.mark.slow
@every_pair
def test_the_backward_neither_takes_nor_returns_what_waits(
    plain: ModulePlan, plan: ModulePlan
) -> None:
    wgrad = wgrad_of(plan)
    given = {argument.buffer for argument in plan.backward.arguments}
    whole = {part: each.buffer for each in plan.joined for part in each.parts}
    touched = {name for step in plan.backward.steps for name in (*step.reads, *step.mutates)}
    assert given == {
        gradient(plan.outputs[0]),
        *{whole.get(name, name) for name in touched} & given,
    }
    results = {result.buffer for result in plan.backward.results}
    assert not results & {f"d{leaf}" for leaf in plan.delayed}
    assert not given & {name for _, name in plan.main_grads}
    assert {*wgrad.mutated} == {name for _, name in plan.main_grads}
    assert bool(wgrad.results) != bool(plan.main_grads)
    assert plan.backward.flags == plain.backward.flags
    assert len(wgrad.flags) == (len(plan.delayed) if len(plan.delayed) > 1 else 0)


def test_frozen_weights_cost_nothing() -> None:
    """What is kept for a weight is made under its flag alone."""
    plan = resolve_module(SPECS, Cell("grouped_mlp", "fp8_block", (DELAYED,)), "sm_90a")
    found = {r.buffer: r.when for r in plan.backward.results if r.buffer in plan.left_for_wgrad}
    assert found == {
        "dy_columnwise": (need("fc2_weight"),),
        "dy_columnwise_scale": (need("fc2_weight"),),
        "dh_columnwise": (need("fc1_weight"),),
        "dh_columnwise_scale": (need("fc1_weight"),),
    }
    for step in plan.backward.steps:
        for name in {*step.writes} & found.keys():
            assert step.wanted(name) == found[name]


def test_a_result_that_only_the_backward_reads_lies_in_its_workspace() -> None:
    plan = resolve_module(SPECS, Cell("grouped_mlp", "bf16", (DELAYED,)), "sm_90a")
    context = launcher_context(plan, SPECS.archs["sm_90a"], "namespace")
    backward = next(program for program in context.programs if program.name == "backward")
    asked = "need_dx || need_dfc1_weight || need_dfc1_bias"
    assert "if (need_dfc1_weight) dh_kept = empty({T, 2 * F}, io, dy);" in backward.results
    assert "dh_kept" in backward.returned
    workspace = "\n".join(backward.workspace)
    assert f"need_dfc1_weight ? kUnwanted : ({asked} ? padded(" in workspace
    assert "void* const dh = need_dfc1_weight ? writable(dh_kept) : workspace[" in workspace


def test_main_grads_are_changed_by_the_wgrad() -> None:
    cell = Cell("linear", "fp8_block", ("add_to_main_grad", DELAYED))
    plan = resolve_module(SPECS, cell, "sm_90a")
    assert schema(plan, wgrad_of(plan)) == (
        "(Tensor dy, Tensor x_columnwise, Tensor x_columnwise_scale, Tensor dy_columnwise,"
        " Tensor dy_columnwise_scale, Tensor(a!) weight_main_grad) -> ()"
    )
    assert "!" not in schema(plan, plan.backward)


def test_decoding_moves_with_the_gemms() -> None:
    plan = resolve_module(SPECS, Cell("grouped_linear", "mxfp8", (DELAYED,)), "sm_90a")
    kinds = [step.primitive for step in wgrad_of(plan).steps]
    assert kinds == ["dequantize_groups", "dequantize_groups", "grouped_gemm"]
    assert "dy_padded_sizes" in wgrad_of(plan).workspace


def test_slots_store_tensors_whose_rows_are_read() -> None:
    """Steps read the amaxes by their own names, which lie in one tensor."""
    plan = resolve_module(SPECS, Cell("grouped_mlp", "nvfp4", (DELAYED,)), "cpu")
    text = cell_context(plan, ()).wgrad
    assert text is not None
    slots = dict(zip(text.operands, text.slots, strict=True))
    assert "stored=False" in slots["dy"]
    assert slots["saved_amaxes"] == "_delayed.Slot((2, num_groups), torch.float32)"


def test_explain_tells_of_it() -> None:
    plan = resolve_module(SPECS, Cell("linear", "fp8_block", (DELAYED,)), "cpu")
    text = "\n".join(explain(plan))
    assert "dy_columnwise_scale" in text and "kept for the wgrad" in text
    assert "\nwgrad (dy, x_columnwise, " in text and "-> dweight" in text
