"""Bundles by path, here and in other interpreters, and the tests that they bring."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiers import first_with_each_option
from unit.gpu_files import load

from fusegen import __version__, api
from fusegen.ir.naming import Cell
from fusegen.publish.lock import LOCK_NAME, Lock, dump_lock
from fusegen.publish.selection import Selection
from fusegen.spec.serving import ALL, all_archs
from fusegen.tuning.variants import publish_cells

LOAD = """
import importlib.util, sys
def load(name, folder):
    spec = importlib.util.spec_from_file_location(
        name, f"{folder}/__init__.py", submodule_search_locations=[folder])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
"""


def load_cells(name: str, folder: Path, cells: Iterable[Cell]) -> str:
    """A CPU bundle of any cells, written below a folder and imported under a name."""
    return load_bundle(f"{name}_bundle", write_cells(name, "cpu", folder, cells))


def write_cells(name: str, arch: str, folder: Path, cells: Iterable[Cell]) -> Path:
    """A bundle of any cells, all of which can be made, below a folder."""
    lacking = publish_cells(api.load_specs(), arch, cells, name, folder / arch)
    assert not lacking, lacking[0]
    return folder / arch


def cells_of_every_option(folder: Path) -> tuple[Cell, ...]:
    """The first CPU cell, sorted, that has an option, for every option; specs go to a folder."""
    evidence = load("evidence")
    evidence.write_further_specs(folder)
    specs = api.load_specs(api.Folders(specs=(folder,)))
    planned = {str(cell): cell for cell in evidence.cells(specs, "cpu")}
    chosen = first_with_each_option(planned)
    assert set(chosen) == set(evidence.option_words())
    return tuple(planned[name] for name in sorted(set(chosen.values())))


def load_bundle(name: str, folder: Path) -> str:
    """Import a bundle under a name, which comes back: its cells are submodules of that."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return name


def class_of(bundle: str, cell: str) -> Any:
    """The module class of a cell of an imported bundle."""
    module = importlib.import_module(f"{bundle}.{cell}")
    (found,) = (
        each
        for each in vars(module).values()
        if isinstance(each, type)
        and each.__module__ == module.__name__
        and hasattr(each, "describe")
    )
    return found


def run_generated_tests(bundle: Path, *chosen: str) -> int:
    """The tests of a bundle, or those that pytest is told to choose, pass, and none is skipped.

    Returns:
        how many there are.
    """
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    run = subprocess.run(
        [*words, str(bundle / "tests")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and " skipped" not in run.stdout
    return int(passed[1])


def write_fat(namespace: str, folder: Path, cells: Iterable[Cell]) -> Path:
    """A bundle for all architectures with any cells, below a folder."""
    archs = all_archs(api.load_specs())
    selection = Selection(ALL, namespace, cells=tuple(sorted(cells)), archs=archs)
    place = folder / ALL
    place.mkdir(parents=True)
    text = dump_lock(Lock(__version__, selection.to_json(), {}))
    (place / LOCK_NAME).write_text(text, encoding="utf-8")
    (*_, done) = api.generate(api.Request(folder)).bundles
    assert not done.unsupported, done.unsupported[0]
    return place
