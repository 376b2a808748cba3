"""Names of the steps of a plan, on standard error as they begin."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext


def step(name: str, *, runs: bool = True) -> AbstractContextManager[object]:
    """Write the name, unless the step does not run."""
    if runs:
        print(name, file=sys.stderr, flush=True)
    return nullcontext()
