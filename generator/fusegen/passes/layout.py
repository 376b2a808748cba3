"""A recipe and an architecture's layout, settled for each other before any pass.

Where block-scaled MMAs read the scales of GEMMs these lie in atoms, and fp32 ones that are powers
of two are stored as their exponents: the same numbers, of which the MMA reads one for each 32
elements. A recipe of which only some scalings are read so keeps its scales in logical order, and
one of which only some formats are transposed has all of them so: groups of tokens start in one way
only.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.dtypes import DType
from ..ir.quantization import Extent, QuantizationSpec, ScaleRounding, ScaleRule
from ..spec.arch import ArchSpec
from ..spec.recipe import RecipeSpec


def with_layout(recipe: RecipeSpec, arch: ArchSpec, *, gemms: bool) -> tuple[RecipeSpec, ArchSpec]:
    """Both as passes read them.

    Args:
        recipe, arch: as they are written.
        gemms: whether the module, or one that reads what it gives, has GEMMs; nothing else reads
            atoms.
    """
    roles = {role: _exponents(spec) for role, spec in recipe.roles.items()}
    formats = [spec.format for spec in roles.values()]
    scalings = [spec.scaling for spec in roles.values()] if gemms else []
    layout = arch.layout.of(formats, scalings)
    stored = replace(recipe, roles=roles) if layout.scale_atoms else recipe
    return stored, replace(arch, layout=layout)


def _exponents(spec: QuantizationSpec) -> QuantizationSpec:
    """The same with exponents for scales, where scales of blocks are powers of two."""
    powers = (
        spec.scale.rule is ScaleRule.MAX_OVER_AMAX and spec.scale.round is not ScaleRounding.NONE
    )
    if not powers or Extent.ALL in spec.block:
        return spec
    return replace(spec, scale=replace(spec.scale, dtype=DType.E8M0))
