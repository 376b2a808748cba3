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
from fusegen.families.family import Config
from fusegen.families.mma_sync import MmaConfig
from fusegen.families.registry import FAMILIES
from fusegen.families.wgmma import Schedule, WgmmaConfig
from fusegen.ir.kernel import GemmKind
from fusegen.ir.naming import Cell
from fusegen.ir.predicate import Predicate
from fusegen.passes.pipeline import resolve
from fusegen.publish.paths import builtin_specs, builtin_templates
from fusegen.spec.arch import ArchSpec, KindSpec, RuleSpec

SPECS = load([builtin_specs(), Path(__file__).parents[1] / "numerics" / "specs"])
ARCHS = {name: arch for name, arch in SPECS.archs.items() if arch.kernels}
CELLS = (
    Cell("grouped_linear", "bf16", ("add_to_main_grad",)),
    Cell("grouped_linear", "fp8_block"),
    Cell("grouped_linear", "fp8_current"),
    Cell("grouped_linear", "fp8_free_1x64"),  # decoded everywhere
    Cell("grouped_linear", "nvfp4"),
    Cell("grouped_mlp", "mxfp8", ("debug",)),
    Cell("grouped_mlp", "mxfp8"),
    Cell("layer_norm", "bf16"),
    Cell("residual_rms_norm", "bf16"),
    Cell("rms_norm_linear", "mxfp8"),
    Cell("rotary", "bf16"),
    Cell("rotary_qkv", "bf16"),
    Cell("softmax", "bf16"),
    Cell("cross_entropy", "bf16"),
    Cell("dropout", "bf16"),
    Cell("moe_layer", "bf16"),
    Cell("moe_layer", "fp8_delayed"),
    Cell("router", "bf16", ("fp32_router_weight",)),
)
# Of FP8 no copy is transposed there, and the instruction reads every recipe's E2M1 as it is.
NOWHERE = {("sm_100a", "dequantize_groups")}
STATING = {family.name for family in FAMILIES if family.constants(None, None, None, {})}
"""Families whose units state numbers."""
LISTED = [
    (arch, family)
    for arch, spec in ARCHS.items()
    for family in dict.fromkeys(each.template or name for name, each in spec.kernels.items())
    if family in STATING and (arch, family) not in NOWHERE
]
"""Those of each architecture that a recipe needs."""
STRUCT = re.compile(r"(struct Stated {.*?};)", re.DOTALL)
STATED = re.compile(r"static constexpr int (\w+) = (\d+);")

Units = Mapping[str, str]


def write_units(arch: ArchSpec, cells: tuple[Cell, ...], folder: Path) -> Units:
    """The bundle's device code below a folder; the first unit of each template that states numbers.

    Returns:
        texts by family's name.
    """
    plan = resolve(replace(SPECS, archs={**SPECS.archs, arch.name: arch}), arch.name, list(cells))
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
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Units]]:
    """By architecture, the folder of its bundle and texts of units."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ARCHS}
    return {name: (folders[name], write_units(ARCHS[name], CELLS, folders[name])) for name in ARCHS}


def compiled(
    text: str, arch: ArchSpec, folder: Path, name: str
) -> subprocess.CompletedProcess[str]:
    """PTX alone: what is asserted when a unit is read is all that is asked."""
    tools = find_toolchain()
    source = folder / "csrc" / "kernels" / f"{name}_stated.cu"
    source.write_text(text, encoding="utf-8")
    includes = [f"-I{folder / 'csrc'}"]
    ptx = [f"-arch={arch.isa.replace('sm', 'compute')}", "-ptx"]
    flags = ["-std=c++17", "-DNDEBUG", "--expt-relaxed-constexpr", *ptx]
    command = [str(tools.nvcc), *flags, *includes, str(source), "-o", str(source.with_suffix(".p"))]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_family_that_states_numbers_has_a_unit_here(
    bundles: Mapping[str, tuple[Path, Units]],
) -> None:
    assert {family for _, family in LISTED} == STATING
    assert {(arch, each) for arch, (_, units) in bundles.items() for each in units} == {*LISTED}


@pytest.mark.parametrize(("arch", "family"), LISTED)
def test_every_other_number_is_refused_by_its_name(
    arch: str, family: str, bundles: Mapping[str, tuple[Path, Units]]
) -> None:
    """All numbers of a unit are one more; each assertion fails, and says which it is about."""
    folder, units = bundles[arch]
    before, stated, after = STRUCT.split(units[family])
    names = [name for name, _ in STATED.findall(stated)]
    assert names
    stated = STATED.sub(lambda m: f"static constexpr int {m[1]} = {int(m[2]) + 1};", stated)
    done = compiled(f"{before}{stated}{after}", ARCHS[arch], folder, family)
    assert done.returncode != 0
    missed = [name for name in names if f"{name}: unit against" not in done.stderr]
    assert not missed, done.stderr[-3000:]


POINTS: Mapping[str, Mapping[str, Config]] = {
    "sm_90a": {
        "gemm_sm90": WgmmaConfig(Schedule.PINGPONG, (64, 256, 64), (1, 1)),
        "gemm_fp8_block_sm90": WgmmaConfig(Schedule.COOPERATIVE, (192, 128, 128), (1, 1)),
    },
    "sm_80": {"gemm_mma": MmaConfig((64, 128, 64), (2, 4), 3, 1)},
    "sm_89": {
        "gemm_mma": MmaConfig((64, 256, 64), (2, 4), 2, 1),
        "gemm_fp8_split_mma": MmaConfig((64, 128, 128), (1, 4), 3, 1),
    },
}
"""Configurations that no rule chooses, in the place of those that one does."""


@pytest.mark.parametrize("name", POINTS)
def test_other_configurations_are_derived_alike(name: str, tmp_path: Path) -> None:
    """A changed point changes what both derive, by the same amounts."""
    arch = ARCHS[name]
    kernels, changed = dict(arch.kernels), set()
    for family, point in POINTS[name].items():
        only = KindSpec((point,), (RuleSpec(point.name, Predicate(())),))
        kernels[family] = replace(kernels[family], kinds=dict.fromkeys(GemmKind, only))
        changed.add(kernels[family].template or family)
    units = write_units(replace(arch, kernels=kernels), CELLS[:2], tmp_path)
    for family in changed:
        done = compiled(units[family], arch, tmp_path, family)
        assert done.returncode == 0, done.stderr[-3000:]
    assert dict(STATED.findall(units[min(changed - {"gemm_fp8_sm90"})]))["tile_m"] == "64"
