"""Tensors of which a chunk of the rows is there at a time: plans, rules, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plans import SPECS

from fusegen.checks.load import load
from fusegen.emit.launcher.program import launcher_context
from fusegen.emit.text.explain import explain
from fusegen.ir.dtypes import DType
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import Program
from fusegen.ir.shapes import Shape
from fusegen.ir.step import Chunks, Step
from fusegen.ir.text import parse, text
from fusegen.passes.draft import NotPossible
from fusegen.passes.pipeline import resolve, resolve_module
from fusegen.passes.verify import verify_pass
from fusegen.publish.paths import builtin_specs
from fusegen.spec.load import SpecSet
from fusegen.spec.offers import words_of
from fusegen.steps import is_gemm
from fusegen.steps.copies import Formats
from fusegen.steps.verify import faults, views

MODULE = "linear_cross_entropy"
HOPPER = "sm_90a"
ARCHS = tuple(SPECS.archs)
LOOPING = tuple(name for name, arch in SPECS.archs.items() if arch.has_kernels)
FPROP = "  - {step: gemm, kind: fprop, a: x, b: weight, out: logits}\n"
OP = (builtin_specs() / "ops" / f"{MODULE}.yaml").read_text(encoding="utf-8")


def planned(*options: str, arch: str = HOPPER, specs: SpecSet = SPECS) -> ModulePlan:
    cell = Cell(MODULE, "bf16", options)
    return resolve_module(specs, cell, arch, observe=verify_pass)


def changed(folder: Path, *changes: tuple[str, str]) -> SpecSet:
    """The built-in specs, and a module ``toy`` of the op with some text in the place of other."""
    op = OP.replace(MODULE, "toy", 1)
    for old, new in changes:
        assert old in op, old
        op = op.replace(old, new)
    module = "edition: 2\nmodule: toy\nclass: Toy\nop: toy\n"
    for kind, text_ in (("ops", op), ("modules", module)):
        (folder / kind).mkdir()
        (folder / kind / "toy.yaml").write_text(text_, encoding="utf-8")
    return load([builtin_specs(), folder])


def loop(program: Program) -> Step:
    (step,) = (each for each in program.steps if each.chunks)
    return step


def words(step: Step) -> str:
    return " ".join(filter(None, (step.primitive, step.kind)))


@pytest.mark.parametrize("arch", LOOPING)
def test_a_loop_is_one_step_of_each_direction(arch: str) -> None:
    plan = planned(arch=arch)
    forward, backward = plan.forward, plan.backward
    assert [words(step) for step in forward.steps] == ["chunked"]
    assert [words(step) for step in backward.steps] == ["chunked", "narrow"]
    assert [words(part) for part in loop(forward).parts] == ["gemm fprop", "cross_entropy"]
    assert [(words(part), part.when) for part in loop(backward).parts] == [
        ("gemm fprop", ()),
        ("cross_entropy_grad", ()),
        ("gemm dgrad", ("need_dx",)),
        ("gemm wgrad", ("need_dweight",)),
    ]
    assert parse(text(plan)) == plan


@pytest.mark.parametrize("arch", LOOPING)
def test_logits_have_the_memory_of_one_chunk(arch: str) -> None:
    """Their gradient lies where they do, and of fewer rows than a chunk has there are no more."""
    plan = planned(arch=arch)
    assert plan.forward.workspace == ("logits_chunk",)
    assert plan.backward.workspace == ("dweight_sum", "logits_chunk")
    assert plan.buffer("logits_chunk").shape == Shape.parse(["min(T, 2048)", "V"])
    chunks = loop(plan.backward).chunks
    assert chunks is not None
    assert chunks.memory == (("logits", "logits_chunk"), ("dlogits", "logits_chunk"))
    assert [result.buffer for result in plan.saved] == ["x", "targets", "weight", "lse"]
    for program in plan.programs:
        names = {n for step in program.steps for n in (*step.reads, *step.writes)}
        assert names.isdisjoint(("logits", "dlogits"))


def test_sums_are_in_fp32_until_the_last_chunk() -> None:
    plan = planned()
    chunks = loop(plan.backward).chunks
    assert chunks is not None
    (later,) = chunks.adding
    first = next(part for part in loop(plan.backward).parts if part.writes == later.writes)
    assert plan.buffer("dweight_sum").dtype is DType.FLOAT32
    assert (first.kernels, later.kernels) == ("gemm_sm90_wgrad_fp32", "gemm_sm90_wgrad_add")
    assert (first.input("accumulate"), later.input("accumulate")) == (None, "dweight_sum")
    assert {first.kernels, later.kernels} <= {each.name for each in plan.kernel_sets}


@pytest.mark.parametrize(
    ("option", "steps", "adding", "workspace"),
    [
        ("add_to_main_grad", ["chunked"], 0, ("logits_chunk",)),
        ("write_main_grad", ["chunked"], 1, ("logits_chunk",)),
        (
            "write_16_bit_main_grad",
            ["chunked", "narrow"],
            1,
            ("weight_main_grad_sum", "logits_chunk"),
        ),
    ],
)
def test_a_main_grad_in_fp32_is_added_to_without_a_sum_of_its_own(
    option: str, steps: list[str], adding: int, workspace: tuple[str, ...]
) -> None:
    backward = planned(option).backward
    chunks = loop(backward).chunks
    assert [words(step) for step in backward.steps] == steps
    assert chunks is not None and len(chunks.adding) == adding
    assert backward.workspace == workspace
    assert backward.mutated == ("weight_main_grad",)


def test_without_kernels_all_rows_are_there_at_once() -> None:
    """The reference runs the same steps everywhere, in an order of its own."""
    plan = planned(arch="cpu")
    assert not any(step.chunks for step in plan.steps)
    assert sorted(map(words, plan.steps)) == sorted(map(words, planned().unmerged.steps))


def test_launchers_loop_over_the_rows() -> None:
    context = launcher_context(planned(), SPECS.archs[HOPPER], "namespace")
    forward, backward = ("\n".join(p.steps[0].lines) for p in context.programs)
    assert "fusegen/host/chunks.h" in context.headers
    assert "for (int64_t first = 0; first < T; first += 2048) {" in forward
    assert "const int64_t rows = min(T - first, 2048);" in forward
    assert "/*a=*/behind(pointer(x_dense), first * 2 * H)," in forward
    assert "arguments.targets = integers(behind(pointer(targets_dense), 8 * first));" in forward
    # Of no rows a sum is zeros, which the first chunk writes.
    assert "for (int64_t first = 0; first == 0 || first < T; first += 2048) {" in backward
    assert "(first == 0 ? gemm_sm90_wgrad_fp32 : gemm_sm90_wgrad_add)(io," in backward
    assert "/*out=*/writable(dweight_sum)," in backward
    assert backward.count("logits_chunk") == 5


def test_every_chunk_reads_the_weight_again() -> None:
    lines = " ".join(line.strip() for line in explain(planned()))
    assert "6 T V H + 4 T V flop; 2048 rows of T at a time" in lines
    assert "gemm_sm90_fprop; 2 T V H flop; 2 T H + 2 T V + ceildiv(T, 2048) 2 V H bytes" in lines
    assert "gemm_sm90_wgrad_fp32 then gemm_sm90_wgrad_add; 2 T V H flop;" in lines


def test_other_steps_stand_around_a_loop(tmp_path: Path) -> None:
    """What gives its operands comes before it, and what reads its results behind it."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "head.yaml").write_text(
        "edition: 2\nmodule: head\nclass: Head\nsummary: a norm and a head\n"
        "dims: {T: tokens, H: hidden, V: vocabulary}\n"
        "inputs: {x: {shape: [T, H]}, targets: {shape: [T], dtype: int64}}\n"
        "chain:\n"
        "  - {op: rms_norm, as: norm, dims: {D: H}}\n"
        "  - {op: linear_cross_entropy, as: head}\n",
        encoding="utf-8",
    )
    specs = load([builtin_specs(), tmp_path])
    for options in ((), ("recompute_activations",), ("nvtx_ranges",)):
        plan = resolve_module(specs, Cell("head", "bf16", options), HOPPER, observe=verify_pass)
        assert [words(step) for step in plan.forward.steps] == ["norm rms", "chunked"]
        again = ["norm rms"] if "recompute_activations" in options else []
        found = [words(step) for step in plan.backward.steps]
        assert sorted(found) == sorted([*again, "chunked", "narrow", "norm_grad rms"])
        assert found.index("chunked") < found.index("norm_grad rms")


