"""Dropout: elements are zeroed at random, and what is kept is left as bits for the gradient."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.shapes import Const, Expr, mul, product
from ..ir.step import Step
from ..ir.words import AttributeType
from .definition import AttributeDef, Reference, StepDef
from .launch import Field, Launch, Origin, sizes

_P = AttributeDef("p", AttributeType.FLOAT)
_SIZES = {"rows": "T", "columns": "D"}
_X, _BITS = "T... D", "T... D/8"
_MASK = (DType.UINT8,)

LAUNCH = Launch(
    "DropoutArguments",
    "dropout/dropout.h",
    (
        Field("x", Origin.OPERAND, "a"),
        Field("random", Origin.INTEGER_OPERAND, "random"),
        Field("y", Origin.RESULT, "out"),
        Field("mask", Origin.RESULT, "mask"),
        Field("p", Origin.ATTRIBUTE, _P.name),
        *sizes("rows", "columns"),
    ),
    assigned=True,
)
GRAD_LAUNCH = Launch(
    "DropoutGradArguments",
    "dropout/dropout.h",
    (
        Field("dy", Origin.OPERAND, "grad"),
        Field("mask", Origin.OPERAND, "mask"),
        Field("dx", Origin.RESULT, "out"),
        Field("p", Origin.ATTRIBUTE, _P.name),
        *sizes("rows", "columns"),
    ),
    assigned=True,
)


def _flops(step: Step) -> Expr:
    """One multiplication for each element; random bits are integers."""
    return mul(Const(1), product((*dict(step.sizes).values(),)))


DROPOUT = StepDef(
    "dropout",
    operands=("a", "random"),
    results=("out", "mask"),
    attributes=(_P,),
    shapes={None: {"a": _X, "random": "W", "out": _X, "mask": _BITS}},
    dtypes={"random": (DType.INT64,), "mask": _MASK},
    neutral={_P.name: 0.0},
    reference=Reference("dropout.forward", frozenset(("a", "random"))),
    sizes=_SIZES,
    flops=_flops,
    launch=lambda _: LAUNCH,
)

DROPOUT_GRAD = StepDef(
    "dropout_grad",
    operands=("grad", "mask"),
    attributes=(_P,),
    shapes={None: {"grad": _X, "mask": _BITS, "out": _X}},
    dtypes={"mask": _MASK},
    reference=Reference("dropout.backward", frozenset(("grad", "mask"))),
    sizes=_SIZES,
    flops=_flops,
    launch=lambda _: GRAD_LAUNCH,
)
