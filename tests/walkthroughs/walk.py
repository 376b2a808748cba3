"""Walk-throughs: what somebody adds to fusegen, in a folder of files that lie as in the repository.

``changes.patch`` has what changes in files that are there; a README says what was to be done.
`docs/tables.py` counts both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from fusegen.build.toolchain import BuildError, find_toolchain

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARTS = ("generator", "specs", "templates")
"""Folders of the repository that fusegen runs from."""
PATCH = "changes.patch"


def has_toolchain() -> bool:
    """Whether kernels can be built here."""
    try:
        find_toolchain()
    except BuildError:
        return False
    return True


def applied(name: str, folder: Path) -> Path:
    """A copy of fusegen with a walk-through in it, below a folder; where it lies."""
    root, own = folder / "fusegen", HERE / name
    for part in PARTS:
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in PARTS:
        if (own / part).is_dir():
            _add(own / part, root / part)
    if (own / PATCH).exists():
        subprocess.run(["git", "apply", own / PATCH], cwd=root, check=True)
    return root


def _add(files: Path, folder: Path) -> None:
    """Copy files that are new; one that is there belongs into the patch."""
    for path in files.rglob("*"):
        place = folder / path.relative_to(files)
        if path.is_file():
            assert not place.exists(), place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def fusegen(root: Path, *words: str | Path) -> str:
    """Run a command of a copy of fusegen; its output, both streams."""
    env = os.environ | {"PYTHONPATH": str(root / "generator")}
    command = [sys.executable, "-m", "fusegen", *map(str, words)]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def installed(folder: Path, source: Path, version: str = "") -> Path:
    """A folder for ``PYTHONPATH`` that has a package, as an editable installation leaves it.

    Args:
        source: folder of the package's ``pyproject.toml``.
        version: that it is installed as; its own by default.
    """
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = version or project["version"]
    code = project["name"].replace("-", "_")
    about = folder / f"{code}-{version}.dist-info"
    about.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
    (about / "METADATA").write_text(metadata, encoding="utf-8")
    (group,) = project["entry-points"]
    points = "".join(f"{key} = {value}\n" for key, value in project["entry-points"][group].items())
    (about / "entry_points.txt").write_text(f"[{group}]\n{points}", encoding="utf-8")
    shutil.copytree(source / code, folder / code, ignore=shutil.ignore_patterns("__pycache__"))
    return folder
