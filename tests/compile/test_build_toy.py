"""Build a toy bundle with the real compilers: one kernel, one operator."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusegen.build import compilation
from fusegen.build.compilation import (
    HEADER_OF_LAUNCHERS,
    HOST_FLAGS,
    HOST_STRICT,
    KERNEL_FLAGS,
    KERNEL_STRICT,
    SharedHeader,
)
from fusegen.build.library import BuildReport, build, is_current, stale_cells
from fusegen.build.objcache import CachedObject, KernelUsage, ObjectCache
from fusegen.build.output import kernel_usage, warning_lines
from fusegen.build.processes import Runner
from fusegen.build.progress import Silent
from fusegen.build.sass import cuobjdump
from fusegen.build.sources import CellUnits, read_sources
from fusegen.build.toolchain import BuildError, Toolchain, find_toolchain
from fusegen.emit.digests import Digests, read_library

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "templates" / "static" / "csrc"
UNITS = {"kernels/twice.cu", "toy.cpp", "digests.cpp"}

SOURCES = """\
# A comment, as generated files begin with one.
set(FUSEGEN_NAMESPACE fusegen_toy)
set(FUSEGEN_GENCODE arch=compute_90a,code=sm_90a)
set(FUSEGEN_CELLS
    toy__plain__fast)
set(FUSEGEN_DIGEST_toy__plain__fast
    "00c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00c0ffee")
set(FUSEGEN_UNITS_toy__plain__fast
    toy.cpp
    kernels/twice.cu)
"""
WITH_PTX = SOURCES.replace(
    "arch=compute_90a,code=sm_90a", '"arch=compute_80,code=[sm_80,compute_80]"'
)
CELL = "toy__plain__fast"
DIGEST = "00c0ffee" * 8

HEADER = """\
#pragma once
#include <cuda_runtime_api.h>
#include <cstdint>
constexpr float kFactor = 2.0f;
namespace toy {
struct Outcome { int code; const char* call; bool ok() const { return code == 0; } };
Outcome twice(const float* x, float* y, int64_t n, cudaStream_t stream);
}
"""

KERNEL = """\
#include "toy.h"
namespace toy {
__global__ void twice_kernel(const float* x, float* y, int64_t n) {
  __shared__ float staged[256];
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  staged[threadIdx.x] = i < n ? x[i] : 0.0f;
  __syncthreads();
  if (i < n) y[i] = kFactor * staged[threadIdx.x ^ 1];
}
Outcome twice(const float* x, float* y, int64_t n, cudaStream_t stream) {
  twice_kernel<<<static_cast<unsigned>((n + 255) / 256), 256, 0, stream>>>(x, y, n);
  return {static_cast<int>(cudaGetLastError()), "twice"};
}
}
"""

# The CPU implementation exercises the glue that a CPU-only PyTorch can run.
LAUNCHER = """\
#include "fusegen/host/checks.h"
#include "fusegen/host/stable.h"
#include "toy.h"
using fusegen::ScalarType;
using fusegen::Tensor;
namespace {
constexpr const char* kCell = "toy__plain__fast";
constexpr fusegen::Arch kArch{"sm_90a", 9, 0, fusegen::Reach::none};
constexpr fusegen::Arch kArchs[] = {
    kArch, {"sm_80", 8, 0, fusegen::Reach::later}, {"sm_80", 8, 0, fusegen::Reach::minor}};

Tensor twice_cuda(const Tensor& x) {
  const int32_t device = fusegen::require_arch(kCell, "x", x, kArch);
  const fusegen::DeviceGuard guard(device);
  const Tensor packed = fusegen::dense(x);
  Tensor y = fusegen::empty({x.size(0)}, ScalarType::Float, x);
  fusegen::check(kCell, toy::twice(static_cast<const float*>(fusegen::pointer(packed)),
                                   static_cast<float*>(fusegen::writable(y)), x.numel(),
                                   fusegen::current_stream(kCell, device)));
  return y;
}

Tensor twice_cpu(const Tensor& x) {
  fusegen::check_dtype(kCell, "x", fusegen::given(x), ScalarType::Float);
  fusegen::check_rank(kCell, "x", fusegen::given(x), 1, true, "[T]");
  const Tensor packed = fusegen::dense(x);
  Tensor y = fusegen::empty({x.size(0)}, ScalarType::Float, x);
  const auto* from = static_cast<const float*>(fusegen::pointer(packed));
  if (reinterpret_cast<std::uintptr_t>(from) % fusegen::kAlignment != 0) {
    fusegen::fail(kCell, "dense() returned a tensor that is not aligned");
  }
  for (int64_t i = 0; i < x.numel(); ++i) {
    static_cast<float*>(fusegen::writable(y))[i] = kFactor * from[i];
  }
  return y;
}

Tensor make_cpu(const Tensor& x, int64_t a, int64_t b, int64_t c) {
  return fusegen::empty({a, b, c}, ScalarType::BFloat16, x);
}

std::tuple<Tensor> refuse_cpu(const Tensor& x, int64_t how) {
  if (how == 0) fusegen::require_arch(kCell, "x", x, kArch);
  if (how == 1) fusegen::check_size(kCell, "x", fusegen::given(x), -1, 7, "K");
  if (how == 2) fusegen::check_multiple(kCell, "K", x.numel(), 64, "sm_90a");
  if (how == 3) fusegen::check(kCell, cudaErrorInvalidValue, "launch of twice");
  if (how == 4) fusegen::check(kCell, toy::Outcome{700, "twice"});
  if (how == 5) fusegen::current_stream(kCell, 0);
  return {x};
}

// On a device that there is none of here.
std::tuple<Tensor> place_cpu(const Tensor& x, int64_t arch, int64_t major, int64_t minor) {
  const fusegen::DeviceFacts facts{int(major), int(minor), 1};
  fusegen::require_capability(kCell, "x", kArchs[arch], facts);
  return {x};
}
}
STABLE_TORCH_LIBRARY_IMPL(fusegen_toy, CUDA, m) { m.impl("twice", TORCH_BOX(&twice_cuda)); }
STABLE_TORCH_LIBRARY_IMPL(fusegen_toy, CPU, m) {
  m.impl("twice", TORCH_BOX(&twice_cpu));
  m.impl("make", TORCH_BOX(&make_cpu));
  m.impl("refuse", TORCH_BOX(&refuse_cpu));
  m.impl("place", TORCH_BOX(&place_cpu));
}
"""

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
LOAD = (
    f"CAPABILITIES = {CAPABILITIES}"
    + """
