"""What a buffer holds before it changes."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.buffers import Buffer
from ..ir.step import Step
from .copies import Formats, Results, Stored
from .definition import StepDef, Trait


def _infer(step: Step, buffers: Mapping[str, Buffer], formats: Formats) -> Results:
    before = buffers[step.reads[0]]
    return {"out": Stored(before.dtype, before.shape)}


SNAPSHOT = StepDef("snapshot", infer=_infer, traits=frozenset((Trait.COPIES_MEMORY,)))
