"""What a module takes its first input as.

A tensor that several modules read, or that a norm, a dispatch or another product leaves quantised,
need not be quantised by each of its readers.
"""

from __future__ import annotations

from .amax_reduction import REDUCED_AMAX
from .backward_precision import BackwardPrecision
from .option import Choice, Exclusion, ModuleFacts, Option, RecipeFacts

QUANTIZED_INPUT = "quantized_input"


def _applies_to(facts: ModuleFacts) -> str | None:
    if facts.chunks:
        return "an op has a chunk of the rows of a tensor at a time, which no recipe quantises"
    return None if facts.first_of_gemms else "its first input is not read by a GEMM alone"


def _applies_under(facts: RecipeFacts) -> str | None:
    if facts.input_bits:
        return None
    return f"recipe {facts.name!r} quantises no input that could come quantised"


INPUT_FORMAT = Option(
    "input_format",
    "What the first input may come as",
    (
        Choice("input_in_high_precision", "A tensor of the module's own type"),
        Choice(
            QUANTIZED_INPUT,
            "That, or codes and scales in the recipe's format, which `quantize_input` of the"
            " module makes, too",
        ),
    ),
    _applies_to,
    _applies_under,
    (
        Exclusion(
            QUANTIZED_INPUT,
            BackwardPrecision.HIGH.value,
            "the backward reads the input in high precision, of which there are codes alone",
        ),
        Exclusion(
            QUANTIZED_INPUT,
            REDUCED_AMAX,
            "amaxes of an input that comes quantised are moved on where that is done",
        ),
    ),
)
