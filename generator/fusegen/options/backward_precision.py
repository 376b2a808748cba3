"""What the GEMMs of a backward read."""

from __future__ import annotations

from enum import Enum

from .option import Choice, ModuleFacts, Option, RecipeFacts


class BackwardPrecision(str, Enum):
    """What the GEMMs of a backward read."""

    QUANTIZED = "quantized_backward"
    HIGH = "high_precision_backward"
    DEQUANTIZED = "dequantized_backward"


def _applies_to(facts: ModuleFacts) -> str | None:
    return None if facts.gemms else "no GEMM's backward could read other operands"


def _applies_under(facts: RecipeFacts) -> str | None:
    if facts.quantizes:
        return None
    return f"recipe {facts.name!r} quantises nothing, forward or backward"


BACKWARD_PRECISION = Option(
    "backward_precision",
    "What the GEMMs of a backward read",
    (
        Choice(BackwardPrecision.QUANTIZED.value, "Quantised copies, as the recipe says"),
        Choice(BackwardPrecision.HIGH.value, "x, w and dy as they came in, not quantised"),
        Choice(
            BackwardPrecision.DEQUANTIZED.value,
            "x and w as the forward read them, decoded, and dy as it came in",
        ),
    ),
    _applies_to,
    _applies_under,
)