import ctypes, json, sys, torch
library = sys.argv[1]
torch.library.define("fusegen_toy::twice", "(Tensor x) -> Tensor")
torch.library.define("fusegen_toy::make", "(Tensor x, int a, int b, int c) -> Tensor")
torch.library.define("fusegen_toy::refuse", "(Tensor x, int how) -> Tensor")
torch.library.define("fusegen_toy::place", "(Tensor x, int arch, int major, int minor) -> Tensor")
torch.ops.load_library(library)
ops = torch.ops.fusegen_toy

def layout(tensor):
    return [str(tensor.dtype), list(tensor.shape), list(tensor.stride())]

def refusal(op, *arguments):
    try:
        op(*arguments)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "no error"

said = ctypes.c_char.in_dll(ctypes.CDLL(library), "fusegen_digests")
said = ctypes.string_at(ctypes.addressof(said)).decode()
x = torch.arange(16, dtype=torch.float32)
shapes = [(2, 3, 4), (0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 1, 1)]
print(json.dumps({
    "made": [layout(ops.make(x, *shape)) for shape in shapes],
    "expected": [layout(torch.empty(shape, dtype=torch.bfloat16)) for shape in shapes],
    "digests": said,
    "plain": ops.twice(x).tolist(),
    "misaligned": ops.twice(x[1:]).tolist(),
    "strided": ops.twice(x[::2]).tolist(),
    "dtype": refusal(ops.twice, x.to(torch.float8_e8m0fnu)),
    "rank": refusal(ops.twice, x[None]),
    "refusals": [refusal(ops.refuse, x, how) for how in range(6)],
    "cuda": torch.version.cuda is not None,
    "places": [
        [refusal(ops.place, x, arch, *capability) for capability in CAPABILITIES]
        for arch in range(3)
    ],
}))
"""
)


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return find_toolchain()


def write_bundle(folder: Path) -> Path:
    """A bundle laid out as the generator lays it out, static files included."""
    csrc = folder / "csrc"
    (csrc / "kernels").mkdir(parents=True)
    (csrc / "fusegen" / "host").mkdir(parents=True)
    for name in (
        "CMakeLists.txt",
        "exports.map",
        "digests.cpp",
        "fusegen/host/stable.h",
        "fusegen/host/checks.h",
    ):
        shutil.copyfile(STATIC / name, csrc / name)
    (csrc / "sources.cmake").write_text(SOURCES)
    (csrc / "toy.h").write_text(HEADER)
    (csrc / "toy.cpp").write_text(LAUNCHER)
    (csrc / "kernels" / "twice.cu").write_text(KERNEL)
    return folder


def compiled(report: BuildReport) -> set[str]:
    return {unit.name for unit in report.units if not unit.cached}


def exported(library: Path) -> set[str]:
    said = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    )
    return {line.split()[-1] for line in said.stdout.splitlines()}


def needed(library: Path) -> set[str]:
    said = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    )
    lines = [line for line in said.stdout.splitlines() if "(NEEDED)" in line]
    assert "RPATH" not in said.stdout
    assert "RUNPATH" not in said.stdout
    return {line.split("[")[1].rstrip("]").split(".so")[0] for line in lines}


def codes(library: Path) -> set[str]:
    """Machine code and PTX of a library, such as `sm_80.cubin` and `sm_80.ptx`."""
    listed = (
        cuobjdump(library.parent, words, library.name) for words in ("--list-elf", "--list-ptx")
    )
    return {
        f"{code}.{kind}" for code, kind in re.findall(r"(sm_\w+)\.(cubin|ptx)", "".join(listed))
    }


def load(library: Path) -> dict[str, object]:
    """Load the library into a fresh PyTorch and call it there."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(library)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


