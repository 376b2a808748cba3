"""Whether the bias of the last grouped GEMM is weighted by token."""

from __future__ import annotations

from .option import Choice, ModuleFacts, Option

SCALED_BIAS = "scaled_bias"


def _applies_to(facts: ModuleFacts) -> str | None:
    return None if facts.grouped_bias else "no grouped GEMM adds a bias that could be scaled"


SCALE_BIAS = Option(
    "scale_bias",
    "Whether the bias of the last grouped GEMM is weighted by token",
    (
        Choice("plain_bias", "The bias is added as it is"),
        Choice(SCALED_BIAS, "The bias is multiplied by the scale of each row before it is added"),
    ),
    _applies_to,
)
