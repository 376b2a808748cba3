"""The cells that names and targets stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..ir.naming import Cell
from ..options import OPTIONS, of_one_option
from .kinds import SpecKind
from .load import SpecSet
from .offers import not_offered, words_of
from .target import Kept, TargetSpec
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


@dataclass(frozen=True, slots=True)
class TargetCells:
    """Cells that targets name for an architecture.

    Attributes:
        files: those that are made.
        digests: those of which digests are kept alone.
    """

    files: tuple[Cell, ...]
    digests: tuple[Cell, ...]

    @property
    def every(self) -> tuple[Cell, ...]:
        """All of them, sorted."""
        return tuple(sorted((*self.files, *self.digests)))


def target_cells(specs: SpecSet, targets: Iterable[str]) -> dict[str, TargetCells]:
    """The cells of each architecture, or `all`, that the targets name, in the order they name them.

    Raises:
        UsageError: an unknown target.
    """
    found: dict[str, dict[Kept, set[Cell]]] = {}
    for name in targets:
        target = specs.targets[spec_named(specs, SpecKind.TARGETS, name)]
        cells = _cells_of(specs, target)
        for arch in target.archs:
            kept = found.setdefault(arch, {each: set() for each in Kept})
            kept[target.kept].update(cells)
    return {
        arch: TargetCells(
            files=tuple(sorted(kept[Kept.FILES])),
            digests=tuple(sorted(kept[Kept.DIGESTS] - kept[Kept.FILES])),
        )
        for arch, kept in found.items()
    }


def _cells_of(specs: SpecSet, target: TargetSpec) -> tuple[Cell, ...]:
    """Every module of a target with every recipe, and the choices that it asks for."""
    if not target.every_option:
        return with_options(specs, product(target.modules, target.recipes), target.options)
    modules = {name: specs.modules[name] for name in target.modules}
    return tuple(
        cell
        for name, module in modules.items()
        for word in words_of(module, specs.ops)
        for cell in with_options(specs, product([name], target.recipes), [word])
    )


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
