"""A module's first input comes quantised: what quantises it moves into a program of its own.

The forward takes the copies as arguments.  It keeps the tensor as one, too: this tells sizes and
type, and has the gradient, but nobody reads an element of it, so that a tensor without memory may
stand in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import lcm

from ..ir.segments import Exchange, Group
from ..ir.shapes import Along, along
from ..steps import quantizes
from ..steps.collectives import ALL_GATHER, GATHER_COPY, PLACEHOLDER
from .draft import Draft, NotPossible
from .share_amaxes import share_amax_of_input
from .tensor_parallel import token_symbols


def take_quantized(draft: Draft) -> Draft:
    """Move the step that quantises the first input into ``quantize_input``.

    Raises:
        NotPossible: no step quantises the first input, or something else reads it; or its tokens
            are gathered, and a copy has something that spans those of all ranks.
    """
    first = draft.inputs[0]
    readers = [step for step in (*draft.forward, *draft.backward) if first in step.reads]
    moved = [step for step in draft.forward if quantizes(step) and first in step.reads]
    if len(moved) != 1 or len(readers) != 1 or first in draft.outputs:
        raise NotPossible(f"{first!r} is not read by one step alone, which quantises it")
    (step,) = moved
    draft = replace(
        draft,
        forward=tuple(each for each in draft.forward if each is not step),
        quantize_input=(step,),
        input_copies=tuple(name for copy in step.copies for name in copy.buffers),
    )
    gathered = next(
        (e for e in draft.exchanges if (e.kind, e.buffer) == (ALL_GATHER.name, first)), None
    )
    if gathered is None:
        return draft
    delayed = step.input("amax_history") is not None
    given = {copy.scale for copy in step.copies} if delayed else {}  # one for all ranks
    copies = [name for name in draft.input_copies if name not in given]
    own = (*_of_copies(draft, copies, gathered.group),)
    exchanges = (e for each in draft.exchanges for e in (own if each is gathered else (each,)))
    draft = replace(draft, exchanges=tuple(exchanges))
    return share_amax_of_input(draft) if delayed else draft


def _of_copies(draft: Draft, copies: Iterable[str], group: Group) -> Iterator[Exchange]:
    """What ranks do with the first input and buffers of its copies, to have those of all rows."""
    (tokens,) = token_symbols(draft)
    found = {name: _along(draft, name, tokens) for name in copies}
    rows = lcm(*(each.unit for each in found.values()))
    yield Exchange(PLACEHOLDER.name, draft.inputs[0], True, group, (("rows", str(rows)),))
    for name, each in found.items():
        attributes = (("dim", str(each.dim)), ("tail", str(each.tail)))
        yield Exchange(GATHER_COPY.name, name, True, group, attributes)


def _along(draft: Draft, name: str, tokens: str) -> Along:
    """Where a buffer of a copy has tokens.

    Raises:
        NotPossible: it has one value for all tokens.
    """
    found = along(draft.buffers[name].shape, tokens)
    if found is None:
        raise NotPossible(
            f"{name!r} is of the tokens of all ranks together, so that copies of those of one"
            " cannot be gathered"
        )
    return found
