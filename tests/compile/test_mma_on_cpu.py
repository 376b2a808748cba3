"""The GEMMs of mma.sync, whole kernels with launches, on the CPU against float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from sim.program import CASES, HEADERS, RAGGED, Case, Fault, Program, break_headers, run
from sim.without_ptx import headers_on_cpu

from fusegen.checks.load import load
from fusegen.families.limits import REGISTERS, SHARED_MEMORY
from fusegen.publish.paths import builtin_specs

FAMILY_HEADER = "mma.h"
FIRST_HEADERS = ("gemm/gemm.mma.cuh",)
LIMITS = "Limits<166912, 65536>"


@dataclass(frozen=True, slots=True)
class Gemm:
    """One kernel; `config` are the first template arguments of `MmaConfig`."""

    kind: str
    config: str
    store: str = "io"
    decoded: str = ""

    @property
    def name(self) -> str:
        stored = "" if self.store == "io" else self.store
        tile = "x".join(self.config.split(", "))
        parts = ("decoded" if self.decoded else "plain", self.kind, self.decoded, stored, tile)
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
        return f'{{"{self.name}", &sim::{function}<{", ".join(arguments)}>}},'


SQUARE = "128, 128, 32, 2, 2, 4, 2"
WIDE = "128, 256, 32, 2, 4, 4, 1"
WIDE_LONG = "128, 256, 64, 2, 4, 3, 1"
TALL = "256, 128, 64, 4, 2, 3, 1"
SMALL = "64, 64, 64, 2, 2, 2, 2"
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
)
# Contractions of fewer steps than stages, one after the other, and groups without any.
SHORT = Case("short", 150, 72, 136, (1, 0, 33, 2, 0, 0, 64, 20))
ALL_CASES = (*CASES, SHORT)
FORWARD, BACKWARD = Gemm("fprop", SQUARE), Gemm("dgrad", SQUARE)

# Which tile is chosen depends on the sizes and on the device's memory; what comes out must not. Of
# gradients in fp32 every bit of the sums shows.
BY_KIND = {
    "fprop": [Gemm("fprop", tile) for tile in (SQUARE, WIDE, SMALL)],
    "dgrad": [Gemm("dgrad", tile) for tile in (SQUARE, WIDE, TALL)],
    "wgrad": [Gemm("wgrad", tile, "fp32") for tile in (SQUARE, WIDE_LONG, WIDE, SMALL)],
}
TILES = [gemm for gemms in BY_KIND.values() for gemm in gemms]
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
        "load/cp_async.mma.cuh",
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
}


@pytest.fixture
def cache(pytestconfig: pytest.Config) -> Path:
    """Where programs wait for the next run, and for the other workers of this one."""
    assert pytestconfig.cache is not None, "pytest runs with -p no:cacheprovider: drop that"
    return pytestconfig.cache.mkdir("mma_on_cpu")


@pytest.mark.parametrize("gemm", GEMMS, ids=lambda gemm: gemm.name)
def test_gemms(gemm: Gemm, cache: Path) -> None:
    headers = headers_on_cpu(HEADERS, FIRST_HEADERS)
    program = Program("mma", FAMILY_HEADER, [each.entry() for each in GEMMS], headers)
    done = run(program.build(cache / program.name), gemm.name, ALL_CASES)
    assert (done.returncode, done.stdout) == (0, f"{len(ALL_CASES)} cases\n"), (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, cache: Path) -> None:
    fault = FAULTS[name]
    headers = break_headers(headers_on_cpu(HEADERS, FIRST_HEADERS), [fault])
    entries = [gemm.entry() for gemm in (FORWARD, BACKWARD)]
    program = Program(f"broken_{name}", FAMILY_HEADER, entries, headers)
    fault.check(run(program.build(cache / program.name), fault.gemm, [RAGGED]), RAGGED)


def digests(gemms: Sequence[Gemm], name: str, headers: Mapping[str, str], cache: Path) -> set[str]:
    """Of the results of each GEMM, which are right."""
    program = Program(name, FAMILY_HEADER, [each.entry() for each in TILES], headers)
    built = program.build(cache / name)
    done = [run(built, each.name, ALL_CASES, digest=True).stdout.split("\n") for each in gemms]
    assert all(count == f"{len(ALL_CASES)} cases" for count, *_ in done), done
    return {digest for _, digest, *_ in done}


def test_shipped_tiles_are_compared() -> None:
    family = load([builtin_specs()]).archs["sm_80"].kernels["gemm_mma"]
    for kind, spec in family.kinds.items():
        shipped = {point.cpp({SHARED_MEMORY: 166912, REGISTERS: 65536}) for point in spec.points}
        compared = {f"{each.config}, fusegen::{LIMITS}" for each in BY_KIND[kind.value]}
        assert shipped <= compared


@pytest.mark.parametrize("kind", BY_KIND)
def test_every_tile_gives_the_same_bits(kind: str, cache: Path) -> None:
    headers = headers_on_cpu(HEADERS, FIRST_HEADERS)
    assert len(digests(BY_KIND[kind], "tiles", headers, cache)) == 1


def test_another_order_of_sums_shows(cache: Path) -> None:
    headers = break_headers(headers_on_cpu(HEADERS, FIRST_HEADERS), BACKWARDS)
    assert len(digests(BY_KIND["wgrad"], "tiles_backwards", headers, cache)) == 2
