"""Fusions: steps that one kernel does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..ir.fields import STRICT
from ..steps import STEPS
from ..steps.definition import Trait
from .fields import Edition, Line, Name, OptionName, StepName

MERGES = {
    parts: each.name for each in STEPS if Trait.JOINS not in each.traits for parts in each.parts
}
"""Kinds of steps, each of which reads what the one before it gives, to that of one kernel which
does what they do."""


class FusionPass(str, Enum):
    """When a fusion applies; a joint one owns both directions."""

    JOINT = "joint"
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, config=STRICT)
class PatternStep:
    """A step of a pattern, or the step that replaces it; names are pattern variables.

    Attributes:
        step: its kind.
        in_: operands in the order of the step's slots.
        out: results in that order.
        kind: variant of the primitive; a pattern that says none matches every one.
        op: in a pattern, the op that a pointwise step computes.  The replacement does it by itself,
            whereas the expression of a step without ``op`` goes along to the replacement.
        with_: in a replacement, further operands by slot.
    """

    step: StepName
    in_: Annotated[tuple[Name, ...], Field(alias="in")]
    out: tuple[Name, ...]
    kind: str | None = None
    op: Name | None = None
    with_: Annotated[Mapping[Name, Name], Field(alias="with", default_factory=dict)] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True, config=STRICT)
class FusionPrograms:
    """Steps per direction.

    Attributes:
        forward: of the forward, in the order in which each reads the one before it.
        backward: of the backward, likewise.
    """

    forward: tuple[PatternStep, ...] = ()
    backward: tuple[PatternStep, ...] = ()


@dataclass(frozen=True, slots=True, config=STRICT)
class FusionConditions:
    """Where a fusion applies; what is left out is no condition.

    Attributes:
        archs: on these.
        recipes: with these.
        quantized: with recipes that quantise a role, or with those that quantise none.
        amax_pass: with recipes some role of which needs one, or with those where none does.
        options: of modules.
    """

    archs: tuple[Name, ...] = ()
    recipes: tuple[Name, ...] = ()
    quantized: bool | None = None
    amax_pass: bool | None = None
    options: Mapping[OptionName, Name] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, config=STRICT)
class FusionSpec:
    """A pattern of steps and what replaces it.

    Attributes:
        pass_: joint, forward or backward.
        match: steps to find, connected by the pattern's variables.
        rewrite: steps to put in their place.
        keep: variables that a joint fusion saves for its backward.
        drop: variables that it no longer saves because its backward rebuilds them.
        when: where it applies.
        declined: why it nowhere does, though one kernel could do the steps: what was found when one
            did.  Where its pattern stands, ``explain`` says so.
    """

    edition: Edition
    fusion: Name
    pass_: Annotated[FusionPass, Field(alias="pass")]
    summary: Line
    match: FusionPrograms
    rewrite: FusionPrograms
    keep: tuple[Name, ...] = ()
    drop: tuple[Name, ...] = ()
    when: FusionConditions = FusionConditions()
    declined: Line | None = None

    @property
    def name(self) -> str:
        return self.fusion

    @property
    def merges(self) -> bool:
        """Whether it puts one kernel in the place of several steps, which the plan still names.

        Its names say how the steps hang together: an expression with further operands matches, but
        for one of a GEMM's result alone.
        """
        rewrite = (*self.rewrite.forward, *self.rewrite.backward)
        return any(step.step in MERGES.values() for step in rewrite)
