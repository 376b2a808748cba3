"""Texts of directions that consist of several segments: one Python function each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from math import lcm

from ...ir.plan import ModulePlan
from ...ir.program import Argument, Direction, Program, Segment
from ...ir.segments import Group, Start, Wait
from ...ir.shapes import Along, Expr, Sym, along, substitute, symbols, to_python
from ...steps import adds_named_rows
from ...steps.collectives import REDUCE_SCATTER, collective
from .conditions import Conditions, named_conditions
from .words import attribute_text, bind_lines, pieces, return_annotation, schema, tensor_text


@dataclass(frozen=True, slots=True)
class WholeText:
    """The one op that compiled code may call in the place of a direction's segments.

    Attributes:
        schema: of it, cut into pieces that fit a line.
        keywords: of what makes it of the direction's function.
    """

    schema: tuple[str, ...]
    keywords: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DirectionText:
    """A direction of several segments.

    Attributes:
        name: of the direction.
        about: what it is, for people.
        parameters: of its function.
        returns: its return annotation.
        body: its lines.
        whole: the same as one op; None where nothing is sent.
    """

    name: str
    about: str
    parameters: tuple[str, ...]
    returns: str
    body: tuple[str, ...]
    whole: WholeText | None


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


_PIECES = 2
"""In how many a rank's sums of rows are made and sent: the first travels beside the second."""

LEFT = "left"
"""What the function of a backward that lets go of memory calls what the forward left."""


def left_for(plan: ModulePlan, direction: Direction) -> tuple[str, ...]:
    """What a direction's function is handed in a list, to let go of it; empty where it is not.

    Autograd lets go of what was saved for a backward, and of nothing else.  Where gradients of
    weights are delayed, they read it later.
    """
    if direction.name != "backward" or len(direction.programs) < 2 or plan.wgrad:
        return ()
    whole = plan.whole(direction)
    if plan.main_grads and plan.own_type_argument(whole) not in plan.incoming:
        return ()  # the type of a stand-in for a gradient is read off afterwards
    held = (a.buffer for a in whole.arguments if a.buffer in plan.caches)
    return (*(result.buffer for result in plan.saved), *held)


def handed_in(plan: ModulePlan, direction: Direction) -> tuple[str, ...]:
    """Tensors that a direction's function takes one by one: incoming gradients come first."""
    left = {*left_for(plan, direction)}
    names = (argument.buffer for argument in plan.whole(direction).arguments)
    own = [name for name in names if name not in left]
    return tuple(sorted(own, key=lambda name: name not in plan.incoming))


def _text(plan: ModulePlan, direction: Direction) -> DirectionText:
    whole = plan.whole(direction)
    left = left_for(plan, direction)
    printer = _Printer(plan, direction, left)
    conditions = named_conditions(whole, lambda names: printer.body(names))
    taken = {argument.buffer: argument for argument in whole.arguments}
    tensors = [tensor_text(plan, taken[name]) for name in handed_in(plan, direction)]
    first = len([name for name in handed_in(plan, direction) if name in plan.incoming])
    scalars = (attribute_text(a) for a in plan.attributes_of(whole))
    return DirectionText(
        name=direction.name,
        about=_about(direction, left),
        parameters=(
            *(f"{tensor.name}: {tensor.annotation}" for tensor in tensors[:first]),
            *((f"{LEFT}: list",) if left else ()),
            *(f"{tensor.name}: {tensor.annotation}" for tensor in tensors[first:]),
            *(f"{flag}: bool" for flag in whole.flags),
            *(f"{each.name}: {each.annotation}" for each in scalars),
            *(f"{name}: ProcessGroup | None" for name in group_names(direction)),
        ),
        returns=return_annotation(
            "Tensor | None" if result.when else "Tensor" for result in whole.results
        ),
        body=(*_unpacked(left), *conditions.lines, *printer.body(conditions)),
        whole=_whole(plan, direction, left) if direction.starts else None,
    )


