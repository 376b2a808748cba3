"""Cut programs into segments: ops, and between them the collectives that no op runs.

A backward is also cut where memory can go (``freeing.py``): autograd's context lets go of what was
saved, so that what an op was the last to read is free before the next one allocates.  No op takes
more tensors for that than one may have, or than the backward has as one.  Inside each op its steps
run in the order that needs least (``order.py``).

A collective stands before the first step that reads what it gives.  Each op is a program of its
own: what crosses from one to another is a result of the one and an argument of the other, and what
lives in one op alone stays in its workspace.

What ranks exchange of whole tensors surrounds the ops.  What comes in is started before the first,
in the order in which it is waited for; rows that the forward's steps read last, and what the
forward left and the backward exchanges again, are waited for by the op that reads them, the rest
before the first.  No op takes snapshots of state alone while rows travel: the backward alone reads
what it gives, so that PyTorch's compiler would run it there, of state that has changed by then.
What leaves is started behind the last step that writes any of it, so that other gradients are
computed meanwhile.  Such a backward keeps the order of its steps: gradients of inputs come first.

Start and wait of others stand side by side.  A start further up would end an op there, so that the
steps between start and wait would be an op of their own: one more call from Python into C++, which
takes the host 10 to 20 us.  All that is asked for is the reduction of a few floats, amaxes, which
takes no longer than that: overlap would hide less than it costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import count

from ..ir.dtypes import DType
from ..ir.program import Argument, Check, Direction, Program, Segment, own_type_argument
from ..ir.segments import Collective, Start, Wait
from ..ir.step import Result, Step
from ..steps import copies_memory
from ..steps.collectives import collective
from .by_rows import (
    as_they_arrive,
    behind_product,
    between_rows,
    by_rows,
    products_as_they_arrive,
)
from .draft import Draft, NotPossible
from .freeing import best_way
from .join_saved import MOST
from .programs import Dims, bind_dimensions, program, symbols_used

When = tuple[str, ...]


def cut(draft: Draft, dims: Dims, *, freeing: bool) -> Draft:
    """Every program becomes a direction.

    Args:
        draft: with programs.
        dims: keywords of its dimensions, for messages.
        freeing: the backward is cut where memory can go.

    Raises:
        NotPossible: no argument of an op tells a dimension that its steps need.
    """
    directions = tuple(_direction(draft, whole, dims, freeing) for whole in draft.programs)
    return replace(draft, programs=(), directions=directions)


def _direction(draft: Draft, whole: Program, dims: Dims, freeing: bool) -> Direction:
    collectives = [each for each in draft.collectives if each.direction == whole.name]
    most = max(MOST, len(whole.arguments))

    def ops(making: _Cut, places: tuple[int, ...]) -> tuple[Segment, ...]:
        if not (collectives or places):
            return (making.whole,)
        try:
            return tuple(making.segments(collectives, places, late=True))
        except NotPossible:  # one of more ops is told too little
            return tuple(making.segments(collectives, places, late=False))

    if whole.name != "backward" or not all(each.outside for each in collectives):
        segments = ops(_Cut(draft, whole, dims), between_rows(draft, whole))
        segments = by_rows(draft, dims, whole, segments)
        return Direction(whole.name, as_they_arrive(segments, whole.flags))

    def possible_cuts(backward: Program) -> Callable[[tuple[int, ...]], bool]:
        making = _Cut(draft, backward, dims)

        def possible(places: tuple[int, ...]) -> bool:
            try:
                made = Direction(whole.name, ops(making, places))
            except NotPossible:  # an op of those is told too little
                return False
            return all(len(op.arguments) <= most for op in made.programs)

        return possible

    best, places = best_way(draft, whole, possible_cuts, freeing=freeing, ordering=not collectives)
    places = tuple(sorted({*places, *behind_product(draft, best)}))
    segments = products_as_they_arrive(draft, dims, ops(_Cut(draft, best, dims), places))
    return Direction(whole.name, as_they_arrive(segments, whole.flags))


@dataclass(frozen=True, slots=True)
class _Cut:
    """A program that is cut.

    Attributes:
        draft: whose buffers it names.
        whole: the program.
        dims: keywords of its dimensions, for messages.
        made: ops of the steps between two places, or why there is none.  What is there before an op
            is there under the same flags wherever the program is cut before it.
    """

    draft: Draft
    whole: Program
    dims: Dims
    made: dict[tuple[int, int, bool], Program | NotPossible] = field(default_factory=dict)

    def segments(
        self, collectives: list[Collective], further: tuple[int, ...], *, late: bool
    ) -> Iterator[Segment]:
        """Ops and collectives in their order; an op begins at each further place, too.

        Args:
            collectives: of the program.
            further: places.
            late: whether what may come in where it is read first does so, and what leaves does
                before the last step.
        """
        places = {each.future: self._place(each, late=late) for each in collectives}
        collectives = sorted(collectives, key=lambda each: places[each.future][1])
        there = {a.buffer: a.when for a in self.whole.arguments}
        numbers, begin, end = count(1), 0, len(self.whole.steps)
        started: dict[str, Start] = {}
        for place in sorted(
            {0, *further, end, *(each for pair in places.values() for each in pair)}
        ):
            if place > begin:
                op = self._op(begin, place, there, collectives, late=late)
                op = replace(op, part=next(numbers))
                there |= {result.buffer: result.when or op.when for result in op.results}
                yield op
            begin = place
            starting = (each for each in collectives if places[each.future][0] == place)
            starts = {each.future: _start(each, there) for each in starting}
            yield from starts.values()
            started |= starts
            for each in (each for each in collectives if places[each.future][1] == place):
                when = started[each.future].when
                pairs = zip(each.results, each.operands, strict=True)
                there |= {name: there.get(operand, when) for name, operand in pairs}
                yield Wait(each.future, each.results, when)

    def _place(self, collective: Collective, *, late: bool) -> tuple[int, int]:
        """The steps before which a collective is started and waited for."""
        if not collective.outside:
            return (self._first_reader(collective),) * 2
        if {*collective.operands} & {result.buffer for result in self.whole.results}:
            end = len(self.whole.steps)
            return self._last_leaving() if late else end, end
        place = self._first_reader(collective)
        if self.whole.name == "backward":
            waits = {*collective.operands}.isdisjoint(self.draft.incoming)
        else:
            waits = place == self._last_rows
        computes = not all(map(copies_memory, self.whole.steps[:place]))
        return 0, place if late and waits and computes else 0

    @property
    def _last_rows(self) -> int:
        """The position of the first reader of the rows that come in and are read last."""
        given = {result.buffer for result in self.whole.results}
        rows = (
            each
            for each in self.draft.collectives
            if each.direction == self.whole.name and each.outside
            if collective(each.kind).brings_rows and given.isdisjoint(each.operands)
        )
        return max(map(self._first_reader, rows), default=0)

    def _first_reader(self, collective: Collective) -> int:
        """The position of the first step that reads what it gives; behind all where none does."""
        steps = self.whole.steps
        reading = (i for i, step in enumerate(steps) if {*step.reads} & {*collective.results})
        return next(reading, len(steps))

    def _last_leaving(self) -> int:
        """The position behind the last step that writes what a collective takes out of the ops."""
        taken = {n for c in self.draft.collectives if c.outside for n in c.operands}
        steps = enumerate(self.whole.steps, 1)
        return max(i for i, step in steps if {*step.writes} & taken)

    def _op(
        self,
        begin: int,
        end: int,
        there: dict[str, When],
        collectives: list[Collective],
        *,
        late: bool,
    ) -> Program:
        key = (begin, end, late)
        if key not in self.made:
            try:
                self.made[key] = self._program(begin, end, there, collectives)
            except NotPossible as reason:
                self.made[key] = reason
        made = self.made[key]
        if isinstance(made, NotPossible):
            raise made
        return made

    def _program(
        self, begin: int, end: int, there: dict[str, When], collectives: list[Collective]
    ) -> Program:
        steps = self.whole.steps[begin:end]
        when = _common(steps)
        wanted = {name for step in self.whole.steps[end:] for name in step.reads}
        wanted |= {name for each in collectives for name in each.operands}
        results = tuple(_under(when, result) for result in self._results(steps, wanted))
        arguments = self._arguments(steps, begin, end, there, when)
        arguments = self._telling(arguments, steps, results, when)
        called = tuple(_called_under(when, step) for step in steps)
        made = program(
            self.whole.name,
            self.draft,
            tuple(part for step in called for part in step.parts or (step,)),
            arguments,
            self.whole.flags if begin == 0 else self._flags(steps, results, arguments),
            results,
            self.dims,
        )
        own = {each.buffer for each in self.draft.exchanges if each.entering}
        checks = tuple(
            _said_of(each, collectives)
            for each in made.checks
            if each.tensor not in own or not each.symbols  # it is of a rank's tokens
        )
        return replace(made, steps=called, when=when, checks=checks)

    def _results(self, steps: tuple[Step, ...], wanted: set[str]) -> Iterator[Result]:
        """What leaves the direction in its order, then what a later segment reads."""
        written = {name: s.wanted(name) or s.when for s in steps for name in s.writes}
        given = {argument.buffer for argument in self.whole.arguments}
        leaving = {result.buffer: result for result in self.whole.results}
        made = self._tensors({*written})
        for name in dict.fromkeys((*leaving, *written)):
            if name in written and name in wanted and name not in given:
                yield Result(name, written[name])
            elif name in made and name in leaving:
                yield leaving[name]

    def _arguments(
        self, steps: tuple[Step, ...], begin: int, end: int, there: dict[str, When], when: When
    ) -> tuple[Argument, ...]:
        """Those of the direction that these steps read or change, and what was made before.

        The first op takes those that no step reads, too: it checks them.  An op that needs the
        module's type or leading dimensions has the direction's arguments that tell them.
        """
        others = (*self.whole.steps[:begin], *self.whole.steps[end:])
        own, elsewhere = self._tensors(_touched(steps)), self._tensors(_touched(others))
        written = {name for step in steps for name in step.writes}
        changed = self._tensors({name for step in steps for name in step.mutates})
        told = own_type_argument(self.whole.arguments, self.draft.buffers)
        tells = {self.whole.arguments[0].buffer, told}
        taken = [
            replace(argument, mutated=argument.buffer in changed)
            for argument in self.whole.arguments
            if argument.buffer in own
            or (begin == 0 and argument.buffer not in elsewhere)
            or (argument.buffer in tells and self._needs_type(own))
        ]
        given = {argument.buffer for argument in taken}
        read = dict.fromkeys(name for step in steps for name in step.reads if name not in written)
        made = (name for name in read if given.isdisjoint(self._tensors({name})))
        taken += [_argument(name, there[name], when) for name in made]
        return tuple(sorted(taken, key=lambda argument: argument.mutated))

    def _telling(
        self,
        arguments: tuple[Argument, ...],
        steps: tuple[Step, ...],
        results: tuple[Result, ...],
        when: When,
    ) -> tuple[Argument, ...]:
        """The same, and what the module keeps that tells dimensions which these do not.

        Raises:
            NotPossible: a call may ask for a dimension that nothing it is given tells.
        """
        kept = {self.draft.tensor_with(state.buffer) for state in self.draft.states}
        kept |= {parameter.buffer for parameter in self.draft.parameters}
        asked = self._asked(arguments, steps, results)

        def lacking(more: tuple[Argument, ...]) -> set[str]:
            told = self._told((*arguments, *more))
            return {name for name, needs in asked.items() if not _covers(told[name], needs, when)}

        more: tuple[Argument, ...] = ()
        for each in self.whole.arguments:
            certain = each.buffer in kept and not each.mutated and not each.optional
            if certain and lacking(more) & self._told((each,)).keys():
                more += (each,)
        if missing := lacking(more):
            raise NotPossible(f"no argument tells {', '.join(sorted(missing))} under every flag")
        return tuple(sorted((*arguments, *more), key=lambda argument: argument.mutated))

    def _asked(
        self, arguments: tuple[Argument, ...], steps: tuple[Step, ...], results: tuple[Result, ...]
    ) -> dict[str, set[When]]:
        """The conditions under which launches, allocations and checks of sizes need a dimension."""
        asked: dict[str, set[When]] = {}
        needs: list[tuple[AbstractSet[str], When]]
        needs = [(symbols_used(self.draft, (step,), ()), step.when) for step in steps]
        needs += [(symbols_used(self.draft, (), (each,)), each.when) for each in results]
        needs += [(self.draft.buffers[a.buffer].shape.symbols(), a.when) for a in arguments]
        for names, when in needs:
            for name in names:
                asked.setdefault(name, set()).add(when)
        return asked

    def _told(self, arguments: tuple[Argument, ...]) -> defaultdict[str, set[When]]:
        """The conditions under which an argument that tells a dimension is there."""
        there = {each.buffer: each.when for each in arguments}
        told: defaultdict[str, set[When]] = defaultdict(set)
        for each in bind_dimensions(self.draft.buffers, arguments):
            told[each.symbol] = {there[name] for name, *_ in each.candidates}
        return told

    def _tensors(self, names: set[str]) -> set[str]:
        """The same, with the tensor of several states in the place of each of these."""
        return set(map(self.draft.tensor_with, names))

    def _needs_type(self, names: Iterable[str]) -> bool:
        buffers = [self.draft.buffers[name] for name in names]
        return any(each.dtype is DType.IO or each.shape.leading for each in buffers)

    def _flags(
        self, steps: tuple[Step, ...], results: tuple[Result, ...], arguments: tuple[Argument, ...]
    ) -> tuple[str, ...]:
        """Flags that a later op asks for."""
        when = _common(steps)
        named = {flag for result in results for flag in result.when}
        asked = {flag for argument in arguments for flag in argument.when}
        named |= asked & {*when} if when else asked  # else others' parts of it are asked for
        for step in steps:
            named |= {flag for result in step.output_when for flag in result.when}
            if not when or step.when != when:  # else the op is called only where it runs
                named |= {*step.when, *(self.whole.updated_when(step) if step.updates else ())}
        return tuple(flag for flag in self.whole.flags if flag in named)


def _said_of(check: Check, collectives: Iterable[Collective]) -> Check:
    """A check whose message names what the module's caller has, not what ranks made of it."""
    pairs = (zip(c.results, c.operands, strict=True) for c in collectives if c.outside)
    outside = {result: operand for each in pairs for result, operand in each}
    tensor, reference = check.names
    called = (outside.get(tensor, tensor), outside.get(reference, reference))
    return check if called == check.names else replace(check, called=called)


