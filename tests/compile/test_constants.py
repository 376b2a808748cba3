"""What units state of their kernels is what device code derives; nvcc refuses every other number.

Two derivations stand against each other: a family's, in Python, which a unit prints, and that of
the headers.  A number of an architecture's spec reaches both, so a mistake of either ends here.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fusegen.build.toolchain import find_toolchain
from fusegen.checks.load import load
from fusegen.emit.bundle import render_bundle
from fusegen.emit.render import Renderer
from fusegen.families.registry import FAMILIES
from fusegen.families.wgmma import Schedule, WgmmaConfig
from fusegen.ir.kernel import GemmKind
from fusegen.ir.naming import Cell
from fusegen.ir.predicate import Predicate
from fusegen.passes.pipeline import resolve
from fusegen.publish.paths import builtin_specs, builtin_templates
from fusegen.spec.arch import ArchSpec, KindSpec, RuleSpec

SPECS = load([builtin_specs()])
ARCH = SPECS.archs["sm_90a"]
CELLS = (
    Cell("grouped_linear", "bf16", ("add_to_main_grad",)),
    Cell("grouped_linear", "fp8_block"),
    Cell("grouped_linear", "nvfp4"),
    Cell("grouped_mlp", "mxfp8", ("debug",)),
    Cell("grouped_mlp", "mxfp8"),
)
STATING = [family.name for family in FAMILIES if family.constants(None, None, None, {})]
"""Families whose units state numbers."""
STRUCT = re.compile(r"(struct Stated {.*?};)", re.DOTALL)
STATED = re.compile(r"static constexpr int (\w+) = (\d+);")

Units = Mapping[str, str]


def write_units(arch: ArchSpec, cells: tuple[Cell, ...], folder: Path) -> Units:
    """The bundle's device code below a folder; the first unit of each template that states numbers.

    Returns:
        texts by family's name.
    """
    plan = resolve(replace(SPECS, archs={**SPECS.archs, "sm_90a": arch}), "sm_90a", list(cells))
    assert not plan.unsupported
    files = render_bundle(plan.modules, arch, "constants", Renderer((builtin_templates(),)))
    for path in files:
        if path.startswith("csrc/"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(files[path].data)
    units = [u for m in plan.modules for kernels in m.kernel_sets for u in kernels.units]
    stating = {unit.template: unit.name for unit in units if unit.constants}
    return {name: files[f"csrc/kernels/{unit}.cu"].text for name, unit in stating.items()}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Units]:
    folder = tmp_path_factory.mktemp("constants")
    return folder, write_units(ARCH, CELLS, folder)


def compiled(text: str, folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    """PTX alone: what is asserted when a unit is read is all that is asked."""
    tools = find_toolchain()
    assert tools.cutlass_include
    source = folder / "csrc" / "kernels" / f"{name}_stated.cu"
    source.write_text(text, encoding="utf-8")
    includes = [f"-I{folder / 'csrc'}", f"-I{tools.cutlass_include}"]
    flags = ["-std=c++17", "-DNDEBUG", "--expt-relaxed-constexpr", "-arch=compute_90a", "-ptx"]
    command = [str(tools.nvcc), *flags, *includes, str(source), "-o", str(source.with_suffix(".p"))]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_family_that_states_numbers_has_a_unit_here(bundle: tuple[Path, Units]) -> None:
    assert {*bundle[1]} == {*STATING}


@pytest.mark.parametrize("family", STATING)
def test_every_other_number_is_refused_by_its_name(family: str, bundle: tuple[Path, Units]) -> None:
    """All numbers of a unit are one more; each assertion fails, and says which it is about."""
    folder, units = bundle
    before, stated, after = STRUCT.split(units[family])
    names = [name for name, _ in STATED.findall(stated)]
    assert names
    stated = STATED.sub(lambda m: f"static constexpr int {m[1]} = {int(m[2]) + 1};", stated)
    done = compiled(f"{before}{stated}{after}", folder, family)
    assert done.returncode != 0
    missed = [name for name in names if f"{name}: unit against" not in done.stderr]
    assert not missed, done.stderr[-3000:]


POINTS = {
    "gemm_sm90": WgmmaConfig(Schedule.PINGPONG, (64, 256, 64), (1, 1)),
    "gemm_fp8_block_sm90": WgmmaConfig(Schedule.COOPERATIVE, (192, 128, 128), (1, 1)),
}
"""Configurations that no rule chooses, in the place of those that one does."""


def test_other_configurations_are_derived_alike(tmp_path: Path) -> None:
    """A changed tile, cluster or schedule changes what both derive, by the same amounts."""
    kernels = dict(ARCH.kernels)
    for name, point in POINTS.items():
        only = KindSpec((point,), (RuleSpec(point.name, Predicate(())),))
        kernels[name] = replace(kernels[name], kinds=dict.fromkeys(GemmKind, only))
    units = write_units(replace(ARCH, kernels=kernels), CELLS[:2], tmp_path)
    for name in ("gemm_sm90", "gemm_fp8_sm90"):
        done = compiled(units[name], tmp_path, name)
        assert done.returncode == 0, done.stderr[-3000:]
    stated = dict(STATED.findall(units["gemm_sm90"]))
    assert (stated["tile_m"], stated["cluster"]) == ("64", "1")
