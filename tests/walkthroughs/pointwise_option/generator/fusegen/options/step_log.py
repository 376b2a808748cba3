"""Whether a module says which step it runs."""

from __future__ import annotations

from .option import Choice, Option, Scope

STEP_LOG = Option(
    "step_log",
    "Whether a module says which step it runs",
    (
        Choice("no_step_log", "It does not"),
        Choice(
            "logged_steps",
            "Each step writes its name to standard error as it begins",
            Scope(python="step_log", cpp="step_log"),
        ),
    ),
)