class Recorder:
    """Progress that remembers what it heard."""

    def __init__(self) -> None:
        self.total = 0
        self.units: list[tuple[str, bool]] = []
        self.links: list[bool] = []

    def start(self, total: int) -> None:
        self.total = total

    def unit_done(self, name: str, *, cached: bool, seconds: float) -> None:
        assert seconds > 0
        self.units.append((name, cached))

    def link_done(self, library: Path, *, cached: bool) -> None:
        assert library.is_file()
        self.links.append(cached)


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory, toolchain: Toolchain
) -> Iterator[tuple[Path, Path, BuildReport]]:
    """A built bundle, the cache it filled, and its report."""
    bundle = write_bundle(tmp_path_factory.mktemp("built") / "bundle")
    root = tmp_path_factory.mktemp("cache")
    report = build(bundle, jobs=1, toolchain=toolchain, cache=ObjectCache(root))
    yield bundle, root, report


@pytest.fixture
def copy(built: tuple[Path, Path, BuildReport], tmp_path: Path) -> tuple[Path, Path]:
    """A clone of the bundle in another folder, and a cache that holds its objects."""
    _, root, _ = built
    shutil.copytree(root, tmp_path / "cache")
    return write_bundle(tmp_path / "elsewhere" / "bundle"), tmp_path / "cache"


def test_first_build_compiles_and_reports(built: tuple[Path, Path, BuildReport]) -> None:
    bundle, _, report = built
    assert report.library == bundle / "lib" / "fusegen_toy.so"
    assert report.linked
    assert compiled(report) == UNITS
    kernel = report.units[0]
    assert kernel.name == "kernels/twice.cu"
    assert len(kernel.report.kernels) == 1
    usage = kernel.report.kernels[0]
    assert "twice_kernel" in usage.name
    assert usage.shared == 256 * 4
    assert 0 < usage.registers <= 32
    assert (usage.spill_stores, usage.spill_loads) == (0, 0)
    assert all(unit.report.warnings == () for unit in report.units)
    assert all(unit.report.peak_bytes > 2**20 for unit in report.units)
    assert json.loads(json.dumps(report.as_dict()))["units"][0]["name"] == "kernels/twice.cu"


def test_library_exports_only_its_digests(built: tuple[Path, Path, BuildReport]) -> None:
    library = built[2].library
    assert {name.split("@")[0] for name in exported(library)} == {"fusegen_digests"}
    assert {"libtorch", "libtorch_cpu", "libc10"} <= needed(library)
    assert not {"libcuda", "libcudart"} & needed(library)


