"""The bundle that has the kernels of sm_100a with tensor cores in software: it compiles for Hopper.

It is there to be run on a GPU, by `tests/gpu`; `test_tcgen05_on_cpu` has faults that are noticed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tensor_cores.generate import ARCH, cells, generate

from fusegen.build.toolchain import find_toolchain

pytestmark = pytest.mark.compile

FAMILIES = ("gemm_tcgen05", "gemm_fp8", "gemm_mx", "gemm_pow2", "gemm_nv", "gemm_decoded")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of grouped layers, in which each of these families has units; below a path with blanks."""
    wanted = (each for each in cells() if each.module == "grouped_linear")
    return generate(tmp_path_factory.mktemp("twin of sm_100a"), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_units_compile_for_hopper(family: str, bundle: Path) -> None:
    """Machine code of a unit, with a kernel of each type, and the host's code that launches it."""
    assert bundle.name == ARCH
    tools = find_toolchain()
    unit = min((bundle / "csrc" / "kernels").glob(f"{family}_*wgrad*.cu"))
    assert '#include "fusegen/mainloop/tcgen05_twin.cuh"' in unit.read_text("utf-8")
    includes = [f"-I{bundle / 'csrc'}"]
    flags = ["-std=c++17", "-O1", "-DNDEBUG", "--expt-relaxed-constexpr", "-arch=sm_90a"]
    out = bundle.parent / f"{family}.o"
    command = [str(tools.nvcc), *flags, *includes, "-c", str(unit), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
    code = out.read_bytes()
    assert all(element in code for element in (b"13__nv_bfloat16", b"6__half"))
