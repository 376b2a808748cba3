"""The rows of tokens and the quantisation of these, in one step."""

from __future__ import annotations

from . import quantize
from .definition import StepDef
from .launch import Field, Launch, Origin
from .routing import GATHER_ROWS

LAUNCH = Launch(
    "GatherQuantizeArguments",
    "routing/gather_quantize.h",
    (Field("gather", Origin.PARTS),),
    assigned=True,
)

GATHER_QUANTIZE = StepDef(
    "gather_quantize",
    parts=((GATHER_ROWS.name, quantize.QUANTIZE.name),),
    infer=quantize.infer,
    launch=lambda _: LAUNCH,
)
