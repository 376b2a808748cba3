"""Conversions in hardware give what those in software give, for every float."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from fusegen.build.toolchain import BuildError, find_toolchain

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "templates" / "static" / "csrc"


def test_every_float(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if major < 10:
        pytest.skip("no conversions of E2M1 and E8M0 in hardware")
    try:
        tools = find_toolchain()
    except BuildError as missing:
        pytest.skip(str(missing))
    code, program = f"{major}{minor}a", tmp_path / "conversions"
    target = ["-gencode", f"arch=compute_{code},code=sm_{code}", "-fmad=false", f"-I{CSRC}"]
    command = [str(tools.nvcc), "-std=c++17", *target, str(HERE / "conversions.cu")]
    subprocess.run([*command, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
