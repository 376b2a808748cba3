"""Plans as drawings: a box per step, a line per tensor, what is saved between the directions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...ir.buffers import size_in_bytes
from ...ir.plan import ModulePlan
from ...ir.program import Direction, Program, Segment
from ...ir.segments import Start, Wait
from ...ir.shapes import to_markdown
from ...ir.step import Step
from ..python.conditions import any_of
from ..python.words import step_name
from ..text.explain import step_rows
from .layout import PART, Box, Drawing, Gutter, Lane, Line, Net, draw

STEP_WIDTH, SAVED_WIDTH = 344, 260
_GIVEN, _LEFT = "given", "left"
_PIECE = re.compile(r"[^\s_]+_?|_|\s+")
_LETTER = 6.7
"""Pixels of a letter of the style sheet's type, which has one width."""

Costs = Mapping[tuple[str, int], str]
"""What steps cost at given sizes, for people, by direction and place in all of it, from 1."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """A direction, or an op by itself, before it has a place."""

    plan: ModulePlan
    name: str
    segments: tuple[Segment, ...]
    given: tuple[str, ...]
    left: tuple[str, ...]


def drawings(plan: ModulePlan, costs: Costs) -> Iterator[Drawing]:
    """Forward and backward in one drawing, then each other direction and each conversion."""
    forward, backward, *others = plan.directions
    if plan.is_identity:
        return
    if plan.backward.steps:
        yield _training(plan, forward, backward, costs)
    else:
        yield _alone(_lane(plan, forward, ()), costs)
    for direction in others:
        yield _alone(_lane(plan, direction, ()), costs)
    for each in plan.conversions:
        program, own = each.program, plan.of(each)
        name = f"quantize(role={each.role.value!r}), {each.form.value}"
        yield _alone(_Lane(own, name, (program,), program.takes, program.gives), {})


def _lane(plan: ModulePlan, direction: Direction, saved: Iterable[str]) -> _Lane:
    whole = plan.whole(direction)
    known = {*saved}
    given = (n for name in whole.takes for n in _parts(plan, name) if n not in known)
    left = (n for name in whole.gives for n in _parts(plan, name) if n not in known)
    return _Lane(plan, direction.name, direction.segments, (*given,), (*left,))


def _parts(plan: ModulePlan, name: str) -> tuple[str, ...]:
    """What steps call a tensor: the buffers that lie in it, where several do."""
    joined = plan.joined_tensor(name)
    return joined.parts if joined else (name,)


def _alone(lane: _Lane, costs: Costs) -> Drawing:
    boxes = _boxes(lane, costs)
    gutter = Gutter(_nets(lane, boxes), 0, 0, left=True)
    return draw(f"{lane.plan.cell}: {lane.name}", [Lane(lane.name, STEP_WIDTH, boxes)], [gutter])


def _training(plan: ModulePlan, forward: Direction, backward: Direction, costs: Costs) -> Drawing:
    """Both directions side by side, and what the one saves for the other between them."""
    saved = tuple(n for result in plan.saved for n in _parts(plan, result.buffer))
    ahead = _lane(plan, forward, ())
    ahead = replace(ahead, left=tuple(n for n in ahead.left if n not in saved or n in plan.outputs))
    there = {name for step in plan.forward.steps for name in step.writes} | {*ahead.given}
    # What nobody gives in the forward, such as a weight that its backward alone reads.
    missing = tuple(name for name in saved if name not in there)
    ahead = replace(ahead, given=(*ahead.given, *missing))
    back = _lane(plan, backward, saved)
    first, last = _boxes(ahead, costs), _boxes(back, costs)
    column = tuple(_saved_box(plan, name) for name in saved)
    keeping = tuple(Net(name, _tail(first, name), (f"saved {name}",)) for name in saved)
    reading = (Net(name, f"saved {name}", _heads(last, name)) for name in saved)
    lanes = (
        Lane(ahead.name, STEP_WIDTH, first),
        Lane("saved for the backward", SAVED_WIDTH if column else 24, column),
        Lane(back.name, STEP_WIDTH, last),
    )
    gutters = (
        Gutter(_nets(ahead, first), 0, 0, left=True),
        Gutter(keeping, 0, 1),
        Gutter(tuple(net for net in reading if net.heads), 1, 2),
        Gutter(_nets(back, last), 2, 2),
    )
    return draw(f"{plan.cell}: forward, backward, and what is saved between", lanes, gutters)


# ---- boxes


def _boxes(lane: _Lane, costs: Costs) -> tuple[Box, ...]:
    made: list[Box] = []
    if lane.given:
        made.append(Box(f"{lane.name} {_GIVEN}", _GIVEN, _tensors(lane.plan, lane.given, "given")))
    place = 0
    for segment in lane.segments:
        match segment:
            case Program():
                for index, step in enumerate(segment.steps, 1):
                    place += 1
                    cost = costs.get((lane.name, place), "")
                    made.append(_step_box(lane.plan, segment, step, index, cost))
            case Start() | Wait():
                made.append(_exchange_box(lane, segment))
    if lane.left:
        lines = (Line("result", "title"), *(Line(name, "in", name) for name in lane.left))
        made.append(Box(f"{lane.name} {_LEFT}", _LEFT, lines))
    return tuple(made)


def _tensors(plan: ModulePlan, names: Iterable[str], title: str) -> tuple[Line, ...]:
    return (Line(title, "title"), *(line for name in names for line in _tensor(plan, name)))


def _tensor(plan: ModulePlan, name: str) -> Iterator[Line]:
    """What is given, with its shape and type below."""
    buffer = plan.buffer(name)
    yield Line(name, "out", name)
    yield from _text(f"{buffer.shape} {buffer.dtype.value}", "type")


def _step_box(plan: ModulePlan, program: Program, step: Step, index: int, cost: str) -> Box:
    row, *parts = step_rows(plan, program, step, index)
    _, kernels, flops, moved, when, _ = row
    head = [Line(step_name(step, index), "title"), *_text(cost, "cost")]
    head += [*_text(kernels, "kernel"), *_text(flops, "work"), *_text(moved, "work")]
    head += _text(when, "when")
    region = [*_region(step, parts)]
    framed = (len(head) + 1, len(head) + len(region)) if region else None
    if step.pointwise and not region:
        head += _text(step.pointwise.formula, "part")
    changed = {*step.mutates}
    reads = (Line(f"{n}, changed in place" if n in changed else n, "in", n) for n in _read(step))
    writes = (line for n in step.writes if n not in changed for line in _tensor(plan, n))
    lines = _parted(head, region, reads, writes)
    return Box(f"{program.function} {index}", "step", lines, framed)


def _read(step: Step) -> Iterable[str]:
    """What a step reads or changes, each once."""
    return dict.fromkeys((*step.reads, *step.mutates))


def _parted(*parts: Iterable[Line]) -> tuple[Line, ...]:
    """Parts of a box, with gaps between those that have lines."""
    lines: list[Line] = []
    for part in map(tuple, parts):
        lines += [PART, *part] if lines and part else part
    return tuple(lines)


def _region(step: Step, parts: Sequence[tuple[str, ...]]) -> Iterator[Line]:
    """What a fusion, or a loop, has put into one step."""
    if not step.parts and not step.rule:
        return
    reason = f"one step by {step.rule}" if step.rule else "one launch for"
    if step.chunks:
        reason = "a loop over chunks of the rows"
    yield from _text(reason, "rule")
    for number, part in enumerate(step.parts, 1):
        yield from _text(", ".join(filter(None, (step_name(part, number), part.item))), "part")
        if part.pointwise:
            yield from _text(part.pointwise.formula, "math")
        if parts:
            yield from _text(parts[number - 1][3], "work")
    if step.pointwise and not step.parts:
        yield from _text(step.pointwise.formula, "math")


def _exchange_box(lane: _Lane, segment: Start | Wait) -> Box:
    """The start of a collective, or the wait for it."""
    if isinstance(segment, Start):
        title = f"start {segment.kind} over {segment.group.name}"
    else:
        title = f"wait for {segment.future}"
    when = _text(f"if {any_of(segment.when)}" if segment.when else "", "when")
    takes = (Line(name, "in", name) for name in segment.takes)
    gives = (Line(name, "out", name) for name in segment.gives)
    lines = _parted((*_text(title, "title"), *when), takes, gives)
    return Box(f"{lane.name} {title}", "exchange", lines)


def _saved_box(plan: ModulePlan, name: str) -> Box:
    buffer, width = plan.buffer(name), _letters(SAVED_WIDTH)
    shape = f"{buffer.shape} {buffer.dtype.value}"
    size = f"{to_markdown(size_in_bytes(buffer))} bytes"
    lines = [Line(name, "out", name), *_text(shape, "type", width), *_text(size, "work", width)]
    return Box(f"saved {name}", "saved", tuple(lines))


def _letters(width: int) -> int:
    return int((width - 20) / _LETTER)


def _text(text: str, style: str, width: int = _letters(STEP_WIDTH)) -> Iterator[Line]:
    """Text over as many lines as it takes; long names are cut behind an underscore."""
    line = ""
    for piece in _PIECE.findall(text):
        for part in (piece[i : i + width] for i in range(0, len(piece), width)):
            if len((line + part).rstrip()) > width:
                yield Line(line.rstrip(), style)
                line = ""
            line = (line + part).lstrip()
    if line:
        yield Line(line.rstrip(), style)


# ---- lines between boxes


def _nets(lane: _Lane, boxes: Sequence[Box]) -> tuple[Net, ...]:
    """A line for every tensor that a box of the lane gives and others of it take."""
    given = (line.port for box in boxes for line in box.lines if line.style == "out")
    found = (Net(name, _tail(boxes, name), _heads(boxes, name)) for name in dict.fromkeys(given))
    return tuple(net for net in found if net.heads)


def _tail(boxes: Sequence[Box], name: str) -> str:
    return next(box.key for box in boxes if Line(name, "out", name) in box.lines)


def _heads(boxes: Sequence[Box], name: str) -> tuple[str, ...]:
    return tuple(
        box.key
        for box in boxes
        if any(line.port == name and line.style == "in" for line in box.lines)
    )
