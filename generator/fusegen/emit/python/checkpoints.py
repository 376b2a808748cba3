"""Context of a bundle's list of what state dicts do not tell of its cells' parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...ir.plan import ModulePlan
from ...ir.segments import OF_PARTS
from ...ir.shapes import factors_of, symbols
from ...ir.step import HALVES, INTERLEAVE, Step
from ...steps import is_gemm
from .experts import takes_slots


@dataclass(frozen=True, slots=True)
class LayoutText:
    """How a cell's parameters are laid out.

    Attributes:
        cell: its name.
        grouped: Python source of the paths of parameters whose first dimension is that of groups.
        gated: the same of those whose rows are gate and up of an activation.
        block: rows of gate and up alternate in blocks of so many; 0 where gate is all before up.
        split: of those that a rank has a part of: path, dimension, and how many halves of it lie
            one behind the other; empty where there are none.
        group: attribute of the module that has the ranks with these parts; empty where none have.
        slots: whether tokens come in slots for each of these ranks.
    """

    cell: str
    grouped: str
    gated: str
    block: int
    split: str
    group: str
    slots: bool


@dataclass(frozen=True, slots=True)
class CheckpointsContext:
    """Everything ``integrations/_parameters.py`` states: every cell that has parameters."""

    cells: tuple[LayoutText, ...]


def checkpoints_context(plans: Iterable[ModulePlan]) -> CheckpointsContext | None:
    """What the file states; None where no cell has parameters."""
    cells = tuple(_layout(plan) for plan in plans if plan.parameters)
    return CheckpointsContext(cells) if cells else None


def _layout(plan: ModulePlan) -> LayoutText:
    activations = [step for step in plan.exact if _reads_halves(step)]
    read = {each.buffer for step in activations for each in step.inputs}
    gemms = [step for step in plan.exact if is_gemm(step)]
    gated = _parameters_of(step for step in gemms if step.out in read)
    grouped = _parameters_of(step for step in gemms if step.input("groups"))
    alternate = any(step.pointwise and step.pointwise.interleaved for step in activations)
    split = tuple(_split(plan, alternate=alternate))
    return LayoutText(
        cell=plan.cell,
        grouped=repr(tuple(p.path for p in plan.parameters if p.buffer in grouped)),
        gated=repr(tuple(p.path for p in plan.parameters if p.buffer in gated)),
        block=INTERLEAVE if alternate else 0,
        split=repr(split) if split else "",
        group=next((each.name for each in plan.process_groups if each in OF_PARTS), ""),
        slots=takes_slots(plan),
    )


def _split(plan: ModulePlan, *, alternate: bool) -> Iterator[tuple[str, int, int]]:
    """Halves that alternate are split as one, by blocks of both."""
    for parameter in plan.parameters:
        for axis, dim in enumerate(plan.buffer(parameter.buffer).shape.flat):
            if symbols(dim) & {*plan.split}:
                halves, _ = factors_of(dim)
                yield parameter.path, axis, 1 if alternate else halves


def _reads_halves(step: Step) -> bool:
    math = step.pointwise
    return math is not None and any(each.access in HALVES for each in math.operands)


def _parameters_of(gemms: Iterable[Step]) -> set[str | None]:
    return {step.input(slot) for step in gemms for slot in ("b", "add")}
