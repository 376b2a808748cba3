"""Kinds of steps and kernels for the logarithm of the sum of each row's exponentials."""

from __future__ import annotations

from pathlib import Path

from fusegen.extensions import Extension
from fusegen.families.family import Family
from fusegen.ir.dtypes import DType
from fusegen.ir.shapes import Const, Expr, mul, product
from fusegen.ir.step import Step
from fusegen.steps.definition import Reference, StepDef
from fusegen.steps.launch import Field, Launch, Origin, sizes

_SIZES = {"rows": "T", "columns": "N"}


def _flops(step: Step) -> Expr:
    """An exponential and an addition, or a product, for each element."""
    extents = dict(step.sizes)
    return mul(Const(2), product((extents["rows"], extents["columns"])))


FORWARD_LAUNCH = Launch(
    "LogSumExpArguments",
    "log_sum_exp.h",
    (
        Field("x", Origin.OPERAND, "a"),
        Field("y", Origin.RESULT, "out"),
        Field("lse", Origin.FLOAT_RESULT, "lse"),
        *sizes("rows", "columns"),
    ),
    assigned=True,
)
BACKWARD_LAUNCH = Launch(
    "LogSumExpGradArguments",
    "log_sum_exp.h",
    (
        Field("dy", Origin.OPERAND, "a"),
        Field("x", Origin.OPERAND, "b"),
        Field("lse", Origin.FLOAT_OPERAND, "lse"),
        Field("dx", Origin.RESULT, "out"),
        *sizes("rows", "columns"),
    ),
    assigned=True,
)

FORWARD = StepDef(
    "log_sum_exp",
    operands=("a",),
    results=("out", "lse"),
    shapes={None: {"a": "T N", "out": "T", "lse": "T"}},
    dtypes={"lse": (DType.FLOAT32,)},
    reference=Reference("log_sum_exp.forward", frozenset(("a",))),
    sizes=_SIZES,
    independent=("T",),
    flops=_flops,
    launch=lambda _: FORWARD_LAUNCH,
)
BACKWARD = StepDef(
    "log_sum_exp_grad",
    operands=("a", "b", "lse"),
    shapes={None: {"a": "T", "b": "T N", "lse": "T", "out": "T N"}},
    dtypes={"lse": (DType.FLOAT32,)},
    reference=Reference("log_sum_exp.backward", frozenset(("a", "b", "lse"))),
    sizes=_SIZES,
    independent=("T",),
    flops=_flops,
    launch=lambda _: BACKWARD_LAUNCH,
)

EXTENSION = Extension(
    steps=(FORWARD, BACKWARD),
    families=(
        Family(
            "log_sum_exp",
            (FORWARD.name,),
            launch=FORWARD_LAUNCH,
            summary="The logarithm of the sum of each row's exponentials.",
            device="log_sum_exp.cuh",
            row_alignment=8,
        ),
        Family(
            "log_sum_exp_grad",
            (BACKWARD.name,),
            launch=BACKWARD_LAUNCH,
            summary="Its gradient.",
            device="log_sum_exp.cuh",
            row_alignment=8,
        ),
    ),
    folder=Path(__file__).parent,
)
