"""Finding compilers, headers and PyTorch: every place, every missing piece, every old version."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from fusegen.build import toolchain
from fusegen.build.toolchain import (
    INSTALL_CUDA,
    INSTALL_TORCH,
    BuildError,
    Origin,
    Toolchain,
    find_toolchain,
)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def write_toolkit(root: Path, version: str = "13.0", library: str = "lib64") -> Path:
    """A CUDA toolkit whose nvcc answers the two questions that are asked of it."""
    for name in ("include/cuda_runtime_api.h", f"{library}/libcudart_static.a"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    script(
        root / "bin" / "nvcc",
        f"""case "$1" in
--version) echo "Cuda compilation tools, release {version}, V{version}.1";;
--dryrun) echo '#$ TOP={root}/bin/..' >&2; echo '#$ INCLUDES="-I{root}/bin/../include"  ' >&2;;
*) exit 1;;
esac""",
    )
    return root


@dataclasses.dataclass(frozen=True)
class Machine:
    """A made-up machine: nothing of the real one can be found."""

    root: Path

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": str(self.root / "bin")}

    def find(self, **env: str) -> Toolchain:
        return find_toolchain(self.env | env)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A host compiler, a CUDA toolkit in the system's place, torch as a package."""
    packages = tmp_path / "packages"
    script(tmp_path / "bin" / "g++", "echo made-up g++ 12")
    write_toolkit(tmp_path / "system")
    for path in (
        packages / "torch" / "include" / "torch" / "csrc" / "stable" / "library.h",
        packages / "torch" / "lib" / "libtorch.so",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    # Importing it would show: located packages are never executed.
    (packages / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (packages / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\n")
    monkeypatch.setattr(sys, "path", [str(packages)])
    for name in ("torch", "nvidia"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(toolchain, "SYSTEM_ROOT", tmp_path / "system")
    monkeypatch.setattr(toolchain, "SYSTEM_HOST_COMPILER", tmp_path / "bin" / "g++")
    return Machine(tmp_path)


def remove(path: Path) -> None:
    for entry in sorted(path.rglob("*"), reverse=True):
        entry.rmdir() if entry.is_dir() else entry.unlink()
    path.rmdir()


def test_search_order(machine: Machine) -> None:
    for name in ("home", "path", "onpath"):
        write_toolkit(machine.root / name)
    on_path = f"{machine.root}/onpath/bin:{machine.root}/bin"
    home, path = str(machine.root / "home"), str(machine.root / "path")
    write_toolkit(machine.root / "packages" / "nvidia" / "cu13", library="lib")
    found = machine.find(CUDA_HOME=home, CUDA_PATH=path, PATH=on_path)
    assert (found.origin, found.nvcc) == (Origin.CUDA_HOME, machine.root / "home/bin/nvcc")
    assert machine.find(CUDA_PATH=path, PATH=on_path).origin is Origin.CUDA_PATH
    assert machine.find(PATH=on_path).origin is Origin.PATH
    assert machine.find().origin is Origin.SYSTEM
    remove(machine.root / "system")
    pip = machine.find()
    assert pip.origin is Origin.PIP
    assert pip.cuda_library == machine.root / "packages/nvidia/cu13/lib"
    assert pip.cuda_include == (machine.root / "packages/nvidia/cu13/include",)


def test_what_was_found_is_told(machine: Machine) -> None:
    found = machine.find()
    assert found.version == (13, 0)
    assert found.torch.version == "2.13.0+cpu"
    assert found.describe() == (
        f"nvcc 13.0 from /usr/local/cuda ({machine.root}/system/bin/nvcc), "
        f"host compiler {machine.root}/bin/g++, torch 2.13.0+cpu"
    )
    assert "release 13.0" in found.identity
    assert "made-up g++ 12" in found.identity
    assert str(machine.root) not in found.identity


def test_libcudacxx_folder_is_included(machine: Machine) -> None:
    (machine.root / "system" / "include" / "cccl").mkdir()
    include = machine.root / "system" / "include"
    assert machine.find().cuda_include == (include, include / "cccl")


def test_missing_nvcc_names_the_command(machine: Machine) -> None:
    remove(machine.root / "system")
    with pytest.raises(BuildError, match="nvcc was not found") as caught:
        machine.find()
    assert caught.value.remedy == INSTALL_CUDA
    assert str(caught.value).endswith(f"run: {INSTALL_CUDA}")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("CUDA_HOME", "/nowhere", "CUDA_HOME is /nowhere, but /nowhere/bin/nvcc does not"),
        ("CXX", "no-such-compiler", "CXX is no-such-compiler"),
    ],
)
def test_a_variable_that_is_set_is_never_passed_over(
    machine: Machine, variable: str, value: str, message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        machine.find(**{variable: value})


def test_incomplete_toolkit(machine: Machine) -> None:
    (machine.root / "system" / "lib64" / "libcudart_static.a").unlink()
    with pytest.raises(BuildError, match="has no static runtime") as caught:
        machine.find()
    assert caught.value.remedy == INSTALL_CUDA


def test_missing_and_old_torch(machine: Machine) -> None:
    version = machine.root / "packages" / "torch" / "version.py"
    version.write_text("__version__ = '2.9.1+cu130'\n")
    with pytest.raises(BuildError, match=r"torch 2\.11 or newer is needed.*but torch 2\.9\.1"):
        machine.find()
    remove(machine.root / "packages" / "torch" / "include")
    with pytest.raises(BuildError, match="no headers of the stable ABI"):
        machine.find()
    remove(machine.root / "packages" / "torch")
    with pytest.raises(BuildError, match="torch is not installed") as caught:
        machine.find()
    assert caught.value.remedy == INSTALL_TORCH


@pytest.mark.parametrize(
    ("code", "version", "least"),
    [("sm_90a", "12.2", "12.3"), ("sm_100a", "12.6", "12.8"), ("sm_89", "11.7", "11.8")],
)
def test_old_nvcc_is_refused(machine: Machine, code: str, version: str, least: str) -> None:
    write_toolkit(machine.root / "old", version)
    old = machine.find(CUDA_HOME=str(machine.root / "old"))
    with pytest.raises(BuildError) as caught:
        old.require(code)
    assert f"{code} needs nvcc {least} or newer, but nvcc {version} was found" in str(caught.value)
    machine.find().require(code)


def test_unknown_architecture_is_left_to_nvcc(machine: Machine) -> None:
    write_toolkit(machine.root / "old", "11.0")
    old = machine.find(CUDA_HOME=str(machine.root / "old"))
    assert old.require("sm_130a") is None


def test_nvcc_that_fails_is_shown(machine: Machine) -> None:
    script(machine.root / "system" / "bin" / "nvcc", "echo broken; exit 3")
    with pytest.raises(BuildError, match=r"--version` failed with exit code 3:\nbroken"):
        machine.find()
