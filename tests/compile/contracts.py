"""Compiled units held against the contracts of their families, for tests and for `compile_all`."""

from __future__ import annotations

import faulthandler
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from fusegen.build.contracts import Promise, promises
from fusegen.build.library import BuildReport, build
from fusegen.build.objcache import Report
from fusegen.build.sass import opcodes
from fusegen.ir.plan import ModulePlan
from fusegen.passes.pipeline import resolve
from fusegen.publish.selection import read_selection
from fusegen.spec.load import SpecSet

OF_BUNDLE = {"digests.cpp"}
"""Units of no cell."""


def compiled(bundle: Path) -> BuildReport:
    """Build a bundle, without the limit that pytest sets each test.

    Without a cache of objects the largest take half an hour, and compilers do not stand still.
    """
    faulthandler.cancel_dump_traceback_later()
    return build(bundle)


def plans_of(bundle: Path, specs: SpecSet) -> tuple[ModulePlan, ...]:
    """Plans of all cells of a bundle, as its lock names them."""
    selection = read_selection(bundle)
    assert selection is not None, bundle
    return resolve(specs, selection.arch, selection.cells).modules


def promises_of(bundle: Path, specs: SpecSet) -> dict[str, Promise]:
    """What each unit of a bundle has to be."""
    selection = read_selection(bundle)
    assert selection is not None, bundle
    return promises(plans_of(bundle, specs), specs.archs[selection.arch])


def broken(
    built: BuildReport, promised: Mapping[str, Promise], without: Collection[str] = ()
) -> list[str]:
    """What of the units of a library is otherwise than its contract says, one line each.

    Args:
        built: the library.
        promised: by unit.
        without: units that were looked at elsewhere.
    """
    reports = {unit.name: unit.report for unit in built.units if unit.name not in OF_BUNDLE}
    assert {*reports} == {*promised}, "contracts are of other units than were compiled"
    chosen = {name: report for name, report in reports.items() if name not in without}
    return broken_by(chosen, promised, built.library)


def broken_by(
    reports: Mapping[str, Report], promised: Mapping[str, Promise], binary: Path
) -> list[str]:
    """The same of units whose machine code lies in one file."""
    code = opcodes(binary, _kernels(reports[name] for name in reports if _reads(promised[name])))
    return [
        f"{name}: {what}"
        for name, report in reports.items()
        for what in promised[name].breaches(report, code)
    ]


def _reads(promise: Promise) -> bool:
    return promise.contract.reads_code


def _kernels(reports: Iterable[Report]) -> list[str]:
    return [kernel.name for report in reports for kernel in report.kernels]