def test_library_works_in_pytorch(built: tuple[Path, Path, BuildReport]) -> None:
    said = load(built[2].library)
    title, line = str(said["digests"]).splitlines()
    assert title == "fusegen digests"
    assert line.split()[:2] == [CELL, DIGEST]
    assert read_library(built[2].library) == {CELL: Digests(DIGEST, line.split()[2])}
    assert said["plain"] == [2.0 * i for i in range(16)]
    assert said["misaligned"] == [2.0 * i for i in range(1, 16)]
    assert said["made"] == said["expected"]
    assert said["strided"] == [2.0 * i for i in range(0, 16, 2)]
    cell = "toy__plain__fast: "
    assert said["dtype"] == cell + "x: expected dtype float32, got float8_e8m0fnu"
    assert said["rank"] == cell + "x: expected 1 dimension [T], got 2"
    expected = [
        cell + "x: expected a tensor on a CUDA device, got one on the CPU or another device",
        cell + "x: expected K = 7 in dimension 0, got 16",
        cell + "K: expected a multiple of 64 on sm_90a, got 16",
        cell + "launch of twice: cudaErrorInvalidValue: invalid argument",
        cell + "twice: cudaErrorIllegalAddress: an illegal memory access was encountered",
    ]
    if not said["cuda"]:
        expected.append(cell + "this PyTorch has no CUDA support")
    refusals = said["refusals"]
    assert isinstance(refusals, list)
    assert refusals[: len(expected)] == expected


@pytest.mark.parametrize(
    ("arch", "name", "runs_on"),
    [
        (0, "sm_90a", [(9, 0)]),
        (1, "sm_80", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]),
        (2, "sm_80", [(8, 0), (8, 6), (8, 9)]),
    ],
    ids=["own instructions", "with PTX", "machine code alone"],
)
def test_devices_that_cannot_run_a_library_are_refused_with_the_command(
    built: tuple[Path, Path, BuildReport], arch: int, name: str, runs_on: list[tuple[int, int]]
) -> None:
    places = load(built[2].library)["places"]
    assert isinstance(places, list)
    for said, (major, minor) in zip(places[arch], CAPABILITIES, strict=True):
        refused = (
            f"toy__plain__fast: built for {name}, but x is on a device of capability"
            f" {major}.{minor}; run, where that device is: fusegen generate --arch native"
            " --module toy --recipe plain"
        )
        assert said == ("no error" if (major, minor) in runs_on else refused)


def test_second_build_does_nothing(
    built: tuple[Path, Path, BuildReport], toolchain: Toolchain
) -> None:
    bundle, root, first = built
    before = first.library.stat().st_mtime_ns
    heard = Recorder()
    second = build(bundle, toolchain=toolchain, cache=ObjectCache(root), progress=heard)
    assert compiled(second) == set()
    assert not second.linked
    assert first.library.stat().st_mtime_ns == before
    assert heard.total == len(UNITS)
    assert {name for name, cached in heard.units if cached} == UNITS
    assert heard.links == [True]
    assert [u.report for u in second.units] == [u.report for u in first.units]


def test_clone_elsewhere_hits(copy: tuple[Path, Path], toolchain: Toolchain) -> None:
    bundle, root = copy
    report = build(bundle, toolchain=toolchain, cache=ObjectCache(root))
    assert compiled(report) == set()
    assert report.linked
    assert f"{CELL} {DIGEST} " in str(load(report.library)["digests"])


