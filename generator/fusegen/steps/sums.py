"""Sums over rows: of a tensor, or of each group of it."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.shapes import Expr, product
from ..ir.step import Step
from .definition import Reference, StepDef, Trait
from .launch import GROUP_SIZES, Field, Launch, Origin, sizes

_SIZES = {"tokens": "T", "groups": "E", "n": "N", "k": ""}
LAUNCH = Launch(
    "GroupSumArguments",
    "reduce/group_sum.h",
    (
        Field("a", Origin.OPERAND, "a"),
        Field("out", Origin.RESULT, "out"),
        GROUP_SIZES,
        *sizes("tokens", "groups", "n"),
        Field("row_scales", Origin.FLOAT_OPERAND, "scales", optional=True),
    ),
)


def _flops(step: Step) -> Expr:
    sizes = dict(step.sizes)
    return product((sizes["tokens"], sizes["n"]))


COLUMN_SUM = StepDef(
    "column_sum",
    operands=("a",),
    optional=("scales",),
    shapes={None: {"a": "T... N", "scales": "T...", "out": "N"}},
    dtypes={"scales": (DType.FLOAT32,)},
    traits=frozenset((Trait.SUMS_ROWS,)),
    reference=Reference("steps.column_sum", frozenset(("a", "scales"))),
    sizes={**_SIZES, "groups": ""},
    flops=_flops,
    launch=lambda _: LAUNCH,
)

GROUP_SUM = StepDef(
    "group_sum",
    operands=("a", "groups"),
    optional=("scales",),
    shapes={None: {"a": "T N", "groups": "E", "scales": "T", "out": "E N"}},
    dtypes={"groups": (DType.INT64,), "scales": (DType.FLOAT32,)},
    traits=frozenset((Trait.SUMS_ROWS,)),
    reference=Reference("steps.group_sum", frozenset(("a", "groups", "scales"))),
    sizes=_SIZES,
    flops=_flops,
    launch=lambda _: LAUNCH,
)
