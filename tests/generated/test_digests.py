"""A cell is known by all that decides what it computes, not by its signature."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusegen import api

from .loading import LOAD

OP = """\
edition: 2
op: twist
summary: y is made of x
dims: {{T: elements}}
inputs: {{x: {{shape: [T...]}}}}
outputs: {{y: {{shape: [T...]}}}}
pointwise: {{y: {formula}}}
"""
MODULE = "edition: 2\nmodule: twist\nclass: Twist\nop: twist\n"
SQUARE, CUBE = "relu(x) ** 2", "relu(x) ** 3 + x"


def write_specs(folder: Path, formula: str) -> Path:
    """A spec folder with the module `twist`."""
    for kind, text in (("ops", OP.format(formula=formula)), ("modules", MODULE)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / kind / "twist.yaml").write_text(text)
    return folder


def generate(
    out: Path, formula: str, *modules: str, arch: str = "cpu", namespace: str | None = None
) -> Path:
    """A bundle of `twist` and of other modules."""
    specs = write_specs(out / "specs", formula)
    api.generate(
        api.Request(
            out,
            archs=(arch,),
            modules=("twist", *modules),
            recipes=("bf16",),
            namespace=namespace,
            folders=api.Folders(specs=(specs,)),
        )
    )
    return out / arch


def run(script: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter."""
    words = [sys.executable, "-I", "-c", f"{LOAD}\nimport torch\n{script}"]
    return subprocess.run(words, capture_output=True, text=True, cwd="/", check=False)


def refusal(script: str) -> str:
    """The ImportError that a script ends in."""
    done = run(script)
    assert done.returncode == 1, done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: "), done.stderr
    return last


def test_another_formula_of_one_signature_is_refused(tmp_path: Path) -> None:
    one = generate(tmp_path / "one", SQUARE, "silu")
    two = generate(tmp_path / "two", CUBE, "silu")
    text = refusal(
        f"""
a, b = load("a", {str(one)!r}), load("b", {str(two)!r})
assert a.twist__bf16.twist(torch.tensor([2.0]).bfloat16()).item() == 4
b.twist__bf16
"""
    )
    assert str(one) in text and str(two) in text and "--namespace" in text
    # Only the cell that differs is refused, and either bundle alone is what it says.
    shared = run(
        f"""
a, b = load("a", {str(one)!r}), load("b", {str(two)!r})
assert a.twist__bf16._forward is not None
assert a.silu__bf16._forward is b.silu__bf16._forward
"""
    )
    assert shared.returncode == 0, shared.stderr
    alone = run(
        f"""
b = load("b", {str(two)!r})
assert b.twist__bf16.twist(torch.tensor([2.0]).bfloat16()).item() == 10
"""
    )
    assert alone.returncode == 0, alone.stderr


def test_another_namespace_is_the_way_out(tmp_path: Path) -> None:
    one = generate(tmp_path / "one", SQUARE)
    two = generate(tmp_path / "two", CUBE, namespace="acme")
    done = run(
        f"""
x = torch.tensor([2.0]).bfloat16()
assert load("a", {str(one)!r}).twist__bf16.twist(x).item() == 4
assert load("b", {str(two)!r}).twist__bf16.twist(x).item() == 10
"""
    )
    assert done.returncode == 0, done.stderr


def test_a_refused_cell_leaves_its_name_to_the_first(tmp_path: Path) -> None:
    one, two = generate(tmp_path / "one", SQUARE), generate(tmp_path / "two", CUBE)
    done = run(
        f"""
a, b = load("a", {str(one)!r}), load("b", {str(two)!r})
first = a.twist__bf16
for _ in range(2):
    try:
        b.twist__bf16
    except ImportError:
        pass
    else:
        raise AssertionError("it was not refused")
copy = load("c", {str(shutil.copytree(one, tmp_path / "copy"))!r})
assert copy.twist__bf16._forward is first._forward
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_neither_the_folder_nor_other_cells_change_a_digest(tmp_path: Path, arch: str) -> None:
    few = generate(tmp_path / "few", SQUARE, arch=arch)
    many = generate(tmp_path / "many", SQUARE, "silu", "linear", "quantize", arch=arch)
    name = "twist__bf16.py"
    assert (few / name).read_text() == (many / name).read_text()
    assert (few / "_library.py").read_text() == (many / "_library.py").read_text()
    other = generate(tmp_path / "other", CUBE, arch=arch)
    assert digest(few / name) != digest(other / name)


def digest(cell: Path) -> str:
    """What a cell's Python states."""
    (line,) = (line for line in cell.read_text().splitlines() if line.startswith("DIGEST = "))
    return line.split('"')[1]
