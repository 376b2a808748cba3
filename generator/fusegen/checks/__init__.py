"""Cross checks of the specs against each other: every name means something, every rule is total."""

from __future__ import annotations

from collections.abc import Iterator

from ..load import SpecSet
from ..model.source import Problem
from ..model.specs import SpecKind
from .archs import check_arch
from .fusions import check_fusion
from .modules import check_module
from .ops import check_op
from .recipes import check_recipe
from .targets import check_target


def check(specs: SpecSet, *, complete: bool) -> Iterator[Problem]:
    """Every problem between specs.

    Args:
        specs: what was read.
        complete: whether every file could be read; if not, a missing name proves nothing.
    """
    for name, op in specs.ops.items():
        yield from check_op(op, specs.source(SpecKind.OPS, name))
    for name, module in specs.modules.items():
        yield from check_module(module, specs, specs.source(SpecKind.MODULES, name), complete)
    for name, recipe in specs.recipes.items():
        yield from check_recipe(recipe, specs.source(SpecKind.RECIPES, name))
    for name, arch in specs.archs.items():
        yield from check_arch(arch, specs.source(SpecKind.ARCHS, name))
    for name, fusion in specs.fusions.items():
        yield from check_fusion(fusion, specs, specs.source(SpecKind.FUSIONS, name), complete)
    if complete:
        for name, target in specs.targets.items():
            yield from check_target(target, specs, specs.source(SpecKind.TARGETS, name))
