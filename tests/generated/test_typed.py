"""Bundles in a project of somebody else's, under type checkers as they come: no configuration."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusegen.ir.naming import Cell

from .loading import cells_of_every_option, write_cells, write_fat

CPU = Path(__file__).parents[2] / "generated" / "cpu"
QUANTIZE = tuple(Cell("quantize", recipe) for recipe in ("fp8_delayed", "mxfp8", "nvfp4"))
GATHERED = Cell("mlp_swiglu", "mxfp8", ("quantized_input", "tensor_sequence_parallel"))

USE = """\
import torch
from experts.grouped_mlp__bf16 import GroupedMLP

layer = GroupedMLP(num_groups=4, hidden=32, intermediate=64)
"""

RIGHT = """\
from typing import assert_type

x, probs = torch.randn(8, 32).bfloat16(), torch.rand(8)
assert_type(layer(x, torch.tensor([2, 2, 2, 2]), probs=probs), torch.Tensor)
assert_type(layer.fc1.weight, torch.nn.Parameter)
assert_type(layer.fc2.bias, torch.nn.Parameter | None)
"""

WRONG = """\
layer(torch.randn(8, 32))
layer.fc1.weight.shape + "4"
"""

CHECKERS = {
    "mypy": ("--config-file=", "--cache-dir=.cache"),
    "pyright": ("--pythonpath", sys.executable),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with bundles: the committed one, one with every option, and a fat one."""
    root = tmp_path_factory.mktemp("project")
    unwanted = shutil.ignore_patterns("lib", "__pycache__")
    shutil.copytree(CPU, root / "experts", ignore=unwanted)
    cells = (*cells_of_every_option(tmp_path_factory.mktemp("specs")), *QUANTIZE, GATHERED)
    write_cells("typed", "cpu", root, cells).rename(root / "options")
    fat = (Cell("grouped_mlp", "fp8_delayed", ("cached_weights",)), QUANTIZE[0])
    write_fat("typed_fat", root, fat).rename(root / "fat")
    (root / "right.py").write_text(USE + RIGHT, "utf-8")
    (root / "wrong.py").write_text(USE + WRONG, "utf-8")
    return root


def errors(checker: str, project: Path, *paths: str) -> list[str]:
    """Lines that a checker finds fault with, in a project that says nothing of checkers."""
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    words = [sys.executable, "-m", checker, *CHECKERS[checker], *paths]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if "error:" in line]
    assert done.returncode == bool(found), done.stdout + done.stderr
    return found


@pytest.mark.parametrize("checker", CHECKERS)
def test_bundles_have_no_errors(project: Path, checker: str) -> None:
    assert errors(checker, project, "experts", "options", "fat", "right.py") == []


@pytest.mark.parametrize("checker", CHECKERS)
def test_wrong_calls_are_found(project: Path, checker: str) -> None:
    found = errors(checker, project, "wrong.py")
    lines = {int(line.split("wrong.py:")[1].split(":")[0]) for line in found}
    first = USE.count("\n") + 1
    assert lines == {first, first + 1}
