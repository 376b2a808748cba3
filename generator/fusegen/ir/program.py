"""An op: arguments, results, checks and steps; and a direction, which ops make up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from .buffers import Buffer
from .dtypes import DType
from .names import plain
from .naming import UPDATE_STATE
from .segments import Start, Wait
from .shapes import Expr, symbols
from .step import Result, Step


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor argument of a program; conditional ones are None unless a flag asks for them.

    ``mutated`` ones are changed in place; they stand last.  ``filled`` ones of those hold nothing
    before: the op's direction allocates them, as it would a result.
    """

    buffer: str
    optional: bool
    when: tuple[str, ...] = ()
    mutated: bool = False
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a dimension is read from: candidate (tensor, axis, divisor), the first present counts.

    Axis counts from the end (-1 is innermost); None is the product of the leading dimensions, of
    which ``trailing`` gives how many are not leading.
    """

    symbol: str
    candidates: tuple[tuple[str, int | None, int], ...]


def own_type_argument(arguments: tuple[Argument, ...], buffers: Mapping[str, Buffer]) -> str:
    """The argument that tells what the module's own type is: the first that has it for certain.

    The first of all where none has: an op of numbers alone asks for no such type.
    """
    own = (a.buffer for a in arguments if not a.optional and buffers[a.buffer].dtype is DType.IO)
    return next(own, arguments[0].buffer)


class CheckKind(str, Enum):
    """What an argument check compares."""

    RANK = "rank"
    IO_DTYPE = "io_dtype"
    SAME_DTYPE = "same_dtype"
    DTYPE = "dtype"
    DEVICE = "device"
    SIZE = "size"
    MULTIPLE = "multiple"
    LEAST = "least"
    CONTIGUOUS = "contiguous"


@dataclass(frozen=True, slots=True)
class Check:
    """One argument check, printed to Python and C++ with the same words.

    Attributes:
        kind: what is compared.
        tensor: argument it is about.
        optional: skipped where the argument is None.
        reference: the argument it must agree with (dtype, device).
        axis: from the end, for SIZE.
        expr: expected size or, for MULTIPLE and LEAST, the size itself.
        number: expected rank, divisor, or what the size is at least.
        divisor: for MULTIPLE: the size that it is a multiple of; None where that is the number.
        exact: for RANK: False allows more dimensions.
        dtype: expected element type.
        label: how the message calls the dimension or the shape.
        called: how it calls the tensor and the one it must agree with, where the module's caller
            has others in their place.
    """

    kind: CheckKind
    tensor: str
    optional: bool = False
    reference: str | None = None
    axis: int = 0
    expr: Expr | None = None
    number: int = 0
    divisor: Expr | None = None
    exact: bool = True
    dtype: DType = DType.IO
    label: str = ""
    called: tuple[str, str] | None = None

    @property
    def names(self) -> tuple[str, str]:
        """How the message calls the tensor, and the one it must agree with."""
        return self.called or (self.tensor, self.reference or "")

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the sizes that it reads."""
        sizes = (size for size in (self.expr, self.divisor) if size is not None)
        return frozenset().union(*map(symbols, sizes))


