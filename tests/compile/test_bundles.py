"""Committed bundles compile as the contracts of their families say, and load anywhere.

Those of `WHOLE` are built.  Of the others the units are compiled that none of these has with the
same text, and what calls kernels; `compile_all.py` compiles the rest for them, too.
"""

from __future__ import annotations

import faulthandler
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from plans import SPECS

from fusegen.build.compilation import commands, compile_all
from fusegen.build.library import BuildReport, UnitReport, default_jobs
from fusegen.build.objcache import ObjectCache, default_root
from fusegen.build.progress import Silent
from fusegen.build.sources import read_sources
from fusegen.build.toolchain import find_toolchain
from fusegen.families.pointwise_quantize import POINTWISE_QUANTIZE

from .contracts import broken, broken_by, compiled, promises_of

ROOT = Path(__file__).parents[2]
COMPILED = sorted(path.parents[1] for path in (ROOT / "generated").glob("*/csrc/sources.cmake"))
WHOLE = [bundle for bundle in COMPILED if bundle.name in ("sm_90a", "sm_100a", "sm_120a")]
pytestmark = pytest.mark.compile


# Element types, as names of kernels have them. A unit has the same kernels for each.
ELEMENTS = ("13__nv_bfloat16", "6__half")

# Loads a bundle by path, and runs one of its modules on the CPU.
LOAD_LIBRARY = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location(
    "vendored", {folder!r} + "/__init__.py", submodule_search_locations=[{folder!r}])
sys.modules["vendored"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["vendored"])
module = getattr(sys.modules["vendored"], {cell!r})
library = sys.modules["vendored"]._library
assert library._NAMESPACE.compiled
names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
assert library.NAMESPACE + "::" + {cell!r} + "_forward" in names
grouped = {cell!r}.startswith("grouped")
layer = module.GroupedLinear(2, 16, 8) if grouped else module.Linear(16, 8)
for weight in layer.parameters():  # which some cells want
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
x = torch.ones(4, 16, dtype=torch.bfloat16)
y = layer(x, torch.tensor([1, 2])) if grouped else layer(x)
assert y.shape == (4, 8) and y[:3].any() and y[3:].any() != grouped
"""


@cache
def report(bundle: Path) -> BuildReport:
    """The build of a bundle, once per run; objects come from the cache where nothing changed."""
    return compiled(bundle)


@pytest.fixture(params=WHOLE, ids=lambda path: path.name)
def built(request: pytest.FixtureRequest) -> BuildReport:
    """Every bundle that is built, in turn."""
    return report(request.param)


def kernel_units(built: BuildReport) -> list[UnitReport]:
    return [unit for unit in built.units if unit.name.startswith("kernels/")]


def test_there_is_a_compiled_bundle() -> None:
    assert {"sm_80", "sm_90a"} <= {path.name for path in COMPILED}


def test_every_unit_keeps_its_contract(built: BuildReport) -> None:
    assert broken(built, promises_of(built.library.parents[1], SPECS)) == []


@pytest.mark.parametrize(
    "bundle", [each for each in COMPILED if each not in WHOLE], ids=lambda path: path.name
)
def test_units_of_its_own_keep_their_contracts(bundle: Path, tmp_path: Path) -> None:
    csrc = bundle / "csrc"
    sources = read_sources(csrc / "sources.cmake")
    known = {text for other in WHOLE for text in texts(other).values()}
    own = {name for name, text in texts(bundle).items() if text not in known}
    assert own and len(own) < len(sources.kernel_sources)
    wanted = {*own, *sources.host_sources}
    every = commands(csrc, sources, find_toolchain(), tmp_path, strict=True, lineinfo=False)
    plan = [command for command in every if command.name in wanted]
    faulthandler.cancel_dump_traceback_later()
    cache = ObjectCache(default_root())
    objects = compile_all(plan, tmp_path, cache, default_jobs(), Silent())
    promised = promises_of(bundle, SPECS)
    for name in own:
        made = objects[name]
        assert broken_by({name: made.report}, promised, made.path) == []


def texts(bundle: Path) -> dict[str, str]:
    """The units with kernels, as they would be in any bundle: without what was generated from
    what."""
    sources = read_sources(bundle / "csrc" / "sources.cmake")
    found = {}
    for name in sources.kernel_sources:
        lines = (bundle / "csrc" / name).read_text("utf-8").splitlines()
        code = "\n".join(line for line in lines if not line.startswith("//"))
        found[name] = code.replace(sources.namespace, "")
    return found


UNTYPED = {f"kernels/{name}.cu" for name in ("gather_rows", "routing_plan", "take", "route")}
"""Units whose kernels copy 16-bit values, whatever they are, or have fp32 and integers alone."""


def test_every_kernel_unit_holds_the_kernels_of_each_type(built: BuildReport) -> None:
    units = kernel_units(built)
    assert units
    for unit in units:
        names = [kernel.name for kernel in unit.report.kernels]
        first, *others = (named_for(names, element) for element in ELEMENTS)
        assert bool(first) != (unit.name in UNTYPED), unit.name
        assert all(each == first for each in others), unit.name


def named_for(names: Iterable[str], element: str) -> set[str]:
    """Names of the kernels of an element type, without the type."""
    return {name.replace(element, "") for name in names if element in name}


def test_a_launch_asks_for_what_its_contract_says() -> None:
    """Rows of the second half of a gradient wait while the first is quantised."""
    headers = ROOT / "templates" / "static" / "csrc" / "fusegen"
    source = (headers / "pointwise" / "pointwise_quantize.cuh").read_text("utf-8")
    assert "kSharedBytes = kWarpRows * kThreads * int(sizeof(uint2));" in source
    for contract in POINTWISE_QUANTIZE.contracts:
        assert contract.launch_memory == {"quantize_halves_kernel": 16 * 256 * 8}


@pytest.mark.parametrize("bundle", WHOLE, ids=lambda path: path.name)
def test_loads_without_a_gpu_and_runs_on_the_cpu(bundle: Path) -> None:
    """The library of a GPU loads into a PyTorch without CUDA, and CPU tensors run the reference."""
    report(bundle)
    linears = (*bundle.glob("grouped_linear__*.py"), *bundle.glob("linear__*.py"))
    cells = sorted(path.stem for path in linears)
    assert cells
    for cell in cells:
        script = LOAD_LIBRARY.format(folder=str(bundle), cell=cell)
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
