"""One tensor for the states of delayed scaling that an op moves on, and one for its statistics.

Each quantised tensor has an amax history and a scale, each of its copies a record.  As arguments of
their own they would be most of what an op takes, and each argument costs the host time in every
call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ..ir.buffers import Buffer, JoinedTensor, State, StateFill
from ..ir.dtypes import DType
from ..ir.naming import QUANTIZE_INPUT
from ..ir.shapes import Const, Expr, Shape
from ..ir.step import Step
from .draft import Draft

_JOINED = {
    "state": (StateFill.ZEROS, StateFill.ONES),
    "statistics": (StateFill.RECORD,),
}
"""What histories and scales start as, and what records do, by the word for their tensor.

State dicts have the former alone, so that the two lie apart; other states have another type, or a
state dict's own names.
"""


def join_states(draft: Draft) -> Draft:
    """Put the histories and scales of each program into one tensor, and its records into another.

    States of another number of groups, as of a dense layer before grouped ones, have one more.
    """
    tensors: list[JoinedTensor] = []
    buffers: dict[str, Buffer] = {}
    programs = product(_steps(draft), _JOINED.items())
    for (name, steps), (word, fills) in programs:
        by_extent: dict[Expr, list[State]] = {}
        for state in _changed_by(draft, steps, fills):
            by_extent.setdefault(_extent(draft, state), []).append(state)
        for number, (extent, states) in enumerate(by_extent.items(), 1):
            buffer = f"{name}_{word}" if number == 1 else f"{name}_{word}_{number}"
            rows = sum(_rows(draft, state) for state in states)
            buffers[buffer] = Buffer(buffer, DType.FLOAT32, Shape(None, (Const(rows), extent)))
            tensors.append(JoinedTensor(buffer, tuple(state.buffer for state in states)))
    return replace(draft.with_buffers(buffers), joined=tuple(tensors))


def _steps(draft: Draft) -> Iterator[tuple[str, tuple[Step, ...]]]:
    yield "forward", draft.forward
    yield "backward", draft.backward
    yield QUANTIZE_INPUT, draft.quantize_input
    yield "refresh", draft.refresh


def _changed_by(
    draft: Draft, steps: tuple[Step, ...], fills: tuple[StateFill, ...]
) -> Iterator[State]:
    """States that steps change, of those that start as one of these."""
    own = {name for step in steps for name in step.mutates}
    return (each for each in draft.states if each.buffer in own and each.fill in fills)


def _extent(draft: Draft, state: State) -> Expr:
    return draft.buffers[state.buffer].shape.dims[-1]


def _rows(draft: Draft, state: State) -> int:
    """Rows of its own: one of a vector."""
    *leading, _ = draft.buffers[state.buffer].shape.dims
    assert all(isinstance(dim, Const) for dim in leading), state
    return leading[0].value if leading and isinstance(leading[0], Const) else 1
