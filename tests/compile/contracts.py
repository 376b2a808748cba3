"""What compiled units of bundles have to be, by the contracts of their families."""

from __future__ import annotations

import faulthandler
from pathlib import Path

from fusegen.build.contracts import Promise, promises
from fusegen.build.library import BuildReport, build
from fusegen.ir.plan import ModulePlan
from fusegen.passes.pipeline import resolve
from fusegen.publish.selection import read_selection
from fusegen.spec.load import SpecSet


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
