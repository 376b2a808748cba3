"""A norm and the quantisation of what it gives, in one step."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.shapes import Const, Expr, Shape, add, floordiv, mul, product
from ..ir.step import Step
from . import quantize
from .copies import Formats, Results, Stored
from .definition import StepDef
from .launch import Field, Launch, Origin
from .norm import NORM

STATISTICS = "statistics"
"""Slot of mean and rstd of every row, which tiles share, and of how many of a band are there."""

_OF_ROWS = ("mean", "rstd")
_BAND = 128  # rows of a tile: tiles beside each other wait for the statistics of them


def _rows(step: Step, buffers: Mapping[str, Buffer]) -> tuple[Expr, ...]:
    return buffers[step.input("a") or ""].shape.fixed().dims[:-1]


def _scratch(step: Step, buffers: Mapping[str, Buffer], formats: Formats) -> Results:
    """Two numbers for each row, whether or not the backward wants them, and a word for a band."""
    del formats
    rows = product(_rows(step, buffers))
    words = add(mul(Const(len(_OF_ROWS)), rows), add(floordiv(rows, _BAND), Const(1)))
    return {STATISTICS: Stored(DType.FLOAT32, Shape(None, (words,)))}


def _infer(step: Step, buffers: Mapping[str, Buffer], formats: Formats) -> Results:
    """What is quantised, statistics of rows, and scratch."""
    of_rows = Stored(DType.FLOAT32, Shape(None, _rows(step, buffers)))
    return {
        **quantize.infer(step, buffers, formats),
        **dict.fromkeys(_OF_ROWS, of_rows),
        **_scratch(step, buffers, formats),
    }


LAUNCH = Launch(
    "NormQuantizeArguments",
    "norm/norm_quantize.h",
    (Field("norm", Origin.PARTS, STATISTICS),),
    assigned=True,
)

NORM_QUANTIZE = StepDef(
    "norm_quantize",
    parts=((NORM.name, quantize.QUANTIZE.name),),
    infer=_infer,
    scratch=_scratch,
    flops=NORM.flops,
    launch=lambda _: LAUNCH,
)
