"""What compilers print: warnings, and what kernels need of an SM."""

from __future__ import annotations

import re
from typing import Final

from .objcache import KernelUsage

_USAGE: Final = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'"
    r"|(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
    r"|Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?"
)


def kernel_usage(text: str) -> tuple[KernelUsage, ...]:
    """Read the report of `ptxas -v`: one entry per kernel, in the order of the report.

    Functions that are no kernels have a stack line but no registers of their own; they are skipped.
    """
    found: list[KernelUsage] = []
    name, stack = "", (0, 0, 0)
    for match in _USAGE.finditer(text):
        if match["name"] is not None:
            name, stack = match["name"], (0, 0, 0)
        elif match["stack"] is not None:
            stack = (int(match["stack"]), int(match["stores"]), int(match["loads"]))
        elif name:
            registers, shared = int(match["registers"]), int(match["shared"] or 0)
            found.append(KernelUsage(name, registers, *stack, shared=shared))
            name = ""
    return tuple(found)


def warning_lines(text: str) -> tuple[str, ...]:
    """The lines of a compiler's output that warn, ptxas's notes on lost performance among them."""
    pattern = re.compile(r"\bwarning\b\s*[:#]|Potential Performance Loss", re.IGNORECASE)
    return tuple(line.strip() for line in text.splitlines() if pattern.search(line))
