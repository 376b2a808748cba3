"""Configurations of kernels of tensor memory: what the family accepts compiles, and nothing else.

The family, in Python, and the headers' assertions are two derivations of the same rules.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from unit.gpu_files import load

from fusegen.build.toolchain import find_toolchain
from fusegen.families.limits import hardware_limits
from fusegen.families.tcgen05 import Operands, Tcgen05Config
from fusegen.ir.kernel import GemmKind, Store
from fusegen.ir.kernel_set import Variant
from fusegen.publish.paths import builtin_templates

pytestmark = pytest.mark.compile

CSRC = builtin_templates() / "static" / "csrc"
LIMITS = hardware_limits((10, 0))
STORES = (Store.IO, Store.ADD)
LAUNCHES = {
    Operands(16): ("GemmArguments", "launch_tcgen05_gemm<kKind, __half"),
    Operands(8): (
        "Fp8GemmArguments",
        "launch_fp8_tcgen05_gemm<kKind, __nv_fp8_e5m2, __nv_fp8_e4m3, __half,"
        " fusegen::Fp8Scaling::row",
    ),
    Operands(8, 32): (
        "ScaledGemmArguments",
        "launch_scaled_tcgen05_gemm<kKind, __nv_fp8_e5m2, __nv_fp8_e4m3, __half",
    ),
    Operands(4, 16): (
        "ScaledGemmArguments",
        "launch_scaled_tcgen05_gemm<kKind, __nv_fp4_e2m1, __nv_fp4_e2m1, __half",
    ),
}
Point = tuple[Operands, Tcgen05Config]


def text_of(points: Sequence[Point]) -> str:
    """Launches of kernels whose results go to memory each way that they can."""
    launches = []
    for index, ((operands, config), store) in enumerate(product(points, STORES)):
        arguments, launch = LAUNCHES[operands]
        launches.append(
            f"fusegen::Status launch_{index}(const fusegen::{arguments}& in, fusegen::Stream& s)"
            " {\n"
            f"  using Config = fusegen::Tcgen05Config<{config.cpp(LIMITS)}>;\n"
            "  constexpr fusegen::Gemm kKind = fusegen::Gemm::wgrad;\n"
            f"  return fusegen::{launch}, Config, fusegen::Store::{store.value}>(in, s);\n}}\n"
        )
    headers = ("gemm_fp8", "gemm_scaled")
    includes = (f'#include "fusegen/gemm/{name}.sm100.cuh"\n' for name in headers)
    return "".join((*includes, *launches))


def compiled(points: Sequence[Point], folder: Path) -> subprocess.CompletedProcess[str]:
    """PTX alone: assertions are all that is asked."""
    tools = find_toolchain()
    source = folder / "configs.cu"
    source.write_text(text_of(points), encoding="utf-8")
    includes = [f"-I{CSRC}"]
    flags = ["-std=c++17", "--expt-relaxed-constexpr", "-arch=compute_100a", "-ptx"]
    command = [str(tools.nvcc), *flags, *includes, str(source), "-o", str(source.with_suffix(".p"))]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def refusals(operands: Operands, config: Tcgen05Config) -> list[str]:
    variants = (Variant((), (), (), store) for store in STORES)
    found = (operands.problems(config, GemmKind.WGRAD, each, LIMITS) for each in variants)
    return [problem for problems in found for problem in problems]


def accepted() -> list[Point]:
    extents = ((128, 256), (64, 128, 192, 256), (32, 64, 128, 256))
    every = product(LAUNCHES, product(*extents), (1, 2, 3), (1, 2))
    points = ((operands, Tcgen05Config(tile, sums, ctas)) for operands, tile, sums, ctas in every)
    return [point for point in points if not refusals(*point)]


def test_configurations_that_are_accepted_compile(tmp_path: Path) -> None:
    points = accepted()
    # Scales leave no room for two sums of 256 columns, and a pair of CTAs takes no fewer columns.
    assert len(points) == (2 * 4 + 2 * 3) + (2 * 2 + 2 * 1)
    done = compiled(points, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("operands", "config", "word"),
    [
        (Operands(16), Tcgen05Config((128, 128, 32), 2), "64 elements along K"),
        (Operands(4, 16), Tcgen05Config((128, 128, 128), 2), "256 elements along K"),
        (Operands(16), Tcgen05Config((64, 128, 64), 2), "128 rows"),
        (Operands(16), Tcgen05Config((128, 192, 64), 2), "columns"),
        (Operands(16), Tcgen05Config((128, 128, 64), 3), "1 or 2 sums"),
        (Operands(16), Tcgen05Config((128, 256, 64), 2, 2), "256 rows"),
        (Operands(16), Tcgen05Config((256, 256, 64), 2), "128 rows"),
        (Operands(8), Tcgen05Config((256, 128, 128), 2, 2), "128 columns for each CTA"),
        (Operands(16), Tcgen05Config((384, 256, 64), 1, 3), "1 CTA per MMA, or 2"),
        (Operands(8, 32), Tcgen05Config((128, 256, 128), 2), "sums and scales take more than 512"),
    ],
    ids=lambda value: value.name if isinstance(value, Tcgen05Config) else "",
)
def test_configurations_that_are_refused_do_not_compile(
    operands: Operands, config: Tcgen05Config, word: str, tmp_path: Path
) -> None:
    found = refusals(operands, config)
    assert any(word in each for each in found), found
    done = compiled([(operands, config)], tmp_path)
    assert done.returncode != 0 and "static assertion" in done.stderr, done.stderr[-3000:]


FAULTS = {
    "": "",
    "uint32_t(columns / 8) << 17": "uint32_t(columns / 8) << 16",
    "constexpr uint64_t kVersion = uint64_t(1) << 46;": "constexpr uint64_t kVersion = 0;",
    "K * kSwizzleBytes / 16 : 1": "1 : 1",
    "index << 4 | index << 29": "index << 4",
    "kMmaKBytes * 8 / Bits * kSwizzleBytes / 16": "kMmaKBytes / 16",
    "uint32_t(b == StageMajor::MN) << 16": "0",
}
"""Code of the header, and what to break it into."""


@pytest.mark.parametrize("sound", FAULTS, ids=range(len(FAULTS)))
def test_descriptors_are_those_of_cute(sound: str, tmp_path: Path) -> None:
    """Every number that the tensor core is told, against the constructors of CUTLASS."""
    tools = find_toolchain()
    header = "fusegen/mainloop/umma.sm100.cuh"
    text = (CSRC / header).read_text("utf-8")
    assert sound in text
    (tmp_path / header).parent.mkdir(parents=True)
    (tmp_path / header).write_text(text.replace(sound, FAULTS[sound]) if sound else text, "utf-8")
    cutlass = load("cutlass_headers").cutlass_include()
    includes = [f"-I{path}" for path in (tmp_path, CSRC, cutlass)]
    flags = ["-std=c++17", "--expt-relaxed-constexpr", "-arch=sm_100a"]
    program = tmp_path / "program"
    source = Path(__file__).with_name("umma_descriptors.cu")
    command = [str(tools.nvcc), *flags, *includes, str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert bool(done.returncode) == bool(sound), done.stdout
