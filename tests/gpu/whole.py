"""Every module that ships, under every recipe, of an architecture of which a part is committed.

    python tests/gpu/ledger.py build "sm_89 whole"

For a GPU that nobody had, the repository keeps files of a few cells and digests of the others.  Its
first run is of all of them: the tests of this folder are of modules that the few need not have.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import bundles
import further
import matrix

from fusegen.ir.naming import Cell


def cells(folder: Path) -> tuple[Cell, ...]:
    """All cells without options of a committed bundle: those with files, and those with digests."""
    found = matrix.read_cells((folder / "README.md").read_text("utf-8"))
    found += matrix.read_manifest((folder / bundles.MANIFEST).read_text("utf-8"))
    supported = (each for each in found if each.status != "unsupported")
    return tuple(sorted({Cell(each.module, each.recipe) for each in supported}))


def generate(archs: Iterable[str]) -> None:
    """Bring the bundles of these architectures in `build/whole` up to the specs.

    Raises:
        LedgerError: somebody edited one.
    """
    wanted = {arch: cells(bundles.GENERATED / arch) for arch in archs}
    if wanted:
        further.generate(bundles.BUILD / bundles.WHOLE, wanted, ())
