"""Whether a module looks at what quantisation loses."""

from __future__ import annotations

from .option import Choice, ModuleFacts, Option, RecipeFacts

STATISTICS = "debug"


def _applies_to(facts: ModuleFacts) -> str | None:
    return None if facts.quantizes else "no op makes copies to take statistics of"


def _applies_under(facts: RecipeFacts) -> str | None:
    if facts.quantizes:
        return None
    return f"recipe {facts.name!r} quantises nothing to take statistics of"


DEBUG = Option(
    "debug",
    "Whether a module looks at what quantisation loses",
    (
        Choice("no_statistics", "It does not"),
        Choice(STATISTICS, "Each quantised copy leaves statistics in a buffer of the module"),
    ),
    _applies_to,
    _applies_under,
)
