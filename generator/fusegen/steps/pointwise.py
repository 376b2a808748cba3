"""Expressions of an op, evaluated element by element, and their derivatives."""

from __future__ import annotations

from dataclasses import replace

from ..ir.shapes import Const, Expr, product
from ..ir.step import Operand, Step
from .definition import StepDef, Trait
from .launch import Field, Launch, Origin

ROW_GROUPS = "row groups"
"""Slot of the group sizes of a pointwise step whose results are zero past them.  No tensor of an op
can be called so."""


LAUNCH = Launch(
    "PointwiseArguments",
    "pointwise/pointwise.h",
    (Field("", Origin.EXPRESSION), Field("", Origin.ROW_GROUPS, ROW_GROUPS)),
)


def in_groups(step: Step, groups: str) -> Step:
    """A step whose results are zero in the rows past groups of these sizes, without its kernel."""
    math = step.pointwise
    assert math is not None, step
    return replace(
        step,
        inputs=(*step.inputs, Operand(ROW_GROUPS, groups)),
        pointwise=replace(math, kernel=f"grouped_{math.kernel}", grouped=True),
    )


def _flops(step: Step) -> Expr:
    math = step.pointwise
    assert math is not None, step
    return product((Const(math.cost), math.rows, math.columns))


POINTWISE = StepDef(
    "pointwise",
    traits=frozenset((Trait.PRINTED, Trait.RECOMPUTED)),
    flops=_flops,
    launch=lambda _: LAUNCH,
)

POINTWISE_GRAD = StepDef(
    "pointwise_grad",
    traits=frozenset((Trait.PRINTED, Trait.DERIVED)),
    flops=_flops,
    launch=lambda _: LAUNCH,
)
