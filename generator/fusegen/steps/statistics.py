"""What a quantised copy lost of the tensor that it was made from, in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.shapes import Const, Shape
from ..ir.step import Step
from .copies import Formats, Results, Stored
from .definition import Reference, StepDef, Trait
from .launch import Field, Launch, Origin, sizes

PARTIALS = "partials"
"""Slot of what the blocks of threads leave of statistics, to be added up in a fixed order."""

_NUMBERS = 5  # the fields of ``Statistics`` in reference/_statistics.py
_BLOCKS, _WORDS = 1024, 12  # of threads, each of which leaves as many words of 4 bytes

RESULTS: Results = {
    "out": Stored(DType.FLOAT32, Shape(None, (Const(_NUMBERS),))),
    PARTIALS: Stored(DType.FLOAT32, Shape(None, (Const(_BLOCKS), Const(_WORDS)))),
}
"""The numbers of a copy, and scratch: the same for every copy."""


def _infer(step: Step, buffers: Mapping[str, Buffer], formats: Formats) -> Results:
    return RESULTS


LAUNCH = Launch(
    "StatisticsArguments",
    "quantize/statistics.h",
    (
        Field("input", Origin.OPERAND, "a"),
        Field("group_sizes", Origin.INTEGER_OPERAND, "groups", optional=True),
        *sizes("rows", "columns", "groups"),
        Field("data", Origin.OPERAND, "copy"),
        Field("scale", Origin.OPERAND, "copy_scale"),
        Field("amax", Origin.FLOAT_OPERAND, "copy_amax", optional=True),
        Field("pitch", Origin.PITCH, "copy"),
        Field("row_align", Origin.ALIGNMENT),
        Field("token_pitch", Origin.TOKEN_PITCH, "copy"),
        Field("partials", Origin.RESULT, PARTIALS),
        Field("blocks", Origin.LENGTH, PARTIALS),
        Field("output", Origin.FLOAT_RESULT, "out"),
    ),
    assigned=True,
)

STATISTICS = StepDef(
    "statistics",
    infer=_infer,
    traits=frozenset((Trait.OBSERVES,)),
    reference=Reference(
        "statistics.measure", frozenset(("a", "groups", "copy", "copy_scale", "copy_amax"))
    ),
    launch=lambda _: LAUNCH,
)
