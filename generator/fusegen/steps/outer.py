"""The outer product of a number for each row and a vector: the gradient of what that multiplied."""

from __future__ import annotations

from ..ir.dtypes import DType
from .definition import Reference, StepDef
from .pointwise import POINTWISE

OUTER = StepDef(
    "outer",
    operands=("a", "b"),
    shapes={None: {"a": "T", "b": "N", "out": "T N"}},
    dtypes={"a": (DType.FLOAT32,)},
    independent=("T", "N"),
    reference=Reference("steps.outer", frozenset(("a", "b"))),
    formula=lambda _: "a * b",
    flops=POINTWISE.flops,
    launch=POINTWISE.launch,
)
