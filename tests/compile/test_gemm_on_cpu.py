"""The GEMMs of sm_90a, whole kernels with their launches, on the CPU against float64."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
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

from fusegen.families.wgmma import LIMITS

FAMILY_HEADER = "hopper.h"
FIRST_HEADERS = (
    "gemm/gated_codes.sm90.cuh",
    "gemm/gemm_decoded.sm90.cuh",
    "gemm/gemm_gather.sm90.cuh",
    "gemm/launch_fp8.sm90.cuh",
)


class Family(Enum):
    """GEMMs that are compiled into one program."""

    PLAIN = "plain"
    GATHERED = "gathered"
    DECODED = "decoded"
    FAST = "fast"
    CODES = "codes"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class Gemm:
    """One kernel: schedule, tile and cluster are template arguments of `Config`."""

    family: Family
    kind: str
    config: str
    scaling: str = ""
    formats: str = ""
    store: str = "io"

    @property
    def name(self) -> str:
        stored = "" if self.store == "io" else self.store
        parts = (self.family.value, self.kind, self.scaling, self.formats, stored, self.config)
        tile = "x".join(part for part in parts[-1].split(", ") if part.isdigit())
        return "_".join(part for part in (*parts[:-1], tile) if part)

    def entry(self) -> str:
        """Its line in the list that a program is compiled with."""
        config = f"Config<{self.config}, Limits<{', '.join(map(str, LIMITS.values()))}>>"
        if self.family is Family.PLAIN:
            call = f"run_hopper<Gemm::{self.kind}, Store::{self.store}, {config}>"
        elif self.family is Family.GATHERED:
            kind = f"Gemm::{self.kind}, Store::{self.store}, Gather::{self.scaling}"
            call = f"run_gathered_hopper<{kind}, {config}>"
        elif self.family is Family.CODES:
            call = f"run_gated_codes<{config}>"
        elif self.family is Family.DECODED:
            call = f"{self._decoded()}, {config}>"
        else:
            codes = ", ".join(f"__nv_fp8_{code}" for code in self.formats.split("_"))
            call = (
                f"run_fp8<Gemm::{self.kind}, Store::{self.store}, {codes}, "
                f"Fp8Scaling::{self.scaling}, "
                f"Accumulation::{self.family.value}, {config}>"
            )
        return f'{{"{self.name}", &sim::{call}}},'

    def _decoded(self) -> str:
        """Function of a GEMM of decoded operands, and its first arguments."""
        kind = f"Gemm::{self.kind}, Store::{self.store}"
        if self.scaling in ("", AMAXES):
            return f"run_decoded_hopper<{kind}, {str(self.scaling == AMAXES).lower()}"
        ends = ", ".join(f"EndScale::{end}" for end in self.scaling.split("_"))
        return f"run_scaled_hopper<{kind}, {ends}"


AMAXES = "amaxes"
WIDE_PLAIN = "128, 256, 64, 2, Schedule::cooperative"
TURNS_PLAIN = "128, 192, 64, 2, Schedule::pingpong"
SMALL_PLAIN = "128, 128, 64, 2, Schedule::pingpong"
WIDE = "128, 256, 128, 2, Schedule::cooperative"
WIDE_ALONE = "128, 256, 128, 1, Schedule::cooperative"
NARROW = "128, 128, 128, 2, Schedule::cooperative"
THREE = "192, 128, 128, 2, Schedule::cooperative"  # math warpgroups
TURNS = "128, 192, 128, 2, Schedule::pingpong"
TURNS_NARROW = "128, 128, 128, 2, Schedule::pingpong"

PLAIN_FPROP = Gemm(Family.PLAIN, "fprop", TURNS_PLAIN)
PLAIN_DGRAD = Gemm(Family.PLAIN, "dgrad", WIDE_PLAIN)
BLOCK_FPROP = Gemm(Family.SPLIT, "fprop", WIDE, "block", "e4m3_e4m3")
BLOCK_WGRAD = Gemm(Family.SPLIT, "wgrad", WIDE, "block", "e5m2_e4m3")
BROKEN_ADD = Gemm(Family.SPLIT, "wgrad", WIDE, "tensor", "e4m3_e4m3", store="add")
CODES = Gemm(Family.CODES, "fprop", TURNS, store="codes")
GATHERED_FPROP = Gemm(Family.GATHERED, "fprop", TURNS_PLAIN, "a")
GATHERED_DGRAD = Gemm(Family.GATHERED, "dgrad", SMALL_PLAIN, "a")
GATHERED_WGRAD = Gemm(Family.GATHERED, "wgrad", WIDE_PLAIN, "b", store="fp32")
BROKEN = (PLAIN_FPROP, BLOCK_WGRAD, BROKEN_ADD, GATHERED_FPROP, GATHERED_WGRAD)
# Families alternate, so that two workers of pytest-xdist seldom wait for one compilation.
GEMMS = (
    PLAIN_FPROP,
    Gemm(Family.FAST, "fprop", WIDE, "tensor", "e4m3_e5m2"),
    BLOCK_FPROP,
    PLAIN_DGRAD,
    Gemm(Family.DECODED, "fprop", SMALL_PLAIN, AMAXES),
    Gemm(Family.FAST, "dgrad", TURNS_NARROW, "row", "e5m2_e4m3"),
    Gemm(Family.SPLIT, "dgrad", NARROW, "block", "e5m2_e4m3"),
    Gemm(Family.PLAIN, "wgrad", SMALL_PLAIN),
    Gemm(Family.DECODED, "wgrad", WIDE_PLAIN, AMAXES),
    Gemm(Family.FAST, "wgrad", TURNS, "row", "e4m3_e4m3"),
    BLOCK_WGRAD,
    Gemm(Family.FAST, "wgrad", WIDE, "tensor", "e5m2_e4m3"),
    Gemm(Family.DECODED, "dgrad", SMALL_PLAIN),
    Gemm(Family.SPLIT, "fprop", WIDE_ALONE, "block", "e4m3_e4m3"),
    Gemm(Family.SPLIT, "dgrad", WIDE, "row", "e4m3_e4m3"),
    Gemm(Family.SPLIT, "wgrad", NARROW, "tensor", "e4m3_e4m3"),
    Gemm(Family.PLAIN, "wgrad", WIDE_PLAIN, store="add"),
    Gemm(Family.PLAIN, "wgrad", TURNS_PLAIN, store="fp32"),
    Gemm(Family.PLAIN, "wgrad", TURNS_PLAIN, store="add_io"),
    Gemm(Family.SPLIT, "wgrad", THREE, "block", "e4m3_e4m3"),
    Gemm(Family.SPLIT, "wgrad", THREE, "block", "e5m2_e4m3", store="add"),
    Gemm(Family.FAST, "wgrad", TURNS, "row", "e4m3_e4m3", store="fp32"),
    Gemm(Family.PLAIN, "fprop", WIDE_PLAIN, store="scaled_bias"),
    Gemm(Family.PLAIN, "fprop", TURNS_PLAIN, store="scaled_bias"),
    Gemm(Family.DECODED, "fprop", SMALL_PLAIN, AMAXES, store="scaled_bias"),
    Gemm(Family.FAST, "fprop", TURNS, "row", "e4m3_e4m3", store="scaled_bias"),
    # Scales of either operand at the end: of its rows, of its groups, or none.
    Gemm(Family.DECODED, "fprop", SMALL_PLAIN, "row_row"),
    Gemm(Family.DECODED, "dgrad", WIDE_PLAIN, "row_tensor"),
    Gemm(Family.DECODED, "wgrad", WIDE_PLAIN, "row_row", store="add"),
    Gemm(Family.DECODED, "fprop", WIDE_PLAIN, "tensor_tensor", store="scaled_bias"),
    Gemm(Family.DECODED, "wgrad", SMALL_PLAIN, "none_row", store="fp32"),
    Gemm(Family.DECODED, "dgrad", SMALL_PLAIN, "tensor_none"),
    Gemm(Family.SPLIT, "fprop", WIDE, "block", "e4m3_e4m3", store="scaled_bias"),
    # Expressions of results: all that comes in buffers has come, or the tile has more than these.
    Gemm(Family.PLAIN, "fprop", WIDE_PLAIN, store="binary"),
    Gemm(Family.PLAIN, "dgrad", SMALL_PLAIN, store="binary"),
    Gemm(Family.PLAIN, "dgrad", WIDE_PLAIN, store="unary"),
    Gemm(Family.FAST, "fprop", TURNS, "row", "e4m3_e4m3", store="binary"),
    Gemm(Family.SPLIT, "dgrad", NARROW, "tensor", "e5m2_e4m3", store="binary"),
    Gemm(Family.SPLIT, "fprop", WIDE, "block", "e4m3_e4m3", store="binary"),
    Gemm(Family.DECODED, "dgrad", SMALL_PLAIN, AMAXES, store="binary"),
    Gemm(Family.DECODED, "fprop", WIDE_PLAIN, "row_row", store="unary"),
    # What they begin with goes to memory, too, or not.
    Gemm(Family.PLAIN, "fprop", WIDE_PLAIN, store="unary_aux"),
    Gemm(Family.PLAIN, "fprop", TURNS_PLAIN, store="unary_aux"),
    Gemm(Family.FAST, "fprop", TURNS, "tensor", "e4m3_e4m3", store="unary_aux"),
    Gemm(Family.SPLIT, "fprop", WIDE, "block", "e4m3_e4m3", store="unary_aux"),
    Gemm(Family.DECODED, "fprop", SMALL_PLAIN, AMAXES, store="unary_aux"),
    # Halves of rows: of parts of 64 columns, one or two of them, and of parts of 32.
    Gemm(Family.PLAIN, "fprop", WIDE_PLAIN, store="gated_aux"),
    Gemm(Family.PLAIN, "fprop", TURNS_PLAIN, store="gated_aux"),
    Gemm(Family.PLAIN, "fprop", SMALL_PLAIN, store="gated_aux"),
    Gemm(Family.PLAIN, "fprop", WIDE_PLAIN, store="gated"),
    Gemm(Family.PLAIN, "fprop", TURNS_PLAIN, store="gated"),
    # Halves of rows in codes, by parts of 32 columns and of 64.
    CODES,
    Gemm(Family.CODES, "fprop", TURNS_NARROW, store="codes"),
    # Rows of tokens: of x and dy as the first operand, whose contraction runs along them or over
    # them, and of x as the second.
    GATHERED_FPROP,
    Gemm(Family.GATHERED, "fprop", WIDE_PLAIN, "a", store="gated_aux"),
    Gemm(Family.GATHERED, "dgrad", WIDE_PLAIN, "a"),
    GATHERED_DGRAD,
    Gemm(Family.GATHERED, "wgrad", TURNS_PLAIN, "a"),
    GATHERED_WGRAD,
    Gemm(Family.GATHERED, "wgrad", SMALL_PLAIN, "b", store="add"),
)


# Tiles of long groups are added by TMA, of short ones by warps.
LONG_GROUP = Case("long_group", 1360, 72, 136, (20, 1300, 0, 40))
# Contractions so long and groups so large that a warpgroup without rows multiplies as well.
IN_STEP = {
    PLAIN_DGRAD: Case("in_step", 1030, 4096, 8, (1030,)),
    BLOCK_FPROP: Case("in_step", 1030, 8, 8192, (1030,)),
}


# Groups with whole row blocks of tokens that are there before others.
ARRIVING = Case("arriving", 900, 80, 144, (300, 0, 600))

# A kernel with an epilogue runs beside the one without.
WITH_EPILOGUE = tuple(
    each
    for each in CASES
    if each.name in ("ragged", "dense", "sizes_out_of_range", "tiny", "no_group_has_tokens")
)


def cases_of(gemm: Gemm) -> tuple[Case, ...]:
    arriving = (ARRIVING,) if gemm.family is Family.GATHERED and gemm.kind != "wgrad" else ()
    return (*_cases_of(gemm), *arriving)


def _cases_of(gemm: Gemm) -> tuple[Case, ...]:
    if gemm.store == "codes":  # of which there are always all
        return tuple(case for case in OF_HALVES if not case.leaves)
    if gemm.store in ("gated", "gated_aux"):
        return OF_HALVES
    if gemm.store in ("unary", "unary_aux", "binary"):
        return WITH_EPILOGUE
    long_group = (LONG_GROUP,) if gemm.store in ("add", "add_io") else ()
    in_step = (IN_STEP[gemm],) if gemm in IN_STEP else ()
    return (*CASES, *long_group, *in_step)


# One header each and no GEMM in common, so that one copy serves for all.
FAULTS = (
    # Stages are given away while their multiplications still read them.
    Fault(
        "mainloop/running_sums.sm90.cuh",
        "wait_for_mmas<1>();",
        "wait_for_mmas<8>();",
        PLAIN_FPROP.name,
        ", not ",
    ),
    # Stages whose scales were read are never given back.
    Fault(
        "mainloop/split_sums.sm90.cuh",
        "if (Sum::kReadsStage) release_stage();",
        "",
        BLOCK_WGRAD.name,
        "deadlock:",
    ),
    # Old values come into a buffer before what was stored from it has been read.
    Fault(
        "sink/loaded.sm90.cuh",
        "wait_for_stores<Buffers == 1 ? 0 : 1>();",
        "",
        BROKEN_ADD.name,
        ", not ",
    ),
    # Every second line of a gathered operand is not permuted as MMAs read it.
    Fault(
        "load/gathered.sm90.cuh",
        "(i % 2 == 0 ? to : to ^ kOther)",
        "to",
        GATHERED_FPROP.name,
        ", not ",
    ),
    # Clusters compute neighbouring rows of a transposed tile as if they were columns.
    Fault(
        "tile_source/across.cuh",
        "tile.column = column;",
        "tile.column = row;",
        GATHERED_WGRAD.name,
        ", not ",
    ),
)


@pytest.fixture
def cache(pytestconfig: pytest.Config) -> Path:
    """Where programs wait for the next run, and for the other workers of this one."""
    assert pytestconfig.cache is not None, "pytest runs with -p no:cacheprovider: drop that"
    return pytestconfig.cache.mkdir("gemm_on_cpu")


@pytest.mark.parametrize("gemm", GEMMS, ids=lambda gemm: gemm.name)
def test_gemms(gemm: Gemm, cache: Path) -> None:
    together = [other for other in GEMMS if other.family is gemm.family]
    headers = headers_on_cpu(HEADERS, FIRST_HEADERS)
    entries = [other.entry() for other in together]
    program = Program(gemm.family.value, FAMILY_HEADER, entries, headers)
    cases = cases_of(gemm)
    done = run(program.build(cache / program.name), gemm.name, cases)
    assert (done.returncode, done.stdout) == (0, f"{len(cases)} cases\n"), done.stdout + done.stderr


OF_CODES = (
    # The second row of a lane's codes lies where another lane's is.
    Fault(
        "sink/gated_codes.sm90.cuh",
        "own + i % 2 * 8 * kColumns",
        "own + i % 2 * 4 * kColumns",
        CODES.name,
        " has code ",
    ),
)
OF_COLUMNS = (
    # Rows behind a group's last are those of the next one.
    Fault(
        "sink/columnwise_codes.sm90.cuh",
        "row + 8 < rows ? codes[2 * p + 1] : 0",
        "row + 8 < rows + 8 ? codes[2 * p + 1] : 0",
        CODES.name,
        ", not 0",
    ),
)


OF_ARRIVING = (
    # A row block is computed of whose rows the first have not arrived.
    Fault(
        "tile_source/blocks_of_slots.cuh",
        "blocks(rows_before(range_.first, begin, tokens), TileM)",
        "rows_before(range_.first, begin, tokens) / TileM",
        GATHERED_DGRAD.name,
        ", not ",
    ),
)


@pytest.mark.parametrize(
    ("gemms", "faults", "case"),
    (
        (BROKEN, FAULTS, RAGGED),
        ((CODES,), OF_CODES, OF_HALVES[0]),
        ((CODES,), OF_COLUMNS, OF_HALVES[0]),
        ((GATHERED_DGRAD,), OF_ARRIVING, ARRIVING),
    ),
)
def test_faults_are_noticed(
    gemms: tuple[Gemm, ...], faults: tuple[Fault, ...], case: Case, cache: Path
) -> None:
    headers = break_headers(headers_on_cpu(HEADERS, FIRST_HEADERS), faults)
    name = f"broken_{gemms[0].family.value}_{Path(faults[0].header).name.partition('.')[0]}"
    program = Program(name, FAMILY_HEADER, [each.entry() for each in gemms], headers)
    built = program.build(cache / program.name)
    for fault in faults:
        fault.check(run(built, fault.gemm, [case]), case)
