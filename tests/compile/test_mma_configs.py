"""Configurations of `mma.sync` kernels: what the family accepts compiles, what it refuses does not.

The family, in Python, and the headers' assertions are two derivations of the same rules.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from fusegen.build.toolchain import find_toolchain
from fusegen.families.limits import hardware_limits
from fusegen.families.mma_sync import MmaConfig, Operands
from fusegen.ir.kernel import GemmKind, Store
from fusegen.ir.kernel_set import Variant
from fusegen.publish.paths import builtin_templates

pytestmark = pytest.mark.compile

CSRC = builtin_templates() / "static" / "csrc"
LIMITS = hardware_limits((8, 0))
PLAIN = Variant((), (), ())


def text_of(configs: Sequence[MmaConfig]) -> str:
    """Launches of kernels whose operands lie in memory each way that they can."""
    cases = product(configs, ((GemmKind.FPROP, Store.IO), (GemmKind.WGRAD, Store.FP32)))
    launches = [
        f"fusegen::Status launch_{index}(const fusegen::GemmArguments& in, fusegen::Stream& s) {{\n"
        f"  using Config = fusegen::MmaConfig<{config.cpp(LIMITS)}>;\n"
        f"  return fusegen::launch_mma_gemm<fusegen::Gemm::{kind.value}, __half, Config,"
        f" fusegen::Store::{store.value}>(in, s);\n}}\n"
        for index, (config, (kind, store)) in enumerate(cases)
    ]
    return "".join(('#include "fusegen/gemm/gemm.mma.cuh"\n', *launches))


def compiled(configs: Sequence[MmaConfig], folder: Path) -> subprocess.CompletedProcess[str]:
    """PTX alone: assertions are all that is asked."""
    tools = find_toolchain()
    source = folder / "configs.cu"
    source.write_text(text_of(configs), encoding="utf-8")
    includes = [f"-I{CSRC}", f"-I{tools.cutlass_include}"]
    flags = ["-std=c++17", "--expt-relaxed-constexpr", "-arch=compute_80", "-ptx"]
    command = [str(tools.nvcc), *flags, *includes, str(source), "-o", str(source.with_suffix(".p"))]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def refusals(config: MmaConfig) -> list[str]:
    return list(Operands(element_bits=16).problems(config, GemmKind.WGRAD, PLAIN, LIMITS))


def accepted() -> list[MmaConfig]:
    """One of each shape of tile and warps; most stages and CTAs that fit."""
    found: dict[tuple[object, ...], MmaConfig] = {}
    extents, warps = (64, 128, 192, 256), (1, 2, 4)
    for m, n, k, rows, columns in product(extents, extents, (32, 64), warps, warps):
        for stages, ctas in product((2, 3, 4, 6), (1, 2, 3, 4)):
            config = MmaConfig((m, n, k), (rows, columns), stages, ctas)
            if not refusals(config):
                found[config.tile, config.warps] = config
    return [*found.values()]


def test_configurations_that_are_accepted_compile(tmp_path: Path) -> None:
    """A sample, spread over all shapes."""
    every = accepted()
    assert len(every) > 20
    sample = every[:: -(-len(every) // 10)]
    done = compiled(sample, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (MmaConfig((128, 128, 48), (2, 2), 3, 1), "elements along K"),
        (MmaConfig((128, 128, 32), (2, 2), 1, 1), "2 stages"),
        (MmaConfig((96, 128, 32), (2, 2), 3, 1), "rows of a warp, got 48"),
        (MmaConfig((128, 256, 32), (2, 2), 3, 1), "evenly"),
        (MmaConfig((64, 64, 32), (4, 4), 3, 1), "evenly"),
        (MmaConfig((256, 128, 32), (2, 2), 3, 1), "accumulators"),
        (MmaConfig((128, 128, 32), (2, 2), 4, 4), "registers"),
        (MmaConfig((128, 128, 64), (2, 2), 3, 2), "shared memory"),
    ],
    ids=lambda value: value.name if isinstance(value, MmaConfig) else value,
)
def test_configurations_that_are_refused_do_not_compile(
    config: MmaConfig, word: str, tmp_path: Path
) -> None:
    assert any(word in each for each in refusals(config)), refusals(config)
    done = compiled([config], tmp_path)
    assert done.returncode != 0 and "static assertion" in done.stderr, done.stderr[-3000:]
