"""Sums of tensors of one shape, element by element: where several ops give a tensor's gradient."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.step import Step
from .definition import Reference, StepDef, Trait
from .pointwise import POINTWISE

_SLOTS = ("a", "b", "c", "d", "e", "f", "g", "h")

MOST_OPERANDS = len(_SLOTS)
"""What a pointwise kernel reads at most."""


def slots(count: int) -> tuple[str, ...]:
    """Slots of so many operands, in the order of the sum.

    Raises:
        ValueError: a sum has two operands at least, and no more than a kernel reads.
    """
    if not 2 <= count <= MOST_OPERANDS:
        raise ValueError(f"expected 2 to {MOST_OPERANDS} operands, got {count}")
    return _SLOTS[:count]


def _formula(step: Step) -> str:
    """From left to right; kernels keep that order, as no compiler regroups sums of floats."""
    return " + ".join(slot for slot in _SLOTS if step.input(slot))


ADD = StepDef(
    "add",
    operands=_SLOTS[:2],
    optional=_SLOTS[2:],
    shapes={None: dict.fromkeys((*_SLOTS, "out"), "T...")},
    dtypes=dict.fromkeys((*_SLOTS, "out"), (DType.IO, DType.FLOAT32)),
    linear=_SLOTS,
    traits=frozenset((Trait.COMMUTES,)),
    reference=Reference("steps.add", frozenset(_SLOTS)),
    formula=_formula,
    flops=POINTWISE.flops,
    launch=POINTWISE.launch,
)
