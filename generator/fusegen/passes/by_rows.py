"""Ops that begin before the rows of all ranks are there, or whose rows leave rank by rank.

A product of rows that ranks gather may have those of one rank at a time, each part written where it
belongs in the whole: its op fills arguments.  So may a product, or a sum of rows for each token,
whose rows ranks scatter.  ``cut.py`` ends an op where that leaves it nothing else to do; whether a
call does so is asked when it runs (``_overlap.py`` of a bundle).  A GEMM that gathers rows itself
is told which are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

from ..ir.dtypes import DType
from ..ir.kernel import GemmKind
from ..ir.program import Argument, Check, Program, Segment
from ..ir.segments import Collective, Start, Wait
from ..ir.shapes import symbols
from ..ir.step import Step
from ..steps import adds_named_rows, definition, is_gemm
from ..steps.collectives import ALL_GATHER, REDUCE_SCATTER, SHARE, CollectiveDef, collective
from ..steps.gathered_gemm import multiplies_rows_of
from .draft import Draft
from .programs import Dims, program

# ---- where an op ends


def between_rows(draft: Draft, whole: Program) -> tuple[int, ...]:
    """Places that leave an op what it may do for the rows of one rank at a time: behind the first
    product of rows that ranks gather, and before the last one, or sums of rows, that they scatter.
    """
    scattered = {name for c in _of(draft, whole, REDUCE_SCATTER) for name in c.operands}
    last = enumerate(whole.steps[1:][-1:], len(whole.steps) - 1)
    leaving = (
        place
        for place, step in last
        if (adds_named_rows(step) or _is_product(step)) and step.out in scattered
    )
    return tuple(sorted({*behind_product(draft, whole), *leaving}))


def behind_product(draft: Draft, whole: Program) -> tuple[int, ...]:
    """The place behind the first product, if it is of rows that ranks gather and others follow."""
    gathered = {name for c in _of(draft, whole, ALL_GATHER) for name in c.results}
    behind = _first_product(whole.steps)
    inside = 0 < behind < len(whole.steps) and whole.steps[0].input("a") in gathered
    return (behind,) if inside else ()


def _of(draft: Draft, whole: Program, kind: CollectiveDef) -> Iterator[Collective]:
    """Collectives of a kind that a program has."""
    own = (each for each in draft.collectives if each.direction == whole.name)
    return (each for each in own if each.kind == kind.name)


def _first_product(steps: tuple[Step, ...]) -> int:
    """How many steps are a product and elementwise ones of what they make; 0 where the first is
    none.
    """
    if not steps or not _is_product(steps[0]):
        return 0
    made = {*steps[0].writes}
    for place, step in enumerate(steps[1:], 1):
        if step.pointwise is None or is_gemm(step) or not made >= {*step.reads}:
            return place
        made |= {*step.writes}
    return len(steps)


def _is_product(step: Step) -> bool:
    """Whether a step multiplies rows, each by itself, and reads no others."""
    product = is_gemm(step) and step.kind in _OF_ROWS and not step.copies
    return product and {each.slot for each in step.inputs} <= _OF_A_PRODUCT


_OF_ROWS = (GemmKind.FPROP.value, GemmKind.DGRAD.value)
_OF_A_PRODUCT = {"a", "b", "add"}
"""Operands of a GEMM of which the first alone has rows."""


# ---- what begins early


def by_rows(
    draft: Draft, dims: Dims, whole: Program, segments: tuple[Segment, ...]
) -> tuple[Segment, ...]:
    """Mark rows that are gathered before an op, or scattered behind it, which may have those of one
    rank at a time.

    Args:
        draft: whose buffers they name.
        dims: keywords of its dimensions, for messages.
        whole: the program whose segments they are.
        segments: in order.
    """
    if _first_product(whole.steps):
        segments = _shares_first(segments)
    marked = list(segments)
    for place, three in enumerate(zip(segments, segments[1:], segments[2:], strict=False)):
        match three:
            case (Program() as op, Start(kind=REDUCE_SCATTER.name) as start, Wait() as wait):
                rows = _rows_of_last(op)
                readers = [each for each in segments if not {*op.gives}.isdisjoint(each.takes)]
                if rows and start.takes == op.gives and readers == [start] and wait.gives:
                    marked[place] = _of_any_rows(draft, dims, op, rows)
                    marked[place + 1] = replace(start, by_rows=(rows,))
    for place, three in enumerate(zip(marked, marked[1:], marked[2:], strict=False)):
        match three:
            case (Start(kind=ALL_GATHER.name), Wait() as wait, Program() as op):
                rows = _multiplied(draft, op)
                readers = [each for each in marked if rows in each.takes]
                if wait.gives == (rows,) and readers == [op]:
                    marked[place] = replace(three[0], by_rows=(rows,))
                    marked[place + 2] = _in_place(draft, dims, op)
    return tuple(marked)


def _rows_of_last(op: Program) -> str:
    """The argument that an op multiplies row by row, or that names what it adds up for each row, if
    that is all it does; empty otherwise.
    """
    step, *others = op.steps
    if others or op.gives != step.writes:
        return ""
    if adds_named_rows(step):
        return step.input(definition(step.primitive).named) or ""
    return (step.input("a") or "") if _is_product(step) else ""


def products_as_they_arrive(
    draft: Draft, dims: Dims, segments: tuple[Segment, ...]
) -> tuple[Segment, ...]:
    """Mark waits for rows behind which an op multiplies those of each rank by themselves, though
    others read all of them, and though it may not be asked for.

    Args:
        draft: whose buffers they name.
        dims: keywords of its dimensions, for messages.
        segments: in order.
    """
    marked = list(segments)
    starts = {each.future: each for each in segments if isinstance(each, Start)}
    for place, pair in enumerate(pairwise(segments)):
        match pair:
            case (Wait() as wait, Program() as op):
                rows = _multiplied(draft, op)
                gathers = starts[wait.future].kind == ALL_GATHER.name
                if gathers and wait.results == (rows,) and not wait.when:
                    marked[place] = replace(wait, by_rows=(rows,))
                    marked[place + 1] = _in_place(draft, dims, op)
    return tuple(marked)


def as_they_arrive(segments: tuple[Segment, ...], flags: tuple[str, ...]) -> tuple[Segment, ...]:
    """Mark ops behind what brings rows that have a GEMM which gathers its rows: that may begin with
    those of this rank's tokens.  They run in every call, of which one flag at least is set.
    """
    marked = list(segments)
    gathers = {
        each.future: (place, each)
        for place, each in enumerate(segments)
        if isinstance(each, Start) and collective(each.kind).brings_rows and not each.by_rows
    }
    for place, pair in enumerate(pairwise(segments), 1):
        match pair:
            case (Wait(when=()) as wait, Program() as op) if wait.future in gathers:
                (rows,) = wait.results
                always = not op.when or {*flags} <= {*op.when}
                first = op.arguments[0].buffer == rows
                if always and first and any(multiplies_rows_of(each, rows) for each in op.steps):
                    marked[place] = replace(op, arriving=rows, when=())
                    at, start = gathers[wait.future]
                    marked[at] = replace(start, ahead=True)
    return tuple(marked)


def _shares_first(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The same; what sends nothing stands before what a product may begin without."""
    shares = {s.future for s in segments if isinstance(s, Start) and s.kind == SHARE.name}
    first = next(place for place, each in enumerate(segments) if isinstance(each, Program))
    early = (each for each in segments[:first] if isinstance(each, Start | Wait))
    return (*sorted(early, key=lambda each: each.future not in shares), *segments[first:])


