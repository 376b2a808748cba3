"""Which kernels there are to check and time, and how each becomes a library of its own."""

from __future__ import annotations

import concurrent.futures
import functools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "benchmarks" / "kernels"
CSRC = ROOT / "templates" / "static" / "csrc"
# quantize_kernels.cuh, its ctypes mirror and CUDA on the CPU are those of the tests.
COMPILE_TESTS = ROOT / "tests" / "compile"
BUILT = ROOT / "build" / "kernels"

sys.path.insert(0, str(ROOT / "generator"))

from fusegen.build.toolchain import find_toolchain  # noqa: E402
from fusegen.families.mma_sync import MmaConfig  # noqa: E402
from fusegen.families.wgmma import LIMITS  # noqa: E402


class Kind(StrEnum):
    """Which GEMM of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Format(StrEnum):
    """Of an operand's codes."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"


class Scaling(StrEnum):
    """What shares a scale: see gemm_fp8.h."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"


class Accumulation(StrEnum):
    """How GEMMs are summed: see gemm_fp8.h."""

    FAST = "fast"
    SPLIT = "split"


class Schedule(StrEnum):
    """How two math warpgroups share tiles."""

    COOPERATIVE = "cooperative"
    PINGPONG = "pingpong"


class Output(Enum):
    """Element of the result."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def cxx(self) -> str:
        """The C++ type."""
        return "__nv_bfloat16" if self is Output.BFLOAT16 else "__half"


_TILE = re.compile(r"(cooperative|pingpong)_(\d+)x(\d+)x(\d+)_(\d)x1(?:_buffers(\d+))?")
_BUFFERS = 2  # the default of Config


@dataclass(frozen=True, slots=True)
class Tile:
    """A point of specs/archs/sm_90a.yaml, such as cooperative_128x256x128_2x1.

    `buffers`, the least number of store buffers per warp, is named where it is not the default.
    """

    schedule: Schedule
    m: int
    n: int
    k: int
    cluster: int
    buffers: int = _BUFFERS

    @property
    def name(self) -> str:
        """What `parse` reads."""
        name = f"{self.schedule}_{self.m}x{self.n}x{self.k}_{self.cluster}x1"
        return name if self.buffers == _BUFFERS else f"{name}_buffers{self.buffers}"

    @classmethod
    def parse(cls, name: str) -> Tile:
        """The tile of this name.

        Raises:
            ValueError: it is not a tile's name.
        """
        match = _TILE.fullmatch(name)
        if match is None:
            raise ValueError(f"tile {name!r}: expected one like cooperative_128x256x128_2x1")
        schedule, *sizes = match.groups(default=str(_BUFFERS))
        m, n, k, cluster, buffers = map(int, sizes)
        return cls(Schedule(schedule), m, n, k, cluster, buffers)


@dataclass(frozen=True, slots=True)
class Target:
    """One FP8 kernel."""

    kind: Kind
    format_a: Format
    format_b: Format
    scaling: Scaling
    accumulation: Accumulation
    tile: Tile
    output: Output = Output.BFLOAT16

    @property
    def name(self) -> str:
        """What `parse` reads."""
        modes = self.kind, self.format_a, self.format_b, self.scaling, self.accumulation
        output = () if self.output is Output.BFLOAT16 else (self.output.value,)
        return ".".join((*modes, self.tile.name, *output))

    @classmethod
    def parse(cls, name: str) -> Target:
        """The kernel of this name: KIND.FORMAT.FORMAT.SCALING.ACCUMULATION.TILE[.float16].

        Raises:
            ValueError: it is not a kernel's name.
        """
        words = name.split(".")
        if len(words) not in (6, 7):
            raise ValueError(
                f"kernel {name!r}: expected KIND.FORMAT.FORMAT.SCALING.ACCUMULATION.TILE[.float16]"
            )
        return cls(
            Kind(words[0]),
            Format(words[1]),
            Format(words[2]),
            Scaling(words[3]),
            Accumulation(words[4]),
            Tile.parse(words[5]),
            Output(words[6]) if len(words) == 7 else Output.BFLOAT16,
        )

    @property
    def library(self) -> Path:
        """Where its library is built."""
        return BUILT / f"{self.name}.so"

    def macros(self) -> dict[str, str]:
        """What gemm_fp8.cu is compiled with."""
        return {
            "KIND": self.kind,
            "FORMAT_A": f"__nv_fp8_{self.format_a}",
            "FORMAT_B": f"__nv_fp8_{self.format_b}",
            "ELEMENT": self.output.cxx,
            "SCALING": self.scaling,
            "ACCUMULATION": self.accumulation,
            "TILE_SCHEDULE": self.tile.schedule,
            "TILE_M": str(self.tile.m),
            "TILE_N": str(self.tile.n),
            "TILE_K": str(self.tile.k),
            "TILE_CLUSTER": str(self.tile.cluster),
            "TILE_BUFFERS": str(self.tile.buffers),
            "SHARED_MEMORY": str(LIMITS["shared_memory"]),
            "REGISTERS": str(LIMITS["registers"]),
        }


