"""Scales of E8M0 are bytes at the border of an op that changes something in place.

Inductor takes apart no change in place whose op has an operand or a result of E8M0
(``auto_functionalized_v2 was not removed``): Triton lacks the type, so its graph passes leave such
nodes alone.  Ops that change nothing are called as they are.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.dtypes import DType
from ..ir.step import Step
from .draft import Draft


def pass_as_bytes(draft: Draft) -> Draft:
    """Let bytes cross between programs where E8M0 would, of which one changes something."""
    scales = {name for name, buffer in draft.buffers.items() if buffer.dtype is DType.E8M0}
    programs = (
        draft.forward,
        draft.backward,
        draft.quantize_input,
        draft.refresh,
        draft.wgrad,
    )
    seen = [(_changes(steps), _touched(steps) & scales) for steps in programs]
    changing = {name for changes, names in seen if changes for name in names}
    crossing = {name for name in changing if sum(name in names for _, names in seen) > 1}
    return draft.with_buffers(
        {name: replace(draft.buffers[name], dtype=DType.UINT8) for name in crossing}
    )


def _changes(steps: tuple[Step, ...]) -> bool:
    return any(step.mutates for step in steps)


def _touched(steps: tuple[Step, ...]) -> frozenset[str]:
    return frozenset(name for step in steps for name in (*step.reads, *step.writes))
