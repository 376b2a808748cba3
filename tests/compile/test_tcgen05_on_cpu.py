"""The GEMMs of sm_100a, whole kernels with launches, on the CPU against float64.

The tensor core and its memory are software, which reads descriptors as the PTX ISA has them.  What
this cannot show is whether the hardware reads them so, and what it does at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from sim.program import (
    CASES,
    HEADERS,
    OF_HALVES,
    Case,
    Fault,
    Program,
    break_headers,
    run,
)
from sim.without_ptx import headers_on_cpu

from fusegen.checks.load import load
from fusegen.families.limits import hardware_limits
from fusegen.publish.paths import builtin_specs

FAMILY_HEADER = "tensor_memory.h"
FIRST_HEADERS = ("gemm/gemm_fp8.sm100.cuh", "gemm/gemm_scaled.sm100.cuh")
ATOMS = "mainloop/tcgen05.sm100.cuh"
TWIN = (
    Path(__file__).parents[1]
    / "tensor_cores/fusegen_tensor_cores/templates/static/csrc/fusegen/mainloop/tcgen05_twin.cuh"
)
LIMITS = f"Limits<{', '.join(map(str, hardware_limits((10, 0)).values()))}>"


@dataclass(frozen=True, slots=True)
class Gemm:
    """One kernel; `config` are the first template arguments of `Tcgen05Config`."""

    kind: str
    config: str
    store: str = "io"
    decoded: str = ""
    codes: str = ""
    """Formats of quantised operands, and their scaling; `nv` is one word of both."""

    @property
    def name(self) -> str:
        stored = "" if self.store == "io" else self.store
        tile = "x".join(self.config.split(", "))
        what = self.codes.replace(" ", "_") or ("decoded" if self.decoded else "plain")
        return "_".join(part for part in (what, self.kind, self.decoded, stored, tile) if part)

    def entry(self) -> str:
        """Its line in the list that a program is compiled with."""
        config = f"Tcgen05Config<{self.config}, {LIMITS}>"
        arguments = [f"Gemm::{self.kind}", f"Store::{self.store}", config]
        function = "run_tcgen05"
        if self.codes == "nv":
            function = "run_nv_tcgen05"
        elif self.codes.endswith(" mx"):
            a, b, _ = self.codes.split()
            function = "run_mx_tcgen05"
            arguments[2:2] = [f"__nv_fp8_{a}", f"__nv_fp8_{b}"]
        elif self.codes:
            a, b, scaling = self.codes.split()
            function = "run_fp8_tcgen05"
            arguments[2:2] = [f"__nv_fp8_{a}", f"__nv_fp8_{b}", f"Fp8Scaling::{scaling}"]
        elif self.decoded:
            ends = [f"EndScale::{end}" for end in self.decoded.split("_")]
            function = "run_decoded_tcgen05" if len(ends) == 1 else "run_scaled_tcgen05"
            amaxes = [str(self.decoded == "amaxes").lower()]
            arguments[2:2] = amaxes if len(ends) == 1 else ends
        return f'{{"{self.name}", &sim::{function}<{", ".join(arguments)}>}},'


WIDE = "128, 256, 64, 2, 1"
SQUARE = "128, 128, 64, 2, 1"
WIDE_CODES = "128, 256, 128, 2, 1"
SQUARE_CODES = "128, 128, 128, 2, 1"
ALONE = "128, 256, 64, 1, 1"
WIDE_MX = "128, 256, 128, 1, 1"
WIDE_NV = "128, 256, 256, 1, 1"
SQUARE_NV = "128, 128, 256, 2, 1"
PAIR = "256, 256, 64, 2, 2"
PAIR_CODES = "256, 256, 128, 2, 2"
PAIR_MX = "256, 256, 128, 1, 2"
PAIR_NV = "256, 256, 256, 1, 2"
GEMMS = (
    Gemm("fprop", SQUARE),
    Gemm("dgrad", SQUARE),
    Gemm("wgrad", SQUARE),
    Gemm("dgrad", WIDE),
    Gemm("wgrad", ALONE),
    Gemm("fprop", WIDE, "scaled_bias"),
    Gemm("fprop", SQUARE, "unary"),
    Gemm("fprop", SQUARE, "unary_aux"),
    Gemm("dgrad", WIDE, "binary"),
    Gemm("wgrad", WIDE, "fp32"),
    Gemm("wgrad", SQUARE, "add"),
    Gemm("wgrad", WIDE, "add_io"),
    Gemm("dgrad", SQUARE, decoded="plain"),
    Gemm("fprop", WIDE, decoded="amaxes"),
    Gemm("wgrad", SQUARE, "add", decoded="amaxes"),
    Gemm("fprop", SQUARE, decoded="row_row"),
    Gemm("wgrad", WIDE, "fp32", decoded="row_tensor"),
    Gemm("fprop", WIDE_CODES, codes="e4m3 e4m3 tensor"),
    Gemm("dgrad", SQUARE_CODES, codes="e5m2 e4m3 row"),
    Gemm("dgrad", WIDE_CODES, codes="e4m3 e5m2 tensor"),
    Gemm("wgrad", WIDE_CODES, "fp32", codes="e5m2 e4m3 tensor"),
    Gemm("wgrad", SQUARE_CODES, "add", codes="e4m3 e4m3 row"),
    Gemm("fprop", SQUARE_CODES, "binary", codes="e4m3 e5m2 row"),
    Gemm("fprop", WIDE_MX, codes="e4m3 e4m3 mx"),
    Gemm("dgrad", SQUARE_CODES, codes="e5m2 e4m3 mx"),
    Gemm("dgrad", WIDE_MX, codes="e4m3 e4m3 mx"),
    Gemm("wgrad", WIDE_MX, "fp32", codes="e4m3 e4m3 mx"),
    Gemm("wgrad", SQUARE_CODES, "add", codes="e5m2 e4m3 mx"),
    Gemm("fprop", WIDE_NV, "scaled_bias", codes="nv"),
    Gemm("dgrad", SQUARE_NV, codes="nv"),
    Gemm("wgrad", WIDE_NV, codes="nv"),
    Gemm("wgrad", SQUARE_NV, "fp32", codes="nv"),
    Gemm("fprop", PAIR),
    Gemm("dgrad", PAIR),
    Gemm("wgrad", PAIR),
    Gemm("wgrad", PAIR, "add"),
    Gemm("fprop", PAIR, "unary_aux"),
    Gemm("dgrad", PAIR, "binary"),
    Gemm("wgrad", PAIR, "fp32", decoded="row_tensor"),
    Gemm("fprop", PAIR_CODES, "scaled_bias", codes="e4m3 e4m3 row"),
    Gemm("dgrad", PAIR_CODES, codes="e5m2 e4m3 tensor"),
    Gemm("wgrad", PAIR_CODES, "add_io", codes="e5m2 e4m3 row"),
    Gemm("fprop", PAIR_MX, codes="e4m3 e4m3 mx"),
    Gemm("dgrad", PAIR_MX, codes="e5m2 e4m3 mx"),
    Gemm("wgrad", PAIR_MX, codes="e5m2 e4m3 mx"),
    Gemm("wgrad", PAIR_NV, codes="nv"),
    # Halves of rows: boxes of B of 64 and of 128 rows, and of a pair a half to each CTA.
    Gemm("fprop", SQUARE, "gated_aux"),
    Gemm("fprop", WIDE, "gated_aux"),
    Gemm("fprop", PAIR, "gated_aux"),
    Gemm("fprop", WIDE, "gated"),
    Gemm("fprop", PAIR, "gated"),
)
FORWARD, BACKWARD, ALONG = GEMMS[:3]
ALONG_CODES = next(each for each in GEMMS if each.kind == "wgrad" and each.codes.endswith("row"))
OF_PAIR, OF_PAIR_MX = (
    next(each for each in GEMMS if each.config == config) for config in (PAIR, PAIR_MX)
)
ALONG_MX = next(each for each in GEMMS if each.kind == "wgrad" and each.codes.endswith("mx"))
OF_ROWS_HALVES = next(each for each in GEMMS if each.store == "gated")
FOR_EVERY_STORE = OF_HALVES[0]  # columns that any store can have
# Tiles of long groups are added by TMA, of short ones by warps.
LONG_GROUP = Case("long_group", 1360, 72, 136, (20, 1300, 0, 40))
# Tiles of 256 rows of which the second CTA has some, all or none.
HALVES = Case("halves", 700, 280, 264, (256, 0, 129, 128, 187), sm_count=5)
# Contractions of fewer stages than there are, one after the other, and groups without any.
SHORT = Case("short", 150, 72, 136, (1, 0, 33, 2, 0, 0, 64, 20))

# Each in a program of its own: one place, so that what is noticed is that.
FAULTS = {
    # Sums are read before the tensor core is done with them.
    "full": Fault(
        "gemm/gemm.sm100.cuh",
        "sums.full[sum.slot].wait(sum.phase);",
        "",
        FORWARD.name,
        "deadlock:",
    ),
    # The next tile's sums begin in an accumulator that is still read.
    "empty": Fault(
        "mainloop/tensor_sums.sm100.cuh",
        "sums.empty[sum.slot].wait(sum.phase ^ 1);",
        "",
        FORWARD.name,
        "deadlock:",
    ),
    # Stages are multiplied before they are loaded.
    "stage": Fault(
        "mainloop/tensor_sums.sm100.cuh",
        "stages.full[at.slot].wait(at.phase);\n      peer.wait(at.slot, at.phase);",
        "",
        BACKWARD.name,
        ", not ",
    ),
    # Nobody says that stages may be loaded again.
    "commit": Fault(
        "mainloop/tensor_sums.sm100.cuh",
        "tcgen05::commit<kCtas>(stages.empty[at.slot]);",
        "",
        ALONG.name,
        "deadlock:",
    ),
    # A tile adds to what the accumulator had before.
    "add": Fault(
        "mainloop/tensor_sums.sm100.cuh",
        "k > 0 || step > 0",
        "true",
        FORWARD.name,
        ", not ",
    ),
    # The boxes of an MN-major operand are looked for elsewhere.
    "leading": Fault(
        "mainloop/umma.sm100.cuh",
        "K * kSwizzleBytes / 16 : 1",
        "1 : 1",
        ALONG.name,
        ", not ",
    ),
    # The next MMA of an MN-major stage begins where that of a K-major one does.
    "step": Fault(
        "mainloop/umma.sm100.cuh",
        "kMmaKBytes * 8 / Bits * kSwizzleBytes / 16",
        "kMmaKBytes / 16",
        ALONG_CODES.name,
        ", not ",
    ),
    # Codes of the next group's tokens are added to a group's last sums.
    "clipped": Fault(
        "load/coordinates.sm90.cuh",
        "return ragged_coordinates(row, tile.begin, tile.tokens, k);",
        "return ragged_coordinates(row, tile.begin, tile.tokens + 16, k);",
        ALONG_CODES.name,
        ", not ",
    ),
    # Both strips of a warp are the first one.
    "strip": Fault(
        "fragment/tensor_memory.sm100.cuh",
        "(uint32_t(strip) * kStripStep << 16)",
        "0",
        BACKWARD.name,
        ", not ",
    ),
    # Both boxes of B are of gate.
    "gate": Fault(
        "load/coordinates.sm90.cuh",
        "(column - tile.column) / BoxWidthB",
        "0",
        OF_ROWS_HALVES.name,
        ", not ",
    ),
}
FAULTS_OF_SCALES = {
    # Scales lie where a group's tokens do, and not with its first atom.
    "atoms": Fault(
        "load/scale_atoms.sm90.cuh",
        "const int32_t first = kind == Gemm::wgrad ?",
        "const int32_t first = kind != Gemm::wgrad ?",
        ALONG_MX.name,
        ", not ",
    ),
    # Scales of the next step's elements.
    "scale": Fault(
        "mainloop/tensor_sums.sm100.cuh",
        "scale_byte(kBytes * step)",
        "scale_byte(kBytes * (step ^ 1))",
        ALONG_MX.name,
        ", not ",
    ),
}
FAULTS_OF_PAIRS = {
    # The first CTA does not wait for what the second one loads.
    "peer": Fault(
        "mainloop/tensor_sums.sm100.cuh",
        "peer.wait(at.slot, at.phase);",
        "",
        OF_PAIR.name,
        ", not ",
    ),
    # The second CTA's rows are the first one's.
    "half": Fault(
        "gemm/gemm.sm100.cuh",
        "tile.row += below > 0 ? T::kTileM : 0;",
        "",
        OF_PAIR.name,
        ", not ",
    ),
    # Both CTAs load the same columns of B.
    "columns": Fault(
        "load/pair_loader.sm100.cuh",
        "tile.column + int32_t(rank) * T::kLoadedN",
        "tile.column",
        OF_PAIR_MX.name,
        ", not ",
    ),
    # An accumulator is added to when the first CTA has read its half.
    "read": Fault(
        "gemm/gemm.sm100.cuh",
        "sums.init(T::kStoringWarps * T::kCluster);",
        "sums.init(T::kStoringWarps);",
        OF_PAIR.name,
        "deadlock:",
    ),
}


def headers() -> Mapping[str, str]:
    """Those of the family, with a tensor core in software."""
    return headers_on_cpu(HEADERS, FIRST_HEADERS, {ATOMS: TWIN.read_text(encoding="utf-8")})


@pytest.fixture
def cache(pytestconfig: pytest.Config) -> Path:
    """Where programs wait for the next run, and for the other workers of this one."""
    assert pytestconfig.cache is not None, "pytest runs with -p no:cacheprovider: drop that"
    return pytestconfig.cache.mkdir("tcgen05_on_cpu")


def cases_of(gemm: Gemm) -> tuple[Case, ...]:
    if gemm.store in ("gated", "gated_aux"):
        return (*OF_HALVES, replace(HALVES, n=272))
    return (*CASES, SHORT, HALVES, *([LONG_GROUP] if gemm.store in ("add", "add_io") else []))


@pytest.mark.parametrize("gemm", GEMMS, ids=lambda gemm: gemm.name)
def test_gemms(gemm: Gemm, cache: Path) -> None:
    program = Program("tcgen05", FAMILY_HEADER, [each.entry() for each in GEMMS], headers())
    cases = cases_of(gemm)
    done = run(program.build(cache / program.name), gemm.name, cases)
    assert (done.returncode, done.stdout) == (0, f"{len(cases)} cases\n"), done.stdout + done.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, cache: Path) -> None:
    notice(name, FAULTS[name], cache)


@pytest.mark.parametrize("name", FAULTS_OF_SCALES)
def test_faults_of_scales_are_noticed(name: str, cache: Path) -> None:
    notice(name, FAULTS_OF_SCALES[name], cache)


@pytest.mark.parametrize("name", FAULTS_OF_PAIRS)
def test_faults_of_pairs_are_noticed(name: str, cache: Path) -> None:
    notice(name, FAULTS_OF_PAIRS[name], cache)


def notice(name: str, fault: Fault, cache: Path) -> None:
    entries = [
        gemm.entry()
        for gemm in (
            *(FORWARD, BACKWARD, ALONG, ALONG_CODES, ALONG_MX),
            *(OF_PAIR, OF_PAIR_MX, OF_ROWS_HALVES),
        )
    ]
    broken = break_headers(headers(), [fault])
    program = Program(f"broken_{name}", FAMILY_HEADER, entries, broken)
    fault.check(
        run(program.build(cache / program.name), fault.gemm, [FOR_EVERY_STORE]), FOR_EVERY_STORE
    )


def test_tiles_of_the_shipped_spec_are_run() -> None:
    kernels = load([builtin_specs()]).archs["sm_100a"].kernels
    limits = hardware_limits((10, 0))
    shipped = {
        point.cpp(limits).replace("fusegen::", "")
        for name, family in kernels.items()
        for spec in family.kinds.values()
        for point in spec.points
        if "tcgen05" in (family.template or name)
    }
    assert shipped and shipped <= {f"{gemm.config}, {LIMITS}" for gemm in GEMMS}
