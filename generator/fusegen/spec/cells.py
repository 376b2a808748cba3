"""The cells that names and targets stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..ir.naming import Cell
from ..options import OPTIONS, of_one_option
from .kinds import SpecKind
from .load import SpecSet
from .offers import not_offered
from .usage import UsageError, spec_named


def without_fusions(specs: SpecSet, names: Iterable[str]) -> SpecSet:
    """The specs without these fusions; one that they do not have is left out already."""
    left_out = {*names}
    fusions = {name: fusion for name, fusion in specs.fusions.items() if name not in left_out}
    return replace(specs, fusions=fusions)


def product(modules: Iterable[str], recipes: Iterable[str]) -> tuple[Cell, ...]:
    """Every module with every recipe, sorted, each once."""
    recipes = tuple(recipes)
    return tuple(sorted({Cell(module, recipe) for module in modules for recipe in recipes}))


def with_options(specs: SpecSet, cells: Iterable[Cell], words: Sequence[str]) -> tuple[Cell, ...]:
    """The cells with these choices, in the order of the registry.

    A first choice is what a module is without being asked, so no cell is named after it.

    Raises:
        UsageError: a module does not offer a choice, or two of them are of one option.
    """
    return tuple(sorted({_with_options(specs, cell, words) for cell in cells}))


def _with_options(specs: SpecSet, cell: Cell, words: Sequence[str]) -> Cell:
    module = specs.modules[spec_named(specs, SpecKind.MODULES, cell.module)]
    reasons = (not_offered(word, module, specs.ops) for word in words)
    reason = next((reason for reason in reasons if reason), None) or of_one_option(words)
    if reason:
        raise UsageError(reason)
    further = (word for option in OPTIONS for word in option.further)
    return Cell(cell.module, cell.recipe, tuple(word for word in further if word in words))


def target_cells(specs: SpecSet, targets: Iterable[str]) -> dict[str, tuple[Cell, ...]]:
    """The cells of each architecture, or `all`, that the targets name, in the order they name them.

    Raises:
        UsageError: an unknown target.
    """
    found: dict[str, set[Cell]] = {}
    for name in targets:
        target = specs.targets[spec_named(specs, SpecKind.TARGETS, name)]
        cells = with_options(specs, product(target.modules, target.recipes), target.options)
        for arch in target.archs:
            found.setdefault(arch, set()).update(cells)
    return {arch: tuple(sorted(cells)) for arch, cells in found.items()}


def targets_or_names(targets: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a target together with single names.

    Raises:
        UsageError: both are given.
    """
    if targets and names:
        raise UsageError(
            "--target names archs, modules and recipes at once; leave out --arch, --module, "
            "--recipe and --option, or --target"
        )
