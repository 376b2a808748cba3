"""Scales of E8M0 are bytes at the border of an op that changes something in place.

Inductor takes apart no change in place whose op has an operand or a result of E8M0
(``auto_functionalized_v2 was not removed``): Triton lacks the type, so its graph passes leave such
nodes alone.  Ops that change nothing are called as they are.
"""

from __future__ import annotations

from dataclasses import replace

from ..model.dtypes import DType
from ..model.plan import Buffer, Step
from .draft import Draft


def pass_as_bytes(draft: Draft) -> Draft:
    """Let bytes cross between programs where E8M0 would, of which one changes something."""
    programs = (draft.forward, draft.backward, draft.refresh, draft.wgrad)
    changing = {name for each in programs if _changes(each) for name in _touched(each)}
    crossing = {
        name
        for name, buffer in draft.buffers.items()
        if buffer.dtype is DType.E8M0 and sum(name in _touched(each) for each in programs) > 1
    }
    return draft.with_buffers(
        {name: _bytes(draft.buffers[name]) for name in draft.buffers if name in changing & crossing}
    )


def _changes(steps: tuple[Step, ...]) -> bool:
    return any(step.mutates for step in steps)


def _touched(steps: tuple[Step, ...]) -> frozenset[str]:
    return frozenset(name for step in steps for name in (*step.reads, *step.writes))


def _bytes(buffer: Buffer) -> Buffer:
    return replace(buffer, dtype=DType.UINT8)
