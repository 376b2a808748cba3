"""Amaxes of delayed scaling are shared by ranks before they move its state on.

A step that quantises by a delayed scale leaves its amax as a result instead of moving the state on
itself.  One collective per direction reduces the amaxes of all its steps, and steps of their own at
the direction's end move the states on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.segments import Collective, Group
from ..ir.shapes import Expr, Shape, add
from ..ir.step import Operand, Result, Step
from ..steps import quantizes
from ..steps.collectives import ALL_REDUCE
from ..steps.update_scale import UPDATE_SCALE, role_attribute
from .draft import Draft
from .liveness import flags_of

AMAX_GROUP = Group("amax_group", "ranks whose amaxes move the scales on together")


def share_amaxes(draft: Draft) -> Draft:
    """Put a collective between the steps that quantise and the state that they move on."""
    forward = _shared(draft, draft.forward, flags_of(draft))
    backward = _shared(draft, draft.backward, ())
    found = {"forward": forward, "backward": backward}
    collectives = tuple(
        Collective(
            ALL_REDUCE.name,
            direction,
            tuple(each.operands),
            tuple(each.results),
            _future(direction),
            AMAX_GROUP,
            (("op", "max"),),
        )
        for direction, each in found.items()
        if each.operands
    )
    buffers = {name: buffer for each in found.values() for name, buffer in each.buffers.items()}
    futures = {
        _future(direction): Buffer(_future(direction), DType.FLOAT32, Shape(None, (each.length,)))
        for direction, each in found.items()
        if each.length is not None
    }
    return replace(
        draft.with_buffers(buffers | futures),
        forward=(*forward.steps, *forward.updates),
        backward=(*backward.steps, *backward.updates),
        collectives=(*draft.collectives, *collectives),
    )


@dataclass(slots=True)
class _Shared:
    """A direction whose amaxes leave it.

    Attributes:
        steps: all of before; those that quantise move no state on.
        updates: move it on.
        operands, results: amaxes of the rank and of all ranks.
        buffers: of these.
        length: of all operands.
    """

    steps: list[Step] = field(default_factory=list)
    updates: list[Step] = field(default_factory=list)
    operands: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    length: Expr | None = None


def _shared(draft: Draft, steps: tuple[Step, ...], asking: tuple[str, ...]) -> _Shared:
    """The steps of a direction, and what is to follow them.

    Args:
        draft: whose buffers they name.
        steps: of the direction.
        asking: flags under which steps of the direction move state on, where not each has its own.
    """
    found = _Shared()
    for step in steps:
        if not (quantizes(step) and step.input("amax_history")):
            found.steps.append(step)
            continue
        own, reduced = _amaxes(draft, step)
        found.buffers |= {own.name: own, reduced.name: reduced}
        found.operands.append(own.name)
        found.results.append(reduced.name)
        (size,) = own.shape.dims
        found.length = size if found.length is None else add(found.length, size)
        found.steps.append(_without_state(step, own.name, asking))
        found.updates.append(_update(step, reduced.name, asking or step.when))
    return found


def _amaxes(draft: Draft, step: Step) -> Iterator[Buffer]:
    """The buffers of the rank's amax and of that of all ranks: one for each scale."""
    shape = draft.buffers[step.input("scale") or ""].shape
    for name in ("amax", "shared_amax"):
        yield Buffer(f"{step.copies[0].original}_{name}", DType.FLOAT32, shape)


def _without_state(step: Step, amax: str, asking: tuple[str, ...]) -> Step:
    kept = (step.input("amax_history"), step.input("scale"))
    return replace(
        step,
        inputs=tuple(o for o in step.inputs if o.slot != "amax_history"),
        outputs=(*step.outputs, Operand("amax", amax)),
        output_when=(*step.output_when, *([Result(amax, asking)] if asking else [])),
        mutates=tuple(name for name in step.mutates if name not in kept),
    )


def _update(step: Step, amax: str, when: tuple[str, ...]) -> Step:
    states = tuple(o for o in step.inputs if o.slot in ("amax_history", "scale"))
    return Step(
        UPDATE_SCALE.name,
        None,
        step.item,
        inputs=(Operand("amax", amax), *states),
        outputs=(),
        when=when,
        mutates=tuple(operand.buffer for operand in states),
        attributes=role_attribute(step.copies[0].role),
    )


def _future(direction: str) -> str:
    return f"{direction}_amaxes"
