"""Whether the groups of a grouped layer share a parameter."""

from __future__ import annotations

from .delay_wgrad import DELAYED_WGRAD
from .main_grad import MainGrad
from .option import Choice, Exclusion, ModuleFacts, Option
from .weight_cache import ALONE, CACHED

PER_GROUP = "parameter_per_group"

_REASONS = {
    **{
        choice.value: "GEMMs leave the gradients of all groups in one main_grad, and those of"
        " parameters of their own need not lie side by side"
        for choice in MainGrad
        if choice is not MainGrad.RETURNED
    },
    DELAYED_WGRAD: "gradients that wait are given to one parameter, and hooks run for that",
    CACHED: "copies are checked against the one parameter that they were made of",
    ALONE: "one tensor without memory stands for the weights of all groups",
}


def _applies_to(facts: ModuleFacts) -> str | None:
    return None if facts.grouped_weights else "no grouped GEMM reads a parameter of each group"


PARAMETERS = Option(
    "parameters",
    "Whether the groups of a layer share a parameter",
    (
        Choice("shared_parameter", "The groups are the first dimension of one parameter"),
        Choice(PER_GROUP, "Each group has its own: weight0, weight1, ... side by side in memory"),
    ),
    _applies_to,
    excludes=tuple(Exclusion(PER_GROUP, other, reason) for other, reason in _REASONS.items()),
)
