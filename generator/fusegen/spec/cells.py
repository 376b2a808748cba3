"""The cells that names and targets stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..ir.naming import Cell
from .diagnostics import did_you_mean
from .kinds import SpecKind
from .load import SpecSet
from .usage import UsageError, spec_named


def product(modules: Iterable[str], recipes: Iterable[str]) -> tuple[Cell, ...]:
    """Every module with every recipe, sorted, each once."""
    recipes = tuple(recipes)
    return tuple(sorted({Cell(module, recipe) for module in modules for recipe in recipes}))


def with_options(specs: SpecSet, cells: Iterable[Cell], words: Sequence[str]) -> tuple[Cell, ...]:
    """The cells with these choices, in the order of their modules' options.

    A first choice is what a module is without being asked, so no cell is named after it.

    Raises:
        UsageError: a module does not offer a choice, or two of them are of one option.
    """
    return tuple(sorted({_with_options(specs, cell, words) for cell in cells}))


def _with_options(specs: SpecSet, cell: Cell, words: Sequence[str]) -> Cell:
    offered = specs.modules[spec_named(specs, SpecKind.MODULES, cell.module)].options
    choices = [word for option in offered.values() for word in option]
    for word in words:
        if word not in choices:
            hint = did_you_mean(word, choices) or "; it offers none" * (not choices)
            raise UsageError(f"module {cell.module!r} offers no option {word!r}{hint}")
    chosen = []
    for option, of_option in offered.items():
        named = list(dict.fromkeys(word for word in words if word in of_option))
        if len(named) > 1:
            raise UsageError(f"{' and '.join(named)} are choices of one option, {option.value}")
        chosen += [word for word in named if word != of_option[0]]
    return Cell(cell.module, cell.recipe, tuple(chosen))


def target_cells(specs: SpecSet, targets: Iterable[str]) -> dict[str, tuple[Cell, ...]]:
    """The cells of each architecture that the targets name, in the order they name them.

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
