"""How long quantised copies of weights live, and whether the weights live beside them.

A copy that the forward makes for the backward takes a byte for each parameter, in every micro-batch
that is in flight.  Made in the backward it costs one more read of the weight, and nothing between.
"""

from __future__ import annotations

from .amax_reduction import REDUCED_AMAX
from .backward_precision import BackwardPrecision
from .option import Choice, Exclusion, ModuleFacts, Option, RecipeFacts

FRESH, HELD = "fresh_weights", "held_weights"
CACHED, ALONE = "cached_weights", "quantized_weights"


def _applies_to(facts: ModuleFacts) -> str | None:
    return None if facts.weights else "no GEMM reads a weight whose copies could be kept"


def _applies_under(facts: RecipeFacts) -> str | None:
    if facts.weights:
        return None
    return f"recipe {facts.name!r} quantises no weight whose copies could be kept"


WEIGHT_CACHE = Option(
    "weight_cache",
    "How long quantised copies of weights live, and whether the weights live beside them",
    (
        Choice(FRESH, "Forward and backward quantise the weights, each for itself"),
        Choice(HELD, "Each forward quantises the weights, for its backward, too"),
        Choice(CACHED, "The copies are buffers, made anew when the module is told to"),
        Choice(ALONE, "The same, and the weights themselves take no memory"),
    ),
    _applies_to,
    _applies_under,
    (
        Exclusion(
            HELD,
            BackwardPrecision.HIGH.value,
            "the backward reads weights in high precision, so that no copies of them are held",
        ),
        Exclusion(CACHED, REDUCED_AMAX, "amaxes of cached weights are not shared between ranks"),
        Exclusion(ALONE, REDUCED_AMAX, "amaxes of quantised weights are not shared between ranks"),
        Exclusion(
            ALONE,
            BackwardPrecision.HIGH.value,
            "the backward reads weights in high precision, and quantized_weights keeps the"
            " recipe's format alone; take cached_weights",
        ),
    ),
)
