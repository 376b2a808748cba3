"""A tensor in fp32, such as a sum, rounded once to the module's own type."""

from __future__ import annotations

from ..ir.dtypes import DType
from .definition import Reference, StepDef, Trait
from .pointwise import POINTWISE

NARROW = StepDef(
    "narrow",
    operands=("a",),
    shapes={None: {"a": "T...", "out": "T..."}},
    dtypes={"a": (DType.FLOAT32,)},
    traits=frozenset((Trait.ROUNDS,)),
    reference=Reference("sums.narrow", frozenset(("a",))),
    formula=lambda _: "a",
    flops=POINTWISE.flops,
    launch=POINTWISE.launch,
)
