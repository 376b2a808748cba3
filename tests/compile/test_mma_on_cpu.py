"""The GEMMs of mma.sync, whole kernels with launches, on the CPU against float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from sim.program import (
    CASES,
    HEADERS,
    OF_HALVES,
    RAGGED,
    Case,
    Fault,
    Program,
    break_headers,
    run,
)
from sim.without_ptx import headers_on_cpu

from fusegen.checks.load import load
from fusegen.families.limits import REGISTERS, SHARED_MEMORY
from fusegen.publish.paths import builtin_specs

FAMILY_HEADER = "mma.h"
FIRST_HEADERS = ("gemm/gemm.mma.cuh", "gemm/gemm_fp8.mma.cuh", "gemm/gemm_scaled.mma.cuh")
LIMITS = "Limits<166912, 65536>"


@dataclass(frozen=True, slots=True)
class Gemm:
    """One kernel; `config` are the first template arguments of `MmaConfig`.

    `codes` are formats, scaling and accumulation of FP8 operands, `atoms` formats and accumulation
    of those whose scales the instruction reads.
    """

    kind: str
    config: str
    store: str = "io"
    decoded: str = ""
    codes: tuple[str, ...] = ()
    atoms: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        stored = "" if self.store == "io" else self.store
        tile = "x".join(self.config.split(", "))
        ways = {"decoded": self.decoded, "codes": self.codes, "atoms": self.atoms}
        what = next((word for word, way in ways.items() if way), "plain")
        parts = (what, self.kind, self.decoded, *self.codes, *self.atoms, stored, tile)
        return "_".join(part for part in parts if part)

    def entry(self) -> str:
        """Its line in the list that a program is compiled with."""
        config = f"MmaConfig<{self.config}, {LIMITS}>"
        function = "run_mma"
        arguments = [f"Gemm::{self.kind}", f"Store::{self.store}", config]
        if self.decoded:
            ends = [f"EndScale::{end}" for end in self.decoded.split("_")]
            function = "run_decoded_mma" if len(ends) == 1 else "run_scaled_mma"
            amaxes = [str(self.decoded == "amaxes").lower()]
            arguments[2:2] = amaxes if len(ends) == 1 else ends
        if self.codes:
            a, b, scaling, sums = self.codes
            function = "run_fp8_mma"
            formats = [f"__nv_fp8_{each}" for each in (a, b)]
            arguments[2:2] = [*formats, f"Fp8Scaling::{scaling}", f"Accumulation::{sums}"]
        if self.atoms:
            *formats, sums = self.atoms
            function = "run_atoms_mma"
            words = ", ".join(f"__nv_fp8_{each}" for each in formats)
            multiply = f"MxWarpMma<{words}>" if formats else "NvWarpMma"
            arguments[2:2] = [multiply, f"Accumulation::{sums}"]
        return f'{{"{self.name}", &sim::{function}<{", ".join(arguments)}>}},'


SQUARE = "128, 128, 32, 2, 2, 4, 2"
WIDE = "128, 256, 32, 2, 4, 4, 1"
WIDE_LONG = "128, 256, 64, 2, 4, 3, 1"
TALL = "256, 128, 64, 4, 2, 3, 1"
SMALL = "64, 64, 64, 2, 2, 2, 2"
WIDE_WARPS = "64, 128, 32, 4, 1, 3, 2"
GEMMS = (
    Gemm("fprop", SQUARE),
    Gemm("dgrad", SQUARE),
    Gemm("wgrad", SQUARE),
    Gemm("fprop", WIDE, "scaled_bias"),
    Gemm("dgrad", TALL),
    Gemm("wgrad", TALL, "add"),
    Gemm("wgrad", WIDE, "fp32"),
    Gemm("wgrad", SMALL, "add_io"),
    Gemm("wgrad", SMALL, "add"),
    Gemm("fprop", SMALL),
    Gemm("fprop", SMALL, decoded="amaxes"),
    Gemm("dgrad", SQUARE, decoded="plain"),
    Gemm("wgrad", SQUARE, "add", decoded="amaxes"),
    Gemm("fprop", SQUARE, "scaled_bias", decoded="amaxes"),
    # Scales of either operand at the end: of its rows, of its groups, or none.
    Gemm("fprop", SQUARE, decoded="row_row"),
    Gemm("wgrad", SMALL, "add", decoded="row_row"),
    Gemm("dgrad", SQUARE, decoded="tensor_tensor"),
    Gemm("fprop", TALL, "scaled_bias", decoded="none_row"),
    Gemm("wgrad", TALL, "fp32", decoded="row_tensor"),
    # Expressions of results.
    Gemm("fprop", WIDE, "binary"),
    Gemm("dgrad", SQUARE, "binary"),
    Gemm("dgrad", SMALL, "unary"),
    Gemm("dgrad", SQUARE, "binary", decoded="amaxes"),
    Gemm("fprop", TALL, "unary", decoded="row_row"),
    Gemm("fprop", WIDE, "unary_aux"),
    Gemm("fprop", SMALL, "unary_aux", decoded="amaxes"),
    # Halves of rows: a thread's lines of B are of one half or of both, and a warp's halves have 16
    # columns, 32 or 64.
    Gemm("fprop", SQUARE, "gated_aux"),
    Gemm("fprop", WIDE, "gated_aux"),
    Gemm("fprop", SMALL, "gated_aux"),
    Gemm("fprop", WIDE_WARPS, "gated_aux"),
    Gemm("fprop", WIDE, "gated"),
    Gemm("fprop", SQUARE, "gated"),
)
# FP8: a stage of 64 or 128 of the contraction, where sums of 128 are of two stages or of one.
CODES = "128, 128, 64, 2, 4, 4, 1"
CODES_WIDE = "128, 256, 64, 2, 4, 3, 1"
CODES_SMALL = "64, 128, 64, 1, 4, 3, 2"
CODES_LONG = "128, 128, 128, 2, 4, 2, 1"
E4M3 = ("e4m3", "e4m3")
BLOCKS = (*E4M3, "block", "split")
FP8 = (
    Gemm("fprop", CODES, codes=BLOCKS),
    Gemm("dgrad", CODES, codes=("e5m2", "e4m3", "block", "split")),
    Gemm("wgrad", CODES, codes=BLOCKS),
    Gemm("fprop", CODES_WIDE, codes=(*E4M3, "tensor", "fast")),
    Gemm("dgrad", CODES_WIDE, codes=("e5m2", "e4m3", "row", "fast")),
    Gemm("wgrad", CODES_WIDE, "fp32", codes=("e4m3", "e5m2", "tensor", "fast")),
    Gemm("fprop", CODES_SMALL, "scaled_bias", codes=(*E4M3, "row", "split")),
    Gemm("dgrad", CODES_SMALL, codes=("e5m2", "e5m2", "tensor", "split")),
    Gemm("wgrad", CODES_SMALL, "add", codes=("e5m2", "e4m3", "row", "split")),
    Gemm("wgrad", CODES_SMALL, "add_io", codes=("e5m2", "e4m3", "block", "split")),
    Gemm("fprop", CODES_LONG, "scaled_bias", codes=BLOCKS),
    Gemm("wgrad", CODES_LONG, "add", codes=BLOCKS),
    Gemm("dgrad", CODES, "binary", codes=("e5m2", "e4m3", "tensor", "split")),
    Gemm("fprop", CODES_WIDE, "unary_aux", codes=(*E4M3, "row", "fast")),
    Gemm("dgrad", CODES_SMALL, "unary", codes=BLOCKS),
)
# Scales that the instruction reads: a stage has half of an atom or all of it, of NV two or four.
MX = "128, 128, 64, 2, 4, 4, 1"
MX_LONG = "128, 128, 128, 2, 4, 2, 1"
MX_WIDE = "128, 256, 64, 2, 4, 3, 1"
NV = "128, 128, 128, 2, 4, 4, 1"
NV_LONG = "128, 128, 256, 4, 2, 2, 1"
NV_TALL = "256, 128, 128, 4, 2, 2, 1"
FP4 = ("fast",)
ATOMS = (
    Gemm("fprop", MX, atoms=(*E4M3, "fast")),
    Gemm("dgrad", MX, atoms=("e5m2", "e4m3", "fast")),
    Gemm("wgrad", MX, "add", atoms=("e5m2", "e4m3", "fast")),
    Gemm("fprop", MX_LONG, "scaled_bias", atoms=(*E4M3, "split")),
    Gemm("dgrad", MX, "binary", atoms=(*E4M3, "split")),
    Gemm("wgrad", MX, "fp32", atoms=(*E4M3, "split")),
    Gemm("wgrad", MX_LONG, "add_io", atoms=("e4m3", "e5m2", "fast")),
    Gemm("fprop", MX_WIDE, "unary_aux", atoms=("e5m2", "e5m2", "fast")),
    Gemm("fprop", NV, atoms=FP4),
    Gemm("dgrad", NV, atoms=FP4),
    Gemm("wgrad", NV, "fp32", atoms=FP4),
    Gemm("wgrad", NV_LONG, "add", atoms=FP4),
    Gemm("fprop", NV_LONG, "scaled_bias", atoms=FP4),
    Gemm("dgrad", NV_TALL, "unary", atoms=FP4),
)
PROGRAMS = {"mma": GEMMS, "mma_fp8": FP8, "mma_atoms": ATOMS}
# Contractions of fewer steps than stages, one after the other, and groups without any.
SHORT = Case("short", 150, 72, 136, (1, 0, 33, 2, 0, 0, 64, 20))
ALL_CASES = (*CASES, SHORT)
FORWARD, BACKWARD = Gemm("fprop", SQUARE), Gemm("dgrad", SQUARE)
OF_HALVES_OF_A_WARP = Gemm("fprop", SQUARE, "gated")
FOR_EVERY_STORE = OF_HALVES[0]  # columns that any store can have

# Which tile is chosen depends on the sizes and on the device's memory; what comes out must not. Of
# gradients in fp32 every bit of the sums shows.
ADA = ("128, 256, 32, 2, 4, 3, 1", "128, 128, 32, 2, 4, 4, 1", "64, 128, 32, 1, 4, 3, 2")
BY_KIND = {
    "fprop": [Gemm("fprop", tile) for tile in (SQUARE, WIDE, SMALL, *ADA)],
    "dgrad": [Gemm("dgrad", tile) for tile in (SQUARE, WIDE, TALL, *ADA)],
    "wgrad": [Gemm("wgrad", tile, "fp32") for tile in (SQUARE, WIDE_LONG, WIDE, SMALL, *ADA)],
}
TILES = [gemm for gemms in BY_KIND.values() for gemm in gemms]
# Sums of 128 by stages of 64 and of 128.
SPLIT = [Gemm("wgrad", tile, "fp32", codes=BLOCKS) for tile in (CODES, CODES_SMALL, CODES_LONG)]
# Sums over the steps of a stage from its end: right, but by stages of 32 otherwise than of 64.
BACKWARDS = [
    Fault(
        "mainloop/mma.mma.cuh",
        f"{operand}.load(registers_[step % 2].{name}, {stage}, step);",
        f"{operand}.load(registers_[step % 2].{name}, {stage}, kSteps - 1 - step);",
        "",
        "",
    )
    for operand, name, stage in (
        ("a_", "a", "stages_ + at_"),
        ("b_", "b", "stages_ + at_ + T::A::kBytes"),
    )
]

BROKEN = (FORWARD, BACKWARD, OF_HALVES_OF_A_WARP, *FP8, *ATOMS)
# Each in a program of its own: one place, so that what is noticed is that.
FAULTS = {
    # Stages are read before their copies are waited for, and so are the last ones left.
    "wait": Fault(
        "mainloop/mma.mma.cuh",
        "wait_for_copies<kAhead - 1>();",
        "wait_for_copies<kAhead>();",
        FORWARD.name,
        "left before its copies had landed",
    ),
    # Stages are filled while other warps still read them.
    "barrier": Fault("mainloop/mma.mma.cuh", "__syncthreads();", "", FORWARD.name, ", not "),
    # What a stage has past the contraction's end is what it held before.
    "tail": Fault(
        "load/async.mma.cuh",
        "uint32_t bytes) {",
        "uint32_t bytes) {\n  if (bytes == 0) return;",
        FORWARD.name,
        ", not ",
    ),
    # The end of a group is followed by the next one's tokens.
    "tokens": Fault(
        "load/cp_async.mma.cuh",
        "const int32_t lines = kTransposed ? left : extent_;",
        "const int32_t lines = kTransposed ? left + 1 : extent_;",
        BACKWARD.name,
        "an access to global memory outside every tensor",
    ),
    # A warp has gate where it should have up.
    "halves": Fault(
        "load/addresses.mma.cuh",
        "return of_tile % WarpColumns >= WarpColumns / 2;",
        "return false && of_tile > 0;",
        OF_HALVES_OF_A_WARP.name,
        ", not ",
    ),
}
FAULTS_OF_CODES = {
    # Rows of codes end within 16 bytes, and memory goes on behind them.
    "row": Fault(
        "load/cp_async.mma.cuh",
        "min(elements, Layout::kChunkElements) * Layout::kBits + 7",
        "Layout::kChunkElements * Layout::kBits + 7",
        FP8[0].name,
        " is nan",
    ),
    # Each block has the scales of the one before it.
    "scales": Fault(
        "mainloop/split_sums.mma.cuh",
        "    --left_;\n",
        "    if (--left_ % 2 == 1) return;\n",
        FP8[2].name,
        ", not ",
    ),
    # What is left at the end of a contraction is no whole interval.
    "rest": Fault(
        "mainloop/split_sums.mma.cuh",
        "if (++stages_ < Stages && !last) return;",
        "if (++stages_ < Stages) return;",
        FP8[0].name,
        ", not ",
    ),
    # A group's codes begin where they would without padding.
    "padding": Fault(
        "load/padded_tokens.cuh",
        "kTokenAlignment * (tile.begin / kTokenAlignment + tile.group)",
        "tile.begin / 16 * 16",
        FP8[2].name,
        ", not ",
    ),
}
FAULTS_OF_ATOMS = {
    # One byte of one lane's scale is another row's.
    "byte": Fault(
        "load/scale_atoms.mma.cuh",
        "out.a[i] = load_one(from + a_ + of_block(16 * i));",
        "out.a[i] = load_one(from + a_ + of_block(16 * i)) ^ (i == 1 && threadIdx.x == 20);",
        ATOMS[0].name,
        ", not ",
    ),
    # The second half of an atom has the scales of the first.
    "half": Fault(
        "load/scale_atoms.mma.cuh",
        "part_ = (part_ + 1) % kParts;",
        "part_ = 0;",
        ATOMS[0].name,
        ", not ",
    ),
    # A group's scales begin where they would without atoms of their own.
    "atoms": Fault(
        "load/scale_atoms.mma.cuh",
        "return tile.begin / kAtomRows + tile.group;",
        "return tile.begin / kAtomRows;",
        ATOMS[10].name,
        "",
    ),
    # What a transform leaves behind a group's last row is not read.
    "transform": Fault(
        "load/scaled_addresses.mma.cuh",
        "kWholeChunks = kAlongTokens;",
        "kWholeChunks = false;",
        ATOMS[10].name,
        ", not ",
    ),
    # Scales past the end of a contraction are whatever memory has.
    "end": Fault(
        "load/scale_atoms.mma.cuh",
        "const bool any = exists_ && first_ < left;",
        "const bool any = exists_;",
        ATOMS[8].name,
        "",
    ),
}


@pytest.fixture
def cache(pytestconfig: pytest.Config) -> Path:
    """Where programs wait for the next run, and for the other workers of this one."""
    assert pytestconfig.cache is not None, "pytest runs with -p no:cacheprovider: drop that"
    return pytestconfig.cache.mkdir("mma_on_cpu")


@pytest.mark.parametrize("gemm", (*GEMMS, *FP8, *ATOMS), ids=lambda gemm: gemm.name)
def test_gemms(gemm: Gemm, cache: Path) -> None:
    headers = headers_on_cpu(HEADERS, FIRST_HEADERS)
    name = next(name for name, gemms in PROGRAMS.items() if gemm in gemms)
    entries = [each.entry() for each in PROGRAMS[name]]
    program = Program(name, FAMILY_HEADER, entries, headers)
    cases = OF_HALVES if gemm.store in ("gated", "gated_aux") else ALL_CASES
    done = run(program.build(cache / program.name), gemm.name, cases)
    assert (done.returncode, done.stdout) == (0, f"{len(cases)} cases\n"), done.stdout + done.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, cache: Path) -> None:
    notice(name, FAULTS[name], cache)


@pytest.mark.parametrize("name", FAULTS_OF_CODES)
def test_faults_of_codes_are_noticed(name: str, cache: Path) -> None:
    notice(name, FAULTS_OF_CODES[name], cache)


@pytest.mark.parametrize("name", FAULTS_OF_ATOMS)
def test_faults_of_atoms_are_noticed(name: str, cache: Path) -> None:
    notice(name, FAULTS_OF_ATOMS[name], cache)


def notice(name: str, fault: Fault, cache: Path) -> None:
    headers = break_headers(headers_on_cpu(HEADERS, FIRST_HEADERS), [fault])
    entries = [gemm.entry() for gemm in BROKEN if gemm.name == fault.gemm]
    program = Program(f"broken_{name}", FAMILY_HEADER, entries, headers)
    fault.check(
        run(program.build(cache / program.name), fault.gemm, [FOR_EVERY_STORE]), FOR_EVERY_STORE
    )


TWIN = Fault(
    "mainloop/warp_mma_scaled.mma.cuh",
    "inline constexpr bool kBlockScaledMma = true;",
    "inline constexpr bool kBlockScaledMma = false;",
    "",
    "",
)
"""Not broken: what GPUs without the instruction do in its place."""


@pytest.mark.parametrize("gemm", ATOMS, ids=lambda gemm: gemm.name)
def test_twins(gemm: Gemm, cache: Path) -> None:
    headers = break_headers(headers_on_cpu(HEADERS, FIRST_HEADERS), [TWIN])
    program = Program("twins", FAMILY_HEADER, [each.entry() for each in ATOMS], headers)
    done = run(program.build(cache / program.name), gemm.name, [RAGGED, SHORT])
    assert (done.returncode, done.stdout) == (0, "2 cases\n"), done.stdout + done.stderr


def digests(
    gemms: Sequence[Gemm],
    name: str,
    headers: Mapping[str, str],
    cache: Path,
    among: Sequence[Gemm] = (),
) -> set[str]:
    """Of the results of each GEMM, which are right; of those `among` which they are compiled."""
    every = among or gemms
    program = Program(name, FAMILY_HEADER, [each.entry() for each in every], headers)
    built = program.build(cache / name)
    done = [run(built, each.name, ALL_CASES, digest=True).stdout.split("\n") for each in gemms]
    assert all(count == f"{len(ALL_CASES)} cases" for count, *_ in done), done
    return {digest for _, digest, *_ in done}


@pytest.mark.parametrize("family", ["gemm_mma", "gemm_decoded_mma"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_shipped_tiles_are_compared(arch: str, family: str) -> None:
    for kind, spec in load([builtin_specs()]).archs[arch].kernels[family].kinds.items():
        shipped = {point.cpp({SHARED_MEMORY: 166912, REGISTERS: 65536}) for point in spec.points}
        compared = {f"{each.config}, fusegen::{LIMITS}" for each in BY_KIND[kind.value]}
        assert shipped <= compared


@pytest.mark.parametrize("kind", BY_KIND)
def test_every_tile_gives_the_same_bits(kind: str, cache: Path) -> None:
    headers = headers_on_cpu(HEADERS, FIRST_HEADERS)
    assert len(digests(BY_KIND[kind], "tiles", headers, cache, among=TILES)) == 1


def test_another_order_of_sums_shows(cache: Path) -> None:
    headers = break_headers(headers_on_cpu(HEADERS, FIRST_HEADERS), BACKWARDS)
    assert len(digests(BY_KIND["wgrad"], "tiles_backwards", headers, cache)) == 2


def test_partial_sums_are_of_128(cache: Path) -> None:
    headers = headers_on_cpu(HEADERS, FIRST_HEADERS)
    assert len(digests(SPLIT, "tiles_fp8", headers, cache)) == 1
