"""From a quantised copy to 16 bits."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.shapes import Shape
from ..ir.step import LIKE, Step
from .copies import Formats, Original, Results, Stored, decoded_rows
from .definition import Reference, StepDef, Trait
from .launch import Field, Launch, Origin, sizes

PADDED_SIZES = "padded_sizes"
"""Slot of the sizes that groups have in the padded space which one of these steps writes."""


def _infer(step: Step, buffers: Mapping[str, Buffer], formats: Formats) -> Results:
    """The tensor that the copy is of, as rows again, with tokens padded as they are."""
    (copy,) = step.copies
    tensor = Original.of_copy(copy, buffers)
    rows = decoded_rows(tensor, copy, formats.layout)
    found = {"out": Stored(None, Shape(None, (*tensor.stack, rows, tensor.columns)))}
    if copy.groups:
        found[PADDED_SIZES] = Stored(DType.INT64, buffers[copy.groups].shape)
    return found


_COPY = frozenset(("a", "a_scale", "a_amax", "groups"))

PLAIN = Launch(
    "DequantizeArguments",
    "quantize/quantize.h",
    (
        Field("data", Origin.OPERAND, "a"),
        Field("scale", Origin.OPERAND, "a_scale", optional=True),
        Field("output", Origin.RESULT, "out"),
        *sizes("matrices", "lines", "length"),
        Field("pitch", Origin.PITCH, "a"),
        Field("", Origin.SCALE_STRIDES, "a"),
        Field("amax", Origin.FLOAT_OPERAND, "a_amax", optional=True),
        Field("", Origin.LINE_GROUPS, "a"),
    ),
    assigned=True,
    typed_by="out",
)
PADDED = Launch(
    "DequantizeGroupsArguments",
    "quantize/quantize.h",
    (
        Field("data", Origin.OPERAND, "a"),
        Field("scale", Origin.OPERAND, "a_scale", optional=True),
        Field("output", Origin.RESULT, "out"),
        Field("group_sizes", Origin.INTEGER_OPERAND, "groups"),
        Field("padded_sizes", Origin.INTEGER_RESULT, PADDED_SIZES, optional=True),
        *sizes("rows", "columns", "groups"),
        Field("pitch", Origin.PITCH, "a"),
        Field("row_align", Origin.ALIGNMENT),
    ),
    assigned=True,
    typed_by="out",
)

DEQUANTIZE = StepDef(
    "dequantize",
    infer=_infer,
    traits=frozenset((Trait.DECODES,)),
    reference=Reference("quantized.dequantize", _COPY | {LIKE}),
    launch=lambda _: PLAIN,
)

DEQUANTIZE_GROUPS = StepDef(
    "dequantize_groups",
    infer=_infer,
    traits=frozenset((Trait.DECODES,)),
    reference=Reference("quantized.dequantize", _COPY),
    launch=lambda _: PADDED,
)
"""Into the padded space that a columnwise copy of rows in groups lies in."""
