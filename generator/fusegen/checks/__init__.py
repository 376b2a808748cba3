"""Cross checks of the specs against each other: every name means something, every rule is total."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..spec.diagnostics import Problem
from ..spec.kinds import SpecKind
from ..spec.load import SpecKey, SpecSet
from .archs import check_arch
from .fusions import check_fusion
from .modules import check_module
from .ops import check_op
from .recipes import check_recipe
from .targets import check_target


def check(specs: SpecSet, *, complete: bool) -> Iterator[tuple[SpecKey, Problem]]:
    """Every problem between specs, each with the spec that has it.

    Args:
        specs: what was read.
        complete: whether every file could be read; if not, a missing name proves nothing.
    """
    for kind in SpecKind:
        for name in specs.of(kind):
            for problem in _check(kind, name, specs, complete):
                yield (kind, name), problem


def _check(kind: SpecKind, name: str, specs: SpecSet, complete: bool) -> Iterable[Problem]:
    source = specs.source(kind, name)
    match kind:
        case SpecKind.OPS:
            return check_op(specs.ops[name], source)
        case SpecKind.MODULES:
            return check_module(specs.modules[name], specs, source, complete)
        case SpecKind.RECIPES:
            return check_recipe(specs.recipes[name], source)
        case SpecKind.ARCHS:
            return check_arch(specs.archs[name], source)
        case SpecKind.FUSIONS:
            return check_fusion(specs.fusions[name], specs, source, complete)
        case SpecKind.TARGETS:
            return check_target(specs.targets[name], specs, source) if complete else ()
