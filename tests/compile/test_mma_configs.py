"""Configurations of `mma.sync` kernels: what the family accepts compiles, what it refuses does not.

The family, in Python, and the headers' assertions are two derivations of the same rules.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product, repeat
from pathlib import Path

import pytest

from fusegen.build.toolchain import find_toolchain
from fusegen.families.limits import hardware_limits
from fusegen.families.mma_sync import MmaConfig, Operands
from fusegen.ir.dtypes import DType
from fusegen.ir.kernel import GemmKind, Store
from fusegen.ir.kernel_set import Variant
from fusegen.ir.quantization import Accumulation
from fusegen.publish.paths import builtin_templates

pytestmark = pytest.mark.compile

CSRC = builtin_templates() / "static" / "csrc"


@dataclass(frozen=True)
class Kernels:
    """GEMMs of one family: how they are launched, and what Python knows of them.

    Attributes:
        name: in the names of tests.
        operands: of the family.
        variant: of its kernels.
        capability: that they are compiled for.
        launch: C++ of their launch, before the configuration; ``{kind}`` stands for theirs.
        arguments: of the launch.
        header: that has it.
        ways: kinds and stores that are compiled: operands lie in memory each way that they can.
        change: C++ type of what results go through.
    """

    name: str
    operands: Operands
    variant: Variant
    capability: tuple[int, int]
    launch: str
    arguments: str
    header: str
    ways: tuple[tuple[GemmKind, Store], ...] = (
        (GemmKind.FPROP, Store.IO),
        (GemmKind.WGRAD, Store.FP32),
    )
    change: str = "fusegen::Keep"

    @property
    def limits(self) -> Mapping[str, int]:
        return hardware_limits(self.capability)

    def problems(self, config: MmaConfig) -> list[str]:
        every = (replace(self.variant, store=store) for _, store in self.ways)
        kinds = (kind for kind, _ in self.ways)
        found = map(self.operands.problems, repeat(config), kinds, every, repeat(self.limits))
        return [*dict.fromkeys(chain.from_iterable(found))]


def of_codes(sums: str, accumulation: Accumulation) -> Kernels:
    """Of FP8."""
    variant = Variant((DType.E4M3, DType.E4M3), ("row", "row"), (accumulation.value,))
    launch = (
        "launch_fp8_mma_gemm<fusegen::Gemm::{kind}, __nv_fp8_e4m3, __nv_fp8_e4m3, __half,"
        f" fusegen::Fp8Scaling::row, fusegen::Accumulation::{sums}"
    )
    fp8 = ("Fp8GemmArguments", "gemm/gemm_fp8.mma.cuh")
    return Kernels(sums, Operands(element_bits=8), variant, (8, 9), launch, *fp8)


PLAIN = Kernels(
    "plain",
    Operands(element_bits=16),
    Variant((), (), ()),
    (8, 0),
    "launch_mma_gemm<fusegen::Gemm::{kind}, __half",
    "GemmArguments",
    "gemm/gemm.mma.cuh",
)
GATED = replace(
    PLAIN, name="gated", ways=((GemmKind.FPROP, Store.GATED_AUX),), change="Halves<__half>"
)
FAST, SPLIT = of_codes("fast", Accumulation.FAST), of_codes("split", Accumulation.SPLIT_128)


EXPRESSION = """
struct Product {
  static constexpr int operand_count = 2, result_count = 1;
  __host__ __device__ static constexpr fusegen::Slot operand(int index) {
    return {index ? fusegen::Access::second_half : fusegen::Access::first_half, false};
  }
  __host__ __device__ static constexpr fusegen::Slot result(int) {
    return {fusegen::Access::full, false};
  }
  __device__ static void apply(const float* in, float* out, const float*) {
    out[0] = in[0] * in[1];
  }
};
template <class Element>
using Halves = fusegen::Gated<Element, Product, 0, 1>;
"""


def text_of(kernels: Kernels, configs: Sequence[MmaConfig]) -> str:
    """Launches of kernels."""
    cases = product(configs, kernels.ways)
    launches = [
        f"fusegen::Status launch_{index}(const fusegen::{kernels.arguments}& in,"
        " fusegen::Stream& s) {\n"
        f"  using Config = fusegen::MmaConfig<{config.cpp(kernels.limits)}>;\n"
        f"  return fusegen::{kernels.launch.format(kind=kind.value)}, Config,"
        f" fusegen::Store::{store.value}>(in, s, {kernels.change}{{}});\n}}\n"
        for index, (config, (kind, store)) in enumerate(cases)
    ]
    return "".join((f'#include "fusegen/{kernels.header}"\n', EXPRESSION, *launches))


def compiled(
    kernels: Kernels, configs: Sequence[MmaConfig], folder: Path
) -> subprocess.CompletedProcess[str]:
    """PTX alone: assertions are all that is asked."""
    tools = find_toolchain()
    source = folder / "configs.cu"
    source.write_text(text_of(kernels, configs), encoding="utf-8")
    includes = [f"-I{CSRC}"]
    arch = "-arch=compute_{}{}".format(*kernels.capability)
    flags = ["-std=c++17", "--expt-relaxed-constexpr", arch, "-ptx"]
    command = [str(tools.nvcc), *flags, *includes, str(source), "-o", str(source.with_suffix(".p"))]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def accepted(kernels: Kernels) -> list[MmaConfig]:
    """One of each shape of tile and warps; most stages and CTAs that fit."""
    found: dict[tuple[object, ...], MmaConfig] = {}
    extents, warps = (64, 128, 192, 256), (1, 2, 4)
    for m, n, k, rows, columns in product(extents, extents, (32, 64, 128), warps, warps):
        for stages, ctas in product((2, 3, 4, 6), (1, 2, 3, 4)):
            config = MmaConfig((m, n, k), (rows, columns), stages, ctas)
            if not kernels.problems(config):
                found[config.tile, config.warps] = config
    return [*found.values()]


@pytest.mark.parametrize("kernels", [PLAIN, GATED, FAST, SPLIT], ids=lambda each: each.name)
def test_configurations_that_are_accepted_compile(kernels: Kernels, tmp_path: Path) -> None:
    """A sample, spread over all shapes."""
    every = accepted(kernels)
    assert len(every) > 20
    sample = every[:: -(-len(every) // 10)]
    done = compiled(kernels, sample, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("kernels", "config", "word"),
    [
        (PLAIN, MmaConfig((128, 128, 48), (2, 2), 3, 1), "elements along K"),
        (PLAIN, MmaConfig((128, 128, 32), (2, 2), 1, 1), "2 stages"),
        (PLAIN, MmaConfig((96, 128, 32), (2, 2), 3, 1), "rows of a warp, got 48"),
        (PLAIN, MmaConfig((128, 256, 32), (2, 2), 3, 1), "evenly"),
        (PLAIN, MmaConfig((64, 64, 32), (4, 4), 3, 1), "evenly"),
        (PLAIN, MmaConfig((256, 128, 32), (2, 2), 3, 1), "accumulators"),
        (PLAIN, MmaConfig((128, 128, 32), (2, 2), 4, 4), "registers"),
        (PLAIN, MmaConfig((128, 128, 64), (2, 2), 3, 2), "shared memory"),
        (GATED, MmaConfig((64, 64, 64), (2, 4), 2, 2), "32 columns of a warp"),
        (FAST, MmaConfig((128, 128, 32), (2, 4), 3, 1), "elements along K"),
        (FAST, MmaConfig((128, 256, 64), (2, 4), 4, 1), "shared memory"),
        (SPLIT, MmaConfig((128, 256, 64), (2, 4), 3, 1), "more than 128 registers"),
        (SPLIT, MmaConfig((128, 128, 64), (2, 4), 3, 2), "registers"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_configurations_that_are_refused_do_not_compile(
    kernels: Kernels, config: MmaConfig, word: str, tmp_path: Path
) -> None:
    assert any(word in each for each in kernels.problems(config)), kernels.problems(config)
    done = compiled(kernels, [config], tmp_path)
    assert done.returncode != 0 and "static assertion" in done.stderr, done.stderr[-3000:]
