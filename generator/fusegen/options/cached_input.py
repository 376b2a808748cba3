"""How a forward saves what activations behind GEMMs read."""

from __future__ import annotations

from .option import Choice, ModuleFacts, Option, RecipeFacts

CACHE_QUANTIZED = "cache_quantized_input"


def _applies_to(facts: ModuleFacts) -> str | None:
    if facts.activated_gemms:
        return None
    return "no activation reads what a GEMM gives, which is what would be saved quantised"


def _applies_under(facts: RecipeFacts) -> str | None:
    if facts.input_bits == 8:
        return None
    kept = f"{facts.input_bits} bits" if facts.input_bits else "no fewer bits"
    return f"recipe {facts.name!r} has {kept} for inputs: gradients of activations read 8 or 16"


CACHED_INPUT = Option(
    "cached_input",
    "How a forward saves what activations behind GEMMs read",
    (
        Choice("save_input", "As it is"),
        Choice(
            CACHE_QUANTIZED,
            "As the codes and scales that the recipe has for inputs: half of the bytes; their"
            " gradients, and activations made again, follow from what these stand for",
        ),
    ),
    _applies_to,
    _applies_under,
)
