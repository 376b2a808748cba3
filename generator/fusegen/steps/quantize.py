"""Quantised copies of a tensor."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.shapes import Const, Shape, add, floordiv, mul
from ..ir.step import Step
from .copies import Formats, Original, Results, Stored, copy_slots, stored_amaxes, stored_copy
from .definition import Reference, StepDef, Trait
from .launch import Field, Launch, Origin

SUMMED = "sum"
"""Slot of a sum over rows that a step which quantises them leaves, too."""

ROW_SUMS = "row_sums"
"""Slot of what tiles of rows leave of that sum."""

_TILE = 128  # rows that a kernel leaves one partial sum of, at most

_FOUND_FIRST = frozenset(("partial_amax", "row_amax", "column_amax"))


def stored_row_sums(tensor: Original) -> Stored:
    """One row for each pair of a tile and a group that can share rows: see quantize.h."""
    begun = add(mul(Const(2), tensor.parts), Const(1)) if tensor.groups else Const(1)
    segments = add(floordiv(tensor.rows, _TILE), begun)
    return Stored(DType.FLOAT32, Shape(None, (segments, tensor.columns)))


def infer(step: Step, buffers: Mapping[str, Buffer], formats: Formats) -> Results:
    """Copies, amaxes and sums of the tensor that a step quantises."""
    role = step.copies[0].role
    tensor = Original.of_copy(step.copies[0], buffers)
    found = dict(stored_amaxes(tensor, step.copies, formats.roles[role]))
    for copy in step.copies:
        slots = (operand.slot for operand in copy_slots(copy.orientation.value, copy))
        stored = stored_copy(tensor, role, copy.orientation, formats)
        found |= dict(zip(slots, stored, strict=True))
    groups = (tensor.groups,) if tensor.groups else ()
    found[SUMMED] = Stored(DType.IO, Shape(None, (*groups, tensor.columns)))
    return found | {ROW_SUMS: stored_row_sums(tensor)}


def needs_amaxes(step: Step) -> bool:
    """Whether a kernel before its own reads the tensor to find amaxes."""
    return any(operand.slot in _FOUND_FIRST for operand in step.outputs)


LAUNCH = Launch(
    "QuantizeStepArguments",
    "quantize/step.h",
    (Field("quantize.input", Origin.OPERAND, "a"), Field("", Origin.QUANTIZATION)),
    assigned=True,
)

QUANTIZE = StepDef(
    "quantize",
    operands=("a",),
    optional=("groups",),
    shapes={None: {"a": "T... K", "groups": "E", "out": "T... K"}},
    infer=infer,
    dtypes={"groups": (DType.INT64,)},
    traits=frozenset((Trait.QUANTIZES,)),
    reference=Reference(
        "quantized.quantize", frozenset(("a", "groups", "amax_history", "scale", "rng_state"))
    ),
    launch=lambda _: LAUNCH,
)
