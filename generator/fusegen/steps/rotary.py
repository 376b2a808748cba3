"""Rotary embeddings: pairs of a head's elements, rotated by angles of their row, and back."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.shapes import Const, Expr, product
from ..ir.step import Step
from ..ir.words import AttributeType
from .definition import AttributeDef, Reference, StepDef
from .launch import Field, Launch, Origin, sizes

_OPERATIONS = 3  # of an element: two products and a sum
_RULE = {"a": "T... N", "cos": "T... P", "sin": "T... P", "out": "T... N"}

INTERLEAVED = AttributeDef("interleaved", AttributeType.BOOL)

LAUNCH = Launch(
    "RotaryArguments",
    "rotary/rotary.h",
    (
        Field("x", Origin.OPERAND, "a"),
        Field("cos", Origin.FLOAT_OPERAND, "cos"),
        Field("sin", Origin.FLOAT_OPERAND, "sin"),
        Field("y", Origin.RESULT, "out"),
        *sizes("rows", "columns", "pairs"),
        Field("interleaved", Origin.ATTRIBUTE, INTERLEAVED.name),
        Field("kind", Origin.KIND, "RotaryDirection"),
    ),
    assigned=True,
)


def _flops(step: Step) -> Expr:
    extents = dict(step.sizes)
    return product((Const(_OPERATIONS), extents["rows"], extents["columns"]))


ROTARY = StepDef(
    "rotary",
    operands=("a", "cos", "sin"),
    kinds=("forward", "inverse"),
    attributes=(INTERLEAVED,),
    shapes={"forward": _RULE, "inverse": _RULE},
    dtypes={"cos": (DType.FLOAT32,), "sin": (DType.FLOAT32,)},
    divisible={"columns": "2 * pairs"},
    independent=("T",),
    reference=Reference("rotary.rotate", frozenset(("a", "cos", "sin"))),
    sizes={"rows": "T", "columns": "N", "pairs": "P"},
    flops=_flops,
    launch=lambda _: LAUNCH,
)