def test_touched_library_is_linked_again(copy: tuple[Path, Path], toolchain: Toolchain) -> None:
    bundle, root = copy
    report = build(bundle, toolchain=toolchain, cache=ObjectCache(root))
    good = report.library.read_bytes()
    report.library.write_bytes(good[: len(good) // 2])
    assert build(bundle, toolchain=toolchain, cache=ObjectCache(root)).linked
    assert report.library.stat().st_size == len(good)


def test_edited_header_compiles_its_units(copy: tuple[Path, Path], toolchain: Toolchain) -> None:
    bundle, root = copy
    header = bundle / "csrc" / "toy.h"
    header.write_text(HEADER.replace("2.0f", "3.0f"))
    report = build(bundle, jobs=1, toolchain=toolchain, cache=ObjectCache(root))
    assert compiled(report) == UNITS
    assert load(report.library)["plain"] == [3.0 * i for i in range(16)]
    header.write_text(HEADER)
    again = build(bundle, jobs=1, toolchain=toolchain, cache=ObjectCache(root))
    assert compiled(again) == set()
    assert again.linked


def test_header_in_front_of_another_compiles(copy: tuple[Path, Path], toolchain: Toolchain) -> None:
    bundle, root = copy
    shadow = bundle / "csrc" / "kernels" / "toy.h"
    shadow.write_text(HEADER.replace("2.0f", "5.0f"))
    report = build(bundle, jobs=1, toolchain=toolchain, cache=ObjectCache(root))
    assert "kernels/twice.cu" in compiled(report)


def test_launchers_share_what_they_include(
    tmp_path: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes as alone, and the cache knows the headers that were compiled before."""
    csrc = write_bundle(tmp_path / "bundle") / "csrc"
    count = SharedHeader.ALONE + 2
    for i in range(count):
        text = f'#include "{HEADER_OF_LAUNCHERS}"\nint64_t of_{i}(const fusegen::Tensor& x);\n'
        text += f"int64_t of_{i}(const fusegen::Tensor& x) {{ return x.size({i}); }}\n"
        (csrc / f"l{i}.cpp").write_text(text)
    sources = read_sources(csrc / "sources.cmake")
    launchers = CellUnits(DIGEST, tuple(f"l{i}.cpp" for i in range(count)))
    sources = dataclasses.replace(sources, cells={CELL: launchers})
    digests = tmp_path / "digests"
    digests.mkdir()
    (digests / "digests.inc").write_text('"plain"')
    plan = compilation.commands(csrc, sources, toolchain, digests, strict=True, lineinfo=False)
    ran: list[tuple[str, ...]] = []
    run = Runner.run

    def noting(self: Runner, words: Any, **rest: Any) -> Any:
        ran.append(tuple(words))
        return run(self, words, **rest)

    monkeypatch.setattr(Runner, "run", noting)

    def compiled_in(folder: Path) -> tuple[list[str], dict[str, CachedObject]]:
        """What compilers ran on, and the objects."""
        ran.clear()
        folder.mkdir()
        cache = ObjectCache(folder / "cache")
        objects = compilation.compile_all(plan, folder, cache, 2, Silent())
        return [words[words.index("-o") - 1] for words in ran], objects

    ran_on, objects = compiled_in(tmp_path / "a place")
    assert sum(name.endswith("empty.h") for name in ran_on) == 1
    assert len(ran_on) == len(plan) + 1
    cache = ObjectCache(tmp_path / "a place" / "cache")

    def never(*_: Path) -> Any:
        raise AssertionError

    launcher = plan[count - 1]
    assert cache.obtain(launcher.unit, tmp_path / "x.o", never).cached
    monkeypatch.setattr(SharedHeader, "ALONE", count)
    ran_on, alone = compiled_in(tmp_path / "alone")
    assert not any(name.endswith("empty.h") for name in ran_on)
    assert {name: each.sha256 for name, each in alone.items()} == {
        name: each.sha256 for name, each in objects.items()
    }
    assert headers_known(tmp_path / "a place") == headers_known(tmp_path / "alone")
    with (csrc / HEADER_OF_LAUNCHERS).open("a") as header:
        header.write("// edited\n")
    with pytest.raises(AssertionError):
        ObjectCache(tmp_path / "a place" / "cache").obtain(launcher.unit, tmp_path / "y.o", never)


def headers_known(folder: Path) -> dict[str, Any]:
    """What a cache knows that each unit has read, by the unit's key."""
    found = (folder / "cache").rglob("manifests/*.json")
    return {path.name: json.loads(path.read_text())[0]["headers"] for path in found}


def test_a_header_that_launchers_share_fails_as_their_own(
    tmp_path: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    monkeypatch.setattr(SharedHeader, "ALONE", 0)
    (bundle / "csrc" / HEADER_OF_LAUNCHERS).write_text("#pragma once\nnonsense\n")
    with pytest.raises(BuildError, match=r"toy\.cpp does not compile[\s\S]*stable\.h:2"):
        build(bundle, jobs=1, toolchain=toolchain, cache=ObjectCache(tmp_path / "cache"))


def test_a_digest_compiles_one_unit(copy: tuple[Path, Path], toolchain: Toolchain) -> None:
    bundle, root = copy
    (bundle / "csrc" / "sources.cmake").write_text(SOURCES.replace("00c0ffee", "0badcafe"))
    report = build(bundle, jobs=1, toolchain=toolchain, cache=ObjectCache(root))
    assert compiled(report) == {"digests.cpp"}
    assert digests(report.library).cell == "0badcafe" * 8


def digests(library: Path) -> Digests:
    found = read_library(library)
    assert found is not None and set(found) == {CELL}
    return found[CELL]


def test_an_edit_is_seen_once_it_is_built(copy: tuple[Path, Path], toolchain: Toolchain) -> None:
    bundle, root = copy
    first = digests(build(bundle, toolchain=toolchain, cache=ObjectCache(root)).library)
    assert stale_cells(bundle) == {} and is_current(bundle)
    # A header that only another header names, and that was not there before.
    header = bundle / "csrc" / "toy.h"
    header.write_text(HEADER.replace("#pragma once", '#pragma once\n#  include "deep/new.h"'))
    (bundle / "csrc" / "deep").mkdir()
    (bundle / "csrc" / "deep" / "new.h").write_text("#pragma once\n")
    assert stale_cells(bundle) == {CELL: "other sources"} and not is_current(bundle)
    second = digests(build(bundle, jobs=1, toolchain=toolchain, cache=ObjectCache(root)).library)
    assert stale_cells(bundle) == {}
    (bundle / "csrc" / "deep" / "new.h").write_text("#pragma once\n// edited\n")
    assert stale_cells(bundle) == {CELL: "other sources"}
    assert first.cell == second.cell == DIGEST and first.sources != second.sources
    library = bundle / "lib" / "fusegen_toy.so"
    library.write_bytes(library.read_bytes().replace(b"fusegen digests", b"nothing of ours"))
    assert stale_cells(bundle) == {CELL: "it does not say from what"}


def test_an_edit_during_the_build_is_no_library(
    copy: tuple[Path, Path], toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, root = copy

    class Editing(Recorder):
        def unit_done(self, name: str, *, cached: bool, seconds: float) -> None:
            (bundle / "csrc" / "toy.h").write_text(HEADER.replace("2.0f", "3.0f"))

    with pytest.raises(BuildError, match="was changed while it was compiled"):
        build(bundle, toolchain=toolchain, cache=ObjectCache(root), progress=Editing())
    assert not (bundle / "lib").exists()


def test_two_builders_compile_once(tmp_path: Path, toolchain: Toolchain) -> None:
    bundles = [write_bundle(tmp_path / name) for name in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        reports = list(
            pool.map(
                lambda bundle: build(
                    bundle, jobs=1, toolchain=toolchain, cache=ObjectCache(tmp_path / "cache")
                ),
                bundles,
            )
        )
    assert sorted([*compiled(reports[0]), *compiled(reports[1])]) == sorted(UNITS)
    assert reports[0].library.read_bytes() == reports[1].library.read_bytes()


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("kernels/twice.cu", "kFactor *", "kMissing *", 'identifier "kMissing" is undefined'),
        ("toy.cpp", "kFactor *", "kMissing *", "'kMissing' was not declared"),
        ("toy.cpp", "const Tensor packed", "int idle; const Tensor packed", "unused variable"),
        ("kernels/twice.cu", "const int64_t i", "int idle; const int64_t i", "never referenced"),
    ],
)
def test_failure_names_the_file_and_leaves_no_library(
    copy: tuple[Path, Path], toolchain: Toolchain, name: str, old: str, new: str, said: str
) -> None:
    bundle, root = copy
    source = bundle / "csrc" / name
    source.write_text(source.read_text().replace(old, new, 1))
    with pytest.raises(BuildError) as caught:
        build(bundle, jobs=1, toolchain=toolchain, cache=ObjectCache(root))
    assert f"csrc/{name} does not compile" in str(caught.value)
    assert said in str(caught.value)
    assert not (bundle / "lib").exists()


def test_failed_link_leaves_the_library_as_it_was(
    copy: tuple[Path, Path], toolchain: Toolchain
) -> None:
    bundle, root = copy
    library = build(bundle, toolchain=toolchain, cache=ObjectCache(root)).library
    before = library.read_bytes()
    kernel = bundle / "csrc" / "kernels" / "twice.cu"
    kernel.write_text(KERNEL.replace("Outcome twice(", "Outcome thrice("))
    with pytest.raises(BuildError, match="undefined reference to `toy::twice"):
        build(bundle, jobs=1, toolchain=toolchain, cache=ObjectCache(root))
    assert library.read_bytes() == before
    assert sorted(path.name for path in library.parent.iterdir()) == [
        "fusegen_toy.link.json",
        "fusegen_toy.so",
    ]


def write_stuck_compiler(folder: Path) -> tuple[Path, Path]:
    """A host compiler that never finishes toy.cpp, and the file that will hold its process id."""
    compiler, pid_file = folder / "stuck-g++", folder / "pid"
    compiler.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/sh
            case "$*" in *" -c "*"toy.cpp"*) echo $$ > {pid_file}; exec sleep 600;; esac
            exec g++ "$@"
            """
        )
    )
    compiler.chmod(0o755)
    return compiler, pid_file


def test_failing_unit_stops_the_others(tmp_path: Path, toolchain: Toolchain) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    compiler, pid_file = write_stuck_compiler(tmp_path)
    kernel = bundle / "csrc" / "kernels" / "twice.cu"
    kernel.write_text("#error stop here\n")
    stuck = dataclasses.replace(toolchain, host_compiler=compiler)
    started = time.monotonic()
    with pytest.raises(BuildError, match="stop here"):
        build(bundle, jobs=2, toolchain=stuck, cache=ObjectCache(tmp_path / "cache"))
    assert time.monotonic() - started < 60
    if pid_file.exists():  # else the failure came before the other unit had begun
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)
    assert not (bundle / "lib").exists()


def test_interrupt_between_submissions_stops_what_runs(
    tmp_path: Path, toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first compiler may be running before the last unit is handed to the pool."""
    bundle = write_bundle(tmp_path / "bundle")
    compiler, pid_file = write_stuck_compiler(tmp_path)
    submit = ThreadPoolExecutor.submit

    def interrupted(pool: ThreadPoolExecutor, call: Any, index: int, command: Any) -> Any:
        future = submit(pool, call, index, command)
        if command.name != "toy.cpp":
            return future
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    stuck = dataclasses.replace(toolchain, host_compiler=compiler)
    with pytest.raises(KeyboardInterrupt):
        build(bundle, jobs=2, toolchain=stuck, cache=ObjectCache(tmp_path / "cache"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_interrupt_stops_the_compilers(tmp_path: Path) -> None:
    """Ctrl-C during a compilation that would never end: no child, no library, no object."""
    bundle = write_bundle(tmp_path / "bundle")
    compiler, pid_file = write_stuck_compiler(tmp_path)
    # A shell starts its background jobs with SIGINT ignored, and the build would inherit that.
    program = (
        "import signal, sys; from pathlib import Path; from fusegen.build.library import build; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "build(Path(sys.argv[1]), jobs=2)"
    )
    env = os.environ | {
        "CXX": str(compiler),
        "FUSEGEN_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT / "generator"),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(bundle)],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text().strip()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    child = int(pid_file.read_text())
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in said
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not (bundle / "lib").exists()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "set(FUSEGEN_NAMESPACE fusegen_toy)",
            "set(NAMESPACE toy)",
            ":2:5: expected one of FUSEGEN",
        ),
        ("fusegen_toy)", "fusegen-toy)", ":2:23: FUSEGEN_NAMESPACE: expected an identifier, each"),
        ("fusegen_toy)", "a b)", ":2:26: FUSEGEN_NAMESPACE: expected one value, found '2'"),
        ("    toy.cpp", "    ../toy.cpp", f":9:5: FUSEGEN_UNITS_{CELL}: expected a relative path"),
        ("    toy.cpp", "    /toy.cpp", f":9:5: FUSEGEN_UNITS_{CELL}: expected a relative path"),
        ("    toy.cpp", "    a.cpp a.cpp", f":9:11: FUSEGEN_UNITS_{CELL}: expected a relative"),
        ("twice.cu)", "twice.cu", f":11:1: FUSEGEN_UNITS_{CELL}: expected `)`, found 'the end of"),
        ("# A comment,", "list ", ":1:1: expected `set(`, found 'list'"),
        (DIGEST, "${F}", ":7:5: expected a word, a string or a parenthesis, found '\"'"),
        (DIGEST, "00c0ffee", ":7:5: FUSEGEN_DIGEST_toy__plain__fast: expected a hash of 64 hexa"),
        (
            f'set(FUSEGEN_DIGEST_{CELL}\n    "{DIGEST}")',
            "",
            f"a statement set(FUSEGEN_DIGEST_{CELL} ",
        ),
        ("    toy__plain__fast)", "    other)", ":6:5: expected one of FUSEGEN_DIGEST_other, FUSE"),
        ("toy.cpp", "other.cpp", "needs files that do not exist: other.cpp"),
    ],
)
def test_malformed_sources_are_refused_with_their_place(
    tmp_path: Path, toolchain: Toolchain, old: str, new: str, said: str
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    sources = bundle / "csrc" / "sources.cmake"
    assert SOURCES.count(old) == 1
    sources.write_text(SOURCES.replace(old, new))
    with pytest.raises(BuildError) as caught:
        build(bundle, toolchain=toolchain, cache=ObjectCache(tmp_path / "cache"))
    assert str(caught.value).startswith(str(sources))
    assert said in str(caught.value)
    assert "version control" in str(caught.value)


def test_folder_without_kernels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"sources\.cmake does not exist: this is not a bundle"):
        build(tmp_path)


def test_output_of_compilers_is_understood() -> None:
    text = textwrap.dedent(
        """\
        ptxas info    : 11 bytes gmem
        ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90a'
        ptxas info    : Function properties for _Z1kPf
            16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
        ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem, 528 bytes cmem[0]
        ptxas info    : Function properties for helper
            32 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async are serialized
        ptxas info    : Compiling entry function '_Z1lv' for 'sm_90a'
        ptxas info    : Function properties for _Z1lv
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        ptxas info    : Used 8 registers, used 0 barriers
        a.cu(3): warning #177-D: variable "x" was declared but never referenced
        """
    )
    assert kernel_usage(text) == (
        KernelUsage("_Z1kPf", 168, 16, 8, 12, shared=1024),
        KernelUsage("_Z1lv", 8, 0, 0, 0, shared=0),
    )
    assert [line[:20] for line in warning_lines(text)] == [
        "ptxas info    : (C75",
        "a.cu(3): warning #17",
    ]


def test_old_nvcc_is_refused(copy: tuple[Path, Path], toolchain: Toolchain) -> None:
    bundle, _ = copy
    sources = bundle / "csrc" / "sources.cmake"
    sources.write_text(SOURCES.replace("90a", "100a"))
    assert toolchain.version >= (12, 8)
    with pytest.raises(BuildError, match=r"sm_100a needs nvcc 12\.8 or newer, but nvcc 12\.4"):
        build(bundle, toolchain=dataclasses.replace(toolchain, version=(12, 4)))


def test_ptx_beside_machine_code_is_kept(tmp_path: Path, toolchain: Toolchain) -> None:
    """For GPUs that come later."""
    bundle = write_bundle(tmp_path / "bundle")
    (bundle / "csrc" / "sources.cmake").write_text(WITH_PTX)
    cache = ObjectCache(tmp_path / "cache")
    report = build(bundle, jobs=1, toolchain=toolchain, cache=cache)
    assert codes(report.library) == {"sm_80.cubin", "sm_80.ptx"}
    assert [len(unit.report.kernels) for unit in report.units if unit.name.endswith(".cu")] == [1]
    with pytest.raises(BuildError, match=r"sm_80 needs nvcc 11\.4 or newer"):
        build(bundle, toolchain=dataclasses.replace(toolchain, version=(11, 3)))


def test_cmake_builds_the_same_library(tmp_path: Path, toolchain: Toolchain) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    (bundle / "csrc" / "sources.cmake").write_text(WITH_PTX)
    folder = tmp_path / "cmake"
    for command in (
        [
            *("cmake", "-S", str(bundle / "csrc"), "-B", str(folder), "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_CUDA_COMPILER={toolchain.nvcc}",
            "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        ],
        ["cmake", "--build", str(folder), "-j", "1"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    library = bundle / "lib" / "fusegen_toy.so"
    assert {name.split("@")[0] for name in exported(library)} == {"fusegen_digests"}
    assert {"libtorch", "libtorch_cpu", "libc10"} <= needed(library)
    assert codes(library) == {"sm_80.cubin", "sm_80.ptx"}
    assert load(library)["plain"] == [2.0 * i for i in range(16)]
    assert stale_cells(bundle) == {}
    (bundle / "csrc" / "kernels" / "twice.cu").write_text(f"{KERNEL}// edited\n")
    assert stale_cells(bundle) == {CELL: "other sources"}
    again = subprocess.run(["cmake", "--build", str(folder), "-j", "1"], capture_output=True)
    assert again.returncode == 0, again.stdout
    assert stale_cells(bundle) == {}
    commands = json.loads((folder / "compile_commands.json").read_text())
    for entry in commands:
        is_kernel = entry["file"].endswith(".cu")
        flags = (*KERNEL_FLAGS, *KERNEL_STRICT) if is_kernel else (*HOST_FLAGS, *HOST_STRICT)
        words = entry["command"].split()
        assert [flag for flag in flags if flag not in words] == []
        extra = [w for w in words[1:] if w.startswith(("-O", "-std", "-f", "-W", "-X", "--expt"))]
        own = {"-forward-unknown-to-host-compiler", "-Winvalid-pch"}  # what CMake itself adds
        assert sorted(set(extra) - set(flags) - own) == []
