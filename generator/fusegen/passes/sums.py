"""Sums over rows ride along with the quantisation of the same tensor, which reads it anyway."""

from __future__ import annotations

from dataclasses import replace

from ..ir.buffers import Buffer
from ..ir.step import Operand, Step
from ..spec.arch import ArchSpec
from ..steps import quantizes, sums_rows
from ..steps.copies import Original
from ..steps.quantize import ROW_SUMS, SUMMED, stored_row_sums
from .draft import Draft


def fold_sums(draft: Draft, arch: ArchSpec) -> Draft:
    """Give bias gradients to the steps that quantise what they are sums of."""
    buffers: dict[str, Buffer] = {}
    steps = list(draft.backward)
    for step in draft.backward:
        if not sums_rows(step) or {o.slot for o in step.inputs} - {"a", "groups"}:
            continue
        host = next((each for each in steps if _quantizes(each, step)), None)
        if host is None:
            continue
        outputs = [Operand(SUMMED, step.out)]
        if arch.has_kernels:
            stored = stored_row_sums(Original.of_copy(host.copies[0], draft.buffers))
            scratch = Buffer(f"{step.reads[0]}_{ROW_SUMS}", stored.typed, stored.shape)
            buffers[scratch.name] = scratch
            outputs.append(Operand(ROW_SUMS, scratch.name))
        steps.remove(step)
        steps[steps.index(host)] = replace(host, outputs=(*host.outputs, *outputs))
    return replace(draft.with_buffers(buffers), backward=tuple(steps))


def _quantizes(step: Step, summed: Step) -> bool:
    """Whether a step quantises the rows that another one sums, in the same groups."""
    return (
        quantizes(step)
        and step.input("a") == summed.input("a")
        and step.input("groups") == summed.input("groups")
        and SUMMED not in {operand.slot for operand in step.outputs}
    )
