"""The dot product of each row with a vector, or with its group's."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.shapes import Const, Expr, mul, product
from ..ir.step import Step
from .definition import Reference, StepDef
from .launch import GROUP_SIZES, Field, Launch, Origin, sizes

LAUNCH = Launch(
    "GroupRowDotArguments",
    "reduce/group_row_dot.h",
    (
        Field("a", Origin.OPERAND, "a"),
        Field("b", Origin.OPERAND, "b"),
        Field("add", Origin.FLOAT_OPERAND, "add"),
        Field("out", Origin.RESULT, "out"),
        GROUP_SIZES,
        *sizes("tokens", "groups", "n"),
    ),
)


def _flops(step: Step) -> Expr:
    sizes = dict(step.sizes)
    return mul(Const(2), product((sizes["tokens"], sizes["n"])))


ROW_DOT = StepDef(
    "row_dot",
    operands=("a", "b"),
    shapes={None: {"a": "T N", "b": "N", "out": "T"}},
    dtypes={"out": (DType.FLOAT32,)},
    independent=("T",),
    reference=Reference("steps.row_dot", frozenset(("a", "b"))),
    sizes={"tokens": "T", "groups": "", "n": "N", "k": ""},
    flops=_flops,
    launch=lambda _: LAUNCH,
)

GROUP_ROW_DOT = StepDef(
    "group_row_dot",
    operands=("a", "b", "groups"),
    optional=("add",),
    shapes={None: {"a": "T N", "b": "E N", "groups": "E", "add": "T", "out": "T"}},
    dtypes={"groups": (DType.INT64,), "add": (DType.FLOAT32,), "out": (DType.FLOAT32,)},
    reference=Reference("steps.group_row_dot", frozenset(("a", "b", "groups", "add"))),
    sizes={"tokens": "T", "groups": "E", "n": "N", "k": ""},
    flops=_flops,
    launch=lambda _: LAUNCH,
)
