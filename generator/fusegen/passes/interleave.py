"""Gate and up of gated activations alternate in blocks of columns: `glu_interleave_size`."""

from __future__ import annotations

from dataclasses import replace

from ..ir.step import HALVES, INTERLEAVE, INTERLEAVED, Pointwise, PointwiseOperand, Step
from .draft import Draft


def interleave_halves(draft: Draft) -> Draft:
    """Let every step that reads or writes halves of a row find them in alternating blocks."""
    return replace(
        draft,
        forward=tuple(_interleaved(step) for step in draft.forward),
        backward=tuple(_interleaved(step) for step in draft.backward),
    )


def _has_halves(step: Step) -> bool:
    math = step.pointwise
    return math is not None and any(o.access in HALVES for o in (*math.operands, *math.results))


def _interleaved(step: Step) -> Step:
    math = step.pointwise
    if math is None or not _has_halves(step):
        return step
    return replace(step, pointwise=_alternating(math))


def _alternating(math: Pointwise) -> Pointwise:
    """The same math over other places: another kernel."""

    def moved(operands: tuple[PointwiseOperand, ...]) -> tuple[PointwiseOperand, ...]:
        return tuple(replace(o, access=INTERLEAVED.get(o.access, o.access)) for o in operands)

    base, _, direction = math.kernel.rpartition("_")
    return replace(
        math,
        kernel=f"{base}_interleaved_{INTERLEAVE}_{direction}",
        operands=moved(math.operands),
        results=moved(math.results),
        formula=f"{math.formula}, halves in blocks of {INTERLEAVE} columns",
    )
