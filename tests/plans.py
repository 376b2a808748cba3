"""Plans of the built-in specs: each made once in a process, and not before a test looks at it.

Every process that runs tests collects all of them: what a module of tests plans when it is imported
is planned once for each process, and for runs that want none of its tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest

from fusegen.checks.load import load
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.paths import builtin_specs
from fusegen.spec.offers import refusal
from fusegen.spec.op import OpSpec

SPECS = load([builtin_specs()])

Place = tuple[str, Cell]
"""An architecture and a cell on it."""

Check = Callable[..., None]
"""A test of plans, of one or of several beside each other."""


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


SLOW = (pytest.mark.slow,)
"""In the tier of options, where that of fast tests has what stands for it."""

Form = tuple[object, ...]


def form(module: str) -> Form:
    """What passes tell modules apart by: the steps of ops, and of expressions what they read."""
    return tuple(_form(SPECS.ops[name]) for name in SPECS.modules[module].ops)


def _form(op: OpSpec) -> Form:
    if not op.pointwise:
        return tuple(step.primitive for step in (*op.forward, *op.backward))
    halves = any(tensor.halves for tensor in op.tensors.values())
    computes = {*op.pointwise.values()}.isdisjoint(op.inputs)
    return halves, computes, *(len(each) for each in (op.inputs, op.parameters, op.outputs))


@cache
def stand_for_others() -> frozenset[str]:
    """A module of every form: the first in the alphabet."""
    first: dict[Form, str] = {}
    for module in sorted(SPECS.modules):
        first.setdefault(form(module), module)
    return frozenset(first.values())


def by_form(module: str) -> Any:
    """A module as a parameter of a test; slow where another one stands for it."""
    return pytest.param(module, marks=() if module in stand_for_others() else SLOW, id=module)


def every(*columns: Iterable[Place]) -> Callable[[Check], Check]:
    """A test of a plan, run for that of each of these cells; of several, for those in one row.

    It is one test for each module on each architecture: thousands of tests take longer to be
    collected and reported than to run. A failure has a note that names the cell. Modules of one
    form stand for each other, and so do architectures: the first is in the fast tier, the others in
    that of options.

    Args:
        columns: the places of each argument; the last one names the row.
    """
    groups: dict[str, list[tuple[Place, ...]]] = {}
    for row in zip(*columns, strict=True):
        arch, cell = row[-1]
        groups.setdefault(f"{arch}-{cell.module}", []).append(row)

    places = {name: rows[0][-1] for name, rows in groups.items()}
    first, _ = next(iter(places.values()))
    standing = {
        name
        for name, (arch, cell) in places.items()
        if arch == first and cell.module in stand_for_others()
    }
    parameters = [
        pytest.param(rows, marks=() if name in standing else SLOW, id=name)
        for name, rows in groups.items()
    ]

    def decorate(check: Check) -> Check:
        @pytest.mark.parametrize("rows", parameters)
        def run(rows: list[tuple[Place, ...]]) -> None:
            for row in rows:
                try:
                    check(*(plan_of(*place) for place in row))
                except BaseException as error:
                    error.add_note(f"in the plan of {name_of(row[-1])}")
                    raise

        run.__name__, run.__doc__ = check.__name__, check.__doc__
        return run

    return decorate


def name_of(place: Place) -> str:
    """What a plan is called by."""
    arch, cell = place
    return f"{arch}-{cell}"
