"""Steps with other buffers in the place of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir.step import Operand, Step


def with_names(step: Step, final: Callable[[str], str]) -> Step:
    """A step that neither copies nor changes anything, with the buffers that its own become."""

    def operands(given: tuple[Operand, ...]) -> tuple[Operand, ...]:
        return tuple(Operand(operand.slot, final(operand.buffer)) for operand in given)

    math = step.pointwise
    if math:
        math = replace(
            math,
            operands=tuple(replace(each, buffer=final(each.buffer)) for each in math.operands),
            results=tuple(replace(each, buffer=final(each.buffer)) for each in math.results),
        )
    return replace(
        step, inputs=operands(step.inputs), outputs=operands(step.outputs), pointwise=math
    )
