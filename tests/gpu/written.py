"""Cells for the GPU run alone: what users may write themselves, as tests of the CPU write it.

    python tests/gpu/written.py OUT ARCH...   with the package of the extension on PYTHONPATH

Chains of forms that no shipped module has, recipes whose scalings no matrix instruction reads and
the kind of step of an installed extension are generated into `build/written/<arch>`, a bundle like
any other, which is tested and sanitized beside the committed one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import bundles
import further
from entries import LedgerError

from fusegen import api
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.spec.load import SpecSet
from fusegen.steps import is_gemm

TESTS = bundles.ROOT / "tests"
GENERATOR = bundles.ROOT / "generator"

CHAINS = TESTS / "chains" / "specs"
OF_CHAINS = ("bf16", "fp8_block", "nvfp4")
"""Of chains: without scales, with those that GEMMs read, and with those that are decoded before.

The first is what one without GEMMs has; the others would change nothing in it.
"""

RECIPES = (TESTS / "numerics" / "specs", TESTS / "walkthroughs" / "recipe_1x64" / "specs")
OF_RECIPES = ("quantize", "linear", "grouped_linear", "grouped_mlp")
"""Modules under every recipe of those folders."""

EXTENSION = TESTS / "walkthroughs" / "log_sum_exp"
OF_EXTENSION = Cell("log_sum_exp", "bf16")


def cells(specs: SpecSet, arch: str) -> tuple[Cell, ...]:
    """All cells of these folders that can be made on an architecture.

    Args:
        specs: the built-in ones, those of the folders and those of the extension.

    Raises:
        LedgerError: a module or a recipe of which none can be made.
    """
    found: list[Cell] = []
    for name in _named(CHAINS, "modules"):
        plain, *scaled = (Cell(name, recipe) for recipe in OF_CHAINS)
        multiplies = _multiplies(further.plan_of(specs, arch, plain))
        found += _made(specs, arch, name, [plain, *(scaled if multiplies else [])])
    for name in (name for folder in RECIPES for name in _named(folder, "recipes")):
        found += _made(specs, arch, name, [Cell(module, name) for module in OF_RECIPES])
    return (*found, *_made(specs, arch, OF_EXTENSION.module, [OF_EXTENSION]))


def _named(folder: Path, kind: str) -> Iterator[str]:
    return (path.stem for path in sorted((folder / kind).glob("*.yaml")))


def _made(specs: SpecSet, arch: str, name: str, asked: Sequence[Cell]) -> list[Cell]:
    """Those that have a plan."""
    made = [cell for cell in asked if further.plan_of(specs, arch, cell)]
    if not made:
        raise LedgerError(f"{name}: no cell of it can be made on {arch}")
    return made


def _multiplies(plan: ModulePlan | None) -> bool:
    return plan is not None and any(map(is_gemm, plan.forward.steps))


def generate(archs: Sequence[str]) -> None:
    """Bring the bundles of these architectures in `build/written` up to the specs.

    The registry of steps is complete once fusegen is imported, so that a process of its own
    generates them, which finds the extension installed.

    Raises:
        LedgerError: somebody edited one, or something cannot be planned; see `cells`.
    """
    sys.path.append(str(TESTS))
    from walkthroughs.walk import installed

    out = bundles.BUILD / bundles.WRITTEN
    packages = out / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    installed(packages, EXTENSION)
    paths = (GENERATOR, packages, os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(str(each) for each in paths if each)
    words = [sys.executable, str(Path(__file__)), str(out), *archs]
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LedgerError(f"{bundles.WRITTEN}: {done.stderr.strip()}")


def main(out: Path, archs: Sequence[str]) -> int:
    """Generate the bundles in this process; returns the exit code."""
    folders = (CHAINS, *RECIPES)
    shutil.rmtree(further.specs_of(out), ignore_errors=True)
    try:
        specs = api.load_specs(api.Folders(specs=folders))
        further.generate(out, {arch: cells(specs, arch) for arch in archs}, folders)
    except LedgerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
