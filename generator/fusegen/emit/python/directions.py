"""Texts of directions that consist of several segments: one Python function each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...ir.plan import ModulePlan
from ...ir.program import Direction, Program, Segment
from ...ir.segments import Group, Start, Wait
from .conditions import Conditions, named_conditions
from .words import attribute_text, return_annotation, tensor_text


@dataclass(frozen=True, slots=True)
class DirectionText:
    """A direction of several segments.

    Attributes:
        name: of the direction.
        parameters: of its function.
        returns: its return annotation.
        body: its lines.
    """

    name: str
    parameters: tuple[str, ...]
    returns: str
    body: tuple[str, ...]


def direction_texts(plan: ModulePlan) -> tuple[DirectionText, ...]:
    """Functions of those directions that are more than one op, which needs none."""
    return tuple(_text(plan, each) for each in plan.directions if len(each.segments) > 1)


def groups_of(*directions: Direction | None) -> tuple[Group, ...]:
    """Process groups that directions communicate over, each once."""
    starts = (start for each in directions if each for start in each.starts)
    return tuple(dict.fromkeys(start.group for start in starts))


def group_names(*directions: Direction | None) -> tuple[str, ...]:
    """Keywords of these."""
    return tuple(group.name for group in groups_of(*directions))


def _text(plan: ModulePlan, direction: Direction) -> DirectionText:
    whole = direction.whole(plan.leaving)
    printer = _Printer(plan, direction)
    conditions = named_conditions(whole, lambda names: printer.body(names))
    tensors = (tensor_text(plan, a) for a in whole.arguments)
    scalars = (attribute_text(a) for a in plan.attributes_of(whole))
    return DirectionText(
        name=direction.name,
        parameters=(
            *(f"{tensor.name}: {tensor.annotation}" for tensor in tensors),
            *(f"{flag}: bool" for flag in whole.flags),
            *(f"{each.name}: {each.annotation}" for each in scalars),
            *(f"{name}: ProcessGroup | None" for name in group_names(direction)),
        ),
        returns=return_annotation(
            "Tensor | None" if result.when else "Tensor" for result in whole.results
        ),
        body=(*conditions.lines, *printer.body(conditions)),
    )


@dataclass(frozen=True, slots=True)
class _Printer:
    """A direction whose segments are printed."""

    plan: ModulePlan
    direction: Direction

    def body(self, conditions: Conditions) -> Iterator[str]:
        """Lines of all segments and what they return.

        Neighbours that run under the same flags stand together.
        """
        absent = [*self._absent()]
        if absent:
            yield f"{' = '.join(absent)} = None"
        for when, segments in groupby(self.direction.segments, lambda segment: segment.when):
            lines = (self._line(segment, conditions) for segment in segments)
            if when:
                yield f"if {conditions.text(when)}:"
                yield from (f"    {line}" for line in lines)
            else:
                yield from lines
        results = self.direction.whole(self.plan.leaving).results
        if results:
            yield f"return {', '.join(self._value(r.buffer, conditions) for r in results)}"

    def _absent(self) -> Iterator[str]:
        """What is given under flags, and read or returned where they need not be set."""
        leaving = self.plan.leaving
        for segment in self.direction.segments:
            for name in segment.gives if segment.when else ():
                readers = (s for s in self.direction.segments if name in s.takes)
                if name in leaving or any(reader.when != segment.when for reader in readers):
                    yield name

    def _line(self, segment: Segment, conditions: Conditions) -> str:
        match segment:
            case Program():
                return self._call(segment, conditions)
            case Start():
                sources = [self._value(name, conditions) for name in segment.operands]
                words = [f'"{self.plan.cell}"', f'"{segment.group.name}"', segment.group.name]
                words += [_tuple(sources), *(f'{k}="{v}"' for k, v in segment.attributes)]
                return f"{segment.future} = _collectives.start_{segment.kind}({', '.join(words)})"
            case Wait():
                end = "," if len(segment.results) == 1 else ""
                return f"{', '.join(segment.results)}{end} = _collectives.wait({segment.future})"

    def _call(self, program: Program, conditions: Conditions) -> str:
        words = [self._value(argument.buffer, conditions) for argument in program.arguments]
        words += [*program.flags, *(a.name for a in self.plan.attributes_of(program))]
        targets = ", ".join(result.buffer for result in program.results)
        call = f"_{program.function}({', '.join(words)})"
        return f"{targets} = {call}" if targets else call

    def _value(self, name: str, conditions: Conditions) -> str:
        """A buffer as a later segment takes it; an empty stand-in becomes None again."""
        for program in self.direction.programs:
            result = next((r for r in program.results if r.buffer == name), None)
            if result and result.when and not program.returns_none:
                return f"{name} if {conditions.text(result.when)} else None"
        return name


def _tuple(sources: Sequence[str]) -> str:
    return f"({', '.join(sources)})" if len(sources) > 1 else f"({sources[0]},)"
