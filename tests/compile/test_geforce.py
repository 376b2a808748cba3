"""Conversions to E2M1 and E8M0 in hardware, where it has them; contracts say the rest."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fusegen.build.sass import cuobjdump
from fusegen.build.toolchain import find_toolchain
from fusegen.publish.paths import builtin_templates

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("code", "native"), [("120a", True), ("100a", True), ("90a", False)])
def test_conversions_are_the_hardwares_where_it_has_them(
    code: str, native: bool, tmp_path: Path
) -> None:
    """The program that compares both of them, for every float, once there is such a GPU."""
    tools = find_toolchain()
    program = ROOT / "tests" / "gpu" / "conversions.cu"
    flags = ["-std=c++17", "-fmad=false", "-cubin", f"-I{builtin_templates() / 'static' / 'csrc'}"]
    target = ["-gencode", f"arch=compute_{code},code=sm_{code}"]
    command = [str(tools.nvcc), *flags, *target, str(program), "-o", str(tmp_path / "out.cubin")]
    subprocess.run(command, check=True, capture_output=True)
    sass = cuobjdump(tmp_path, "--dump-sass", "out.cubin")
    for each in (r"F2FP\.SATFINITE\.E2M1", r"F2FP\.SATFINITE\.E8\."):
        assert bool(re.search(each, sass)) == native
