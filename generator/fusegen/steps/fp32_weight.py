"""Products of 16-bit rows with a weight in fp32, by 16-bit GEMMs: of three parts, added up.

The first part is the weight rounded to 16 bits; each further one is what is left, times 2^11,
rounded.  Three of them hold all 24 bits of a number in bf16, and in fp16 those above 2^-47.
Products of 16-bit numbers are exact in fp32, so the sum is what a product in fp32 gives, but for
the order in which it adds up.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ir.dtypes import DType
from ..ir.shapes import Const, Expr, product
from ..ir.step import LIKE, Step
from .definition import Reference, StepDef
from .launch import Field, Launch, Origin, sizes

PARTS = 3
"""``kWeightParts`` of fp32_weight/fp32_weight.h."""

_WIDE = (DType.FLOAT32,)
_PARTS = {"parts": f"{PARTS} * n"}

SPLIT_LAUNCH = Launch(
    "SplitWeightArguments",
    "fp32_weight/fp32_weight.h",
    (
        Field("weight", Origin.FLOAT_OPERAND, "a"),
        Field("parts", Origin.RESULT, "out"),
        *sizes("n", "k"),
    ),
)
ADD_LAUNCH = Launch(
    "AddProductsArguments",
    "fp32_weight/fp32_weight.h",
    (
        Field("products", Origin.FLOAT_OPERAND, "a"),
        Field("bias", Origin.OPERAND, "add"),
        Field("sums", Origin.FLOAT_RESULT, "out"),
        *sizes("tokens", "n"),
    ),
)


def _flops(operations: int, *names: str) -> Callable[[Step], Expr]:
    """So many for each element of some sizes."""

    def flops(step: Step) -> Expr:
        extents = dict(step.sizes)
        return product((Const(operations), *(extents[name] for name in names)))

    return flops


SPLIT_WEIGHT = StepDef(
    "split_weight",
    operands=("a", LIKE),
    shapes={None: {"a": "N K", LIKE: "T K", "out": "P K"}},
    dtypes={"a": _WIDE},
    equal=_PARTS,
    reference=Reference("fp32_weight.split", frozenset(("a", LIKE))),
    sizes={"n": "N", "k": "K", "parts": "P"},
    flops=_flops(3 * PARTS, "n", "k"),  # each is rounded, taken away, and the rest scaled
    launch=lambda _: SPLIT_LAUNCH,
)
"""The parts one below the other, in the type of the tensor in the slot ``like``."""

ADD_PRODUCTS = StepDef(
    "add_products",
    operands=("a",),
    optional=("add",),
    shapes={None: {"a": "T P", "add": "N", "out": "T N"}},
    dtypes={"a": _WIDE, "out": _WIDE},
    equal=_PARTS,
    reference=Reference("fp32_weight.add", frozenset(("a", "add"))),
    sizes={"tokens": "T", "n": "N", "parts": "P"},
    flops=_flops(2 * PARTS - 1, "tokens", "n"),  # two are scaled, and there may be a bias
    launch=lambda _: ADD_LAUNCH,
)
"""The products with all parts, the smallest first, and then a bias."""