# ---- the ops


def _multiplied(draft: Draft, op: Program) -> str:
    """The argument that an op multiplies row by row, if all that it does goes by such rows;
    empty otherwise.
    """
    alike = all(draft.buffers[name].dtype is DType.IO for name in op.gives)
    alone = alike and _first_product(op.steps) == len(op.steps)
    return (op.steps[0].input("a") or "") if alone else ""


def _in_place(draft: Draft, dims: Dims, op: Program) -> Program:
    """An op that writes its results into arguments; one that is not wanted is absent."""
    given = {result.buffer: result.when for result in op.results}
    outs = tuple(
        Argument(name, optional=bool(when), when=when, mutated=True, filled=True)
        for name, when in given.items()
    )

    def writing(step: Step) -> Step:
        parts = tuple(map(writing, step.parts))
        return replace(step, mutates=tuple(n for n in step.writes if n in given), parts=parts)

    steps = tuple(map(writing, op.steps))
    parts = tuple(part for step in steps for part in step.parts or (step,))
    arguments = (*op.arguments, *outs)
    made = program(op.name, draft, parts, arguments, op.flags, (), dims)
    checks = _called_alike(made.checks, op.checks)
    return replace(made, steps=steps, part=op.part, when=op.when, checks=checks)


def _of_any_rows(draft: Draft, dims: Dims, op: Program, rows: str) -> Program:
    """An op of one step that takes nothing that tells how many rows there are in all, and that
    gives as many as another argument has.
    """
    (step,) = op.steps
    arguments = tuple(each for each in op.arguments if each.buffer in step.reads)
    if _is_product(step):  # whose first argument says how many
        arguments = tuple(sorted(arguments, key=lambda each: each.buffer != rows))
    made = program(op.name, draft, op.steps, arguments, op.flags, op.results, dims)
    tokens = symbols(draft.buffers[step.out].shape.flat[0])
    checks = (each for each in made.checks if tokens.isdisjoint(each.symbols))
    called = _called_alike(checks, op.checks)
    return replace(made, part=op.part, when=op.when, checks=called)


def _called_alike(checks: Iterable[Check], before: Iterable[Check]) -> tuple[Check, ...]:
    """Checks whose messages call tensors as others of the same do, whatever these must agree with:
    that has the type and the place of what the module's caller gave.
    """

    def alone(check: Check) -> Check:
        return replace(check, called=None, reference=None)

    known = {alone(each): each.names for each in before}
    return tuple(replace(each, called=known.get(alone(each), each.called)) for each in checks)