def _under(when: When, result: Result) -> Result:
    """A result of an op that is called only under flags."""
    return replace(result, when=()) if result.when == when else result


def _called_under(when: When, step: Step) -> Step:
    """A step, with its parts, of such an op."""
    parts = tuple(_called_under(when, part) for part in step.parts)
    return replace(step, when=() if step.when == when else step.when, parts=parts)


def _common(steps: tuple[Step, ...]) -> When:
    """Flags of which one is set whenever any of the steps runs; empty where one always does."""
    if not all(step.when for step in steps):
        return ()
    return tuple(dict.fromkeys(flag for step in steps for flag in step.when))


def _touched(steps: Iterable[Step]) -> set[str]:
    return {name for step in steps for name in (*step.reads, *step.writes, *step.mutates)}


def _argument(name: str, there: When, when: When) -> Argument:
    """What an earlier segment made; it may be absent unless the op is called only where it is."""
    if not there or (when and {*when} <= {*there}):
        return Argument(name, optional=False)
    return Argument(name, optional=True, when=there)


def _start(collective: Collective, there: dict[str, When]) -> Start:
    pairs = zip(collective.operands, collective.results, strict=True)
    conditions = [there[name if name in there else result] for name, result in pairs]
    asked = dict.fromkeys(flag for when in conditions for flag in when)
    return Start(
        collective.kind,
        collective.operands,
        collective.future,
        collective.group,
        tuple(asked) if all(conditions) else (),
        collective.attributes,
        collective.sizes,
    )


def _covers(told: set[When], asked: set[When], common: When) -> bool:
    """Whether a dimension is told whenever it is asked for.

    Args:
        told: the conditions of what tells it.
        asked: the conditions under which it is asked for.
        common: flags of which one is set whenever the op is called; empty where none need be.
    """
    flags = {flag for when in told for flag in when}
    if () in told or (common and flags >= {*common}):
        return True
    return all(when and {*when} <= flags for when in asked)
