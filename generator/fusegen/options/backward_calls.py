"""Whether memory goes while a backward runs.

An op holds what it was given until it returns.  A backward that is several calls lets go of
what each was the last to read before the next allocates its results, as compiled code does
with the tensors of a graph; each call takes the host about 5 us.
"""

from __future__ import annotations

from .option import Choice, ModuleFacts, Option

ONE_CALL = "one_backward_call"


def _applies_to(facts: ModuleFacts) -> str | None:
    if facts.chained_gemms:
        return None
    return "its backward has one GEMM's operands to let go of, which are read until its end"


BACKWARD_CALLS = Option(
    "backward_calls",
    "Whether memory goes while a backward runs",
    (
        Choice("freeing_backward", "Several calls where that lowers the peak of the memory"),
        Choice(ONE_CALL, "One call, which holds all that it was given until its end"),
    ),
    _applies_to,
)
