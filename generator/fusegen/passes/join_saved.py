"""One tensor for the copies that the forward leaves for the backward, where an op would take many.

An op that takes quantised weights and activations, main gradients and statistics at once is as slow
to call as its arguments are many.  A tensor of several has memory for those that a call does not
ask for, too, so that other ops keep a tensor for each, and scales go first: they are small.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.buffers import Buffer, JoinedTensor, is_vector, padded_bytes
from ..ir.dtypes import DType
from ..ir.shapes import Shape, total
from ..ir.step import Step
from .draft import Draft, NotPossible
from .join_amaxes import join_amaxes
from .programs import Dims, programs_of

MOST = 16
"""Tensors that an op takes: each costs the host time in every call."""


def join_saved(draft: Draft, dims: Dims) -> Draft:
    """Put what is saved of copies into one tensor where an op takes more than most.

    Scales and amaxes, and codes where these are not enough.  The tensor is there if a part of it
    is asked for.  What alone tells an op a dimension stays a tensor of its own.
    """
    steps = _first_op(draft)
    copies = [copy for step in steps for copy in step.copies]
    scales = {name for copy in copies for name in (copy.scale, copy.amax) if name}
    codes = {copy.data for copy in copies}
    made = {name for step in steps for name in step.writes}
    narrow = draft
    for name, parts in (("saved_scales", scales), ("saved_copies", scales | codes)):
        saved = _saved(draft, parts & made)
        if len(saved) < 2:  # one stays a tensor of its own
            continue
        if _widest(join_amaxes(narrow), dims) <= MOST:
            break
        joined = _in_one(draft, name, saved)
        if not _tells_dimensions(joined, dims):
            break
        narrow = joined
    return narrow


def _widest(draft: Draft, dims: Dims) -> int:
    return max(len(program.arguments) for program in programs_of(draft, dims))


def _tells_dimensions(draft: Draft, dims: Dims) -> bool:
    """Whether every op still has an argument for each of its dimensions."""
    try:
        programs_of(join_amaxes(draft), dims)
    except NotPossible:
        return False
    return True


def _in_one(draft: Draft, name: str, parts: tuple[str, ...]) -> Draft:
    """The draft with parts in a tensor of bytes."""
    size = total(tuple(padded_bytes(draft.buffers[part]) for part in parts))
    buffer = Buffer(name, DType.UINT8, Shape(None, (size,)))
    joined = (*draft.joined, JoinedTensor(name, parts))
    return replace(draft.with_buffers({name: buffer}), joined=joined)


def _saved(draft: Draft, names: set[str]) -> tuple[str, ...]:
    """Those that are saved; vectors last, as others ask more of their address."""
    saved = [result.buffer for result in draft.saved if result.buffer in names]
    return tuple(sorted(saved, key=lambda name: is_vector(draft.buffers[name])))


def _first_op(draft: Draft) -> tuple[Step, ...]:
    """Steps before collectives cut the forward: no other op makes a part of a tensor of theirs."""
    received = draft.received("forward")
    steps = enumerate(draft.forward)
    end = next((i for i, step in steps if received & {*step.reads}), len(draft.forward))
    return draft.forward[:end]
