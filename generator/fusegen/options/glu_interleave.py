"""Where gated activations find the two halves of a row."""

from __future__ import annotations

from .option import Choice, ModuleFacts, Option

INTERLEAVED = "interleaved_32"


def _applies_to(facts: ModuleFacts) -> str | None:
    if facts.halves:
        return None
    return f"of {', '.join(facts.ops)} no op is a gated activation, whose halves could alternate"


GLU_INTERLEAVE = Option(
    "glu_interleave",
    "Where gated activations find gate and up in a row",
    (
        Choice("whole_halves", "The row is all of gate, then all of up"),
        Choice(INTERLEAVED, "Gate and up alternate in blocks of 32 columns"),
    ),
    _applies_to,
)
