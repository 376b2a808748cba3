"""Rotary embeddings: pairs of a head's elements, rotated by angles of their row, and back.

Rows are those of one tensor, or heads of queries, of keys and of values one behind the other, which
are parted on the way: the first two are rotated, values are copied.
"""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.shapes import Const, Expr, product
from ..ir.step import Step
from ..ir.words import AttributeType
from .definition import AttributeDef, Reference, StepDef
from .launch import Field, Launch, Origin, sizes

_TABLE = "T... P"
_DTYPES = {"cos": (DType.FLOAT32,), "sin": (DType.FLOAT32,)}
_OPERATIONS = 3  # of an element: two products and a sum
_RULE = {"a": "T... N", "cos": _TABLE, "sin": _TABLE, "out": "T... N"}
_PACKED, _QUERIES, _KEYS = "T... N", "T... Q", "T... V"

INTERLEAVED = AttributeDef("interleaved", AttributeType.BOOL)
QUERIES_PER_KEY = AttributeDef("queries_per_key", AttributeType.INT)

_TABLES = (
    Field("cos", Origin.FLOAT_OPERAND, "cos"),
    Field("sin", Origin.FLOAT_OPERAND, "sin"),
)
LAUNCH = Launch(
    "RotaryArguments",
    "rotary/rotary.h",
    (
        Field("x", Origin.OPERAND, "a"),
        *_TABLES,
        Field("y", Origin.RESULT, "out"),
        *sizes("rows", "columns", "pairs"),
        Field("interleaved", Origin.ATTRIBUTE, INTERLEAVED.name),
        Field("kind", Origin.KIND, "RotaryDirection"),
    ),
    assigned=True,
)


_QKV_SIZES = (
    *sizes("rows", "columns", "key_values", "pairs"),
    Field("queries_per_key", Origin.ATTRIBUTE, QUERIES_PER_KEY.name),
    Field("interleaved", Origin.ATTRIBUTE, INTERLEAVED.name),
)
QKV_LAUNCH = Launch(
    "RotaryQkvArguments",
    "rotary/rotary_qkv.h",
    (
        Field("x", Origin.OPERAND, "a"),
        *_TABLES,
        Field("queries", Origin.RESULT, "out"),
        Field("keys", Origin.RESULT, "keys"),
        Field("values", Origin.RESULT, "values"),
        *_QKV_SIZES,
    ),
    assigned=True,
)
QKV_GRAD_LAUNCH = Launch(
    "RotaryQkvGradArguments",
    "rotary/rotary_qkv.h",
    (
        Field("queries", Origin.OPERAND, "grad"),
        Field("keys", Origin.OPERAND, "grad_keys"),
        Field("values", Origin.OPERAND, "grad_values"),
        *_TABLES,
        Field("dx", Origin.RESULT, "out"),
        *_QKV_SIZES,
    ),
    assigned=True,
)


def _flops(step: Step) -> Expr:
    extents = dict(step.sizes)
    return product((Const(_OPERATIONS), extents["rows"], extents["columns"]))


def _qkv_flops(step: Step) -> Expr:
    """Of all elements but values."""
    extents, rotated = dict(step.sizes), dict(step.attributes)[QUERIES_PER_KEY.name]
    assert isinstance(rotated, int), "shapes hold it, so it is a number"
    return product((Const(_OPERATIONS * (rotated + 1)), extents["rows"], extents["key_values"]))


ROTARY = StepDef(
    "rotary",
    operands=("a", "cos", "sin"),
    kinds=("forward", "inverse"),
    attributes=(INTERLEAVED,),
    shapes={"forward": _RULE, "inverse": _RULE},
    dtypes=_DTYPES,
    divisible={"columns": "2 * pairs"},
    independent=("T",),
    reference=Reference("rotary.rotate", frozenset(("a", "cos", "sin"))),
    sizes={"rows": "T", "columns": "N", "pairs": "P"},
    flops=_flops,
    launch=lambda _: LAUNCH,
)

_QKV_DIMENSIONS = {
    "rows": "T",
    "columns": "N",
    "queries": "Q",
    "key_values": "V",
    "pairs": "P",
}
_QKV_EQUAL = {
    "queries": "queries_per_key * key_values",
    "columns": "queries + 2 * key_values",
}

ROTARY_QKV = StepDef(
    "rotary_qkv",
    operands=("a", "cos", "sin"),
    results=("out", "keys", "values"),
    attributes=(QUERIES_PER_KEY, INTERLEAVED),
    shapes={
        None: {
            "a": _PACKED,
            "cos": _TABLE,
            "sin": _TABLE,
            "out": _QUERIES,
            "keys": _KEYS,
            "values": _KEYS,
        }
    },
    dtypes=_DTYPES,
    divisible={"key_values": "2 * pairs"},
    equal=_QKV_EQUAL,
    independent=("T",),
    reference=Reference("rotary.part", frozenset(("a", "cos", "sin"))),
    sizes=_QKV_DIMENSIONS,
    flops=_qkv_flops,
    launch=lambda _: QKV_LAUNCH,
)
"""Packed rows to queries, which are the first result, to keys and to values."""

ROTARY_QKV_GRAD = StepDef(
    "rotary_qkv_grad",
    operands=("grad", "grad_keys", "grad_values", "cos", "sin"),
    attributes=ROTARY_QKV.attributes,
    shapes={
        None: {
            "grad": _QUERIES,
            "grad_keys": _KEYS,
            "grad_values": _KEYS,
            "cos": _TABLE,
            "sin": _TABLE,
            "out": _PACKED,
        }
    },
    dtypes=_DTYPES,
    divisible=ROTARY_QKV.divisible,
    equal=_QKV_EQUAL,
    independent=("T",),
    reference=Reference(
        "rotary.pack", frozenset(("grad", "grad_keys", "grad_values", "cos", "sin"))
    ),
    sizes=_QKV_DIMENSIONS,
    flops=_qkv_flops,
    launch=lambda _: QKV_GRAD_LAUNCH,
)
"""Gradients of queries, of keys and of values to that of packed rows."""
