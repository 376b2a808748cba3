"""Kernels of tensor memory assemble for the family of GPUs, too: one cubin for B200 and B300.

`sm_100f` has all that they use but for what is B200's alone; a spec of it is a copy of `sm_100a`'s
with another `gencode`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fusegen.build.compilation import KERNEL_FLAGS, KERNEL_STRICT
from fusegen.build.toolchain import find_toolchain

pytestmark = pytest.mark.compile

CSRC = Path(__file__).parents[2] / "generated" / "sm_100a" / "csrc"
UNITS = (
    "gemm_tcgen05_fprop_umma_128x128*",
    "gemm_pow2_tcgen05_wgrad_*_umma_256x256*_2",
    "gemm_mx_tcgen05_dgrad_*_umma_256x256*_2",
    "gemm_nv_tcgen05_wgrad_*_umma_128x256*",
)
"""Kinds of operands and of GEMMs, on one SM and on pairs."""


@pytest.mark.parametrize("pattern", UNITS)
def test_a_unit_assembles(pattern: str, tmp_path: Path) -> None:
    tools = find_toolchain()
    unit = min((CSRC / "kernels").glob(f"{pattern}.cu"))
    code = "-gencode=arch=compute_100f,code=sm_100f"
    flags = [*KERNEL_FLAGS, *KERNEL_STRICT, code, f"-ccbin={tools.host_compiler}"]
    includes = [f"-I{CSRC}"]
    command = [str(tools.nvcc), *flags, *includes, "-cubin", str(unit)]
    out = tmp_path / "unit.cubin"
    done = subprocess.run([*command, "-o", str(out)], check=True, capture_output=True, text=True)
    spilled = [line for line in done.stderr.splitlines() if "spill stores" in line]
    assert out.stat().st_size and spilled
    assert all(" 0 bytes spill stores" in line for line in spilled)
