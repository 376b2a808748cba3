"""A recipe and an architecture's layout, where block-scaled MMAs read the scales of GEMMs.

Such scales lie in atoms, and fp32 ones that are powers of two are stored as their exponents: the
same numbers, of which the MMA reads one for each 32 elements.  A recipe of which only some scalings
are read so keeps its scales in logical order, since groups of tokens start in one way only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.dtypes import DType
from ..ir.kernel import LayoutSpec
from ..ir.quantization import Extent, QuantizationSpec, Role, ScaleRounding, ScaleRule
from ..spec.arch import ArchSpec
from ..spec.recipe import RecipeSpec


def with_atoms(recipe: RecipeSpec, arch: ArchSpec, *, gemms: bool) -> tuple[RecipeSpec, ArchSpec]:
    """Both as passes read them.

    Args:
        recipe, arch: as they are written.
        gemms: whether the module has GEMMs; nothing else reads atoms.
    """
    if gemms and arch.layout.scale_atoms:
        roles = {role: _exponents(spec) for role, spec in recipe.roles.items()}
        layout = _layout(arch.layout, roles)
        if layout.scale_atoms:
            return replace(recipe, roles=roles), replace(arch, layout=layout)
    return recipe, replace(arch, layout=replace(arch.layout, scale_atoms=()))


def _layout(layout: LayoutSpec, roles: Mapping[Role, QuantizationSpec]) -> LayoutSpec:
    return layout.of(spec.scaling for spec in roles.values())


def _exponents(spec: QuantizationSpec) -> QuantizationSpec:
    """The same with exponents for scales, where scales of blocks are powers of two."""
    powers = (
        spec.scale.rule is ScaleRule.MAX_OVER_AMAX and spec.scale.round is not ScaleRounding.NONE
    )
    if not powers or Extent.ALL in spec.block:
        return spec
    return replace(spec, scale=replace(spec.scale, dtype=DType.E8M0))
