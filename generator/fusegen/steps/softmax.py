"""Softmax over the last dimension, of scaled and masked rows, and its gradient."""

from __future__ import annotations

from dataclasses import replace

from ..ir.dtypes import DType
from ..ir.shapes import Const, Expr, mul, product
from ..ir.step import Step
from ..ir.words import AttributeType
from .definition import AttributeDef, Reference, StepDef
from .launch import Field, Launch, Origin, sizes

_OUTER = {"outer": "T", "heads": "H", "queries": "S"}
_SIZES = {**_OUTER, "columns": "N"}
_SCALE = AttributeDef("scale", AttributeType.FLOAT)
_FORWARD_OPERATIONS = 5  # of an element: scale, maximum, exponential, sum, quotient
_BACKWARD_OPERATIONS = 5  # a product and a sum for the dot product, a difference, two products

LAUNCH = Launch(
    "SoftmaxArguments",
    "softmax/softmax.h",
    (
        Field("x", Origin.OPERAND, "a"),
        Field("mask", Origin.OPERAND, "mask", optional=True),
        Field("bias", Origin.OPERAND, "bias", optional=True),
        Field("y", Origin.RESULT, "out"),
        Field("scale", Origin.ATTRIBUTE, _SCALE.name),
        *sizes("outer", "heads", "queries", "columns"),
    ),
    assigned=True,
)
CAUSAL_LAUNCH = replace(
    LAUNCH, fields=(*LAUNCH.fields, Field("causal_queries", Origin.SIZE, "queries"))
)
GRAD_LAUNCH = Launch(
    "SoftmaxGradArguments",
    "softmax/softmax.h",
    (
        Field("dy", Origin.OPERAND, "a"),
        Field("y", Origin.OPERAND, "b"),
        Field("dx", Origin.RESULT, "out"),
        Field("scale", Origin.ATTRIBUTE, _SCALE.name),
        *sizes("rows", "columns"),
    ),
    assigned=True,
)


def _flops(step: Step) -> Expr:
    return product((Const(_FORWARD_OPERATIONS), *dict(step.sizes).values()))


def _grad_flops(step: Step) -> Expr:
    return mul(Const(_BACKWARD_OPERATIONS), product((*dict(step.sizes).values(),)))


SOFTMAX = StepDef(
    "softmax",
    operands=("a",),
    optional=("mask", "bias"),
    needed={"masked": ("mask",), "biased": ("bias",)},
    kinds=("rows", "causal", "masked", "biased"),
    attributes=(_SCALE,),
    shapes={
        "rows": {"a": "T... N", "out": "T... N"},
        "causal": {"a": "T... S N", "out": "T... S N"},
        "masked": {"a": "T H S N", "mask": "T S N", "out": "T H S N"},
        "biased": {"a": "T H S N", "bias": "T S N", "out": "T H S N"},
    },
    dtypes={"mask": (DType.UINT8,)},
    independent=("T",),
    reference=Reference("softmax.forward", frozenset(("a", "mask", "bias"))),
    sizes=_SIZES,
    flops=_flops,
    launch=lambda step: CAUSAL_LAUNCH if step.kind == "causal" else LAUNCH,
)

SOFTMAX_GRAD = StepDef(
    "softmax_grad",
    operands=("a", "b"),
    attributes=(_SCALE,),
    shapes={None: {"a": "T... N", "b": "T... N", "out": "T... N"}},
    independent=("T",),
    reference=Reference("softmax.backward", frozenset(("a", "b"))),
    sizes={"rows": "T", "columns": "N"},
    flops=_grad_flops,
    launch=lambda _: GRAD_LAUNCH,
)
