"""Directions of several segments: where programs are cut, and what has to hold of the pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusegen.emit.launcher.program import launcher_context
from fusegen.emit.python.directions import direction_texts
from fusegen.emit.python.words import schema
from fusegen.emit.text.explain import explain
from fusegen.ir.naming import Cell, need
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import Argument, Direction, Program
from fusegen.ir.segments import Start, Wait
from fusegen.ir.text import parse, text
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.verify import verify_pass
from fusegen.steps import moves_state
from fusegen.steps.collectives import collective
from fusegen.steps.verify import VerifyError
from fusegen.steps.verify_directions import direction_faults, verify_plan

from ..segment_plans import SPECS, delayed, edited, exchanged, overlapped

REDUCED = Cell("linear", "fp8_delayed", ("reduced_amax",))


def forward(plan: ModulePlan) -> Direction:
    found = plan.direction("forward")
    assert found is not None
    return found


def words(plan: ModulePlan, name: str = "forward") -> list[str]:
    """The segments of a direction, each by its kind and what it makes."""
    direction = plan.direction(name)
    assert direction is not None
    return [f"{type(each).__name__} {' '.join(each.gives)}".strip() for each in direction.segments]


def test_ops_and_collectives_alternate() -> None:
    plan = exchanged()
    verify_plan(plan)
    ops = ["Program h", "Program a", "Program y"]
    between = [["Start sent_h", "Wait h_max"], ["Start sent_a", "Wait a_max"]]
    assert words(plan) == [ops[0], *between[0], ops[1], *between[1], ops[2]]
    assert words(plan, "backward")[0].startswith("Program dx ")
    assert [program.function for _, program in plan.ops] == [
        "forward_1",
        "forward_2",
        "forward_3",
        "backward",
    ]


def test_an_op_may_run_while_a_collective_does() -> None:
    plan = overlapped()
    verify_plan(plan)
    assert words(plan)[1:4] == ["Start sent_h", "Program a", "Wait h_max"]


@pytest.mark.parametrize("make", [exchanged, overlapped])
def test_plans_with_collectives_read_back(make: object) -> None:
    plan = exchanged() if make is exchanged else overlapped()
    assert parse(text(plan)) == plan
    assert "      start:{all_reduce operands=(h) future=sent_h" in text(plan)


def test_a_direction_may_end_with_a_collective() -> None:
    plan = delayed()
    verify_plan(plan)
    assert parse(text(plan)) == plan
    assert words(plan, "wgrad") == ["Program own", "Start sent", "Wait dweight"]
    assert plan.delayed == ("weight",)


def test_a_direction_as_a_whole_hides_what_is_between_its_ops() -> None:
    plan = exchanged()
    whole = plan.forward
    assert [result.buffer for result in whole.results] == ["y", "h_max", "a_max"]
    assert {argument.buffer for argument in whole.arguments} == {*plan.arguments}
    assert len(whole.steps) == 3 and not whole.part
    assert [group.name for group in plan.process_groups] == ["ranks"]
    plain = resolve_module(SPECS, Cell.parse("grouped_mlp__bf16"), "cpu")
    assert plain.forward is plain.directions[0].programs[0] and not plain.process_groups


def test_an_op_that_needs_the_type_has_the_first_argument() -> None:
    second = forward(exchanged()).programs[1]
    assert [argument.buffer for argument in second.arguments] == ["x", "probs", "h_max"]
    update = forward(resolve_module(SPECS, REDUCED, "cpu")).programs[1]
    assert update.arguments[0] == Argument("x_shared_amax", optional=False)


WAIT_H = "      wait:{sent_h results=(h_max)}\n"
RESULT_A = "results=(\n          {a})"
WAIT_A = "      wait:{sent_a results=(a_max)}\n"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (WAIT_H, WAIT_H * 2, "segment 4 wait: sent_h is waited for, but not started, or waited"),
        (WAIT_A, "", "forward: sent_a is started, but nothing waits for it"),
        (
            "operands=(a)",
            "operands=(sent_h)",
            "start all_reduce: sent_h is a future, which its wait",
        ),
        ("future=sent_a", "future=sent_h", "segment 5 start all_reduce: sent_h is started twice"),
        (RESULT_A, "results=()", "a crosses from op to op, but is no result of the op that gives"),
        (
            "operands=(a)",
            "operands=(y)",
            "segment 5 start all_reduce: y is read, but given by a later",
        ),
        ("operands=(h)", "operands=(x)", "forward: h is a result, but nothing reads it"),
        ("results=(a_max)", "results=(h_max)", "segment 6 wait: h_max is given by two segments"),
        ("results=(a_max)", "results=()", "segment 6 wait: sent_a gives 1 results, got 0"),
        ("results=(a_max)", "results=(none)", "none is no buffer of the module"),
        (
            "a_max dtype=io shape=[T, F]",
            "a_max dtype=io shape=[T, H]",
            "but all_reduce gives [T, F]",
        ),
        ("{a_max dtype=io", "{a_max dtype=float32", "float32, but all_reduce gives [T, F] io"),
        ("attributes=(op:max)", "attributes=(op:least)", "op least is no attribute of all_red"),
        (" attributes=(op:max)", "", "op is an attribute of all_reduce that it lacks"),
        ("part=2", "part=4", "has ops that are not numbered [1, 2, 3]"),
        ("results=(a_max)", "results=(a_max) when=(need_dx)", "sent_a is waited for under other"),
    ],
)
def test_each_rule_can_refuse(old: str, new: str, says: str) -> None:
    broken = parse(edited(text(exchanged()), (old, new)))
    with pytest.raises(VerifyError) as error:
        verify_plan(broken)
    assert says in str(error.value), error.value


def test_no_op_reads_for_the_backward_alone_what_another_one_changes() -> None:
    """PyTorch's compiler would run it in the backward, of state that has moved on by then."""
    cell = Cell.parse("mlp__fp8_delayed__tensor_sequence_parallel")
    plan = resolve_module(SPECS, cell, "cpu")
    whole = forward(plan)
    op = whole.programs[0]
    snapshots = tuple(step for step in op.steps if step.primitive == "snapshot")
    assert len(snapshots) == 2 and op.mutated == ("forward_state",)
    used = {name for step in snapshots for name in step.writes}
    early = replace(
        op,
        steps=snapshots,
        arguments=(Argument("forward_state", optional=False),),
        results=tuple(result for result in op.results if result.buffer in used),
    )
    rest = replace(
        op,
        steps=tuple(step for step in op.steps if step not in snapshots),
        results=tuple(result for result in op.results if result.buffer not in used),
        part=2,
    )
    others = (rest if each is op else each for each in whole.segments)
    broken = replace(whole, segments=(early, *others))
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    says = "is read for the backward alone, and changed by another op"
    found = [str(fault) for fault in direction_faults(broken, buffers)]
    assert [each for each in found if says in each and "forward_state" in each], found
    assert not [*direction_faults(whole, buffers)]


