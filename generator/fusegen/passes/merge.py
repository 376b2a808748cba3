"""An expression and the quantisation of what it gives as one step of one kernel.

The tensor between the two is then neither written nor read.  Fusions whose replacement is a merged
step say where; an architecture without kernels for it leaves the two as they are, and the merged
step keeps them as its parts, which is what plain PyTorch runs everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..ir.buffers import Buffer
from ..ir.step import Access, Operand, Pointwise, Result, Step
from ..spec.fusion import MERGES
from ..steps.pointwise_quantize import ROW_PARTIALS, stored_row_partials
from .draft import NotPossible
from .kernels import kernel_set
from .rewrite import Bound, Facts, Replacement

_RESULTS = ({Access.FULL}, {Access.FIRST_HALF, Access.SECOND_HALF})


def why_not_merged(bound: Bound, facts: Facts) -> str | None:
    """Why no kernel does both steps, or None."""
    if not facts.arch.has_kernels:
        return f"{facts.arch.name} has no kernels"
    first, second = *bound.forward, *bound.backward
    reason = _misfit(first, second.inputs[0].buffer)
    if reason is not None:
        return reason
    step, _ = _merged("", first, second)
    try:
        kernel_set(step, bound.draft.buffers, facts.arch, facts.recipe)
    except NotPossible as lack:
        return str(lack)
    return None


def merged(rule: str, bound: Bound) -> Replacement:
    """One step for the two, without its kernel, and its scratch."""
    first, second = *bound.forward, *bound.backward
    step, scratch = _merged(rule, first, second)
    if bound.forward:
        return Replacement(forward=(step,), buffers=scratch)
    return Replacement(backward=(step,), buffers=scratch)


def _misfit(step: Step, tensor: str) -> str | None:
    """Why a kernel cannot give the tensor tile by tile, and a sum over its rows at most."""
    math = step.pointwise
    assert math is not None
    rows = [result for result in math.results if result.access is Access.ROW]
    if {result.access for result in math.results if result.buffer == tensor} not in _RESULTS:
        return f"no kernel quantises {tensor} as the expression lays it out"
    if len(rows) > 1 or len(step.writes) != 1 + len(rows):
        return "the expression gives more than a tensor and a sum over its rows"
    return f"the expression clears rows of {tensor} past the groups" if math.grouped else None


def _merged(rule: str, first: Step, second: Step) -> tuple[Step, tuple[Buffer, ...]]:
    """One step for two, and its scratch."""
    math = first.pointwise
    assert math is not None
    tensor = second.input("a")
    scratch = tuple(_row_partials(math))
    outputs = [*second.outputs, *(each for each in first.outputs if each.buffer != tensor)]
    parts = (first, second)
    asked = {name: part.wanted(name) or part.when for part in parts for name in part.writes}
    for buffer in scratch:
        outputs.append(Operand(ROW_PARTIALS, buffer.name))
        asked[buffer.name] = asked[buffer.name.removesuffix(f"_{ROW_PARTIALS}")]
    step = replace(
        second,
        primitive=MERGES[first.primitive, second.primitive],
        item=first.item,
        inputs=(*first.inputs, *(each for each in second.inputs if each.buffer != tensor)),
        outputs=tuple(outputs),
        when=first.when,
        output_when=tuple(
            Result(each.buffer, asked[each.buffer])
            for each in outputs
            if asked[each.buffer] not in ((), first.when)
        ),
        kernels=None,
        alignment=1,
        pointwise=math,
        rule=rule,
        flops=first.flops,
        parts=parts,
        attributes=first.attributes,
    )
    return step, scratch


def _row_partials(math: Pointwise) -> Iterator[Buffer]:
    """What tiles of columns leave of a sum over a row."""
    for name, stored in stored_row_partials(math):
        yield Buffer(f"{name}_{ROW_PARTIALS}", stored.typed, stored.shape)