@dataclass(frozen=True, slots=True)
class Program:
    """One op of a module.

    Attributes:
        name: of its direction: ``forward``, ``backward``, ``quantize_input``, ``refresh`` or
            ``wgrad``.
        arguments: tensors in schema order; the first one gives device and leading shape.
        flags: gradient flags in schema order; of ``refresh`` and ``quantize_input``, whether state
            moves on; of the latter, also whether a columnwise copy is made.
        results: tensors returned.
        steps: in order.
        bindings: dimensions the steps need.
        checks: of the arguments.
        part: which of several ops of its direction it is, counted from 1; 0 where it is alone.
        when: its direction calls it if any of these flags is set; empty is always.
        arriving: the argument, its first, of which other ranks' rows may come after the call; None
            where all is there.
    """

    name: str
    arguments: tuple[Argument, ...]
    flags: tuple[str, ...]
    results: tuple[Result, ...]
    steps: tuple[Step, ...]
    bindings: tuple[Binding, ...]
    checks: tuple[Check, ...]
    part: int = 0
    when: tuple[str, ...] = ()
    arriving: str | None = None

    @property
    def function(self) -> str:
        """What its function is called: ``forward``, or ``forward_2`` where there are several."""
        return f"{self.name}_{self.part}" if self.part else self.name

    @property
    def arrival(self) -> tuple[str, ...]:
        """Numbers that it takes last where rows may come after the call: of tokens that are there,
        the first and one past the last, and the handle of the stream that brings the others.
        """
        parts = ("first", "end", "stream") if self.arriving else ()
        return tuple(f"{self.arriving}_{part}" for part in parts)

    @property
    def takes(self) -> tuple[str, ...]:
        """What it reads or changes."""
        return tuple(argument.buffer for argument in self.arguments if not argument.filled)

    @property
    def gives(self) -> tuple[str, ...]:
        """What it makes."""
        return (*(result.buffer for result in self.results), *self.filled)

    @property
    def filled(self) -> tuple[str, ...]:
        """Arguments that it is the first to write."""
        return tuple(argument.buffer for argument in self.arguments if argument.filled)

    @property
    def workspace(self) -> tuple[str, ...]:
        """Buffers that live inside the call, in the order in which steps write them."""
        outside = {argument.buffer for argument in self.arguments}
        outside |= {result.buffer for result in self.results}
        written = (n for step in self.steps for n in step.writes if n not in step.mutates)
        return tuple(dict.fromkeys(name for name in written if name not in outside))

    def lifetime(self, name: str) -> tuple[int, int]:
        """The first and the last step that touch a buffer, counted from 1."""
        touching = [i for i, s in enumerate(self.steps, 1) if name in (*s.reads, *s.writes)]
        return touching[0], touching[-1]

    @property
    def unmerged(self) -> Program:
        """The same with the parts of every step in its place: what plain PyTorch runs."""
        return replace(self, steps=tuple(p for step in self.steps for p in step.parts or (step,)))

    @property
    def mutated(self) -> tuple[str, ...]:
        """Arguments that are changed in place, in order."""
        return tuple(argument.buffer for argument in self.arguments if argument.mutated)

    def updated_when(self, step: Step) -> tuple[str, ...]:
        """Flags under which a step changes its state: a forward without grad leaves it alone."""
        if self.name == "forward":
            return self.flags
        asked = tuple(flag for flag in self.flags if plain(flag) == UPDATE_STATE)
        return asked or step.when

    @property
    def returns_none(self) -> bool:
        """Whether absent results are None.

        An op that mutates returns empty tensors instead: functionalisation knows optional results
        of functional ops only."""
        return not self.mutated


Segment = Program | Start | Wait
"""What a direction consists of."""


