"""Where GEMMs read the rows of tokens that are gathered for them."""

from __future__ import annotations

from .option import Choice, ModuleFacts, Option, RecipeFacts

WRITTEN_ROWS = "written_rows"


def _applies_to(facts: ModuleFacts) -> str | None:
    if facts.gathered_gemms:
        return None
    return "no GEMM reads rows that the op before it gathers"


def _applies_under(facts: RecipeFacts) -> str | None:
    if not facts.quantizes:
        return None
    return f"recipe {facts.name!r} quantises rows where the tokens lie, and writes no others"


GATHER = Option(
    "gather",
    "Where GEMMs read the rows of tokens that are gathered for them",
    (
        Choice(
            "gathered_rows",
            "Where the tokens lie, if the architecture has kernels for that: nothing writes rows",
        ),
        Choice(
            WRITTEN_ROWS,
            "In a matrix that is written before them, which is faster where a token has two wide"
            " experts",
        ),
    ),
    _applies_to,
    _applies_under,
)