def _whole(plan: ModulePlan, direction: Direction, left: tuple[str, ...]) -> WholeText:
    whole = plan.whole(direction)
    arguments = {argument.buffer: argument for argument in whole.arguments}
    ordered = replace(whole, arguments=tuple(arguments[n] for n in _whole_takes(plan, direction)))
    groups = group_names(direction)
    keywords = [f"groups={len(groups)}"]
    if left:
        begin = _whole_takes(plan, direction).index(left[0])
        keywords.append(f"{LEFT}=slice({begin}, {begin + len(left)})")
    if not whole.returns_none and any(result.when for result in whole.results):
        keywords.append("empty=True")
    return WholeText(pieces(schema(plan, ordered, groups)), tuple(keywords))


def _whole_takes(plan: ModulePlan, direction: Direction) -> tuple[str, ...]:
    """Tensors of a direction in the order of its function, what is left in its place there."""
    own = handed_in(plan, direction)
    first = len([name for name in own if name in plan.incoming])
    return (*own[:first], *left_for(plan, direction), *own[first:])


def _about(direction: Direction, left: tuple[str, ...]) -> str:
    between = ", and collectives between them" if direction.starts else ""
    going = f"; it empties `{LEFT}`, so that what an op was the last to read goes" if left else ""
    return f"The {direction.name}: ops{between}{going}."


def _unpacked(left: tuple[str, ...]) -> Iterator[str]:
    """Names for what a list has, which then holds nothing."""
    if left:
        yield f"({', '.join(left)},) = {LEFT}"
        yield f"{LEFT}.clear()"


