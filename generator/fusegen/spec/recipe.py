"""Recipes: the numerics of the GEMMs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from ..ir.fields import STRICT
from ..ir.kernel import GemmKind
from ..ir.quantization import Accumulation, QuantizationSpec, Role
from .fields import Edition, Line, Name


@dataclass(frozen=True, slots=True, config=STRICT)
class ToleranceSpec:
    """Largest relative Frobenius errors a generated test accepts.

    Attributes:
        gemm: a GEMM with an ``io`` result against float64 of the operands it read.
        end_to_end: a module as deep as an expert MLP against float64 of its unquantised inputs;
            deeper ones are given more, as errors add up in squares.
        float32: sums kept in fp32 against float64.
    """

    gemm: Annotated[float, Field(gt=0, lt=1)]
    end_to_end: Annotated[float, Field(gt=0, lt=1)]
    float32: Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, slots=True, config=STRICT)
class RecipeSpec:
    """Numerics of the GEMMs.

    Attributes:
        source: where the recipe was published.
        roles: how each role is quantised; a role that is not named stays in ``io``.
        gemm: accumulation of each GEMM.
        tolerance: what tests accept.
    """

    edition: Edition
    recipe: Name
    summary: Line
    source: Line
    gemm: Mapping[GemmKind, Accumulation]
    tolerance: ToleranceSpec
    roles: Mapping[Role, QuantizationSpec] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.recipe

    @property
    def amax_pass(self) -> bool:
        """Whether a role of it is read for amaxes before it can be quantised."""
        return any(role.amax_pass for role in self.roles.values())
