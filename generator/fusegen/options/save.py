"""What a forward saves for its backward."""

from __future__ import annotations

from .option import Choice, ModuleFacts, Option

RECOMPUTE = "recompute_activations"


def _applies_to(facts: ModuleFacts) -> str | None:
    if facts.inner_activations:
        return None
    return "neither expression nor norm gives an activation that is saved for the backward"


SAVE = Option(
    "save",
    "What a forward saves for its backward",
    (
        Choice("save_activations", "All that the backward reads"),
        Choice(RECOMPUTE, "The backward makes again what expressions and norms give"),
    ),
    _applies_to,
)
