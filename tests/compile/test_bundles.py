"""Units of committed bundles are what the contracts of their families say, and libraries load.

What is on record as compiled (`on_record.py`) is compiled in part; what is not, all of it.
"""

from __future__ import annotations

import faulthandler
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from tiers import spread

from fusegen import api
from fusegen.build.library import BuildReport
from fusegen.build.objcache import Report
from fusegen.emit.digests import Tree
from fusegen.families.pointwise_quantize import POINTWISE_QUANTIZE

from . import on_record
from .contracts import compiled
from .on_record import COMPILED, ROOT, Unit

pytestmark = pytest.mark.compile

FEW = 2
"""Kernels, and launchers, of a bundle that are compiled though they are on record."""

# Element types, as names of kernels have them. A unit has the same kernels for each.
ELEMENTS = ("13__nv_bfloat16", "6__half")

UNTYPED = {f"kernels/{name}.cu" for name in ("gather_rows", "routing_plan", "take", "route")}
"""Units whose kernels copy 16-bit values, whatever they are, or have fp32 and integers alone."""

# Loads a bundle by path, and runs its module on the CPU.
LOAD_LIBRARY = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location(
    "vendored", {folder!r} + "/__init__.py", submodule_search_locations=[{folder!r}])
sys.modules["vendored"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["vendored"])
layer = sys.modules["vendored"].swiglu__bf16.SwiGLU()
library = sys.modules["vendored"]._library
assert library._NAMESPACE.compiled
names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
assert library.NAMESPACE + "::swiglu__bf16_forward" in names
h = torch.ones(4, 16, dtype=torch.bfloat16)
assert torch.allclose(layer(h).float(), torch.nn.functional.silu(torch.ones(4, 8)), rtol=.01)
"""


def hold(units: dict[str, Unit], scratch: Path) -> None:
    """Demand that units are what they have to be."""
    faulthandler.cancel_dump_traceback_later()  # compilers may take long, and do not stand still
    objects = on_record.compiled(units.values(), scratch)
    for name, unit in units.items():
        assert on_record.breaches(unit, objects[name]) == []
        if name.startswith("kernels/"):
            assert_kernels_of_each_type(name, objects[name].report)


def assert_kernels_of_each_type(name: str, report: Report) -> None:
    """A unit has the same kernels for both element types."""
    names = [kernel.name for kernel in report.kernels]
    first, *others = (named_for(names, element) for element in ELEMENTS)
    assert bool(first) != (name in UNTYPED), name
    assert all(each == first for each in others), name


def named_for(names: Iterable[str], element: str) -> set[str]:
    """Names of the kernels of an element type, without the type."""
    return {name.replace(element, "") for name in names if element in name}


def wanted(units: dict[str, Unit]) -> dict[str, Unit]:
    """Those that are not on record, and a few others."""
    names = on_record.lacking(units, on_record.read())
    for suffix in (".cu", ".cpp"):
        names |= spread([name for name in units if name.endswith(suffix)], FEW)
    return {name: units[name] for name in sorted(names)}


def test_there_is_a_compiled_bundle() -> None:
    assert {"sm_80", "sm_90a"} <= {path.name for path in COMPILED}


@pytest.mark.parametrize("bundle", COMPILED, ids=lambda path: path.name)
def test_units_of_committed_bundles_keep_their_contracts(bundle: Path, tmp_path: Path) -> None:
    hold(wanted(on_record.units_of(bundle, tmp_path)), tmp_path)


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles that are not committed, by their names."""
    folder = tmp_path_factory.mktemp("further")
    return {name: on_record.write_further(name, folder / name) for name in on_record.FURTHER}


@pytest.mark.parametrize("name", on_record.FURTHER)
def test_units_of_further_bundles_keep_their_contracts(
    further: dict[str, Path], name: str, tmp_path: Path
) -> None:
    units = on_record.units_of(further[name], tmp_path)
    launchers = {Path(each).stem for each in units if each.endswith(".cpp")}
    assert launchers == {*map(str, on_record.cells_of(name))}
    hold(wanted(units), tmp_path)


def test_what_decides_a_unit_is_in_its_digest(tmp_path: Path) -> None:
    bundle = small(tmp_path, "sm_90a")
    before = on_record.units_of(bundle, tmp_path)
    kernels = {name for name in before if name.endswith(".cu")}
    known = {unit.digest for unit in before.values()}
    header = bundle / "csrc" / "fusegen" / "pointwise" / "pointwise.cuh"
    text = header.read_text()
    header.write_text(f"{text}\n// a remark\n")
    assert on_record.lacking(on_record.units_of(bundle, tmp_path), known) == set()
    header.write_text(f"{text}\nstatic_assert(true);\n")
    assert on_record.lacking(on_record.units_of(bundle, tmp_path), known) == kernels
    tree = Tree(lambda path: None)
    unit = before[min(kernels)]
    flags = replace(unit.command, flags=(*unit.command.flags, "-O2"))
    promise = replace(unit.promise, registers=1)
    digests = [
        on_record.digest(tree, *each)
        for each in ((unit.command, unit.promise), (flags, unit.promise), (unit.command, promise))
    ]
    assert len({*digests}) == 3


def test_a_record_of_other_compilers_is_none(tmp_path: Path) -> None:
    record = tmp_path / "compiled.txt"
    lines = on_record.RECORD.read_text().splitlines()
    record.write_text("\n".join(["compilers of yesterday", *lines[1:]]))
    assert on_record.read(record) == on_record.read(tmp_path / "none") == frozenset()


def test_nothing_is_on_record_that_no_bundle_has(further: dict[str, Path], tmp_path: Path) -> None:
    every = (on_record.units_of(each, tmp_path) for each in (*COMPILED, *further.values()))
    there = {unit.digest for units in every for unit in units.values()}
    assert on_record.read() <= there, "units have changed since: run `make compiled`"


def test_a_launch_asks_for_what_its_contract_says() -> None:
    """Rows of the second half of a gradient wait while the first is quantised."""
    headers = ROOT / "templates" / "static" / "csrc" / "fusegen"
    source = (headers / "pointwise" / "pointwise_quantize.cuh").read_text("utf-8")
    assert "kSharedBytes = kWarpRows * kThreads * int(sizeof(uint2));" in source
    for contract in POINTWISE_QUANTIZE.contracts:
        assert contract.launch_memory == {"quantize_halves_kernel": 16 * 256 * 8}


def small(folder: Path, arch: str) -> Path:
    """A bundle of one module with few units."""
    request = api.Request(out=folder, archs=(arch,), modules=("swiglu",), recipes=("bf16",))
    api.generate(request)
    return folder / arch


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a", "sm_120a"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    """A library of each architecture."""
    return compiled(small(tmp_path_factory.mktemp("small"), request.param))


def test_loads_without_a_gpu_and_runs_on_the_cpu(built: BuildReport) -> None:
    """The library of a GPU loads into a PyTorch without CUDA, and CPU tensors run the reference."""
    script = LOAD_LIBRARY.format(folder=str(built.library.parents[1]))
    subprocess.run([sys.executable, "-c", script], check=True, cwd="/")


def test_exports_only_its_digests(built: BuildReport) -> None:
    words = ["nm", "-D", "--defined-only", str(built.library)]
    listing = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in listing.splitlines()] == ["fusegen_digests"]


def test_needs_no_cuda_library(built: BuildReport) -> None:
    words = ["readelf", "-d", str(built.library)]
    listing = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", listing)
    assert "libtorch.so" in needed
    assert not [name for name in needed if name.startswith(("libcuda", "libcudart"))]