def test_collectives_of_a_group_are_waited_for_in_their_order() -> None:
    plan = overlapped()
    first, start, second, wait, later, last, third = forward(plan).segments
    assert isinstance(wait, Wait) and isinstance(later, Start)
    swapped = (first, start, second, later, last, wait, third)

    def with_segments(*segments: object) -> ModulePlan:
        direction = replace(forward(plan), segments=segments)
        return replace(plan, directions=(direction, *plan.directions[1:]))

    with pytest.raises(VerifyError, match="sent_a is waited for before sent_h, which ranks has"):
        verify_plan(with_segments(*swapped))
    other = replace(later, group=replace(later.group, name="others"))
    verify_plan(with_segments(first, start, second, other, last, wait, third))


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(KeyError, match="no collective 'gather'; there are all_reduce"):
        collective("gather")


def test_every_op_has_a_function_of_its_own_and_no_schema_a_group() -> None:
    plan = exchanged("sm_90a")
    launcher = launcher_context(plan, SPECS.archs["sm_90a"], "segments")
    names = [program.name for program in launcher.programs]
    assert names == ["forward_1", "forward_2", "forward_3", "backward"]
    assert [program.op for program in launcher.programs] == [f"{plan.cell}_{n}" for n in names]
    assert all("ranks" not in schema(plan, program) for _, program in plan.ops)


def test_a_direction_is_one_function() -> None:
    (printed,) = direction_texts(overlapped())
    assert printed.parameters[-1] == "ranks: ProcessGroup | None"
    started = next(i for i, line in enumerate(printed.body) if line.startswith("sent_h = "))
    assert printed.body[started + 1] == "a = _forward_2(x, probs, h)"
    assert printed.body[started + 2] == "h_max, = _collectives.wait(sent_h)"
    assert printed.body[-1] == "return y, h_max, a_max"
    assert not direction_texts(resolve_module(SPECS, Cell.parse("linear__bf16"), "cpu"))


def test_explain_shows_segments() -> None:
    lines = [*explain(exchanged())]
    assert "start all_reduce max over ranks: h -> sent_h" in lines
    assert "wait sent_h -> h_max" in lines
    assert any(line.startswith("  h ") and line.endswith("between ops") for line in lines)
    assert any(line.startswith("forward_3 (x, fc2_weight, ") for line in lines)


# ---- the option that shares amaxes


@pytest.mark.parametrize("arch", SPECS.archs)
def test_amaxes_are_shared_between_two_ops(arch: str) -> None:
    plan = resolve_module(SPECS, REDUCED, arch)
    for name, sources in (("forward", ("x_amax", "weight_amax")), ("backward", ("dy_amax",))):
        direction = plan.direction(name)
        assert direction is not None
        quantizing, start, wait, moving = direction.segments
        assert isinstance(quantizing, Program) and isinstance(moving, Program)
        assert isinstance(start, Start) and isinstance(wait, Wait)
        assert start.operands == sources and {*sources} <= {*quantizing.gives}
        assert not quantizing.mutated and all(map(moves_state, moving.steps))
        assert {*wait.results} < {*moving.takes} and not moving.results and not moving.flags


def test_a_call_without_gradients_shares_nothing() -> None:
    plan = resolve_module(SPECS, REDUCED, "cpu")
    first, start, wait, last = forward(plan).segments
    flags = tuple(need(leaf) for leaf in plan.differentiated)
    assert not first.when and start.when == wait.when == last.when == flags


def test_an_argument_may_be_absent_under_fewer_flags_than_its_op_runs_under() -> None:
    """One amax of two that move states on: the op runs where either does."""
    cell = Cell("grouped_mlp", "fp8_delayed", ("scaled_bias", "reduced_amax"))
    plan = resolve_module(SPECS, cell, "sm_90a", observe=verify_pass)
    direction = plan.direction("backward")
    assert direction is not None
    moving = direction.programs[-1]
    when = {argument.buffer: argument.when for argument in moving.arguments}
    assert {*when["dh_shared_amax"]} < {*moving.when} and not when["dy_shared_amax"]
