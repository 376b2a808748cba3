"""When the gradients of weights are computed."""

from __future__ import annotations

from .option import Choice, ModuleFacts, Option

DELAYED_WGRAD = "delayed_wgrad"


def _applies_to(facts: ModuleFacts) -> str | None:
    if facts.chunks:
        return "an op has a chunk of rows at a time, which gradients of weights could not wait for"
    return None if facts.weight_gradients else "no GEMM gives the gradient of a weight"


DELAY_WGRAD = Option(
    "delay_wgrad",
    "When the gradients of weights are computed",
    (
        Choice("immediate_wgrad", "In the backward, with all other gradients"),
        Choice(DELAYED_WGRAD, "When backward_dw() is called"),
    ),
    _applies_to,
)
