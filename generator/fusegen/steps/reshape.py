"""The elements of a tensor in other dimensions: row-major, so that memory is as it was.

A launcher copies nothing where it can let the result be the operand's own memory: see
``launcher/memory.py``.  What leaves an op, and came into it or leaves it in other dimensions, too,
is copied.
"""

from __future__ import annotations

from .definition import StepDef, Trait

RESHAPE = StepDef(
    "reshape",
    operands=("a",),
    shapes={None: {"a": "T...", "out": "S..."}},
    linear=("a",),
    traits=frozenset((Trait.COPIES_MEMORY,)),
)