# Modes and tiles that are checked and timed for every kind of GEMM.
_E4M3 = "e4m3.e4m3"
_POINTS = (
    f"{_E4M3}.block.split.cooperative_128x256x128_2x1",
    f"{_E4M3}.block.split.cooperative_128x128x128_2x1",
    f"{_E4M3}.row.split.cooperative_128x256x128_2x1",
    f"{_E4M3}.row.split.cooperative_128x128x128_2x1",
    f"{_E4M3}.row.fast.cooperative_128x256x128_2x1",
    f"{_E4M3}.row.fast.pingpong_128x192x128_2x1",
    f"{_E4M3}.row.fast.pingpong_128x128x128_2x1",
    f"{_E4M3}.tensor.split.cooperative_128x256x128_2x1",
    f"{_E4M3}.tensor.fast.pingpong_128x192x128_2x1",
)
# What those leave out: other formats and results, one store buffer, no cluster, three math
# warpgroups.
_OTHERS = (
    "dgrad.e5m2.e4m3.tensor.split.cooperative_128x256x128_2x1",
    "wgrad.e5m2.e4m3.tensor.split.cooperative_128x256x128_2x1",
    "fprop.e4m3.e5m2.tensor.fast.pingpong_128x192x128_2x1",
    "fprop.e5m2.e5m2.row.fast.cooperative_128x256x128_2x1.float16",
    f"fprop.{_E4M3}.block.split.cooperative_128x256x128_1x1",
    f"wgrad.{_E4M3}.block.split.cooperative_128x256x128_2x1_buffers1",
    f"wgrad.{_E4M3}.block.split.cooperative_192x128x128_2x1",
)


def targets() -> tuple[Target, ...]:
    """Every FP8 kernel that is checked; those of the default output are timed too."""
    names = (f"{kind}.{point}" for kind in Kind for point in _POINTS)
    return tuple(Target.parse(name) for name in (*names, *_OTHERS))


# ---- compilation


@dataclass(frozen=True, slots=True)
class Report:
    """What the compiler said of one library.

    Attributes:
        name: of the library.
        seconds: it took; 0 where the library was up to date.
        registers: the most that one of its kernels uses.
        spills: bytes of spill stores and loads in all.
        serialised: whether the assembler ran MMAs one by one, a great loss of speed.
    """

    name: str
    seconds: float
    registers: int = 0
    spills: int = 0
    serialised: bool = False

    def __str__(self) -> str:
        if self.seconds == 0:
            return f"{self.name}: up to date"
        words = [f"{self.registers} registers", f"{self.spills} bytes spilled"]
        if self.serialised:
            words.append("MMAs SERIALISED")
        return f"{self.name}: {', '.join(words)}, {self.seconds:.1f} s"


def _sources() -> Iterator[Path]:
    for folder in (CSRC / "fusegen", HERE, COMPILE_TESTS):
        for suffix in ("*.h", "*.cuh", "*.cu"):
            yield from folder.rglob(suffix)
    yield Path(__file__)


def _is_current(library: Path) -> bool:
    newest = max(path.stat().st_mtime for path in _sources())
    return library.is_file() and library.stat().st_mtime > newest


def _compile(library: Path, words: Callable[[], Sequence[str]]) -> Report:
    """Run what `words` gives; a current library wants neither a compiler nor headers."""
    if _is_current(library):
        return Report(library.stem, 0.0)
    library.parent.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(".partial")  # a stopped compiler leaves no library behind
    start = time.monotonic()
    command = words()
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    log = done.stdout + done.stderr
    if done.returncode != 0:
        raise SystemExit(f"{library.stem}: {' '.join(command)}\n{log[:4000]}")
    partial.replace(library)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
    seconds = time.monotonic() - start
    serialised = "wgmma.mma_async instructions are serialized" in log
    return Report(library.stem, seconds, max(registers, default=0), sum(spills), serialised)