def test_every_head_has_a_loop_of_its_own(tmp_path: Path) -> None:
    """Two of one x: neither waits for the other, and gradients of x are added up behind them."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "heads.yaml").write_text(
        "edition: 2\nmodule: heads\nclass: Heads\nsummary: two heads\n"
        "dims: {T: tokens, H: hidden, V: vocabulary}\n"
        "inputs: {x: {shape: [T, H]}, targets: {shape: [T], dtype: int64}}\n"
        "chain:\n"
        "  - {op: linear_cross_entropy, as: near, out: first_loss}\n"
        "  - {op: linear_cross_entropy, as: far, out: second_loss, with: {x: x}}\n"
        "outputs: [first_loss, second_loss]\n",
        encoding="utf-8",
    )
    specs = load([builtin_specs(), tmp_path])
    plan = resolve_module(specs, Cell("heads", "bf16"), HOPPER, observe=verify_pass)
    assert [(step.item, words(step)) for step in plan.forward.steps] == [
        ("near", "chunked"),
        ("far", "chunked"),
    ]
    found = [(step.item, words(step)) for step in plan.backward.steps]
    assert sorted(found)[:2] == [("far", "chunked"), ("far", "narrow")]
    # What the first gave is added by the GEMM of the second.
    assert {words for _, words in found} == {"chunked", "narrow"}
    assert "dx_partial_2" in plan.backward.steps[2].reads
    assert plan.backward.workspace.count("near_logits_chunk") == 1


# ---- rules


def plan_formats(plan: ModulePlan) -> Formats:
    return Formats(dict(plan.quantizations), plan.layout)


Change = Callable[[Step, Chunks], Step]


def reads(part: Step, slot: str, buffer: str) -> Step:
    inputs = (replace(o, buffer=buffer) if o.slot == slot else o for o in part.inputs)
    return replace(part, inputs=tuple(inputs))


def after_the_gradient(step: Step, _: Chunks) -> Step:
    """A GEMM that reads the logits, where their gradient lies by then."""
    parts = (reads(p, "a", "logits") if p.kind == "dgrad" else p for p in step.parts)
    return replace(step, parts=tuple(parts))


def gradient_apart(step: Step, chunks: Chunks) -> Step:
    """The gradient lies where something else is that it is not made of."""
    parts = (reads(p, "b", "x") if p.primitive.endswith("_grad") else p for p in step.parts)
    return replace(step, parts=tuple(parts), chunks=chunks)


def unread_sum(step: Step, _: Chunks) -> Step:
    """A part that reads a sum of which the first chunk's share is there."""
    first = step.parts[0]
    last = replace(first, inputs=(replace(first.inputs[0], buffer="dweight_sum"),))
    return replace(step, parts=(*step.parts, last))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda step, chunks: replace(step, chunks=replace(chunks, adding=())),
            "dweight_sum is written by each chunk, but not added up",
        ),
        (
            lambda step, chunks: replace(
                step,
                chunks=replace(chunks, adding=(replace(chunks.adding[0], inputs=()),)),
            ),
            "dweight_sum is another result from the second chunk on",
        ),
        (
            lambda step, chunks: replace(step, chunks=replace(chunks, symbol="H")),
            "x has H elsewhere than in its outermost place",
        ),
        (
            lambda step, chunks: replace(
                step, chunks=replace(chunks, memory=(*chunks.memory, ("dx", "dx_chunk")))
            ),
            "dx is a result, but there in chunks alone",
        ),
        (
            lambda step, chunks: replace(
                step, chunks=replace(chunks, memory=(*chunks.memory, ("dweight_sum", "sum_chunk")))
            ),
            "dweight_sum is read or written, but there in chunks alone",
        ),
        (after_the_gradient, "logits is read after its memory is another's"),
        (gradient_apart, "dlogits is written over what it is not made of"),
        (unread_sum, "dweight_sum is read by a chunk before all have added to it"),
        (
            lambda step, chunks: replace(step, chunks=replace(chunks, rows=1024)),
            "logits_chunk is [min(T, 2048), V], but chunk_1 is [min(T, 1024), V]",
        ),
    ],
)
def test_each_rule_of_loops_can_refuse(change: Change, says: str) -> None:
    plan = planned()
    step = loop(plan.backward)
    assert step.chunks is not None
    steps = tuple(
        change(step, step.chunks) if each is step else each for each in plan.backward.steps
    )
    view, _ = views((replace(plan.backward, steps=steps),))
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    found = [str(fault) for fault in faults(view, buffers, plan_formats(plan))]
    assert any(says in fault for fault in found), found


