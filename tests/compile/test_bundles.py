"""Every committed bundle compiles without warnings or spills, loads anywhere, and uses its MMA."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from fusegen.build.library import BuildReport, UnitReport, build
from fusegen.checks.load import load
from fusegen.publish.paths import builtin_specs

ROOT = Path(__file__).parents[2]
COMPILED = sorted(path.parents[1] for path in (ROOT / "generated").glob("*/csrc/sources.cmake"))
SPECS = load([builtin_specs()])
pytestmark = pytest.mark.compile


@dataclass(frozen=True)
class Gemms:
    """GEMMs of one family in the machine code of a bundle.

    Attributes:
        kernel: part of the names of kernels.
        unit: and of those of units.
        uses: patterns of instructions that each has.
        lacks: of those that none has.
    """

    kernel: str
    unit: str
    uses: tuple[str, ...]
    lacks: tuple[str, ...]


TMA = ("UTMALDG", "UTMASTG")
GEMMS = {
    # FP8 operands multiply as they are, what there is no instruction for as bfloat16.
    "sm_90a": (
        Gemms("ragged_gemm", "/gemm_sm90", (r"HGMMA\.", *TMA), ("QGMMA", "HMMA")),
        Gemms("ragged_fp8_gemm", "/gemm_fp8", (r"QGMMA\.", *TMA), ("HGMMA", "HMMA")),
        Gemms("ragged_decoded_gemm", "/gemm_decoded", (r"HGMMA\.", *TMA), ("QGMMA", "HMMA")),
    ),
    # Operands come by `cp.async` and `ldmatrix`; fragments never go through memory of threads.
    "sm_80": tuple(
        Gemms(kernel, unit, (r"HMMA\.16816\.F32", r"LDGSTS\.\S*128", "LDSM"), ("LDL", "STL"))
        for kernel, unit in (
            ("ragged_mma_gemm", "/gemm_mma"),
            ("ragged_decoded_mma_gemm", "/gemm_decoded_mma"),
        )
    ),
}
"""By architecture."""
# Element types, as names of kernels have them. A unit has the same kernels for each.
ELEMENTS = ("13__nv_bfloat16", "6__half")
# Registers a thread may have, by part of the unit's name: as the launch bounds ask for one block of
# 384 threads to an SM, or two, three or four of 256; GEMMs of 128 threads have all that one can
# have. Amaxes of groups are three.
OTHERS = {
    "norm": 128,
    "ward_quantize_e2m1": 128,
    "ward_quantize_": 80,
    "/quantize_": 80,
    "/statistics_": 128,
    "": 64,
}
REGISTERS = {
    "sm_90a": {"/gemm_": 168, **OTHERS},
    "sm_80": {"/gemm_": 255, "/quantize_e2m1_nv_1x16.": 128, "/rotary_qkv": 72, **OTHERS},
}
PEAK_BYTES_PER_UNIT = 4 << 30


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
layer = module.GroupedLinear(2, 16, 8)
for weight in layer.parameters():  # which some cells want
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
y = layer(torch.ones(4, 16, dtype=torch.bfloat16), torch.tensor([1, 2]))
assert y.shape == (4, 8) and not y[3:].any() and y[:3].any()
"""


@cache
def report(bundle: Path) -> BuildReport:
    """The build of a bundle, once per run; objects come from the cache where nothing changed."""
    return build(bundle)


@pytest.fixture(params=COMPILED, ids=lambda path: path.name)
def built(request: pytest.FixtureRequest) -> BuildReport:
    """Every compiled bundle in turn."""
    return report(request.param)


def kernel_units(built: BuildReport) -> list[UnitReport]:
    return [unit for unit in built.units if unit.name.startswith("kernels/")]


def test_there_is_a_compiled_bundle() -> None:
    assert [path.name for path in COMPILED] == sorted(GEMMS)


def test_no_warnings_and_no_spills(built: BuildReport) -> None:
    for unit in built.units:
        assert unit.report.warnings == (), unit.name
        for kernel in unit.report.kernels:
            assert (kernel.spill_stores, kernel.spill_loads) == (0, 0), (unit.name, kernel.name)
            assert kernel.stack == 0, (unit.name, kernel.name)


def test_every_kernel_unit_holds_the_kernels_of_each_type(built: BuildReport) -> None:
    units = kernel_units(built)
    assert units
    for unit in units:
        names = [kernel.name for kernel in unit.report.kernels]
        first, *others = (named_for(names, element) for element in ELEMENTS)
        assert first, unit.name
        assert all(each == first for each in others), unit.name


def named_for(names: Iterable[str], element: str) -> set[str]:
    """Names of the kernels of an element type, without the type."""
    return {name.replace(element, "") for name in names if element in name}


def test_budgets(built: BuildReport) -> None:
    for unit in built.units:
        assert unit.report.peak_bytes < PEAK_BYTES_PER_UNIT, unit.name
        for kernel in unit.report.kernels:
            most = register_limit(unit.name, arch_of(built))
            assert kernel.registers <= most, (unit.name, kernel.registers)


