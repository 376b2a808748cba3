"""What the README of a bundle shows runs, as it stands there."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def project(bundle: Path, tmp_path: Path) -> Path:
    """A repository with the bundle as `experts`, and a library in it, which git ignores."""
    unwanted = shutil.ignore_patterns("lib", "__pycache__")
    experts = shutil.copytree(bundle, tmp_path / "project" / "experts", ignore=unwanted)
    (experts / "lib").mkdir()
    (experts / "lib" / "experts.so").touch()
    (tmp_path / "project" / ".gitignore").write_text("lib/\n", "utf-8")
    return experts.parent


def block(project: Path, language: str) -> str:
    """The one block of a language that the README has."""
    found = FENCED.findall((project / "experts" / "README.md").read_text("utf-8"))
    (text,) = (text for each, text in found if each == language)
    return str(text)


def run(*words: str | Path, cwd: Path) -> None:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def use(project: Path, place: Path) -> None:
    """The example runs where `experts` lies in a folder."""
    (place / "use.py").write_text(block(project, "python"), "utf-8")
    run(sys.executable, "use.py", cwd=place)


def check_contents(names: Sequence[str], *, compiled: bool) -> None:
    """What is shipped: all that runs, and nothing that only develops it."""
    assert {"experts/__init__.py", "experts/py.typed", "experts/LICENSE"} <= {*names}
    assert not [name for name in names if name.startswith(("experts/tests/", "experts/csrc/"))]
    assert ("experts/lib/experts.so" in names) or not compiled


def test_the_example_runs(project: Path) -> None:
    use(project, project)


def test_a_wheel_of_scikit_build_core(project: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("scikit-build-core is not installed")
    (project / "pyproject.toml").write_text(block(project, "toml"), "utf-8")
    build = "from scikit_build_core.build import build_wheel; build_wheel('wheels')"
    run(sys.executable, "-c", build, cwd=project)
    (wheel,) = (project / "wheels").glob("*.whl")
    compiled = (project / "experts" / "csrc").exists()
    assert ("-py3-none-" if compiled else "-py3-none-any") in wheel.name
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as file:
        check_contents(file.namelist(), compiled=compiled)
        file.extractall(installed)
    use(project, installed)


def test_an_install_of_cmake(project: Path, tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    (project / "CMakeLists.txt").write_text(block(project, "cmake"), "utf-8")
    installed = tmp_path / "installed"
    run(cmake, "-S", ".", "-B", "build", cwd=project)
    run(cmake, "--install", "build", "--prefix", installed, cwd=project)
    found = [path.relative_to(installed).as_posix() for path in installed.rglob("*")]
    check_contents(found, compiled=True)
    use(project, installed)