# ---- what is refused


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("recipe", [name for name, r in SPECS.recipes.items() if r.roles])
def test_recipes_that_quantise_are_refused(recipe: str, arch: str) -> None:
    """With every choice of what the backward reads."""
    for options in ((), ("high_precision_backward",), ("dequantized_backward",)):
        (cell,) = resolve(SPECS, arch, [Cell(MODULE, recipe, options)]).unsupported
        assert cell.reason == (
            f"recipe {recipe!r} quantises what op 'linear_cross_entropy' has a chunk of the rows of"
            " at a time: scales would depend on where rows are cut, and no kernel reads a part of"
            " quantised rows; take a recipe that quantises nothing, such as bf16, or an op that"
            " keeps 'logits' whole"
        )


def test_sums_of_chunks_are_not_rounded_to_16_bits_each() -> None:
    reason = "an op adds up chunks of rows, each of which would be rounded; add in fp32"
    assert "add_to_16_bit_main_grad" not in words_of(SPECS.modules[MODULE], SPECS.ops)
    with pytest.raises(NotPossible, match=reason):
        planned("add_to_16_bit_main_grad")


def test_gradients_of_weights_cannot_wait_for_chunks() -> None:
    with pytest.raises(NotPossible, match="an op has a chunk of rows at a time"):
        planned("delayed_wgrad")


