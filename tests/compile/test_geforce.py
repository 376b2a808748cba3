"""sm_120a: GEMMs whose scales the instruction reads, conversions in hardware, wide copies."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fusegen.build.objcache import CachedObject
from fusegen.build.sass import cuobjdump, opcodes
from fusegen.build.toolchain import find_toolchain
from fusegen.publish.paths import builtin_templates

from . import on_record

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
GEFORCE = ROOT / "generated" / "sm_120a"
USES = {
    "gemm_mx_mma": r"QMMA\.SF\.16832\.F32\.E4M3\.E4M3\.E8",
    "gemm_pow2_mma": r"QMMA\.SF\.16832\.F32\.E4M3\.E4M3\.E8",
    "gemm_nv_mma": r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X",
}
"""The instruction of each family's kernels."""
QUANTIZE = ("kernels/quantize_e2m1_nv_1x16.cu", "kernels/quantize_e4m3_mx_1x32_atoms.cu")
COPIES = (r"LDGSTS\.\S*128", "LDSM")


def test_matrix_instructions_and_conversions(tmp_path: Path) -> None:
    units = on_record.units_of(GEFORCE, tmp_path)
    gemms = {n: family for family in USES for n in sorted(units) if f"/{family}_" in n}
    objects = on_record.compiled([units[name] for name in (*gemms, *QUANTIZE)], tmp_path)
    code = {name: code_of(objects[name]) for name in objects}
    assert sum(len(code[name]) for name in gemms) >= 18  # three kinds of three recipes, two types
    for name, family in gemms.items():
        for text in code[name].values():
            found = {each for each in USES.values() if re.search(rf"\b{each}", text)}
            assert found == {USES[family]}
            assert all(re.search(rf"\b{each}", text) for each in COPIES)
            assert not re.search(r"\b(HMMA|LDL|STL)\.", text)
    quantized = "".join("".join(code[name].values()) for name in QUANTIZE)
    assert re.search(r"F2FP\.SATFINITE\.E2M1", quantized)
    assert re.search(r"F2FP\.SATFINITE\.E8\.", quantized)


def code_of(made: CachedObject) -> dict[str, str]:
    """Opcodes of each kernel of an object, in lines."""
    found = opcodes(made.path, [kernel.name for kernel in made.report.kernels])
    return {name: "\n".join(sorted(words)) for name, words in found.items()}


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
