"""sm_120a: GEMMs whose scales the instruction reads, conversions in hardware, no local memory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fusegen import api
from fusegen.build.library import BuildReport
from fusegen.build.sass import cuobjdump, opcodes
from fusegen.build.toolchain import find_toolchain
from fusegen.publish.paths import builtin_templates

from .contracts import compiled
from .test_bundles import kernel_units

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
MOST_SHARED = 99 << 10  # bytes of a CTA
USES = {
    "gemm_mx_mma": r"QMMA\.SF\.16832\.F32\.E4M3\.E4M3\.E8",
    "gemm_pow2_mma": r"QMMA\.SF\.16832\.F32\.E4M3\.E4M3\.E8",
    "gemm_nv_mma": r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X",
}
"""The instruction of each family's kernels."""
COPIES = (r"LDGSTS\.\S*128", "LDSM")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    """Every quantise and GEMM kernel of a layer of experts, whose stores differ."""
    out = tmp_path_factory.mktemp("geforce")
    request = api.Request(
        out=out,
        archs=("sm_120a",),
        modules=("grouped_linear",),
        recipes=("mxfp8", "nvfp4", "fp8_block"),
    )
    api.generate(request)
    return compiled(out / "sm_120a")


def test_no_warnings_and_no_spills(built: BuildReport) -> None:
    names = [unit.name for unit in kernel_units(built)]
    for family in USES:
        assert sum(f"/{family}_" in name for name in names) == 3, names
    for unit in built.units:
        assert unit.report.warnings == (), unit.name
        for kernel in unit.report.kernels:
            found = (kernel.spill_stores, kernel.spill_loads, kernel.stack)
            assert found == (0, 0, 0), (unit.name, kernel.name)
            assert kernel.shared <= MOST_SHARED, (unit.name, kernel.name)


def test_matrix_instructions(built: BuildReport) -> None:
    kernels = [kernel.name for unit in built.units for kernel in unit.report.kernels]
    code = opcodes(built.library, kernels)
    functions = {name: "\n".join(sorted(words)) for name, words in code.items()}
    gemms = [text for name, text in functions.items() if "ragged_scaled_mma_gemm" in name]
    assert len(gemms) == 18  # three kinds of three recipes in two types
    for text in gemms:
        assert sum(bool(re.search(rf"\b{each}", text)) for each in {*USES.values()}) == 1
        assert all(re.search(rf"\b{each}", text) for each in COPIES)
        assert not re.search(r"\b(HMMA|LDL|STL)\.", text)
    quantized = "".join(text for name, text in functions.items() if "quantize_kernel" in name)
    assert re.search(r"F2FP\.SATFINITE\.E2M1", quantized)
    assert re.search(r"F2FP\.SATFINITE\.E8\.", quantized)


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
