"""Whether profilers see the steps of a module."""

from __future__ import annotations

from .option import Choice, Option

NVTX_RANGES = "nvtx_ranges"

RANGES = Option(
    "ranges",
    "Whether profilers see the steps of a module",
    (
        Choice("no_ranges", "They see its ops"),
        Choice(NVTX_RANGES, "Each step runs in a range that is named after it"),
    ),
)
