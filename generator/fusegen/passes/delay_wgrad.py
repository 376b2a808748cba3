"""Gradients of weights wait: their GEMMs leave the backward for a program of their own."""

from __future__ import annotations

from dataclasses import replace

from ..ir.kernel import GemmKind
from ..ir.step import Step
from ..steps import decodes, is_gemm
from .draft import Draft, NotPossible


def delay_wgrad(draft: Draft) -> Draft:
    """Move the GEMMs that give weights' gradients into ``wgrad``, with what decodes for them.

    All else stays: what quantises a gradient serves other GEMMs, too, and sums with it.

    Raises:
        NotPossible: no GEMM gives one.
    """
    moved = delayed_steps(draft)
    if not moved:
        raise NotPossible("no GEMM gives the gradient of a weight")
    left = tuple(step for step in draft.backward if step not in moved)
    return replace(draft, backward=left, wgrad=moved)


def delayed_steps(draft: Draft) -> tuple[Step, ...]:
    """The steps of the backward that can wait."""
    moved: list[Step] = []
    for step in reversed(draft.backward):
        if _gives_weight_gradient(step) or _decodes_for(step, draft.backward, moved):
            moved.insert(0, step)
    return tuple(moved)


def _gives_weight_gradient(step: Step) -> bool:
    return is_gemm(step) and GemmKind(step.kind) is GemmKind.WGRAD


def _decodes_for(step: Step, steps: tuple[Step, ...], gemms: list[Step]) -> bool:
    """Whether a step decodes an operand that only these GEMMs read."""
    readers = [each for each in steps if {*step.writes} & {*each.reads}]
    return decodes(step) and all(each in gemms for each in readers)
