"""An architecture whose MMA is known is a copied spec: what it renders compiles."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fusegen.build.toolchain import find_toolchain
from fusegen.checks.load import load
from fusegen.commands.scaffold import new
from fusegen.emit.bundle import render_bundle
from fusegen.emit.render import Renderer
from fusegen.ir.naming import Cell
from fusegen.passes.pipeline import resolve
from fusegen.publish.paths import builtin_specs, builtin_templates

pytestmark = pytest.mark.compile

NAME = "sm_86"
CSRC = builtin_templates() / "static" / "csrc"
CELLS = [Cell("grouped_linear", recipe) for recipe in ("bf16", "nvfp4")]
UNITS = ("gemm_mma_wgrad_mma_128x128x32_2x2_4_1", "gemm_decoded_mma_fprop_mma_128x128x32_2x2_4_1")


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Texts of the kernel units of some cells, by name."""
    folder = tmp_path_factory.mktemp("specs")
    new("arch", NAME, origin="sm_80", folder=folder)
    specs = load([builtin_specs(), folder])
    plan = resolve(specs, NAME, CELLS)
    assert [module.cell for module in plan.modules] == [*map(str, CELLS)], plan.unsupported
    files = render_bundle(plan.modules, specs.archs[NAME], "toy", Renderer((builtin_templates(),)))
    kernels = (path for path in files if path.startswith("csrc/kernels/"))
    return {Path(path).stem: files[path].text for path in kernels}


def test_a_bundle_has_the_points_that_fit_alone(units: dict[str, str]) -> None:
    gemms = [name for name in units if name.startswith("gemm_")]
    assert {*UNITS} <= {*gemms}
    assert all(name.endswith("_mma_128x128x32_2x2_4_1") for name in gemms)


@pytest.mark.parametrize("name", UNITS)
def test_its_units_compile_without_spills(units: dict[str, str], name: str, tmp_path: Path) -> None:
    tools = find_toolchain()
    source = tmp_path / f"{name}.cu"
    source.write_text(units[name], encoding="utf-8")
    flags = ["-std=c++17", "--expt-relaxed-constexpr", f"-arch={NAME}", "-cubin", "-Xptxas=-v"]
    includes = [f"-I{CSRC}", f"-I{tools.cutlass_include}"]
    command = [str(tools.nvcc), *flags, *includes, str(source), "-o", str(tmp_path / "unit.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spills == [("0", "0")] * 2, "one kernel per element type"
