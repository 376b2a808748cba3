"""The matrix products of sm_90a, whole kernels with their launches, on the CPU against float64.

`gemm_on_cpu` runs the device headers themselves: a cluster's threads as fibers in random order, and
models of the copies, barriers and matrix instructions that they use. What it cannot show is the
hardware's own part: its short accumulation of 8-bit products, its timing, its memory model beyond
what barriers and waits say.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
from filelock import FileLock

from fusegen.build.toolchain import find_toolchain
from fusegen.families.wgmma import LIMITS

from .gemm_on_cpu.without_ptx import headers_on_cpu

HERE = Path(__file__).parent
SIMULATION = HERE / "gemm_on_cpu"
HEADERS = HERE.parents[1] / "templates" / "static" / "csrc" / "fusegen"
FIRST_HEADERS = ("gemm/gemm_decoded.sm90.cuh", "gemm/launch_fp8.sm90.cuh")
SECONDS = 60


class Family(Enum):
    """Products that are compiled into one program."""

    PLAIN = "plain"
    DECODED = "decoded"
    FAST = "fast"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class Product:
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
            call = f"run_plain<Gemm::{self.kind}, Store::{self.store}, {config}>"
        elif self.family is Family.DECODED:
            amaxes = "true" if self.scaling else "false"
            call = f"run_decoded<Gemm::{self.kind}, Store::{self.store}, {amaxes}, {config}>"
        else:
            codes = ", ".join(f"__nv_fp8_{code}" for code in self.formats.split("_"))
            call = (
                f"run_fp8<Gemm::{self.kind}, Store::{self.store}, {codes}, "
                f"Fp8Scaling::{self.scaling}, "
                f"Accumulation::{self.family.value}, {config}>"
            )
        return f'{{"{self.name}", &sim::{call}}},'


WIDE_PLAIN = "128, 256, 64, 2, Schedule::cooperative"
TURNS_PLAIN = "128, 192, 64, 2, Schedule::pingpong"
SMALL_PLAIN = "128, 128, 64, 2, Schedule::pingpong"
WIDE = "128, 256, 128, 2, Schedule::cooperative"
WIDE_ALONE = "128, 256, 128, 1, Schedule::cooperative"
NARROW = "128, 128, 128, 2, Schedule::cooperative"
THREE = "192, 128, 128, 2, Schedule::cooperative"  # math warpgroups
TURNS = "128, 192, 128, 2, Schedule::pingpong"
TURNS_NARROW = "128, 128, 128, 2, Schedule::pingpong"

PLAIN_FPROP = Product(Family.PLAIN, "fprop", TURNS_PLAIN)
PLAIN_DGRAD = Product(Family.PLAIN, "dgrad", WIDE_PLAIN)
BLOCK_FPROP = Product(Family.SPLIT, "fprop", WIDE, "block", "e4m3_e4m3")
BLOCK_WGRAD = Product(Family.SPLIT, "wgrad", WIDE, "block", "e5m2_e4m3")
# Families alternate, so that two workers of pytest-xdist seldom wait for one compilation.
PRODUCTS = (
    PLAIN_FPROP,
    Product(Family.FAST, "fprop", WIDE, "tensor", "e4m3_e5m2"),
    BLOCK_FPROP,
    PLAIN_DGRAD,
    Product(Family.DECODED, "fprop", SMALL_PLAIN, "amaxes"),
    Product(Family.FAST, "dgrad", TURNS_NARROW, "row", "e5m2_e4m3"),
    Product(Family.SPLIT, "dgrad", NARROW, "block", "e5m2_e4m3"),
    Product(Family.PLAIN, "wgrad", SMALL_PLAIN),
    Product(Family.DECODED, "wgrad", WIDE_PLAIN, "amaxes"),
    Product(Family.FAST, "wgrad", TURNS, "row", "e4m3_e4m3"),
    BLOCK_WGRAD,
    Product(Family.FAST, "wgrad", WIDE, "tensor", "e5m2_e4m3"),
    Product(Family.DECODED, "dgrad", SMALL_PLAIN),
    Product(Family.SPLIT, "fprop", WIDE_ALONE, "block", "e4m3_e4m3"),
    Product(Family.SPLIT, "dgrad", WIDE, "row", "e4m3_e4m3"),
    Product(Family.SPLIT, "wgrad", NARROW, "tensor", "e4m3_e4m3"),
    Product(Family.PLAIN, "wgrad", WIDE_PLAIN, store="add"),
    Product(Family.PLAIN, "wgrad", TURNS_PLAIN, store="fp32"),
    Product(Family.PLAIN, "wgrad", TURNS_PLAIN, store="add_io"),
    Product(Family.SPLIT, "wgrad", THREE, "block", "e4m3_e4m3"),
    Product(Family.SPLIT, "wgrad", THREE, "block", "e5m2_e4m3", store="add"),
    Product(Family.FAST, "wgrad", TURNS, "row", "e4m3_e4m3", store="fp32"),
    Product(Family.PLAIN, "fprop", WIDE_PLAIN, store="scaled_bias"),
    Product(Family.PLAIN, "fprop", TURNS_PLAIN, store="scaled_bias"),
    Product(Family.DECODED, "fprop", SMALL_PLAIN, "amaxes", store="scaled_bias"),
    Product(Family.FAST, "fprop", TURNS, "row", "e4m3_e4m3", store="scaled_bias"),
    Product(Family.SPLIT, "fprop", WIDE, "block", "e4m3_e4m3", store="scaled_bias"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A problem and how it is launched; no sizes: dense."""

    name: str
    tokens: int
    n: int
    k: int
    sizes: tuple[int, ...] = ()
    bias: bool = True
    scale_per_group: bool = True
    sm_count: int = 4

    def line(self) -> str:
        """How the program reads it."""
        flags = (int(self.bias), int(self.scale_per_group))
        numbers = (self.tokens, self.n, self.k, self.sm_count, *flags, len(self.sizes))
        return " ".join([self.name, *map(str, (*numbers, *self.sizes))])


