"""An expression and the quantisation of what it gives, in one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.shapes import Shape, ceildiv
from ..ir.step import Access, Pointwise, Step
from . import quantize
from .copies import Formats, Results, Stored
from .definition import StepDef
from .launch import Field, Launch, Origin
from .pointwise import POINTWISE, POINTWISE_GRAD

ROW_PARTIALS = "row_partials"
"""Slot of what a merged step leaves of a sum over a row, one number per tile of columns."""

_TILE = 128  # columns that a kernel leaves one partial sum of


def stored_row_partials(math: Pointwise) -> Iterator[tuple[str, Stored]]:
    """What tiles of columns leave of each sum over a row, by the buffer of the sum."""
    shape = Shape(None, (ceildiv(math.columns, _TILE), math.rows))
    for result in math.results:
        if result.access is Access.ROW:
            yield result.buffer, Stored(DType.FLOAT32, shape)


def _infer(step: Step, buffers: Mapping[str, Buffer], formats: Formats) -> Results:
    """What is quantised, and scratch; results of the expression are its own to say."""
    assert step.pointwise is not None, step
    found = dict(quantize.infer(step, buffers, formats))
    for _, partials in stored_row_partials(step.pointwise):
        found[ROW_PARTIALS] = partials
    return found


LAUNCH = Launch(
    "PointwiseQuantizeArguments",
    "pointwise/pointwise_quantize.h",
    (Field("expression", Origin.PARTS, ROW_PARTIALS),),
    assigned=True,
)

POINTWISE_QUANTIZE = StepDef(
    "pointwise_quantize",
    parts=((POINTWISE.name, quantize.QUANTIZE.name),),
    infer=_infer,
    flops=POINTWISE.flops,
    launch=lambda _: LAUNCH,
)

POINTWISE_GRAD_QUANTIZE = StepDef(
    "pointwise_grad_quantize",
    parts=((POINTWISE_GRAD.name, quantize.QUANTIZE.name),),
    infer=_infer,
    flops=POINTWISE_GRAD.flops,
    launch=lambda _: LAUNCH,
)
