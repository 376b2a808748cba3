"""The quantised cells of Hopper, made anew: they compile as the committed bundle does, and load."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fusegen import api
from fusegen.build import BuildReport, build

from .test_bundles import GEMM_REGISTERS, LOAD_LIBRARY, disassemble

pytestmark = pytest.mark.compile

MAIN_GRADS = ("add_to_main_grad", "write_main_grad")
MAIN_GRAD_RECIPES = ("bf16", "fp8_block", "mxfp8")
MODULES = ("linear", "grouped_linear", "quantize")
RECIPES = ("fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    """Every recipe of the two linear layers and of quantisation itself."""
    out = tmp_path_factory.mktemp("quantized")
    request = api.Request(
        out=out,
        archs=("sm_90a",),
        modules=MODULES,
        recipes=RECIPES,
        namespace="quantized",
    )
    api.generate(request, api.Policy.WRITE)
    shared = replace(
        request, modules=("linear",), recipes=("fp8_delayed",), options=("reduced_amax",)
    )
    api.generate(shared, api.Policy.WRITE)
    for option in MAIN_GRADS:
        kept = replace(
            request, modules=("grouped_linear",), recipes=MAIN_GRAD_RECIPES, options=(option,)
        )
        api.generate(kept, api.Policy.WRITE)
    return build(out / "sm_90a")


def test_no_warnings_and_no_spills(built: BuildReport) -> None:
    for unit in built.units:
        assert unit.report.warnings == (), unit.name
        for kernel in unit.report.kernels:
            assert (kernel.spill_stores, kernel.spill_loads) == (0, 0), (unit.name, kernel.name)
            limit = GEMM_REGISTERS if "/gemm_" in unit.name else 255
            assert kernel.registers <= limit, (unit.name, kernel.registers)


def test_products_use_their_matrix_instruction(built: BuildReport, tmp_path: Path) -> None:
    """FP8 operands as they are; what there is no instruction for as bfloat16.

    Products of float16 modules are the same kernels with another conversion at the end.
    """
    functions = disassemble(built.library, tmp_path, leave_out=b"6__half")
    units = [each for each in built.units if "_bfloat16_" in each.name]
    for kernel, unit, instruction, other in (
        ("ragged_gemm", "/gemm_sm90", "HGMMA", "QGMMA"),
        ("ragged_fp8_gemm", "/gemm_fp8", "QGMMA", "HGMMA"),
        ("ragged_decoded_gemm", "/gemm_decoded", "HGMMA", "QGMMA"),
    ):
        products = {name: text for name, text in functions.items() if kernel in name}
        assert len(products) == len([each for each in units if unit in each.name]) > 0
        for name, text in products.items():
            assert re.search(rf"\b{instruction}\.", text), name
            assert not re.search(rf"\b{other}\.", text), name
            # What is added to something is added by the memory itself.
            assert ("UTMAREDG" in text) == ("StoreE2" in name), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_loads_and_runs_the_reference_on_the_cpu(built: BuildReport, recipe: str) -> None:
    folder = built.library.parents[1]
    script = LOAD_LIBRARY.format(folder=str(folder), cell=f"grouped_linear__{recipe}")
    subprocess.run([sys.executable, "-c", script], check=True, cwd="/")


def test_the_launchers_exist_for_every_cell(built: BuildReport) -> None:
    cells = {Path(unit.name).stem for unit in built.units if unit.name.endswith(".cpp")}
    expected = {f"{m}__{r}" for m in MODULES for r in RECIPES}
    expected.add("linear__fp8_delayed__reduced_amax")
    expected |= {f"grouped_linear__{r}__{o}" for r in MAIN_GRAD_RECIPES for o in MAIN_GRADS}
    assert cells - {"fingerprint"} == expected
