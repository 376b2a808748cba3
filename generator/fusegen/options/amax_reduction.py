"""Whose amaxes delayed scaling computes its scales from."""

from __future__ import annotations

from .option import Choice, ModuleFacts, Option, RecipeFacts

REDUCED_AMAX = "reduced_amax"


def _applies_to(facts: ModuleFacts) -> str | None:
    return None if facts.gemms else "no GEMM has operands whose amaxes ranks could share"


def _applies_under(facts: RecipeFacts) -> str | None:
    if facts.history:
        return None
    return f"recipe {facts.name!r} keeps no amaxes that ranks could share"


AMAX_REDUCTION = Option(
    "amax_reduction",
    "Whose amaxes delayed scaling computes its scales from",
    (
        Choice("own_amax", "Those of the rank itself"),
        Choice(REDUCED_AMAX, "Those of all ranks, shared by one all-reduce per direction"),
    ),
    _applies_to,
    _applies_under,
)
