"""Recipes: every accumulation is stated, and every role has a format and a scale."""

from __future__ import annotations

from collections.abc import Iterator

from ..load import Source
from ..model.dtypes import DType
from ..model.primitives import GemmKind
from ..model.source import Problem
from ..model.specs import AmaxSource, RecipeSpec

_QUANTIZED = (DType.E4M3, DType.E5M2, DType.E2M1)


def check_recipe(recipe: RecipeSpec, source: Source) -> Iterator[Problem]:
    """Every problem of a recipe."""
    for kind in GemmKind:
        if kind not in recipe.gemm:
            yield source.problem(f"the accumulation of {kind.value} is missing", "gemm")
    for role, spec in recipe.roles.items():
        path = ("roles", role.value)
        if spec.format not in _QUANTIZED:
            formats = ", ".join(dtype.value for dtype in _QUANTIZED)
            yield source.problem(
                f"expected a format among {formats}, got {spec.format.value}", *path, "format"
            )
        if (spec.scale.source is AmaxSource.HISTORY) != (spec.scale.history > 0):
            yield source.problem(
                "a scale from a history has 'history' above 0, another has none", *path, "scale"
            )
