"""Texts of the function that quantises weights which stay so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...ir.buffers import StateFill
from ...ir.plan import ModulePlan
from ...ir.quantization import Orientation
from ...ir.segments import Group
from ...ir.step import Step
from ...steps import quantizes
from .directions import groups_of
from .states import StateText
from .words import ProgramText, TensorText, program_text


@dataclass(frozen=True, slots=True)
class HeldText:
    """A weight that the class has as quantised copies alone; every field is Python source.

    Attributes:
        argument: of the function that refreshes.
        path: of what stands in its place.
        rowwise: paths of the buffers of its rowwise copy.
        copies: paths of all its buffers, by argument.
        state: first values of what else its quantisation changes, by path.
        records: paths of the statistics of its copies, by argument.
    """

    argument: str
    path: str
    rowwise: str
    copies: str
    state: str
    records: str


@dataclass(frozen=True, slots=True)
class RefreshText:
    """The function that quantises the weights into their copies.

    Attributes:
        program: its op.
        weights: what it quantises.
        paths: sources of these in the class.
        states: what it changes.
        caches: those of them that are copies of weights.
        groups: that its collectives are over.
        op_arguments: what the op is called with.
        call_arguments: how the class calls it.
        kept: those of them that the recipe keeps between refreshes; Python source.
        held: the weights, where the class has these copies alone.
    """

    program: ProgramText
    weights: tuple[TensorText, ...]
    paths: tuple[str, ...]
    states: tuple[StateText, ...]
    caches: tuple[str, ...]
    groups: tuple[Group, ...]
    op_arguments: tuple[str, ...]
    call_arguments: tuple[str, ...]
    kept: str
    held: tuple[HeldText, ...]


def refresh_text(plan: ModulePlan, states: tuple[StateText, ...]) -> RefreshText | None:
    if plan.refresh is None:
        return None
    printed = program_text(plan, plan.refresh)
    paths = {parameter.buffer: f"self.{parameter.path}" for parameter in plan.parameters}
    by_name = {state.argument: state for state in states}
    changed = tuple(by_name[name] for name in plan.refresh.mutated)
    caches = tuple(state for state in changed if state.copy)
    held = {parameter.buffer for parameter in plan.quantized}
    groups = groups_of(plan.direction("refresh"))
    return RefreshText(
        program=printed,
        weights=printed.unchanged,
        paths=tuple(paths[weight.name] for weight in printed.unchanged),
        states=changed,
        caches=tuple(state.argument for state in caches),
        groups=groups,
        op_arguments=(
            *(argument.name for argument in printed.arguments),
            *printed.flags,
            *(group.name for group in groups),
        ),
        call_arguments=(
            *(
                _given(plan, name, paths[name]) if name in held else paths[name]
                for name in (weight.name for weight in printed.unchanged)
            ),
            *(f"{state.argument}=self.{state.path}" for state in changed),
            *(f"{flag}={flag}" for flag in printed.flags),
            *(f"{group.name}=self.{group.name}" for group in groups),
        ),
        kept=repr(
            tuple(s.argument for s in changed if not (s.copy or s.argument in plan.record_tensors))
        ),
        held=tuple(_held_texts(plan, plan.refresh.unmerged.steps)) if held else (),
    )


def _given(plan: ModulePlan, weight: str, path: str) -> str:
    """A weight that the class is given, since it has none."""
    return f'_quantized_weights.given("{plan.cell}", "{weight}", {weight}, {path})'


def _held_texts(plan: ModulePlan, steps: tuple[Step, ...]) -> Iterator[HeldText]:
    for step in steps:
        if quantizes(step):
            yield _held_text(plan, step, steps)


def _held_text(plan: ModulePlan, step: Step, steps: tuple[Step, ...]) -> HeldText:
    """The weight that a step of the refresh quantises."""
    weight = step.reads[0]
    path = next(parameter.path for parameter in plan.quantized if parameter.buffer == weight)
    rowwise = next(copy for copy in step.copies if copy.orientation is Orientation.ROWWISE)
    copies = [name for copy in step.copies for name in copy.buffers]
    first = {StateFill.ZEROS: 0.0, StateFill.ONES: 1.0}
    kept = (plan.state(name) for name in step.mutates if name not in copies)
    return HeldText(
        argument=repr(weight),
        path=repr(path),
        rowwise=repr(tuple(plan.state(name).path for name in rowwise.buffers)),
        copies=repr({name: plan.state(name).path for name in copies}),
        state=repr({state.path: first.get(state.fill) for state in kept}),
        records=repr(
            {
                tensor: tensor
                for each in steps
                for name in each.mutates
                if name in plan.records and each.copies[0].original == weight
                for tensor in (plan.tensor_with(name),)
            }
        ),
    )
