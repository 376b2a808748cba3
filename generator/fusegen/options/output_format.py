"""What a module gives its output as."""

from __future__ import annotations

from .amax_reduction import REDUCED_AMAX
from .option import Choice, Exclusion, ModuleFacts, Option, RecipeFacts

QUANTIZED_OUTPUT = "quantized_output"


def _applies_to(facts: ModuleFacts) -> str | None:
    if facts.chunks:
        return "an op has a chunk of the rows of a tensor at a time, which no recipe quantises"
    return (
        None
        if facts.gives_rows
        else ("it gives something else than one tensor of rows, or its backward reads that again")
    )


def _applies_under(facts: RecipeFacts) -> str | None:
    if facts.input_bits:
        return None
    return f"recipe {facts.name!r} quantises no input, which the output would be"


OUTPUT_FORMAT = Option(
    "output_format",
    "What the output is given as",
    (
        Choice("output_in_high_precision", "A tensor of the module's own type"),
        Choice(
            QUANTIZED_OUTPUT,
            "Codes and scales in the recipe's format for inputs, which modules with"
            " quantized_input read as they are",
        ),
    ),
    _applies_to,
    _applies_under,
    (
        Exclusion(
            QUANTIZED_OUTPUT,
            REDUCED_AMAX,
            "amaxes of outputs are not shared between ranks",
        ),
    ),
)
