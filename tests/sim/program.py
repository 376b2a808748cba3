"""Programs that run whole kernels with their launches on the CPU, against float64.

The device headers themselves are compiled: a cluster's threads are fibers in random order, and
there are models of the copies, barriers and matrix instructions that they use. What this cannot
show is the hardware's own part: its short accumulation of 8-bit products, its timing, its memory
model beyond what barriers and waits say.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from fusegen.build.objcache import ObjectCache, Report, Unit, default_root
from fusegen.build.toolchain import find_toolchain

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "templates" / "static" / "csrc" / "fusegen"
SECONDS = 300
# psABI: about parameters of 128-byte alignment before GCC 4.6.
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Wno-psabi", "-Werror")


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
    leaves: bool = False

    def line(self) -> str:
        """How the program reads it."""
        flags = (int(self.bias), int(self.scale_per_group), int(self.leaves))
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
    Case("rows_left", 170, 72, 136, (33,), leaves=True),
)

# Halves of 200 columns end within a part of every tile, those of 8 and 56 within the first one; of
# 264 a cluster has two columns of tiles of one row, and with three of those one CTA has none.
OF_HALVES = (
    replace(RAGGED, n=400),
    Case("halves_dense", 131, 144, 264),
    Case("halves_of_one_group", 140, 528, 392, (140,), bias=False, sm_count=2),
    Case("halves_of_sizes_out_of_range", 140, 112, 136, (-5, 100, 2**62, 9)),
    Case("tiny_halves", 7, 16, 24, (0, 7, 0)),
    Case("halves_without_tokens", 0, 48, 136, (0, 3)),
    Case("halves_that_no_group_has", 70, 48, 136, (0, 0)),
    Case("halves_left", 170, 144, 136, (33,), leaves=True),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Code of a header, what to break it into, and what the program must then say of a GEMM."""

    header: str
    sound: str
    broken: str
    gemm: str
    report: str

    def check(self, done: subprocess.CompletedProcess[str], case: Case) -> None:
        """Demand that the case of the GEMM ended with the report."""
        assert done.returncode == 1, f"{self.gemm}: {done.stdout}{done.stderr}"
        assert done.stdout.startswith(f"{self.gemm}, {case.name}: ")
        assert self.report in done.stdout, done.stdout


def break_headers(headers: Mapping[str, str], faults: Sequence[Fault]) -> dict[str, str]:
    """The headers with all faults in them."""
    broken = dict(headers)
    for fault in faults:
        found = broken[fault.header].count(fault.sound)
        assert found == 1, f"{fault.header} no longer holds one {fault.sound!r}: break other code"
        broken[fault.header] = broken[fault.header].replace(fault.sound, fault.broken)
    return broken


@dataclass(frozen=True, slots=True)
class Program:
    """GEMMs over device headers, to be compiled.

    Attributes:
        name: of the program.
        family: the header of this folder with the functions that run a family's GEMMs.
        gemms: lines of the list of those: a name and a function.
        headers: name -> text of the device headers; see `headers_on_cpu`.
    """

    name: str
    family: str
    gemms: Sequence[str]
    headers: Mapping[str, str]

    def source(self) -> str:
        """The program in C++."""
        entries = "\n".join(self.gemms)
        return (
            f'#include "{self.family}"\nusing namespace fusegen;\n'
            "int main(int count, char** arguments) {\n"
            f"  return sim::main_of({{\n{entries}\n}}, count, arguments);\n}}\n"
        )

    def build(self, folder: Path) -> Path:
        """The program in `folder`: compiled anew only if it would come out different."""
        key = hashlib.sha256(repr((FLAGS, self.source(), dict(self.headers))).encode())
        for path in sorted(HERE.rglob("*.h*")):
            key.update(path.read_bytes())
        program, built = folder / "program", folder / "key"
        folder.mkdir(exist_ok=True)
        with FileLock(folder / "lock"):
            if not built.exists() or built.read_text() != key.hexdigest():
                built.unlink(missing_ok=True)
                self._write(folder)
                _link(folder, program)
                built.write_text(key.hexdigest())
        return program

    def _write(self, folder: Path) -> None:
        (folder / "program.cpp").write_text(self.source())
        shutil.rmtree(folder / "fusegen", ignore_errors=True)
        for name, text in self.headers.items():
            header = folder / "fusegen" / name
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(text)


def _link(folder: Path, program: Path) -> None:
    """The program, of an object that the user's cache has where its text was compiled before."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    assert compiler, "this test compiles C++: install g++"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    cuda = find_toolchain().cuda_include
    # Headers of kernels and of CUDA are not for a host compiler's warnings.
    includes = [f"-I{HERE}", *(f"-isystem{path}" for path in (folder, *cuda))]

    def compiled(binary: Path, rule: Path) -> Report:
        words = [compiler, *FLAGS, *includes, "-MD", "-MF", str(rule), "-c", str(source)]
        begun = time.monotonic()
        subprocess.run([*words, "-o", str(binary)], check=True)
        return Report(time.monotonic() - begun, 0, (), ())

    source, binary = (folder / f"program.{suffix}" for suffix in ("cpp", "o"))
    names = ("program", "sim", *(f"cuda{index}" for index in range(len(cuda))))
    folders = (path.resolve() for path in (folder, HERE, *cuda))
    unit = Unit(source, version.stdout, FLAGS, tuple(zip(names, folders, strict=True)))
    ObjectCache(default_root()).obtain(unit, binary, compiled)
    subprocess.run([compiler, str(binary), "-o", str(program)], check=True)


def run(
    program: Path, gemm: str, cases: Sequence[Case], *, digest: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a GEMM of a program on cases; the first that is wrong ends it.

    Args:
        program: that was built.
        gemm: its name.
        cases: in order.
        digest: whether it also prints one of the results' bits.
    """
    lines = "".join(f"{case.line()}\n" for case in cases)
    return subprocess.run(
        [program, gemm, *(["digest"] if digest else [])],
        input=lines,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
