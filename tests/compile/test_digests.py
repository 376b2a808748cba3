"""Libraries of a real cell: those of other sources or of an earlier plan do not load unnoticed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fusegen import cli
from fusegen.build.library import build, stale_cells
from fusegen.build.toolchain import find_toolchain
from fusegen.emit.digests import read_library

from ..generated.test_digests import CUBE, SQUARE, generate, refusal, run, write_specs

pytestmark = pytest.mark.compile

CELL = "twist__bf16"
HAS = "torch._C._dispatch_has_kernel_for_dispatch_key"


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built bundle with two cells."""
    bundle = generate(tmp_path_factory.mktemp("square"), SQUARE, "silu", arch="sm_90a")
    build(bundle, jobs=1)
    return bundle


@pytest.fixture(scope="module")
def cube(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cell of the same name and signature, with other math; built."""
    bundle = generate(tmp_path_factory.mktemp("cube"), CUBE, arch="sm_90a")
    build(bundle, jobs=1)
    return bundle


@pytest.fixture
def copy(square: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(square, tmp_path / "sm_90a"))


def edit(bundle: Path) -> Path:
    """Change a kernel as somebody may who tries something; it compiles and says so."""
    kernel = bundle / "csrc" / "kernels" / "pointwise_twist_forward.cu"
    kernel.write_text(kernel.read_text() + "// tried something\n")
    return kernel


def test_a_fresh_library_loads(square: Path) -> None:
    done = run(
        f"""
cell = load("a", {str(square)!r}).{CELL}
assert {HAS}("fusegen_sm_90a::{CELL}_forward", "CUDA")
"""
    )
    assert done.returncode == 0, done.stderr
    assert stale_cells(square) == {}


def test_a_library_built_before_generating_is_refused(square: Path, tmp_path: Path) -> None:
    bundle = generate(tmp_path, SQUARE, "silu", arch="sm_90a")
    shutil.copytree(square / "lib", bundle / "lib")
    assert run(f'load("a", {str(bundle)!r}).{CELL}').returncode == 0
    assert generate(tmp_path, CUBE, arch="sm_90a") == bundle
    text = refusal(f'load("a", {str(bundle)!r}).{CELL}')
    library = bundle / "lib" / "fusegen_sm_90a.so"
    assert f"{library} was built from another {CELL} than {bundle}" in text
    assert f"fusegen build {bundle}" in text
    assert stale_cells(bundle) == {CELL: "generated anew since"}
    # The other cell is what it was.
    assert run(f'load("a", {str(bundle)!r}).silu__bf16').returncode == 0


def test_a_cell_that_came_after_the_library_is_refused(cube: Path, tmp_path: Path) -> None:
    bundle = generate(tmp_path, CUBE, "silu", arch="sm_90a")
    shutil.copytree(cube / "lib", bundle / "lib")
    assert run(f'load("a", {str(bundle)!r}).{CELL}').returncode == 0
    assert "was built from another silu__bf16 than" in refusal(
        f'load("a", {str(bundle)!r}).silu__bf16'
    )
    assert stale_cells(bundle) == {"silu__bf16": "not in the library"}


@pytest.mark.parametrize(
    "content", [b"built from something", b"\x7fELF", b"\x7fELF" + b"\xff" * 99]
)
def test_what_is_no_library_is_refused(copy: Path, content: bytes) -> None:
    library = copy / "lib" / "fusegen_sm_90a.so"
    library.unlink()
    library.write_bytes(content)
    text = refusal(f'load("a", {str(copy)!r}).{CELL}')
    assert f"{library} does not say what it was built from" in text
    assert f"fusegen build {copy}" in text


def test_check_tells_a_library_of_other_sources(copy: Path) -> None:
    def check() -> Result:
        return CliRunner().invoke(cli.program, ["check", str(copy), "--specs", str(specs)])

    specs = write_specs(copy.parent / "specs", SQUARE)
    assert check().exit_code == cli.ExitCode.OK
    library = copy / "lib" / "fusegen_sm_90a.so"
    of_sources = read_library(library)
    assert of_sources is not None
    data = library.read_bytes()
    library.unlink()  # The other links of it stay as they are.
    library.write_bytes(data.replace(of_sources[CELL].sources.encode(), b"0" * 64))
    done = check()
    assert done.exit_code == cli.ExitCode.DRIFT
    assert f"{copy} has a library that was not built from it:\n" in done.stdout
    assert f"other sources: {CELL}\n" in done.stdout
    assert done.stdout.endswith(f"To fix it:\nfusegen build {copy}\n")
    assert "is not what its specs" not in done.stdout
    shutil.rmtree(copy / "lib")
    assert check().exit_code == cli.ExitCode.OK


def test_an_edited_kernel_loads_once_it_is_built(square: Path, copy: Path) -> None:
    edit(copy)
    assert stale_cells(copy) == {CELL: "other sources"}
    build(copy, jobs=1)
    assert stale_cells(copy) == {}
    assert run(f'load("a", {str(copy)!r}).{CELL}').returncode == 0
    # It states the digest of the one that was not edited, and is told from it all the same.
    first, second = (read_library(each / "lib" / "fusegen_sm_90a.so") for each in (square, copy))
    assert first is not None and second is not None
    assert first[CELL].cell == second[CELL].cell and first[CELL].sources != second[CELL].sources
    assert first["silu__bf16"] == second["silu__bf16"]
    text = refusal(
        f"""
load("a", {str(square)!r}).{CELL}
load("b", {str(copy)!r}).{CELL}
"""
    )
    assert str(square) in text and str(copy) in text and "--namespace" in text


def test_identical_copies_share_one_library(square: Path, copy: Path) -> None:
    done = run(
        f"""
a, b = load("a", {str(square)!r}).{CELL}, load("b", {str(copy)!r}).{CELL}
assert a._forward is b._forward
libraries = {{line.split()[-1] for line in open("/proc/self/maps") if "fusegen_sm_90a.so" in line}}
assert libraries == {{{str(square / "lib" / "fusegen_sm_90a.so")!r}}}, libraries
"""
    )
    assert done.returncode == 0, done.stderr


def test_a_copy_without_a_library_takes_the_kernels_of_one_that_has_them(
    square: Path, copy: Path
) -> None:
    shutil.rmtree(copy / "lib")
    done = run(
        f"""
a = load("a", {str(copy)!r}).{CELL}
b = load("b", {str(square)!r}).{CELL}
assert a._forward is b._forward
table = torch._C._dispatch_dump("fusegen_sm_90a::{CELL}_forward")
cuda = [line for line in table.splitlines() if line.startswith("CUDA")]
assert len(cuda) == 1 and "_cells.py" not in cuda[0] and "_library.py" not in cuda[0], table
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("built", [True, False])
def test_a_library_may_not_bring_another_cell_under_a_name(
    square: Path, cube: Path, tmp_path: Path, built: bool
) -> None:
    """Loading registers the kernels of every cell of a library, whichever cell asked for it."""
    other = Path(shutil.copytree(cube, tmp_path / "cube"))
    if not built:
        shutil.rmtree(other / "lib")
    text = refusal(
        f"""
load("a", {str(other)!r}).{CELL}
load("b", {str(square)!r}).silu__bf16
"""
    )
    assert str(other) in text and str(square) in text and CELL in text
    text = refusal(
        f"""
load("b", {str(square)!r}).silu__bf16
load("a", {str(other)!r}).{CELL}
"""
    )
    assert str(other) in text and str(square) in text and CELL in text


def test_a_library_rebuilt_under_a_running_process_is_named(square: Path, copy: Path) -> None:
    edited = Path(shutil.copytree(copy, copy.parent / "edited"))
    edit(edited)
    build(edited, jobs=1)
    new, old = (each / "lib" / "fusegen_sm_90a.so" for each in (edited, copy))
    text = refusal(
        f"""
import os, shutil
load("a", {str(copy)!r}).silu__bf16
shutil.copyfile({str(new)!r}, {str(old)!r} + ".new")
os.replace({str(old)!r} + ".new", {str(old)!r})
load("b", {str(copy)!r}).{CELL}
"""
    )
    assert f"{old} was rebuilt after it was loaded; restart Python" in text


def test_cmake_says_the_same_of_every_cell(square: Path, copy: Path, tmp_path: Path) -> None:
    tools = find_toolchain()
    library = copy / "lib" / "fusegen_sm_90a.so"
    library.unlink()
    edit(copy)
    folder = tmp_path / "cmake"
    for words in (
        [
            *("cmake", "-S", str(copy / "csrc"), "-B", str(folder), "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_CUDA_COMPILER={tools.nvcc}",
        ],
        ["cmake", "--build", str(folder), "-j", "1"],
    ):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert stale_cells(copy) == {}
    said = read_library(library)
    build(copy, jobs=1)
    assert said == read_library(library) and said is not None and len(said) == 2
