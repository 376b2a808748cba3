"""Sums over rows ride along with the quantisation of the same tensor, which reads it anyway."""

from __future__ import annotations

from dataclasses import replace

from ..ir.dtypes import DType
from ..ir.plan import Buffer, Operand, Step
from ..ir.shapes import Const, Expr, Shape, add, floordiv, mul
from ..spec.arch import ArchSpec
from ..steps import quantizes, sums_rows
from ..steps.quantize import SUMMED
from .draft import Draft

_TILE = 128  # rows that a kernel leaves one partial sum of, at most


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
            scratch = _partial_sums(step.reads[0], dict(host.sizes), step.input("groups"))
            buffers[scratch.name] = scratch
            outputs.append(Operand("row_sums", scratch.name))
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


def _partial_sums(name: str, sizes: dict[str, Expr], groups: str | None) -> Buffer:
    """One row for each pair of a tile and a group that can share rows: see quantize.h."""
    begun = add(mul(Const(2), sizes["groups"]), Const(1)) if groups else Const(1)
    segments = add(floordiv(sizes["rows"], _TILE), begun)
    return Buffer(f"{name}_row_sums", DType.FLOAT32, Shape(None, (segments, sizes["columns"])))
