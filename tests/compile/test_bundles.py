"""Units of committed bundles are what the contracts of their families say, and libraries load.

What is on record as compiled (`on_record.py`) is compiled in part; what is not, all of it.
"""

from __future__ import annotations

import faulthandler
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiers import spread

from fusegen import api
from fusegen.build.objcache import KernelUsage, Report
from fusegen.emit.digests import Tree
from fusegen.families.pointwise_quantize import POINTWISE_QUANTIZE

from . import on_record
from .contracts import compiled
from .on_record import COMPILED, ROOT, Unit

pytestmark = pytest.mark.compile

FEW = 2
"""Kernels, and launchers, of a bundle that are compiled though they are on record."""

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
    """Demand that units are what they have to be, those that are not on record and a few others."""
    faulthandler.cancel_dump_traceback_later()  # compilers may take long, and do not stand still
    scratch.mkdir(parents=True)
    chosen = wanted(units)
    objects = on_record.compiled(chosen.values(), scratch)
    for name, unit in chosen.items():
        assert on_record.breaches(unit, objects[name]) == []


def wanted(units: dict[str, Unit]) -> dict[str, Unit]:
    """Those that are not on record, and a few others."""
    names = on_record.lacking(units, on_record.read())
    for suffix in (".cu", ".cpp"):
        names |= spread([name for name in units if name.endswith(suffix)], FEW)
    return {name: units[name] for name in sorted(names)}


def test_there_is_a_compiled_bundle() -> None:
    assert {"sm_80", "sm_90a"} <= {path.name for path in COMPILED}


def test_units_of_committed_bundles_keep_their_contracts(tmp_path: Path) -> None:
    """All of them in one test: of parameters a tier runs a few."""
    for bundle in COMPILED:
        hold(on_record.units_of(bundle, tmp_path), tmp_path / bundle.name)


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles that are not committed, by their names."""
    folder = tmp_path_factory.mktemp("further")
    return {name: on_record.write_further(name, folder / name) for name in on_record.FURTHER}


def test_units_of_further_bundles_keep_their_contracts(
    further: dict[str, Path], tmp_path: Path
) -> None:
    for name, bundle in further.items():
        units = on_record.units_of(bundle, tmp_path)
        launchers = {Path(each).stem for each in units if each.endswith(".cpp")}
        assert launchers == {*map(str, on_record.cells_of(name))}
        hold(units, tmp_path / name)


def test_any_scaling_has_the_units_that_it_stands_for(
    further: dict[str, Path], tmp_path: Path
) -> None:
    names = [*on_record.units_of(further["any_scaling"], tmp_path)]
    assert any("quantize_e4m3_block_1x64" in name for name in names)
    assert any("dequantize_groups_e5m2_codes_transposed" in name for name in names)
    assert any("gemm_decoded_sm90_fprop_row_tensor" in name for name in names)


def test_kernels_of_one_type_alone_are_told() -> None:
    def told(name: str, *kernels: str) -> list[str]:
        usages = tuple(KernelUsage(each, 1, 0, 0, 0, 0) for each in kernels)
        return [*on_record.of_one_type(name, Report(1.0, 1, usages, ()))]

    both = [f"_Z3run{element}" for element in on_record.ELEMENTS]
    assert told("kernels/a.cu", *both) == [] and told("a.cpp") == []
    assert told("kernels/a.cu", both[0]) and told("kernels/a.cu") and told("kernels/a.cu", both[1])
    assert told("kernels/take.cu", "_Z4take") == [] and told("kernels/take.cu", *both)


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


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One of each architecture."""
    folder = tmp_path_factory.mktemp("small")
    return [compiled(small(folder, arch)).library for arch in ("sm_90a", "sm_100a", "sm_120a")]


def test_loads_without_a_gpu_and_runs_on_the_cpu(libraries: list[Path]) -> None:
    """The library of a GPU loads into a PyTorch without CUDA, and CPU tensors run the reference."""
    for library in libraries:
        script = LOAD_LIBRARY.format(folder=str(library.parents[1]))
        subprocess.run([sys.executable, "-c", script], check=True, cwd="/")


def test_exports_only_its_digests(libraries: list[Path]) -> None:
    for library in libraries:
        words = ["nm", "-D", "--defined-only", str(library)]
        listing = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert [line.split()[-1] for line in listing.splitlines()] == ["fusegen_digests"]


def test_needs_no_cuda_library(libraries: list[Path]) -> None:
    for library in libraries:
        words = ["readelf", "-d", str(library)]
        listing = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        needed = re.findall(r"NEEDED.*\[(.*)\]", listing)
        assert "libtorch.so" in needed
        assert not [name for name in needed if name.startswith(("libcuda", "libcudart"))]