# Extents: multiples of 8 that leave some of every tile and box. Lengths of dense cases are no
# multiple of 16, so that transposed copies have rows shorter than their pitch.
RAGGED = Case("ragged", 330, 392, 264, (130, 0, 33, 140, 7))
CASES = (
    RAGGED,
    Case("dense", 131, 136, 264, scale_per_group=False),
    Case("dense_three_blocks", 300, 72, 136, bias=False),
    Case("dense_without_tokens", 0, 40, 136),
    # A whole tile and part of another one, in one cluster.
    Case("one_group", 140, 520, 392, (140,), bias=False, sm_count=2),
    Case("sizes_out_of_range", 140, 72, 136, (-5, 100, 2**62, 9), scale_per_group=False),
    Case("tiny", 7, 8, 24, (0, 7, 0)),
    Case("no_group_has_tokens", 70, 40, 136, (0, 0)),
    Case("no_tokens", 0, 40, 136, (0, 3)),
)
# Tiles of long groups are added by TMA, of short ones by warps.
LONG_GROUP = Case("long_group", 1360, 72, 136, (20, 1300, 0, 40))
# Contractions so long and groups so large that a warpgroup without rows multiplies as well.
IN_STEP = {
    PLAIN_DGRAD: Case("in_step", 1030, 4096, 8, (1030,)),
    BLOCK_FPROP: Case("in_step", 1030, 8, 8192, (1030,)),
}


def cases_of(product: Product) -> tuple[Case, ...]:
    long_group = (LONG_GROUP,) if product.store in ("add", "add_io") else ()
    in_step = (IN_STEP[product],) if product in IN_STEP else ()
    return (*CASES, *long_group, *in_step)


@dataclass(frozen=True, slots=True)
class Fault:
    """Code of a header, what to break it into, and what a product must then say."""

    header: str
    sound: str
    broken: str
    product: Product
    report: str


# One header each and no product in common, so that one copy serves for all.
FAULTS = (
    # Stages are given away while their multiplications still read them.
    Fault(
        "mainloop/running_sums.sm90.cuh",
        "cute::warpgroup_wait<1>();",
        "cute::warpgroup_wait<8>();",
        PLAIN_FPROP,
        ", not ",
    ),
    # Stages whose scales were read are never given back.
    Fault(
        "mainloop/split_sums.sm90.cuh",
        "if (Sum::kReadsStage) release_stage();",
        "",
        BLOCK_WGRAD,
        "deadlock:",
    ),
    # Old values come into a buffer before what was stored from it has been read.
    Fault(
        "sink/loaded_add.sm90.cuh",
        "cute::tma_store_wait<Buffers == 1 ? 0 : 1>();",
        "",
        Product(Family.SPLIT, "wgrad", WIDE, "tensor", "e4m3_e4m3", store="add"),
        ", not ",
    ),
)


