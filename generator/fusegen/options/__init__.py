"""Options of generated modules: one file each, in the order in which cells are named after them.

A module has every option that applies to it, by facts about its ops; a pass or a printer asks for
the word that was chosen.  Nothing here imports the rest of fusegen, so that specs can be checked
against the registry, and their schemas printed from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .amax_reduction import AMAX_REDUCTION
from .backward_calls import BACKWARD_CALLS
from .backward_precision import BACKWARD_PRECISION
from .cached_input import CACHED_INPUT
from .debug import DEBUG
from .delay_wgrad import DELAY_WGRAD
from .gather import GATHER
from .glu_interleave import GLU_INTERLEAVE
from .input_format import INPUT_FORMAT
from .main_grad import MAIN_GRAD
from .option import Choice, Exclusion, ModuleFacts, Option, RecipeFacts, Scope
from .output_format import OUTPUT_FORMAT
from .parameters import PARAMETERS
from .ranges import RANGES
from .router_weight import ROUTER_WEIGHT
from .save import SAVE
from .scale_bias import SCALE_BIAS
from .tensor_parallel import TENSOR_PARALLELISM
from .weight_cache import WEIGHT_CACHE

__all__ = [
    "OPTIONS",
    "Choice",
    "Exclusion",
    "ModuleFacts",
    "Option",
    "RecipeFacts",
    "Scope",
    "excluded",
    "of_one_option",
    "option_of",
    "scopes_of",
]

OPTIONS: tuple[Option, ...] = (
    GLU_INTERLEAVE,
    SCALE_BIAS,
    PARAMETERS,
    ROUTER_WEIGHT,
    MAIN_GRAD,
    DELAY_WGRAD,
    WEIGHT_CACHE,
    SAVE,
    CACHED_INPUT,
    GATHER,
    INPUT_FORMAT,
    OUTPUT_FORMAT,
    BACKWARD_CALLS,
    AMAX_REDUCTION,
    TENSOR_PARALLELISM,
    BACKWARD_PRECISION,
    RANGES,
    DEBUG,
)
"""All of them; names of cells, and so files and ops, depend on the order."""


def option_of(word: str) -> Option | None:
    """The option that a word is a choice of."""
    return next((option for option in OPTIONS if word in option.words), None)


def scopes_of(words: Iterable[str]) -> tuple[Scope, ...]:
    """What steps run in under these choices, the outermost first."""
    chosen = set(words)
    choices = (choice for option in OPTIONS for choice in option.choices)
    return tuple(each.scope for each in choices if each.scope and each.word in chosen)


def of_one_option(words: Iterable[str]) -> str | None:
    """What to say of several choices of one option; None where no two are."""
    chosen = list(dict.fromkeys(words))
    for option in OPTIONS:
        named = [word for word in chosen if word in option.words]
        if len(named) > 1:
            return f"{' and '.join(named)} are choices of one option, {option.name}"
    return None


def excluded(words: Iterable[str]) -> str | None:
    """Why choices of different options cannot be had together, whatever their order."""
    chosen = set(words)
    exclusions = (each for option in OPTIONS for each in option.excludes)
    return next((e.reason for e in exclusions if {e.word, e.other} <= chosen), None)