BIAS = (
    ("init: kaiming_uniform}\n", "init: kaiming_uniform}\n  bias: {shape: [V], init: zeros}\n"),
    (FPROP, FPROP.replace("b: weight", "b: weight, add: bias")),
    (
        "b: x, out: dweight}\n",
        "b: x, out: dweight}\n  - {step: column_sum, a: dlogits, out: dbias}\n",
    ),
)


def behind_a_linear_layer(folder: Path, chunk: int) -> SpecSet:
    """A head behind another linear layer, whose result is there in chunks, too."""
    first = "  - {step: gemm, kind: fprop, a: x, b: inner, out: h}\n"
    return changed(
        folder,
        ("  weight: {", "  inner: {shape: [H, H], role: weight, init: zeros}\n  weight: {"),
        ("internal:\n", f"internal:\n  h: {{shape: [T, H], chunk: {chunk}}}\n"),
        (FPROP, first + FPROP.replace("a: x", "a: h")),
        ("a: dlogits, b: weight, out: dx}\n", "a: dlogits, b: weight, out: dh}\n"),
        (
            "a: dlogits, b: x, out: dweight}\n",
            "a: dlogits, b: h, out: dweight}\n"
            "  - {step: gemm, kind: dgrad, a: dh, b: inner, out: dx}\n"
            "  - {step: gemm, kind: wgrad, a: dh, b: x, out: dinner}\n",
        ),
    )


def test_a_loop_has_as_many_steps_and_sums_as_hand_on_chunks(tmp_path: Path) -> None:
    specs = behind_a_linear_layer(tmp_path, 2048)
    backward = resolve_module(specs, Cell("toy", "bf16"), HOPPER, observe=verify_pass).backward
    step = loop(backward)
    assert [part.kind for part in step.parts if is_gemm(part)] == [
        *("fprop", "fprop", "dgrad", "wgrad", "dgrad", "wgrad")
    ]
    assert step.chunks is not None
    assert [each.out for each in step.chunks.adding] == ["dweight_sum", "dinner_sum"]
    assert {*dict(step.chunks.memory).values()} == {"h_chunk", "logits_chunk", "dh_chunk"}
    assert [words(each) for each in backward.steps] == ["chunked", "narrow", "narrow"]


def test_chunks_of_one_loop_have_the_same_rows(tmp_path: Path) -> None:
    specs = behind_a_linear_layer(tmp_path, 128)
    with pytest.raises(NotPossible, match="cannot be the chunks of one loop; let them be the same"):
        resolve_module(specs, Cell("toy", "bf16"), HOPPER)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_step_that_needs_all_rows_is_refused(tmp_path: Path, arch: str) -> None:
    specs = changed(tmp_path, *BIAS)
    reason = (
        "column_sum cannot run for a part of dlogits, of which 2048 rows are there at a time; an op"
        " that keeps it whole says no 'chunk' of 'logits'"
    )
    with pytest.raises(NotPossible, match=reason):
        resolve_module(specs, Cell("toy", "bf16"), arch)


def test_an_op_without_chunks_keeps_its_logits(tmp_path: Path) -> None:
    """Nothing else in the spec says that they are not stored."""
    specs = changed(tmp_path, (", chunk: 2048", ""), ("backward:\n" + FPROP, "backward:\n"))
    plan = resolve_module(specs, Cell("toy", "bf16"), HOPPER, observe=verify_pass)
    assert "logits" in [result.buffer for result in plan.saved]
    assert [words(step) for step in plan.backward.steps if is_gemm(step)] == [
        "gemm dgrad",
        "gemm wgrad",
    ]