@dataclass(frozen=True, slots=True)
class Program:
    """Products over device headers, to be compiled."""

    name: str
    products: Sequence[Product]
    headers: dict[str, str]

    def source(self) -> str:
        entries = "\n".join(product.entry() for product in self.products)
        return (
            '#include "products.h"\nusing namespace fusegen;\n'
            "int main(int count, char** arguments) {\n"
            f"  return sim::main_of({{\n{entries}\n}}, count, arguments);\n}}\n"
        )

    def build(self, folder: Path) -> Path:
        """The program in `folder`: compiled anew only if it would come out different."""
        command = _command(folder)
        key = hashlib.sha256(repr((command, self.source(), self.headers)).encode())
        for path in sorted(SIMULATION.rglob("*.h*")):
            key.update(path.read_bytes())
        program, built = folder / "program", folder / "key"
        folder.mkdir(exist_ok=True)
        with FileLock(folder / "lock"):
            if not built.exists() or built.read_text() != key.hexdigest():
                built.unlink(missing_ok=True)
                self._write(folder)
                subprocess.run([*command, "-o", str(program)], check=True)
                built.write_text(key.hexdigest())
        return program

    def _write(self, folder: Path) -> None:
        (folder / "program.cpp").write_text(self.source())
        shutil.rmtree(folder / "fusegen", ignore_errors=True)
        for name, text in self.headers.items():
            header = folder / "fusegen" / name
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(text)


def _command(folder: Path) -> list[str]:
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    assert compiler, "this test compiles C++: install g++"
    # Stand-ins for CUTLASS come first. Headers of kernels and of CUDA are not for a host compiler's
    # warnings; psABI: about parameters of 128-byte alignment before GCC 4.6.
    own = [f"-I{path}" for path in (SIMULATION, SIMULATION / "stand_ins")]
    others = [f"-isystem{path}" for path in (folder, *find_toolchain().cuda_include)]
    warnings = ["-Wall", "-Wextra", "-Wno-psabi", "-Werror"]
    source = str(folder / "program.cpp")
    return [compiler, "-std=c++17", "-O1", *warnings, *own, *others, source]


def run(program: Path, product: Product, cases: Sequence[Case]) -> subprocess.CompletedProcess[str]:
    lines = "".join(f"{case.line()}\n" for case in cases)
    return subprocess.run(
        [program, product.name],
        input=lines,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.fixture
def cache(pytestconfig: pytest.Config) -> Path:
    """Where programs wait for the next run, and for the other workers of this one."""
    assert pytestconfig.cache is not None, "pytest runs with -p no:cacheprovider: drop that"
    return pytestconfig.cache.mkdir("gemm_on_cpu")


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_products(product: Product, cache: Path) -> None:
    together = [other for other in PRODUCTS if other.family is product.family]
    headers = headers_on_cpu(HEADERS, FIRST_HEADERS)
    program = Program(product.family.value, together, headers)
    cases = cases_of(product)
    done = run(program.build(cache / program.name), product, cases)
    assert (done.returncode, done.stdout) == (0, f"{len(cases)} cases\n"), done.stdout + done.stderr


def test_faults_are_noticed(cache: Path) -> None:
    headers = headers_on_cpu(HEADERS, FIRST_HEADERS)
    for fault in FAULTS:
        found = headers[fault.header].count(fault.sound)
        assert found == 1, f"{fault.header} no longer holds {fault.sound!r}: break other code"
        headers[fault.header] = headers[fault.header].replace(fault.sound, fault.broken)
    program = Program("broken", [fault.product for fault in FAULTS], headers)
    built = program.build(cache / program.name)
    for fault in FAULTS:
        done = run(built, fault.product, [RAGGED])
        assert done.returncode == 1, f"{fault.product.name}: {done.stdout}{done.stderr}"
        assert done.stdout.startswith(f"{fault.product.name}, {RAGGED.name}: ")
        assert fault.report in done.stdout
