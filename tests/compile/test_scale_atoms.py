"""Where scales lie that matrix instructions read, against CuTe's own layouts, for every element."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from unit.gpu_files import load

from fusegen.build.toolchain import find_toolchain
from fusegen.publish.paths import builtin_templates

pytestmark = pytest.mark.compile

SOURCE = Path(__file__).with_name("scale_atoms.cu")
CSRC = builtin_templates() / "static" / "csrc"


def placed(csrc: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """A run of the program; it has host code alone."""
    tools, program = find_toolchain(), folder / "scale_atoms"
    includes = [f"-I{csrc}", f"-I{load('cutlass_headers').cutlass_include()}"]
    command = [str(tools.nvcc), "-std=c++17", "-O1", "--expt-relaxed-constexpr", *includes]
    subprocess.run([*command, str(SOURCE), "-o", str(program)], check=True, capture_output=True)
    return subprocess.run([program], capture_output=True, text=True, check=False)


def test_every_place_is_cutes(tmp_path: Path) -> None:
    done = placed(CSRC, tmp_path)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) > 1_000_000


def test_another_place_is_noticed(tmp_path: Path) -> None:
    """Rows of a word in the order of rows, as one might think."""
    header = CSRC / "fusegen" / "quantize" / "scale_atoms.cuh"
    changed = tmp_path / "fusegen" / "quantize" / header.name
    changed.parent.mkdir(parents=True)
    (changed.parent / "places.cuh").write_text((header.parent / "places.cuh").read_text())
    before = "row % 32 * kAtomRowBytes + row / 32 * kAtomBlocks"
    text = header.read_text()
    assert before in text
    changed.write_text(text.replace(before, "row * kAtomBlocks"))
    done = placed(tmp_path, tmp_path)
    assert done.returncode == 1 and "lies at" in done.stdout
