"""Ops that begin before the rows of all ranks are there, or whose rows leave rank by rank.

A product of rows that ranks gather may have those of one rank at a time, each part written where it
belongs in the whole: its op fills arguments.  So may a product, or a sum of rows for each token,
whose rows ranks scatter.  Rows that are quantised are codes, and their scales where each row has
some.  ``cut.py`` ends an op where that leaves it nothing else to do; whether a call does so is
asked when it runs (``_overlap.py`` of a bundle).  A GEMM that gathers rows itself is told which are
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ..ir.dtypes import DType
from ..ir.kernel import GemmKind
from ..ir.program import Argument, Check, Program, Segment
from ..ir.segments import Collective, Start, Wait
from ..ir.shapes import along, symbols
from ..ir.step import LIKE, Step
from ..steps import adds_named_rows, definition, is_gemm
from ..steps.collectives import (
    ALL_GATHER,
    GATHER_COPY,
    REDUCE_SCATTER,
    CollectiveDef,
    collective,
)
from ..steps.gathered_gemm import multiplies_rows_of
from ..steps.gemm import reads_decoded
from .draft import Draft
from .programs import Dims, program
from .tensor_parallel import token_symbols

# ---- where an op ends


def between_rows(draft: Draft, whole: Program) -> tuple[int, ...]:
    """Places that leave an op what it may do for the rows of one rank at a time: around the first
    product of rows that ranks gather, and before the last one, or sums of rows, that they scatter.
    """
    scattered = {name for c in _of(draft, whole, REDUCE_SCATTER) for name in c.operands}
    last = enumerate(whole.steps[1:][-1:], len(whole.steps) - 1)
    leaving = (
        place
        for place, step in last
        if (adds_named_rows(step) or _rows_of(draft, step)) and step.out in scattered
    )
    return tuple(sorted({*_around_product(draft, whole), *leaving}))


def behind_product(draft: Draft, whole: Program) -> tuple[int, ...]:
    """The place behind the first product, if it is of rows that ranks gather and others follow."""
    gathered = {name for c in _of(draft, whole, ALL_GATHER) for name in c.results}
    behind = _first_product(draft, whole.steps)
    inside = 0 < behind < len(whole.steps) and whole.steps[0].input("a") in gathered
    return (behind,) if inside else ()


def _around_product(draft: Draft, whole: Program) -> Iterator[int]:
    """Places before and behind a product that is the first step to read rows that ranks gather."""
    gathered = {n for c in _of(draft, whole, ALL_GATHER, GATHER_COPY) for n in c.results}
    begin = next((i for i, s in enumerate(whole.steps) if not gathered.isdisjoint(s.reads)), 0)
    length = _first_product(draft, whole.steps[begin:])
    if length and gathered.issuperset(_rows_of(draft, whole.steps[begin])):
        yield from (place for place in (begin, begin + length) if 0 < place < len(whole.steps))


def _of(draft: Draft, whole: Program, *kinds: CollectiveDef) -> Iterator[Collective]:
    """Collectives of some kinds that a program has."""
    own = (each for each in draft.collectives if each.direction == whole.name)
    return (each for each in own if each.kind in {kind.name for kind in kinds})


def _first_product(draft: Draft, steps: tuple[Step, ...]) -> int:
    """How many steps are a product and elementwise ones of what they make; 0 where the first is
    none.
    """
    if not steps or not _rows_of(draft, steps[0]):
        return 0
    made = {*steps[0].writes}
    for place, step in enumerate(steps[1:], 1):
        elementwise = step.pointwise is not None and not step.copies and not is_gemm(step)
        if not elementwise or not made >= {*step.reads}:
            return place
        made |= {*step.writes}
    return len(steps)


def _rows_of(draft: Draft, step: Step) -> tuple[str, ...]:
    """What a step multiplies row by row, and no rows but those: the operand, and its scales where
    each row has some.  Empty where it does anything else, or what decodes them has to go with it.
    """
    if not is_gemm(step) or step.kind not in _OF_ROWS or reads_decoded(step):
        return ()
    if not {each.slot for each in step.inputs} <= {*_ROWS, *_SHARED}:
        return ()
    tokens = token_symbols(draft)
    names = (name for slot in _ROWS if (name := step.input(slot)))
    rows = tuple(name for name in names if _has_tokens(draft, name))
    if len(tokens) != 1 or step.input("a") not in rows:
        return ()
    return rows if all(along(draft.buffers[name].shape, *tokens) for name in rows) else ()


_OF_ROWS = (GemmKind.FPROP.value, GemmKind.DGRAD.value)
_ROWS = ("a", "a_scale", "a_amax")
"""Operands of a GEMM that may have rows."""
_SHARED = ("b", "b_scale", "b_amax", "add", LIKE)
"""Those that all rows share."""


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
    marked = list(segments)
    for place, three in enumerate(zip(segments, segments[1:], segments[2:], strict=False)):
        match three:
            case (Program() as last, Start(kind=REDUCE_SCATTER.name) as start, Wait() as wait):
                rows = _rows_of_last(draft, last)
                readers = [each for each in segments if not {*last.gives}.isdisjoint(each.takes)]
                if rows and start.takes == last.gives and readers == [start] and wait.gives:
                    marked[place] = _of_any_rows(draft, dims, last, rows)
                    rows = tuple(dict.fromkeys((*_telling(draft, last, rows), *rows)))
                    marked[place + 1] = replace(start, by_rows=rows)
    for place, op in enumerate(marked):
        if isinstance(op, Program) and (bringing := _bringing(draft, marked, op)):
            moved = {name for each in bringing for name in each.gives}
            before = (each for each in marked[:place] if moved.isdisjoint(each.gives))
            return (*before, *bringing, _in_place(draft, dims, op), *marked[place + 1 :])
    return tuple(marked)


def _bringing(draft: Draft, segments: Sequence[Segment], op: Program) -> list[Segment]:
    """What brings an op all rows that it multiplies: starts and then waits, by rows; empty where
    others read these, too.
    """
    rows = {*_multiplied(draft, op)}
    waits = {s.future: s for s in segments if isinstance(s, Wait) and rows >= {*s.gives}}
    starts = [s for s in segments if isinstance(s, Start) and s.future in waits]
    if not rows or len(waits) < len(rows) or any(each.when for each in starts):
        return []
    if {each.kind for each in starts} not in ({ALL_GATHER.name}, {GATHER_COPY.name}):
        return []
    if any(not rows.isdisjoint(each.takes) for each in segments if each is not op):
        return []
    marked = (replace(each, by_rows=waits[each.future].results) for each in starts)
    return [*marked, *(waits[each.future] for each in starts)]


def _rows_of_last(draft: Draft, op: Program) -> tuple[str, ...]:
    """Arguments that an op multiplies row by row, or that name what it adds up for each row, if
    that is all it does; empty otherwise.
    """
    step, *others = op.steps
    if others or op.gives != step.writes:
        return ()
    if adds_named_rows(step):
        named = step.input(definition(step.primitive).named)
        return (named,) if named else ()
    return _rows_of(draft, step)


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
                if gathers and wait.results == rows and not wait.when:
                    marked[place] = replace(wait, by_rows=rows)
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


# ---- the ops


def _multiplied(draft: Draft, op: Program) -> tuple[str, ...]:
    """Arguments that an op multiplies row by row, if all that it does goes by such rows; empty
    otherwise.
    """
    alike = all(draft.buffers[name].dtype is DType.IO for name in op.gives)
    if not alike or not 0 < _first_product(draft, op.steps) == len(op.steps):
        return ()
    rows = _rows_of(draft, op.steps[0])
    others = {a.buffer for a in op.arguments} - {*rows, *_telling(draft, op, rows)}
    return () if any(_has_tokens(draft, each) for each in others) else rows


def _telling(draft: Draft, op: Program, rows: tuple[str, ...]) -> tuple[str, ...]:
    """The first argument of an op, if its rows are not of one with leading dimensions in the
    module's own type: it tells these, in as many rows.
    """
    own = (draft.buffers[name] for name in rows)
    if adds_named_rows(op.steps[0]) or any(b.dtype is DType.IO and b.shape.leading for b in own):
        return ()
    return (op.arguments[0].buffer,)


def _has_tokens(draft: Draft, name: str) -> bool:
    return not token_symbols(draft).isdisjoint(draft.buffers[name].shape.symbols())


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


def _of_any_rows(draft: Draft, dims: Dims, op: Program, rows: tuple[str, ...]) -> Program:
    """An op of one step that takes nothing that tells how many rows there are in all, and that
    gives as many as its other arguments have.
    """
    (step,) = op.steps
    if adds_named_rows(step):
        arguments = tuple(each for each in op.arguments if each.buffer in step.reads)
    else:  # the first argument says how many
        first = (*_telling(draft, op, rows), *rows)
        others = (a for a in op.arguments if not _has_tokens(draft, a.buffer))
        given = {each.buffer: each for each in op.arguments}
        arguments = (*(given[name] for name in first), *others)
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
