"""Which ranks have which part of a module's weights, and which of its tokens.

Weights of a layer are split over ranks along the outputs of a GEMM (by columns), along its inputs
(by rows), or, where one GEMM feeds another, between the two.  Each rank then computes a part of the
output, or a partial sum of it.  Outside, tokens are the same on all ranks, or split over them, too.

Where each group of rows has weights of its own, as experts have, each rank may have some of the
groups.  Tokens are split over ranks then: what a rank's experts give for those of all is a partial
sum, too.  Or a rank has as many slots for each rank, with tokens that want that one's experts, and
what these give comes back into the slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from .delay_wgrad import DELAYED_WGRAD
from .option import Choice, Exclusion, ModuleFacts, Option
from .output_format import QUANTIZED_OUTPUT


class Split(Enum):
    """The dimension of a module that weights are split along."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"
    BETWEEN = "between"
    GROUPS = "groups"


@dataclass(frozen=True, slots=True)
class Parallel:
    """What a choice says.

    Attributes:
        split: the dimension.
        sequence: whether tokens are split over ranks, too, where they are not multiplied.
        slots: whether a rank's tokens are in slots for each rank, which gets those alone.
    """

    split: Split
    sequence: bool
    slots: bool = False


_MORE_AROUND = "ops before its GEMMs, or behind them, do more than to move rows and to add them up"


def _column(facts: ModuleFacts) -> str | None:
    if not facts.first_of_gemms:
        return "what comes in is not read by a GEMM alone"
    return None if facts.gives_rows else "it gives something else than one tensor of rows"


def _row(facts: ModuleFacts) -> str | None:
    if not facts.first_of_gemms:
        return "what comes in is not read by a GEMM alone"
    return None if facts.last_of_gemms else "what it gives is not what a GEMM gives"


def _alone(applies: Callable[[ModuleFacts], str | None]) -> Callable[[ModuleFacts], str | None]:
    def applies_to(facts: ModuleFacts) -> str | None:
        if facts.chained_gemms:
            return "one of its GEMMs feeds another: weights are split between them"
        return applies(facts)

    return applies_to


def _chained(facts: ModuleFacts) -> str | None:
    if not facts.chained_gemms:
        return "none of its GEMMs feeds another"
    if not facts.adds_around_gemms:
        return _MORE_AROUND
    return None


def _experts(facts: ModuleFacts) -> str | None:
    if not facts.grouped_weights:
        return "none of its GEMMs has a weight for each group of rows"
    if facts.given_groups:
        return "its rows come in groups, of which a rank would need those of its own from all ranks"
    if facts.plain_weights:
        return "a GEMM of all tokens has a weight: run that in a module beside the experts"
    if not facts.adds_around_gemms:
        return _MORE_AROUND
    return None


def _tokens_side_by_side(
    applies: Callable[[ModuleFacts], str | None],
) -> Callable[[ModuleFacts], str | None]:
    def applies_to(facts: ModuleFacts) -> str | None:
        if facts.given_groups:
            return (
                "its rows come in groups, which are not side by side any more when those of all"
                " ranks are; gather tokens first, as modules do that route them"
            )
        return applies(facts)

    return applies_to


_COLUMN = "Outputs of each rank from all inputs; gradients of the input are added up"
_ROW = "Inputs of each rank to all outputs, which are added up; so are shares of the bias"
_BETWEEN = "What lies between GEMMs; the output and gradients of inputs are added up"
_EXPERTS = "Groups of rows, such as experts, with all of their weights"
_TOKENS = "; ranks have tokens of their own, which are gathered and scattered"
_SLOTS = "; ranks have slots of tokens for each rank, which are exchanged all to all"

_WORDS = {
    Split.OUTPUTS: ("column", _COLUMN, _alone(_column)),
    Split.INPUTS: ("row", _ROW, _alone(_row)),
    Split.BETWEEN: ("tensor", _BETWEEN, _chained),
}

PARALLEL = {
    f"{word}{'_sequence' if sequence else ''}_parallel": Parallel(split, sequence)
    for sequence in (False, True)
    for split, (word, _, _) in _WORDS.items()
}
PARALLEL["expert_parallel"] = Parallel(Split.GROUPS, sequence=True)
PARALLEL["expert_parallel_all_to_all"] = Parallel(Split.GROUPS, sequence=True, slots=True)
"""What each word says."""

OF_GROUPS = tuple(word for word, said in PARALLEL.items() if said.split is Split.GROUPS)
"""Words by which each rank has some of the groups, and most rows may be of others'."""


def _choices() -> tuple[Choice, ...]:
    def choice(word: str, said: Parallel) -> Choice:
        if said.split is Split.GROUPS:
            tokens = _SLOTS if said.slots else _TOKENS
            return Choice(word, _EXPERTS + tokens, None, _experts)
        _, summary, applies_to = _WORDS[said.split]
        if said.sequence:
            return Choice(word, summary + _TOKENS, None, _tokens_side_by_side(applies_to))
        return Choice(word, summary, None, applies_to)

    return tuple(choice(*each) for each in PARALLEL.items())


def _applies_to(facts: ModuleFacts) -> str | None:
    if not facts.weights:
        return "no GEMM has a weight that ranks could share"
    if facts.chunks:
        return "an op has a chunk of the rows of a tensor at a time, of which ranks have none"
    reasons = [applies_to(facts) for _, _, applies_to in _WORDS.values()]
    own = reasons[-1] if facts.chained_gemms else reasons[0]
    return own if all(reasons) else None


def _exclusions() -> tuple[Exclusion, ...]:
    gathered = [word for word, said in PARALLEL.items() if said.sequence]
    added_up = [word for word, said in PARALLEL.items() if said.split is not Split.OUTPUTS]
    return (
        *(
            Exclusion(word, DELAYED_WGRAD, "tokens that gradients of weights read are gathered")
            for word in gathered
        ),
        *(
            Exclusion(word, QUANTIZED_OUTPUT, "partial sums are added up in the module's own type")
            for word in added_up
        ),
    )


TENSOR_PARALLELISM = Option(
    "tensor_parallelism",
    "Which part of its weights, and which tokens, a rank has",
    (Choice("one_rank", "All of them"), *_choices()),
    _applies_to,
    excludes=_exclusions(),
)
