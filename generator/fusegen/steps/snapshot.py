"""What a buffer holds before it changes."""

from __future__ import annotations

from .definition import StepDef, Trait

SNAPSHOT = StepDef("snapshot", traits=frozenset((Trait.COPIES_MEMORY,)))
