"""Bundles in other interpreters: how one is loaded by path there, and its own tests run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LOAD = """
import importlib.util, sys
def load(name, folder):
    spec = importlib.util.spec_from_file_location(
        name, f"{folder}/__init__.py", submodule_search_locations=[folder])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
"""


def run_generated_tests(bundle: Path) -> None:
    """The tests of a bundle pass, and none is skipped."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*words, str(bundle / "tests")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout and " skipped" not in run.stdout
