"""The rules of the IR: every shipped cell keeps them after every pass, and each rule can refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from plans import SLOW, SPECS, by_form

from fusegen import cli
from fusegen.ir.dtypes import DType
from fusegen.ir.naming import Cell
from fusegen.ir.text import parse, text
from fusegen.passes import pipeline
from fusegen.passes.contract import Context, Pass
from fusegen.passes.draft import Draft
from fusegen.passes.pipeline import PASSES, context_of, resolve, resolve_module, run_passes
from fusegen.passes.verify import draft_faults, verify_pass
from fusegen.publish.inputs import derivations
from fusegen.spec.offers import words_of
from fusegen.steps.verify import VerifyError
from fusegen.steps.verify_directions import verify_plan

RECIPES = (*SPECS.recipes,)
WORDS = {name: words_of(module, SPECS.ops) for name, module in SPECS.modules.items()}


def cells_of(module: str, *, every: bool) -> list[Cell]:
    """A module by every recipe, and with each of its choices alone: by every one, too, or by a few,
    others than in the module before, so that all modules together have every pair.
    """
    plain = [Cell(module, recipe, ()) for recipe in RECIPES]
    pairs = ((word, r) for word in WORDS[module] for r in (RECIPES if every else few(module, word)))
    return [*plain, *(Cell(module, recipe, (word,)) for word, recipe in pairs)]


def few(module: str, word: str) -> list[str]:
    having = [name for name, words in WORDS.items() if word in words]
    count = max(2, -(-len(RECIPES) // len(having)))
    first = having.index(module) * count
    return [RECIPES[(first + i) % len(RECIPES)] for i in range(count)]


# What differs on an architecture is which kernels it lacks: one that has few stands for others.
@pytest.mark.parametrize(
    ("arch", "every"),
    [
        pytest.param("sm_80", False, id="sm_80"),
        *(pytest.param(a, True, marks=SLOW, id=f"{a}-every") for a in ("cpu", "sm_80", "sm_90a")),
    ],
)
@pytest.mark.parametrize("module", [*map(by_form, SPECS.modules)])
def test_every_cell_keeps_the_rules_after_every_pass(module: str, arch: str, every: bool) -> None:
    plan = resolve(SPECS, arch, cells_of(module, every=every), derivations(), verify_pass)
    assert plan.modules
    for each in plan.modules:
        verify_plan(each)


def test_every_choice_is_alone_by_every_recipe() -> None:
    cells = {cell for module in SPECS.modules for cell in cells_of(module, every=False)}
    pairs = {(word, cell.recipe) for cell in cells for word in cell.options}
    every = {word for words in WORDS.values() for word in words}
    assert pairs == {(word, recipe) for word in every for recipe in RECIPES}


def draft_at(name: str, cell: str, arch: str = "cpu") -> Draft:
    """A draft after a pass."""
    seen: dict[str, Draft] = {}

    def keep(done: Pass, _: Draft, after: Draft) -> None:
        seen[done.name] = after

    run_passes(context_of(SPECS, Cell.parse(cell), arch, derivations()), keep)
    return seen[name]


LINEAR = "linear__bf16"
SWIGLU = "scaled_swiglu__bf16"
WGRAD = 'wgrad item="" inputs=(a:dy b:x) outputs=(out:dweight)'
MAIN_GRAD = "grouped_linear__bf16__add_to_main_grad"
DELAYED = "linear__fp8_delayed"


DEBUG = "grouped_linear__mxfp8__debug"
ROWWISE = "linear__fp8_rowwise"
EXPERTS = "grouped_mlp__fp8_block"


def test_a_program_that_stays_is_looked_at_again_where_its_buffers_change() -> None:
    before = draft_at("saved", LINEAR)
    weight = replace(before.buffers["weight"], dtype=DType.INT64)
    after = replace(before, buffers={**before.buffers, "weight": weight})
    with pytest.raises(VerifyError, match="weight is int64"):
        verify_pass(PASSES[-1], before, after)


@pytest.mark.parametrize(
    ("cell", "after", "old", "new", "says"),
    [
        # every buffer exists
        (
            LINEAR,
            "saved",
            "b:weight add:bias) outputs",
            "b:wait add:bias) outputs",
            "step 1 gemm fprop: wait is no buffer",
        ),
        (LINEAR, "saved", "{x when=", "{z when=", "forward: z is no buffer of the module"),
        (LINEAR, "saved", "    x:{x dtype=io shape=[T..., K] role=input}\n", "", "x is no buffer"),
        # what is read was written before
        (
            LINEAR,
            "saved",
            "a:dy b:x) outputs",
            "a:dy b:y) outputs",
            "step 2 gemm wgrad: y is read, but no step",
        ),
        (LINEAR, "saved", "(out:y)})", "(out:dx)})", "forward: y is a result, but no step"),
        # conditions imply those of what is read
        (
            LINEAR,
            "saved",
            "{weight when=(need_dx)}",
            "{weight when=(need_dbias)}",
            "gemm dgrad: weight is read if need_dx, but there if need_dbias",
        ),
        (
            LINEAR,
            "saved",
            "outputs=(out:dx) when=(need_dx)",
            "outputs=(out:dx) when=(need_dbias)",
            "backward: dx is a result if need_dx, but there if need_dbias",
        ),
        (LINEAR, "saved", "(out:dx) when=(need_dx)", "(out:dx) when=(need_y)", "need_y is no flag"),
        (SWIGLU, "saved", "{dscales when=", "{dy when=", "dy has a condition, but is not written"),
        # what gives a leaf its gradient is like the leaf
        (
            LINEAR,
            "saved",
            "gradients=(x:dx ",
            "gradients=(x:dy ",
            "dy is io [T..., N], but the gradient of x, io [T..., K]",
        ),
        # one writer, and nothing is changed but what is owned
        (LINEAR, "saved", "(out:dweight)", "(out:dx)", "dx is written, but a step before it"),
        (LINEAR, "saved", "(out:dweight)", "(out:dy)", "dy is written, but is there before"),
        (LINEAR, "saved", WGRAD, f"{WGRAD} mutates=(x)", "x is changed in place, but is neither"),
        (MAIN_GRAD, "saved", " mutates=(weight_main_grad)", "", "weight_main_grad is written, but"),
        (
            DELAYED,
            "saved",
            " mutates=(input_amax",
            " mutates=(x input_amax",
            "x is changed in place",
        ),
        # every step is of use
        (
            LINEAR,
            "liveness",
            "weight:dweight bias",
            "bias",
            "dweight is written, but nothing needs",
        ),
        # slots, shapes and types of the signature
        (LINEAR, "saved", "(a:dy b:x)", "(a:dy b:x a:x)", "a is a slot with two operands"),
        (LINEAR, "saved", "(a:dy b:x)", "(a:dy add:x)", "b is a slot without an operand"),
        (
            LINEAR,
            "saved",
            "dweight:{dweight dtype=io shape=[N, K]}",
            "dweight:{dweight dtype=io shape=[K, N]}",
            "dweight is [K, N], but out is [N, K]",
        ),
        (
            LINEAR,
            "saved",
            "dweight:{dweight dtype=io",
            "dweight:{dweight dtype=int64",
            "dweight is int64, but out is io",
        ),
        (MAIN_GRAD, "saved", "sizes dtype=int64", "sizes dtype=float32", "but groups is int64"),
        (DELAYED, "saved", "x_rowwise dtype=e4m3", "x_rowwise dtype=io", "x_rowwise is io, but a"),
        # copies are whole
        (DELAYED, "saved", " rowwise_scale:x_rowwise_scale", "", "x_rowwise_scale is of a copy"),
        (DELAYED, "saved", " b_scale:weight_rowwise_scale", "", "step reads it nowhere"),
        # expressions
        (SWIGLU, "saved", "{dup buffer=dx", "{dup buffer=dscales", "dscales is float32, but io"),
        (
            SWIGLU,
            "saved",
            "up buffer=x access=second_half",
            "up buffer=x access=full",
            "for T rows",
        ),
        (SWIGLU, "saved", "{gate buffer=x", "{gate buffer=y", "y is in the expression, but no"),
        (SWIGLU, "saved", "outputs=(dx:dx dscales", "outputs=(dx:y dscales", "are not what the"),
        # the same of programs with arguments
        (LINEAR, "programs", "{dy optional=false}\n", "", "dy is read, but no step before it"),
        (LINEAR, "programs", "{dx when=(need_dx)}", "{x when=(need_dx)}", "x is a result if"),
    ],
)
def test_a_broken_draft_is_refused(cell: str, after: str, old: str, new: str, says: str) -> None:
    draft = draft_at(after, cell)
    whole = text(draft)
    assert old in whole
    broken = parse(whole.replace(old, new, 1), Draft)
    done = next(each for each in PASSES if each.name == after)
    with pytest.raises(VerifyError) as error:
        verify_pass(done, draft, broken)
    assert f"after pass {after!r}" in str(error.value)
    assert says in str(error.value), error.value


@pytest.mark.parametrize(
    ("cell", "after", "old", "new", "says"),
    [
        # copies: codes in the pitch, scales of blocks, a byte where 8 bits may be one
        (DEBUG, "statistics", "K, align(32 * (T // 32 + E), 16)]", "K, T]", "but columnwise is [K"),
        (
            DEBUG,
            "statistics",
            "x_columnwise_scale dtype=e8m0 shape=[T // 32 + E",
            "x_columnwise_scale dtype=e8m0 shape=[T // 16 + E",
            "x_columnwise_scale is [T // 16 + E, K], but columnwise_scale is [T // 32 + E, K]",
        ),
        (
            DEBUG,
            "statistics",
            "x_columnwise_scale dtype=e8m0",
            "x_columnwise_scale dtype=e4m3",
            "x_columnwise_scale is e4m3, but columnwise_scale is e8m0",
        ),
        # amaxes and sums that kernels leave
        (ROWWISE, "sums", "[1, K]", "[K, 1]", "x_column_amax is [K, 1], but column_amax is [1, K]"),
        (ROWWISE, "sums", "[T // 128 + 1, N]", "[T // 64 + 1, N]", "but row_sums is [T // 128 + 1"),
        (ROWWISE, "sums", "dbias dtype=io", "dbias dtype=float32", "dbias is float32, but sum is"),
        # what is decoded: transposed tokens with the padding between groups
        (
            DEBUG,
            "statistics",
            "x_columnwise_decoded dtype=bfloat16 shape=[32 * (T // 32 + E)",
            "x_columnwise_decoded dtype=bfloat16 shape=[T",
            "x_columnwise_decoded is [T, K], but out is [32 * (T // 32 + E), K]",
        ),
        (
            DEBUG,
            "statistics",
            "dy_padded_sizes dtype=int64",
            "dy_padded_sizes dtype=io",
            "dy_padded_sizes is io, but padded_sizes is int64",
        ),
        # statistics
        (DEBUG, "statistics", "float32 shape=[5]", "float32 shape=[4]", "is [4], but out is [5]"),
        (DEBUG, "statistics", "shape=[1024, 12]", "shape=[12]", "but partials is [1024, 12]"),
        # a merged step
        (
            EXPERTS,
            "rewrite_copies",
            "[ceildiv(F, 128), T]",
            "[F, T]",
            "but row_partials is",
        ),
    ],
)
def test_a_result_that_is_stored_otherwise_is_refused(
    cell: str, after: str, old: str, new: str, says: str
) -> None:
    draft = draft_at(after, cell, "sm_90a")
    whole = text(draft)
    assert old in whole
    broken = parse(whole.replace(old, new, 1), Draft)
    assert any(says in str(fault) for fault in draft_faults(broken)), [*draft_faults(broken)]


def test_codes_and_scales_may_be_bytes() -> None:
    """Cached copies are: 8 bits are 8 bits."""
    draft = draft_at("weight_cache", "linear__mxfp8__cached_weights")
    assert draft.buffers["weight_rowwise"].dtype is draft.buffers["weight_rowwise_scale"].dtype
    assert not [*draft_faults(draft)]


def test_parts_of_merged_steps_keep_the_rules() -> None:
    draft = draft_at("rewrite_copies", "grouped_mlp__fp8_block", "sm_90a")
    forward, *others = draft.programs
    merged = next(step for step in forward.steps if step.parts)
    broken = replace(merged, parts=merged.parts[1:])
    steps = tuple(broken if step is merged else step for step in forward.steps)
    draft = replace(draft, programs=(replace(forward, steps=steps), *others))
    assert any("a is read, but no step before it" in str(fault) for fault in draft_faults(draft))


def test_a_broken_plan_is_refused() -> None:
    plan = resolve_module(SPECS, Cell.parse(LINEAR), "cpu")
    verify_plan(plan)
    forward, backward = plan.directions
    program = replace(plan.backward, steps=plan.backward.steps[1:])
    directions = (forward, replace(backward, segments=(program,)))
    with pytest.raises(VerifyError, match="plan of linear__bf16 on cpu is broken\n  backward: dx"):
        verify_plan(replace(plan, directions=directions))


def test_a_broken_conversion_is_refused() -> None:
    plan = resolve_module(SPECS, Cell.parse("quantize__fp8_block"), "cpu")
    verify_plan(plan)
    first = plan.conversions[0]
    broken = replace(first, program=replace(first.program, steps=()))
    with pytest.raises(VerifyError, match="is a result, but no step writes it"):
        verify_plan(replace(plan, conversions=(broken, *plan.conversions[1:])))


@pytest.mark.slow
def test_generate_and_check_verify_where_they_are_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(draft: Draft, _: Context) -> Draft:
        return replace(draft, forward=(*draft.forward, *draft.forward))

    out = tmp_path / "generated"
    make = ("--arch", "cpu", "--module", "linear", "--recipe", "bf16", "--out", str(out))
    at = next(i for i, each in enumerate(PASSES, 1) if each.name == "saved")
    broken = (*PASSES[:at], Pass("twice", "Every step of the forward stands twice.", twice))
    monkeypatch.setattr(pipeline, "PASSES", (*broken, *PASSES[at:]))
    for verb in ("generate", "check"):
        words = [verb, *(make if verb == "generate" else (str(out / "cpu"),))]
        refused = CliRunner().invoke(cli.program, [*words, "--verify"])
        assert refused.exit_code == cli.ExitCode.INTERNAL
        assert "after pass 'twice' the draft is broken\n  forward, step 1 gemm" in refused.stderr
        assert verb == "check" or not out.exists()
        assert CliRunner().invoke(cli.program, words).exit_code == cli.ExitCode.OK
