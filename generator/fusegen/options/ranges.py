"""Whether profilers see the steps of a module."""

from __future__ import annotations

from .option import Choice, Option, Scope

RANGES = Option(
    "ranges",
    "Whether profilers see the steps of a module",
    (
        Choice("no_ranges", "They see its ops"),
        Choice(
            "nvtx_ranges",
            "Each step runs in a range that is named after it",
            Scope(python="ranges", cpp="range"),
        ),
    ),
)
