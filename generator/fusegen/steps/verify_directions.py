"""What holds of every direction: how ops and collectives hand on what they give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..ir.buffers import Buffer
from ..ir.plan import ModulePlan
from ..ir.program import Direction, Program, Segment
from ..ir.segments import Start, Wait
from .collectives import collective
from .copies import Formats
from .verify import Fault, VerifyError, faults, views

Buffers = Mapping[str, Buffer]
When = tuple[str, ...]


def direction_faults(
    direction: Direction, buffers: Buffers, leaving: tuple[str, ...] | None = None
) -> Iterator[Fault]:
    """Every rule that the segments of a direction break.

    Args:
        direction: whose ops keep their own rules.
        buffers: of the module.
        leaving: what is read after the direction; None where that is not settled.
    """
    yield from _numbers(direction)
    walk = _Walk(direction, buffers)
    for index, segment in enumerate(direction.segments, 1):
        later = {name for each in direction.segments[index:] for name in each.gives}
        yield from walk.step(f"segment {index}", segment, later)
    yield from walk.end()
    if direction.name == "forward":
        yield from _before_changes(direction)
    if leaving is not None:
        yield from _unread(direction, leaving)


def _numbers(direction: Direction) -> Iterator[Fault]:
    """Ops are counted from 1 where there are several segments; one that is alone has no number."""
    programs = direction.programs
    expected = [*range(1, len(programs) + 1)] if len(direction.segments) > 1 else [0]
    if [program.part for program in programs] != expected:
        yield Fault(direction.name, "", "", f"has ops that are not numbered {expected}")
    for program in programs:
        if program.name != direction.name:
            yield Fault(direction.name, "", program.function, "is an op of another direction")


def _before_changes(direction: Direction) -> Iterator[Fault]:
    """What an op gives of what another one changes is read in the forward, too.

    PyTorch's compiler runs an op that only the backward needs there, of arguments as they are then.
    """
    for op in direction.programs:
        others = [each for each in direction.segments if each is not op]
        changed = {name for each in others if isinstance(each, Program) for name in each.mutated}
        read = changed.intersection(argument.buffer for argument in op.arguments)
        taken = {name for each in others for name in each.takes}
        if read and not op.mutated and taken.isdisjoint(op.gives):
            message = "is read for the backward alone, and changed by another op"
            yield from (Fault("forward", op.function, name, message) for name in sorted(read))


def _unread(direction: Direction, leaving: tuple[str, ...]) -> Iterator[Fault]:
    read = {name for segment in direction.segments for name in segment.takes}
    for name in direction.made:
        if name not in read and name not in leaving:
            yield Fault(direction.name, "", name, "is a result, but nothing reads it")


@dataclass(slots=True)
class _Walk:
    """The segments so far.

    Attributes:
        direction, buffers: as given.
        made: what they gave, and when it is there.
        inside: what lives in one op alone.
        started: collectives without their wait, by future, in order.
        futures: all futures.
    """

    direction: Direction
    buffers: Buffers
    made: dict[str, When] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)
    started: dict[str, Start] = field(default_factory=dict)
    futures: set[str] = field(default_factory=set)

    def step(self, place: str, segment: Segment, later: set[str]) -> Iterator[Fault]:
        """Faults of the next segment, where others give these names."""

        def fault(buffer: str, message: str) -> Fault:
            return Fault(self.direction.name, f"{place} {_words(segment)}", buffer, message)

        match segment:
            case Program():
                found = self._op(segment, later)
            case Start():
                found = self._start(segment, later)
            case Wait():
                found = self._wait(segment)
        yield from (fault(*each) for each in found)

    def end(self) -> Iterator[Fault]:
        """Faults of collectives that nothing waited for."""
        for future in self.started:
            yield Fault(self.direction.name, "", future, "is started, but nothing waits for it")

    def _op(self, program: Program, later: set[str]) -> Iterator[tuple[str, str]]:
        for argument in program.arguments:
            name = argument.buffer
            yield from self._read(name, argument.when or program.when, later)
        for name in program.workspace:
            if name in self.made or name in self.inside:
                yield name, "lives inside of one op, but another one gives it, too"
        self.inside |= {*program.workspace}
        yield from self._give({r.buffer: r.when or program.when for r in program.results})

    def _start(self, start: Start, later: set[str]) -> Iterator[tuple[str, str]]:
        kind = collective(start.kind)
        allowed = dict(kind.attributes)
        if tuple(name for name, _ in start.sizes) != kind.sizes:
            yield start.future, f"is started with other sizes than {start.kind} has"
        for name, value in start.attributes:
            values = allowed.pop(name, ())
            if not (value.isdecimal() if values is None else value in values):
                yield f"{name} {value}", f"is no attribute of {start.kind}"
        for name in allowed:
            yield name, f"is an attribute of {start.kind} that it lacks"
        for name in start.operands:
            yield from self._read(name, None, later)
        found = [self.made.get(name, ()) for name in start.operands]
        asked = {flag for when in found for flag in when}
        if all(found) and not (start.when and {*start.when} <= asked):
            yield start.future, "is started where no operand may be there"
        if start.future in self.futures:
            yield start.future, "is started twice"
        self.futures.add(start.future)
        self.started[start.future] = start

    def _wait(self, wait: Wait) -> Iterator[tuple[str, str]]:
        start = self.started.pop(wait.future, None)
        if start is None:
            yield wait.future, "is waited for, but not started, or waited for before"
            return
        first = next((f for f, each in self.started.items() if each.group == start.group), None)
        if first and self._starts_before(first, start):
            yield wait.future, f"is waited for before {first}, which {start.group.name} has first"
        if wait.when != start.when:
            yield wait.future, "is waited for under other flags than it is started under"
        if len(wait.results) != len(start.operands):
            yield wait.future, f"gives {len(start.operands)} results, got {len(wait.results)}"
            return
        pairs = [*zip(wait.results, start.operands, strict=True)]
        for name, operand in pairs:
            given, sent = self.buffers.get(name), self.buffers.get(operand)
            if given is None or sent is None:
                yield name if given is None else operand, "is no buffer of the module"
            elif given.dtype is not sent.dtype or given.shape != sent.shape:
                words = f"{sent.shape} {sent.dtype.value}"
                yield name, f"is {given.shape} {given.dtype.value}, but {start.kind} gives {words}"
        yield from self._give({n: self.made.get(s) or wait.when for n, s in pairs})

    def _starts_before(self, future: str, start: Start) -> bool:
        order = [each.future for each in self.direction.starts]
        return order.index(future) < order.index(start.future)

    def _read(self, name: str, when: When | None, later: set[str]) -> Iterator[tuple[str, str]]:
        """What is read was given before; without ``when`` it may be absent."""
        if name in self.futures:
            yield name, "is a future, which its wait alone reads"
        elif name in self.inside:
            yield name, "crosses from op to op, but is no result of the op that gives it"
        elif name in later:
            yield name, "is read, but given by a later segment"
        elif when is not None and self.made.get(name) and not _within(when, self.made[name]):
            yield name, f"is read {_if(when)}, but there {_if(self.made[name])}"

    def _give(self, given: dict[str, When]) -> Iterator[tuple[str, str]]:
        for name in given:
            if name in self.made:
                yield name, "is given by two segments"
        self.made |= given


def _within(asked: When, there: When) -> bool:
    """Whether what is asked under some flags is there under each of them."""
    return bool(asked) and {*asked} <= {*there}


def _if(when: When) -> str:
    return f"if {' or '.join(when)}" if when else "always"


def _words(segment: Segment) -> str:
    match segment:
        case Program():
            return segment.function
        case Start():
            return f"start {segment.kind}"
        case Wait():
            return "wait"


def verify_plan(plan: ModulePlan) -> None:
    """Check every direction of a plan, and every op of it.

    Raises:
        VerifyError: with every fault.
    """
    roles = dict(plan.quantizations)
    buffers, formats = {each.name: each for each in plan.buffers}, Formats(roles, plan.layout)
    found: list[Fault] = []
    for direction in plan.directions:
        found += (
            fault
            for view in views(direction.programs, plan.joined)
            for fault in faults(view, buffers, formats)
        )
        found += direction_faults(direction, buffers, plan.leaving)
    for conversion in plan.conversions:
        own, formats = (
            {each.name: each for each in conversion.buffers},
            Formats(roles, conversion.layout),
        )
        found += (
            fault for view in views((conversion.program,)) for fault in faults(view, own, formats)
        )
    if found:
        lines = "\n".join(f"  {fault}" for fault in found)
        raise VerifyError(f"the plan of {plan.cell} on {plan.arch} is broken\n{lines}")