@dataclass(frozen=True, slots=True)
class Direction:
    """Segments that run in their order: ops, and what starts collectives and waits for them.

    What is in a buffer crosses from one op to another only as a result of the one and an argument
    of the other.

    Attributes:
        name: ``forward``, ``backward``, ``quantize_input``, ``refresh`` or ``wgrad``.
        segments: in order.
    """

    name: str
    segments: tuple[Segment, ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        """Its ops."""
        return tuple(each for each in self.segments if isinstance(each, Program))

    @property
    def starts(self) -> tuple[Start, ...]:
        """Where collectives start."""
        return tuple(each for each in self.segments if isinstance(each, Start))

    @property
    def made(self) -> dict[str, tuple[str, ...]]:
        """What ops and collectives give, and the flags under which it is there."""
        found: dict[str, tuple[str, ...]] = {}
        operands: dict[str, tuple[str, ...]] = {}
        for each in self.segments:
            match each:
                case Program():
                    found |= {r.buffer: r.when or each.when for r in each.results}
                    found |= {a.buffer: a.when or each.when for a in each.arguments if a.filled}
                case Start():
                    operands[each.future] = each.operands
                case Wait():
                    of = zip(each.results, operands.get(each.future, ()), strict=False)
                    found |= {name: found.get(operand) or each.when for name, operand in of}
        return found

    @property
    def _outside(self) -> dict[str, str]:
        """What collectives make of what they are given from outside, and what that is."""
        waits = {each.future: each for each in self.segments if isinstance(each, Wait)}
        made = self.made
        return {
            result: operand
            for start in self.starts
            for operand, result in zip(start.operands, waits[start.future].results, strict=True)
            if operand not in made
        }

    def _sent(self, taken: Iterable[Argument]) -> Iterator[Argument]:
        """What collectives are given from outside, as ops take what becomes of it."""
        arguments = {argument.buffer: argument for argument in taken}
        for result, operand in self._outside.items():
            if result in arguments:
                yield replace(arguments[result], buffer=operand)

    @property
    def unmerged(self) -> Direction:
        """The same with the parts of every step in its place."""
        return replace(
            self,
            segments=tuple(s.unmerged if isinstance(s, Program) else s for s in self.segments),
        )

    def whole(self, entering: tuple[str, ...], leaving: tuple[str, ...]) -> Program:
        """All of it as one: what goes in and comes out, and the steps of its ops.

        Its checks are those that every call makes.

        Args:
            entering: what comes from the caller and from the forward, in the order of its
                arguments, which others follow in that of the ops; changed ones are last.
            leaving: what is read after it, in the order of its results; what only its own segments
                read is no result of it.
        """
        first, *others = self.programs
        if not others and len(self.segments) == 1:
            return first
        programs, made = (first, *others), self.made
        taken: dict[str, Argument] = {}
        outside = self._outside
        given = [argument for program in programs for argument in program.arguments]
        for each in (*given, *self._sent(given)):
            known = taken.get(each.buffer, each)
            if each.buffer not in made:
                taken[each.buffer] = replace(
                    known,
                    optional=known.optional and each.optional,
                    mutated=known.mutated or each.mutated,
                )
        order = {name: index for index, name in enumerate(entering)}

        def place(argument: Argument) -> tuple[bool, int]:
            return argument.mutated, order.get(argument.buffer, len(order))

        bindings = {b.symbol: b for p in reversed(programs) for b in p.bindings}
        bindings = {symbol: _bound(each, outside) for symbol, each in bindings.items()}
        always = (program for program in programs if not program.when)
        checks = (_checked(check, outside) for program in always for check in program.checks)
        checks = (check for check in checks if check.tensor in taken)
        return replace(
            first,
            arguments=tuple(sorted(taken.values(), key=place)),
            flags=tuple(dict.fromkeys(flag for p in programs for flag in p.flags)),
            results=tuple(Result(n, made[n]) for n in dict.fromkeys(leaving) if n in made),
            steps=tuple(_asked(step, p.when) for p in programs for step in p.steps),
            bindings=tuple(bindings.values()),
            checks=tuple(dict.fromkeys(checks)),
            part=0,
            arriving=None,
        )


def _bound(binding: Binding, outside: Mapping[str, str]) -> Binding:
    """The same, of what comes from outside."""
    places = ((outside.get(name, name), axis, by) for name, axis, by in binding.candidates)
    return replace(binding, candidates=tuple(places))


def _checked(check: Check, outside: Mapping[str, str]) -> Check:
    """The same, of what comes from outside."""
    tensor, reference = (outside.get(name or "", name) for name in (check.tensor, check.reference))
    return replace(check, tensor=tensor or "", reference=reference, called=None)


def _asked(step: Step, when: tuple[str, ...]) -> Step:
    """A step of an op that is called under flags, with these where it has none of its own."""
    parts = tuple(_asked(part, when) for part in step.parts)
    return replace(step, when=step.when or when, parts=parts)
