"""Bundles by path, here and in other interpreters, and the tests that they bring."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from fusegen import __version__, api
from fusegen.bundle import render_bundle
from fusegen.naming import Cell
from fusegen.polish import polish
from fusegen.publish import publish
from fusegen.resolve import resolve
from fusegen.selection import Selection
from fusegen.sources import Inputs, derivations

LOAD = """
import importlib.util, sys
def load(name, folder):
    spec = importlib.util.spec_from_file_location(
        name, f"{folder}/__init__.py", submodule_search_locations=[folder])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
"""


def write_cells(folder: Path, arch: str, cells: Iterable[Cell], namespace: str) -> Path:
    """A bundle of any cells below a folder, as the command would leave it after one call for each
    choice of options: every call renders anew what the bundle holds."""
    specs, selection = api.load_specs(), Selection(arch, namespace, tuple(sorted(cells)))
    resolved = resolve(specs, arch, selection.cells, derivations())
    assert not resolved.unsupported, resolved.unsupported[0]
    renderer = Inputs().renderer(())
    files = render_bundle(resolved.modules, specs.archs[arch], selection.op_namespace, renderer)
    publish(polish(files), folder / arch, selection.to_json(), __version__)
    return folder / arch


def load_bundle(name: str, folder: Path) -> str:
    """Import a bundle under a name, which comes back: its cells are submodules of that."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return name


def run_generated_tests(bundle: Path) -> None:
    """The tests of a bundle pass, and none is skipped."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*words, str(bundle / "tests")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout and " skipped" not in run.stdout