@dataclass(frozen=True, slots=True)
class _Printer:
    """A direction whose segments are printed.

    ``left`` is what the function alone holds when it begins.
    """

    plan: ModulePlan
    direction: Direction
    left: tuple[str, ...]

    def body(self, conditions: Conditions) -> Iterator[str]:
        """Lines of all segments and what they return.

        Neighbours that run under the same flags stand together.
        """
        if self.direction.starts:
            yield from self._as_one_op(conditions)
        absent = [*self._absent()]
        if absent:
            yield f"{' = '.join(absent)} = None"
        every = _together(self.direction.segments)
        for when, each_of in groupby(every, lambda together: together[0].when):
            lines = [line for each in each_of for line in self._lines(each, conditions)]
            if when:
                yield f"if {conditions.text(when)}:"
                yield from (f"    {line}" for line in lines)
            else:
                yield from lines
        results = self.plan.whole(self.direction).results
        if results:
            yield f"return {', '.join(self._value(r.buffer, conditions) for r in results)}"

    def _as_one_op(self, conditions: Conditions) -> Iterator[str]:
        """What a compiler traces in the place of all that follows, where ranks ask for it."""
        whole, groups = self.plan.whole(self.direction), group_names(self.direction)
        tensors = _whole_takes(self.plan, self.direction)
        scalars = (each.name for each in self.plan.attributes_of(whole))
        words = (*tensors, *whole.flags, *scalars, *(f"_asked.name_of({name})" for name in groups))
        call = f"_{self.direction.name}_whole({', '.join(words)})"
        yield f"if _asked.as_one_op({tensors[0]}, {', '.join(groups)}):"
        results = [result.buffer for result in whole.results]
        if whole.returns_none or not any(result.when for result in whole.results):
            yield f"    return {call}" if results else f"    {call}"
        else:
            yield f"    {', '.join(results)} = {call}"
            values = (_or_none(r.buffer, conditions.text(r.when)) for r in whole.results)
            yield f"    return {', '.join(values)}"
        if not results:
            yield "    return"

    def _lines(self, together: tuple[Segment, ...], conditions: Conditions) -> Iterator[str]:
        """A segment, and the end of what it is the last to take; or several that are one call."""
        match together:
            case (Start(), *_, Program() as op):
                starts = [each for each in together if isinstance(each, Start)]
                yield self._gathered(starts, op, conditions)
                return
            case (Program() as op, Start() as start, Wait() as wait):
                yield self._scattered(op, start, wait, conditions)
                return
            case (Wait(by_rows=()) as wait, Program() as op):
                yield self._arriving(wait, op, conditions)
            case (Wait() as wait, Program() as op):
                yield from self._products(wait, op, conditions)
            case (segment,):
                yield self._line(segment, conditions)
        segments = self.direction.segments
        behind = segments.index(together[-1]) + 1
        if not self.left or behind == len(segments):
            return
        made = {name for each in segments[: behind - 1] for name in each.gives}
        later = {name for each in segments[behind:] for name in each.takes}
        results = {result.buffer for result in self.plan.whole(self.direction).results}
        gone = ({*self.left} | made) - later - results
        names = [name for each in together for name in each.takes if name in gone]
        if names:
            yield f"del {', '.join(names)}"

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
                words = [self._place(segment), _tuple(sources)]
                words += (f"{key}={_scalar(value)}" for key, value in segment.attributes)
                words += (
                    f"{key}={self._size(self._telling(size), size)}" for key, size in segment.sizes
                )
                words += self._dimensions(segment)
                words += ["ahead=True"] if segment.ahead else []
                return f"{segment.future} = _collectives.start_{segment.kind}({', '.join(words)})"
            case Wait():
                end = "," if len(segment.results) == 1 else ""
                return f"{', '.join(segment.results)}{end} = _collectives.wait({segment.future})"

    def _place(self, *starts: Start) -> str:
        operands = (name for each in starts for name in each.operands)
        step = f"{self.direction.name}: {starts[0].kind} of {', '.join(operands)}"
        group = starts[0].group.name
        return f'_collectives.Place("{self.plan.cell}", "{step}", "{group}", {group})'

    def _gathered(self, starts: Sequence[Start], op: Program, conditions: Conditions) -> str:
        """An op that may take the rows of one rank at a time, and what gathers them."""
        rows = tuple(name for each in starts for name in each.by_rows)
        given = (op.arguments[0].buffer,) if op.arguments[0].buffer not in rows else ()
        names = ", ".join((*given, *rows, *op.filled))
        sources = [name for each in starts for name in each.operands]
        words = [self._place(*starts), _tuple(sources), self._widths(op, conditions)]
        words.insert(2, f"lambda {names}: {self._product(op, conditions)}")
        words += self._dimensions(starts[0])
        if given:
            words += [f"like={given[0]}", f"lies={self._lies(rows)}"]
        targets = ", ".join(op.filled) if len(op.filled) > 1 else f"{op.filled[0]},"
        return f"{targets} = _collectives.product_of_gathered({', '.join(words)})"

    def _lies(self, rows: Iterable[str]) -> str:
        """Where each of several tensors has tokens."""
        found = (f"({each.dim}, {each.tail})" for each in self._along(rows))
        return _tuple([*found])

    def _along(self, rows: Iterable[str]) -> Iterator[Along]:
        (tokens,) = symbols(self.plan.token_axis)
        found = (along(self.plan.buffer(name).shape, tokens) for name in rows)
        return (each for each in found if each)

    def _products(self, wait: Wait, op: Program, conditions: Conditions) -> Iterator[str]:
        """The same of rows that others read, too; an op that is not asked for is left out.

        No function of its own: it would name what is let go of behind the call.
        """
        _, *others = (self._value(a.buffer, conditions) for a in op.arguments if not a.filled)
        scalars = (*op.flags, *(each.name for each in self.plan.attributes_of(op)))
        given = (_tuple(others), _tuple(scalars), self._widths(op, conditions))
        words = ", ".join((wait.future, f"_{op.function}", *given))
        targets = ", ".join((*wait.results, *op.filled))
        line = f"{targets} = _collectives.product_as_they_arrive({words})"
        asked = conditions.text(op.when)
        yield from (f"if {asked}:", f"    {line}") if asked else (line,)
        if asked:
            yield from ("else:", f"    {self._line(wait, conditions)}")

    def _widths(self, op: Program, conditions: Conditions) -> str:
        """How wide the tensors are that an op fills."""
        widths = (self._width(op, a, conditions) for a in op.arguments if a.filled)
        return f"widths={_tuple([*widths])}"

    def _scattered(self, op: Program, start: Start, wait: Wait, conditions: Conditions) -> str:
        """An op that may be asked for the rows of one rank at a time, and what scatters them."""
        rows, (result,) = start.by_rows, wait.results
        product = f"lambda {', '.join(rows)}: {self._product(op, conditions)}"
        words = [self._place(start), _tuple(rows), product]
        words += self._dimensions(start)
        if len(rows) > 1:
            unit = lcm(*(each.unit for each in self._along(rows)))
            words += [f"lies={self._lies(rows)}", f"unit={unit}"]
        if adds_named_rows(op.steps[0]):  # in pieces it takes as long
            words.append(f"pieces={_PIECES}")
        return f"{result} = _collectives.scattered_product({', '.join(words)})"

    def _arriving(self, wait: Wait, op: Program, conditions: Conditions) -> str:
        """An op that may begin before all rows of its first argument are there."""
        targets = ", ".join(result.buffer for result in op.results)
        targets = f"({targets})" if len(op.results) > 1 else targets
        words = [wait.future, f"_{op.function}", *self._words(op, conditions)[1:]]
        return f"{op.arriving}, {targets} = _collectives.call_as_they_arrive({', '.join(words)})"

    def _width(self, op: Program, result: Argument, conditions: Conditions) -> str:
        """Columns of what an op fills, as its arguments tell them; None if nobody asks for it."""
        width = self._size(op, self.plan.buffer(result.buffer).shape.dims[-1])
        asked = conditions.text(result.when)
        return f"{width} if {asked} else None" if asked else width

    def _size(self, op: Program, size: Expr) -> str:
        """A size, as arguments of an op tell it."""
        bound = (line.split(" = ", 1) for line in bind_lines(op, symbols(size)))
        sources = {name: Sym(f"({text})" if " " in text else text) for name, text in bound}
        return to_python(substitute(size, sources))

    def _telling(self, size: Expr) -> Program:
        """An op, arguments of which tell a size before any op or collective."""
        made = {name for each in self.direction.segments for name in each.gives}

        def tells(op: Program) -> bool:
            told = {each.symbol: each.candidates[0][0] for each in op.bindings}
            return all(name in told and told[name] not in made for name in symbols(size))

        return next(op for op in self.direction.programs if tells(op))

    def _dimensions(self, start: Start) -> Iterator[str]:
        """How many dimensions a tensor has at least whose first is that of rows."""
        if collective(start.kind).moves_rows:
            (name,) = start.operands
            yield f"dims={len(self.plan.buffer(name).shape.flat)}"

    def _call(self, program: Program, conditions: Conditions) -> str:
        targets = ", ".join(result.buffer for result in program.results)
        call = self._product(program, conditions)
        return f"{targets} = {call}" if targets else call

    def _product(self, program: Program, conditions: Conditions) -> str:
        return f"_{program.function}({', '.join(self._words(program, conditions))})"

    def _words(self, program: Program, conditions: Conditions) -> list[str]:
        """Arguments of an op."""
        words = [self._value(argument.buffer, conditions) for argument in program.arguments]
        scalars = (attribute.name for attribute in self.plan.attributes_of(program))
        return [*words, *program.flags, *scalars]

    def _value(self, name: str, conditions: Conditions) -> str:
        """A buffer as a later segment takes it; an empty stand-in becomes None again."""
        for program in self.direction.programs:
            result = next((r for r in program.results if r.buffer == name), None)
            if result and not program.returns_none:
                return _or_none(name, conditions.text(result.when))
        return name


def _together(segments: Iterable[Segment]) -> Iterator[tuple[Segment, ...]]:
    """Each segment; or an op that may have the rows of one rank at a time with what moves these, or
    may begin before all are there with the wait for them.
    """
    rest = [*segments]
    while rest:
        gathering = len([*takewhile(_by_rows, rest)])
        length = 2 * gathering + 1
        match rest:
            case [Program(), Start(kind=REDUCE_SCATTER.name) as start, *_] if start.by_rows:
                length = 3
            case [Wait(by_rows=by_rows), Program(arriving=rows), *_] if by_rows or rows:
                length = 2
        yield tuple(rest[:length])
        del rest[:length]


def _by_rows(segment: Segment) -> bool:
    """Whether it starts to gather rows of which an op may take those of one rank at a time."""
    return isinstance(segment, Start) and bool(segment.by_rows)


def _or_none(name: str, asked: str) -> str:
    """An empty stand-in becomes None again."""
    return f"{name} if {asked} else None" if asked else name


def _scalar(value: str) -> str:
    return value if value.isdecimal() else f'"{value}"'


def _tuple(sources: Sequence[str]) -> str:
    return f"({sources[0]},)" if len(sources) == 1 else f"({', '.join(sources)})"
