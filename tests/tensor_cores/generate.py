"""The bundle of sm_100a for an H200, with tensor cores in software; all else is the real code.

    python tests/tensor_cores/generate.py OUT
    fusegen build OUT/sm_90a_tcgen05
    FUSEGEN_TEST_BUNDLE=OUT/sm_90a_tcgen05 pytest tests/gpu

Nothing is measured by it: it says whether results are right.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fusegen.ir.naming import Cell
from fusegen.spec.points import point_of

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "gpu"))

import further
import twin_cells
from walkthroughs.walk import installed

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ARCH = "sm_90a_tcgen05"
RECIPES = ROOT / "tests" / "numerics" / "specs"
DECODED = "fp8_free_1x64"
"""One that no instruction reads, in a folder of specs, beside all that are shipped."""
_LEAST_COLUMNS = (256, 128)
"""Of results that the first and the second configuration of a kind are for."""


def cells() -> tuple[Cell, ...]:
    """All of the bundle."""
    return (*twin_cells.cells(), *(Cell(module, DECODED) for module in twin_cells.MODULES))


def twin_of(arch: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of an architecture whose GEMMs are those of another one, in software.

    Args:
        arch: spec of ``sm_100a``, as its YAML has it.
    """
    kernels = {
        name: _in_software(name, family) if "tcgen05" in name else family
        for name, family in arch["kernels"].items()
    }
    changed = {
        "arch": ARCH,
        "summary": "Hopper, with the kernels of sm_100a and tensor cores in software",
        "gencode": "arch=compute_90a,code=sm_90a",
        "kernels": kernels,
    }
    return {**arch, **changed}


def _in_software(name: str, family: Mapping[str, Any]) -> dict[str, Any]:
    """A family of the twin, whose every configuration is met by shapes that are small enough."""
    kinds = {}
    for kind, spec in family["kinds"].items():
        names = [point_of(point).name for point in spec["points"]]
        kinds[kind] = {**spec, "select": _by_columns(names)}
    return {**family, "template": f"{family.get('template', name)}_twin", "kinds": kinds}


def _by_columns(points: Sequence[str]) -> list[dict[str, Any]]:
    """Rules by which the first ones have the widest results, and the last one has the rest."""
    *wider, last = points
    least = zip(wider, _LEAST_COLUMNS, strict=True)
    return [{"when": {"columns": {"ge": n}}, "use": p} for p, n in least] + [{"use": last}]


def write_spec(folder: Path) -> None:
    """Write the spec of the twin below a folder of specs."""
    shipped = (ROOT / "specs" / "archs" / "sm_100a.yaml").read_text("utf-8")
    path = folder / "archs" / f"{ARCH}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(twin_of(yaml.safe_load(shipped)), sort_keys=False), "utf-8")


def generate(out: Path, wanted: Iterable[Cell]) -> Path:
    """The bundle of some cells below a folder; where it lies.

    A registry of families is complete once fusegen is imported, so that processes of their own
    generate it, which find the extension installed.

    Raises:
        CalledProcessError: it could not be generated; the command has said why.
    """
    packages, specs = out / "packages", out / f"{ARCH}_specs"
    shutil.rmtree(packages, ignore_errors=True)
    installed(packages, HERE)
    write_spec(specs)
    paths = (ROOT / "generator", packages, os.environ.get("PYTHONPATH"))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(each) for each in paths if each)}
    command = [sys.executable, "-m", "fusegen", "generate", "--out", str(out)]
    command += [word for folder in (specs, RECIPES) for word in ("--specs", str(folder))]
    targets = further.write_targets(specs, ARCH, {ARCH: wanted})
    command += [word for target in targets for word in ("--target", target)]
    subprocess.run(command, env=env, check=True)
    return out / ARCH


if __name__ == "__main__":
    print(generate(Path(sys.argv[1]).resolve(), cells()))
