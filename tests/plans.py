"""Plans of the built-in specs: each made once in a process, and not before a test looks at it.

Every process that runs tests collects all of them: what a module of tests plans when it is imported
is planned once for each process, and for runs that want none of its tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest

from fusegen.checks.load import load
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.paths import builtin_specs
from fusegen.spec.offers import refusal

SPECS = load([builtin_specs()])

Place = tuple[str, Cell]
"""An architecture and a cell on it."""


@cache
def plan_of(arch: str, cell: Cell) -> ModulePlan:
    """The plan of a cell.

    Raises:
        NotPossible: it cannot be made there; of what is `offered`, every one can.
    """
    return resolve_module(SPECS, cell, arch)


def offered(archs: Iterable[str], cells: Iterable[Cell]) -> list[Place]:
    """The cells whose options their module and recipe have, sorted, on each architecture."""
    known = [cell for cell in sorted(set(cells)) if _has_its_options(cell)]
    return [(arch, cell) for arch in archs for cell in known]


def _has_its_options(cell: Cell) -> bool:
    module, recipe = SPECS.modules[cell.module], SPECS.recipes[cell.recipe]
    return refusal(cell.options, module, recipe, SPECS.ops) is None


def every(places: Iterable[Place]) -> pytest.MarkDecorator:
    """A test of the argument `plan`, run for the plan of each of these cells."""
    return pytest.mark.parametrize("plan", places, ids=name_of, indirect=True)


def name_of(place: Place) -> str:
    """What a test is called by."""
    arch, cell = place
    return f"{arch}-{cell}"
