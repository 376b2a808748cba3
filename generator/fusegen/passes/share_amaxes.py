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
from ..ir.naming import QUANTIZE_INPUT, UPDATE_STATE
from ..ir.segments import TENSOR_GROUP, Collective, Group
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
    draft = replace(draft, forward=forward.all_steps, backward=backward.all_steps)
    return _reduced(
        _reduced(draft, "forward", forward, AMAX_GROUP), "backward", backward, AMAX_GROUP
    )


def share_amax_of_input(draft: Draft) -> Draft:
    """The same of the step that quantises the first input, over ranks that have parts of weights:
    their tokens have one scale."""
    found = _shared(draft, draft.quantize_input, (UPDATE_STATE,))
    draft = replace(draft, quantize_input=found.all_steps)
    return _reduced(draft, QUANTIZE_INPUT, found, TENSOR_GROUP)


def _reduced(draft: Draft, direction: str, found: _Shared, group: Group) -> Draft:
    """The draft with the collective of a direction, if it has amaxes."""
    if found.length is None:
        return draft
    future = Buffer(f"{direction}_amaxes", DType.FLOAT32, Shape(None, (found.length,)))
    collective = Collective(
        ALL_REDUCE.name,
        direction,
        tuple(found.operands),
        tuple(found.results),
        future.name,
        group,
        (("op", "max"),),
    )
    return replace(
        draft.with_buffers({**found.buffers, future.name: future}),
        collectives=(*draft.collectives, collective),
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

    @property
    def all_steps(self) -> tuple[Step, ...]:
        """The steps of the direction."""
        return (*self.steps, *self.updates)


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
