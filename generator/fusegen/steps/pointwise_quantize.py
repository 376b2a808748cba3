"""An expression and the quantisation of what it gives, in one kernel."""

from __future__ import annotations

from .definition import StepDef
from .launch import Field, Launch, Source
from .pointwise import POINTWISE, POINTWISE_GRAD
from .quantize import QUANTIZE

ROW_PARTIALS = "row_partials"
"""Slot of what a merged step leaves of a sum over a row, one number per tile of columns."""

LAUNCH = Launch(
    "PointwiseQuantizeArguments",
    "pointwise_quantize.h",
    (Field("", Source.PARTS, ROW_PARTIALS),),
    assigned=True,
)

POINTWISE_QUANTIZE = StepDef(
    "pointwise_quantize",
    parts=(POINTWISE.name, QUANTIZE.name),
    flops=POINTWISE.flops,
    launch=lambda _: LAUNCH,
)

POINTWISE_GRAD_QUANTIZE = StepDef(
    "pointwise_grad_quantize",
    parts=(POINTWISE_GRAD.name, QUANTIZE.name),
    flops=POINTWISE_GRAD.flops,
    launch=lambda _: LAUNCH,
)
