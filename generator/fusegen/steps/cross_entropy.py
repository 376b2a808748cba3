"""The cross entropy of rows of logits with a target each, and its gradient."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.shapes import Const, Expr, product
from ..ir.step import Step
from ..ir.words import AttributeType
from .definition import AttributeDef, Reference, StepDef
from .launch import Field, Launch, Origin, sizes

_SIZES = {"rows": "T", "columns": "V"}
_OPERATIONS = 4  # of a logit, in either direction: less the largest or lse, exponential, two more
_TYPES = {"targets": (DType.INT64,), "lse": (DType.FLOAT32,)}
_INDICES = {"targets": "columns"}

ATTRIBUTES = (
    AttributeDef("ignore_index", AttributeType.INT),
    AttributeDef("label_smoothing", AttributeType.FLOAT),
    AttributeDef("z_loss", AttributeType.FLOAT),
)
_SCALARS = tuple(Field(each.name, Origin.ATTRIBUTE, each.name) for each in ATTRIBUTES)

LAUNCH = Launch(
    "CrossEntropyArguments",
    "softmax/cross_entropy.h",
    (
        Field("x", Origin.OPERAND, "a"),
        Field("targets", Origin.INTEGER_OPERAND, "targets"),
        Field("loss", Origin.FLOAT_RESULT, "out"),
        Field("lse", Origin.FLOAT_RESULT, "lse"),
        *_SCALARS,
        *sizes("rows", "columns"),
    ),
    assigned=True,
)
GRAD_LAUNCH = Launch(
    "CrossEntropyGradArguments",
    "softmax/cross_entropy.h",
    (
        Field("dloss", Origin.FLOAT_OPERAND, "a"),
        Field("x", Origin.OPERAND, "b"),
        Field("targets", Origin.INTEGER_OPERAND, "targets"),
        Field("lse", Origin.FLOAT_OPERAND, "lse"),
        Field("dx", Origin.RESULT, "out"),
        *_SCALARS,
        *sizes("rows", "columns"),
    ),
    assigned=True,
)


def _flops(step: Step) -> Expr:
    return product((Const(_OPERATIONS), *dict(step.sizes).values()))


CROSS_ENTROPY = StepDef(
    "cross_entropy",
    operands=("a", "targets"),
    results=("out", "lse"),
    attributes=ATTRIBUTES,
    shapes={None: {"a": "T V", "targets": "T", "out": "T", "lse": "T"}},
    dtypes={**_TYPES, "out": (DType.FLOAT32,)},
    indices=_INDICES,
    independent=("T",),
    reference=Reference("cross_entropy.forward", frozenset(("a", "targets"))),
    sizes=_SIZES,
    flops=_flops,
    launch=lambda _: LAUNCH,
)

CROSS_ENTROPY_GRAD = StepDef(
    "cross_entropy_grad",
    operands=("a", "b", "targets", "lse"),
    attributes=ATTRIBUTES,
    shapes={None: {"a": "T", "b": "T V", "targets": "T", "lse": "T", "out": "T V"}},
    dtypes={**_TYPES, "a": (DType.FLOAT32,)},
    indices=_INDICES,
    independent=("T",),
    in_place={"out": "b"},
    reference=Reference("cross_entropy.backward", frozenset(("a", "b", "targets", "lse"))),
    sizes=_SIZES,
    flops=_flops,
    launch=lambda _: GRAD_LAUNCH,
)
