"""Steps and the quantisation of what they give as one step of one kernel.

The tensor between the two is then neither written nor read.  Fusions whose replacement is a merged
step say where; an architecture without kernels for it leaves the two as they are, and the merged
step keeps them as its parts, which is what plain PyTorch runs everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..ir.buffers import Buffer
from ..ir.step import Access, Operand, Result, Step
from ..spec.fusion import MERGES
from ..steps import definition
from ..steps.copies import Formats
from ..steps.pointwise_quantize import ROW_PARTIALS, stored_row_partials
from .draft import Draft, NotPossible
from .kernels import kernel_set
from .rewrite import Bound, Facts, Replacement

_RESULTS = ({Access.FULL}, {Access.FIRST_HALF, Access.SECOND_HALF})

Scratch = tuple[tuple[Operand, Buffer, tuple[str, ...]], ...]
"""Memory that the kernel of a merged step needs: its slot, and the flags under which it does."""


def why_not_merged(bound: Bound, facts: Facts) -> str | None:
    """Why no kernel does both steps, or None."""
    if not facts.arch.has_kernels:
        return f"{facts.arch.name} has no kernels"
    first, second = *bound.forward, *bound.backward
    reason = _misfit(first, second.inputs[0].buffer)
    if reason is not None:
        return reason
    step = _merged("", first, second, ())
    try:
        kernel_set(step, bound.draft.buffers, facts.arch, facts.recipe)
    except NotPossible as lack:
        return str(lack)
    return None


def merged(rule: str, bound: Bound) -> Replacement:
    """One step for the two, without its kernel, and its scratch."""
    first, second = *bound.forward, *bound.backward
    scratch = (*_row_partials(first), *_own_scratch(bound.draft, first, second))
    step = _merged(rule, first, second, scratch)
    buffers = tuple(buffer for _, buffer, _ in scratch)
    if bound.forward:
        return Replacement(forward=(step,), buffers=buffers)
    return Replacement(backward=(step,), buffers=buffers)


def _misfit(step: Step, tensor: str) -> str | None:
    """Why a kernel cannot give the tensor tile by tile, and a sum over its rows at most."""
    math = step.pointwise
    if math is None:
        return None
    rows = [result for result in math.results if result.access is Access.ROW]
    if {result.access for result in math.results if result.buffer == tensor} not in _RESULTS:
        return f"no kernel quantises {tensor} as the expression lays it out"
    if len(rows) > 1 or len(step.writes) != 1 + len(rows):
        return "the expression gives more than a tensor and a sum over its rows"
    return f"the expression clears rows of {tensor} past the groups" if math.grouped else None


def _merged(rule: str, first: Step, second: Step, scratch: Scratch) -> Step:
    """One step for two."""
    tensor = second.input("a")
    outputs = [*second.outputs, *(each for each in first.outputs if each.buffer != tensor)]
    asked = {name: _asked(part, name) for part in (first, second) for name in part.writes}
    for operand, _, when in scratch:
        outputs.append(operand)
        asked[operand.buffer] = when
    return replace(
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
        pointwise=first.pointwise,
        rule=rule,
        flops=first.flops,
        parts=(first, second),
        attributes=first.attributes if first.pointwise else (),
    )


def _asked(step: Step, name: str) -> tuple[str, ...]:
    """Flags that ask for a result."""
    return step.wanted(name) or step.when


def _row_partials(first: Step) -> Iterator[tuple[Operand, Buffer, tuple[str, ...]]]:
    """What tiles of columns leave of a sum over a row, where that is asked for."""
    for name, stored in stored_row_partials(first.pointwise) if first.pointwise else ():
        buffer = Buffer(f"{name}_{ROW_PARTIALS}", stored.typed, stored.shape)
        yield Operand(ROW_PARTIALS, buffer.name), buffer, _asked(first, name)


def _own_scratch(
    draft: Draft, first: Step, second: Step
) -> Iterator[tuple[Operand, Buffer, tuple[str, ...]]]:
    """What the merged kind says that its kernels need, whenever it runs."""
    kind = definition(MERGES[first.primitive, second.primitive])
    if kind.scratch is None:
        return
    formats = Formats(dict(draft.quantizations), draft.layout)
    stored = kind.scratch(_merged("", first, second, ()), draft.buffers, formats)
    for slot, each in stored.items():
        buffer = Buffer(f"{second.input('a')}_{slot}", each.typed, each.shape)
        yield Operand(slot, buffer.name), buffer, first.when