def test_shared_memory_is_what_a_cta_may_have(built: BuildReport) -> None:
    """Static memory as the compiler says it; GEMMs ask for the rest when they are launched.

    What no rule passes over is what every GPU that runs the code lets a CTA have.
    """
    arch = SPECS.archs[arch_of(built)]
    most, least = arch.limits["shared_memory"], arch.least_limits["shared_memory"]
    kinds = [kind for family in arch.kernels.values() for kind in family.kinds.values()]
    last = tuple(f"_{kind.select[-1].use}.cu" for kind in kinds)
    csrc, stated = built.library.parents[1] / "csrc", 0
    for unit in kernel_units(built):
        found = re.search(r"shared_bytes = (\d+);", (csrc / unit.name).read_text("utf-8"))
        stated += bool(found)
        assert bool(found) == ("/gemm_" in unit.name)
        for kernel in unit.report.kernels:
            asked = int(found[1]) if found else parked_bytes(kernel.name)
            assert asked + kernel.shared <= most, (unit.name, kernel.name)
            if not found or unit.name.endswith(last):
                assert asked + kernel.shared <= least, (unit.name, kernel.name)
    assert stated


def parked_bytes(kernel: str) -> int:
    """Of rows of the second half of a gradient, which wait while the first is quantised."""
    if "quantize_halves_kernel" not in kernel:
        return 0
    headers = ROOT / "templates" / "static" / "csrc" / "fusegen"
    source = (headers / "pointwise" / "pointwise_quantize.cuh").read_text("utf-8")
    assert "kSharedBytes = kWarpRows * kThreads * int(sizeof(uint2));" in source
    return 16 * 256 * 8


def register_limit(unit: str, arch: str = "sm_90a") -> int:
    """Of the first entry that is part of the unit's name."""
    return next(limit for part, limit in REGISTERS[arch].items() if part in unit)


def test_matrix_instructions(built: BuildReport, tmp_path: Path) -> None:
    check_matrix_instructions(built, tmp_path)


def check_matrix_instructions(
    built: BuildReport, folder: Path, known: BuildReport | None = None
) -> None:
    """Each GEMM multiplies with its own instruction and moves its tiles as it should.

    Args:
        built: the bundle.
        folder: for its parts.
        known: a bundle that was looked at; what has its bytes is not disassembled again.
    """
    seen, old = set[str](), set[bytes]()
    if known is not None:
        seen = {unit.name for unit in known.units}
        old = {part.read_bytes() for part in parts(known, folder / "known")}
    new = [part for part in parts(built, folder / "new") if part.read_bytes() not in old]
    units = [unit.name for unit in kernel_units(built) if unit.name not in seen]
    functions = disassemble(part for part in new if is_gemm(part.read_bytes()))
    for family in GEMMS[arch_of(built)]:
        gemms = {name: text for name, text in functions.items() if family.kernel in name}
        count = len([name for name in units if family.unit in name])
        assert count > 0 and len(gemms) == count * len(ELEMENTS)
        assert all(len([n for n in gemms if e in n]) == count for e in ELEMENTS)
        for name, text in gemms.items():
            missing = [each for each in family.uses if not re.search(rf"\b{each}", text)]
            strange = [each for each in family.lacks if re.search(rf"\b{each}\.", text)]
            assert not missing and not strange, (name, missing, strange)
            # What is added to something is added by memory, or by warps in tiles of short groups.
            added = re.search("StoreE[67]", name) is not None  # add, add_io of gemm.h
            assert (added and "UTMASTG" in family.uses) == ("UTMAREDG" in text), name


def arch_of(built: BuildReport) -> str:
    """The architecture of a bundle, which its folder is called by."""
    return built.library.parents[1].name


def is_gemm(part: bytes) -> bool:
    """Whether the machine code of a unit is a GEMM's."""
    return any(each.kernel.encode() in part for family in GEMMS.values() for each in family)


def parts(built: BuildReport, folder: Path) -> list[Path]:
    """Machine code of a library, one file per unit."""
    folder.mkdir()
    cuobjdump(folder, "--extract-elf", "all", str(built.library))
    found = sorted(folder.glob("*.cubin"))
    assert found, f"{built.library} holds no code"
    return found


def disassemble(chosen: Iterable[Path]) -> dict[str, str]:
    """Assembly of these parts, by function."""
    functions = {}
    for part in chosen:
        for block in cuobjdump(part.parent, "--dump-sass", part.name).split("Function : ")[1:]:
            name, _, body = block.partition("\n")
            functions[name.strip()] = body
    return functions


def cuobjdump(folder: Path, *words: str) -> str:
    """What the toolkit's disassembler prints, or the one from the package index."""
    environment, program = dict(os.environ), "cuobjdump"
    for binaries in Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin"):
        environment["PATH"] = f"{binaries}{os.pathsep}{environment['PATH']}"
        if (binaries / program).exists():
            program = str(binaries / program)
    done = subprocess.run(
        [program, *words], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("bundle", COMPILED, ids=lambda path: path.name)
def test_loads_without_a_gpu_and_runs_on_the_cpu(bundle: Path) -> None:
    """The library of a GPU loads into a PyTorch without CUDA, and CPU tensors run the reference."""
    report(bundle)
    cells = [path.stem for path in sorted(bundle.glob("grouped_linear__*.py"))]
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
