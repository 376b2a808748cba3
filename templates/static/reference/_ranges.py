"""Ranges that profilers show around the steps of a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function


def step(name: str, *, runs: bool = True) -> AbstractContextManager[object]:
    """The range that a step runs in; none where the step does not run."""
    return record_function(name) if runs else nullcontext()