class Code(StrEnum):
    """What nvcc makes of a kernel."""

    HOPPER = "arch=compute_90a,code=sm_90a"
    NATIVE = "arch=compute_90,code=sm_90"
    # As it is written for GPUs without Hopper's instructions; the driver compiles it for the card.
    AMPERE_PTX = "arch=compute_80,code=compute_80"


def _nvcc(source: Path, *flags: str, code: Code = Code.HOPPER) -> list[str]:
    """The flags that a bundle's kernels are compiled with."""
    tools = find_toolchain()
    return [
        str(tools.nvcc),
        f"-ccbin={tools.host_compiler}",
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        "--expt-relaxed-constexpr",
        "-fmad=false",
        f"-gencode={code}",
        "-Xptxas=-v",
        "-Xcompiler=-fPIC",
        "-shared",
        *flags,
        str(source),
    ]


def build_target(target: Target) -> Report:
    """Build one FP8 kernel for sm_90a; about half a minute."""
    macros = [f"-D{name}={value}" for name, value in target.macros().items()]

    def words() -> list[str]:
        return _nvcc(HERE / "gemm_fp8.cu", *macros, f"-I{CSRC}")

    return _compile(target.library, words)


def mma_library(point: str) -> Path:
    """Where the three bf16 GEMMs of a point of specs/archs/sm_80.yaml are built."""
    return BUILT / f"{point}.so"


def build_mma(point: str, limits: Mapping[str, int]) -> Report:
    """Build them as sm_90 code; about ten seconds.

    Args:
        point: by its name.
        limits: of the architecture that the point is for.
    """
    source = mma_library(point).with_suffix(".cu")

    def words() -> list[str]:
        # In a file: nvcc would cut a macro of its command line at the commas.
        config = MmaConfig.parse(point).cpp(limits)
        text = f'#define POINT MmaConfig<{config}>\n#include "{HERE / "gemm_mma.cu"}"\n'
        source.write_text(text)
        return _nvcc(source, f"-I{CSRC}", code=Code.NATIVE)

    return _compile(mma_library(point), words)


def quantize_library(device: str, code: Code = Code.HOPPER) -> Path:
    """Where the quantise kernels are built, for "cuda" or for the emulation on the "cpu"."""
    suffix = "" if code is Code.HOPPER else f"_{code.name.lower()}"
    return BUILT / f"quantize_{device}{suffix}.so"


def build_quantize(code: Code = Code.HOPPER) -> Report:
    """Build every quantise kernel, and sums over groups."""
    flags = [f"-I{CSRC}", f"-I{COMPILE_TESTS}"]
    return _compile(
        quantize_library("cuda", code), lambda: _nvcc(HERE / "quantize.cu", *flags, code=code)
    )


def build_quantize_emulation() -> Report:
    """Build what `build_quantize` does with the host's compiler, a block of threads as fibers."""
    includes = [f"-I{path}" for path in (COMPILE_TESTS / "cuda_on_cpu", COMPILE_TESTS, CSRC)]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", "-fPIC", "-shared"]
    headers = ["-include", "group_sum_kernels.cuh"]
    source = ["-x", "c++", str(COMPILE_TESTS / "quantize_kernels.cuh")]
    # Clusters have no emulation.
    rest = [*flags, "-D__CUDA_ARCH_LIST__=800", *includes, *headers, *source]
    return _compile(quantize_library("cpu"), lambda: [str(find_toolchain().host_compiler), *rest])


def build(wanted: Iterable[Target], jobs: int, *, quantize: bool = True) -> None:
    """Build libraries that are missing or older than a source, `jobs` at a time.

    Raises:
        SystemExit: a compiler failed; with its command and the start of its messages.
        fusegen.errors.BuildError: nvcc or a host compiler was not found.
    """
    tasks: list[Callable[[], Report]] = []
    if quantize:
        tasks += [functools.partial(build_quantize, code) for code in Code]
    tasks += [functools.partial(build_target, target) for target in wanted]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for report in pool.map(lambda task: task(), tasks):
            print(report, flush=True)
