"""In which type a router has its weight."""

from __future__ import annotations

from .main_grad import MainGrad
from .option import Choice, Exclusion, ModuleFacts, Option

FP32_ROUTER_WEIGHT = "fp32_router_weight"
_NARROW = "the gradient of a weight in fp32 has no main_grad of 16 bits"


def _applies_to(facts: ModuleFacts) -> str | None:
    return None if facts.fp32_products else "no GEMM gives products with a weight in fp32"


ROUTER_WEIGHT = Option(
    "router_weight",
    "In which type a router has its weight",
    (
        Choice("router_weight_of_x", "In the type of x"),
        Choice(FP32_ROUTER_WEIGHT, "In fp32: logits are products with it, not with a rounded one"),
    ),
    _applies_to,
    excludes=tuple(
        Exclusion(FP32_ROUTER_WEIGHT, each.value, _NARROW) for each in MainGrad if each.narrow
    ),
)
