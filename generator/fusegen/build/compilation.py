"""How the units of a bundle are compiled, through the object cache."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .objcache import CachedObject, ObjectCache, Report, Unit, prerequisites
from .output import kernel_usage, warning_lines
from .processes import Run, Runner
from .progress import Progress
from .sources import DIGESTS_SOURCE, Sources
from .toolchain import BuildError, Toolchain

# The tests hold these lists and those of link.py against templates/static/csrc/CMakeLists.txt.
HOST_FLAGS: Final = (
    "-std=c++17",
    "-O1",  # launchers are calls and checks: more takes twice as long and saves no microsecond
    "-DNDEBUG",
    "-DUSE_CUDA",
    "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
)
# No --use_fast_math and no flush to zero: the reference in PyTorch is the normative arithmetic.
KERNEL_FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",  # an assert in device code costs registers and a branch
    "--expt-relaxed-constexpr",  # device code calls the constexpr functions of the host's headers
    "-fmad=false",  # the plan says where results are rounded; contractions differ by context
    "-Xptxas=-v",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
)

HEADER_OF_LAUNCHERS: Final = "fusegen/host/stable.h"
"""What every launcher includes, and spends half of its compilation on: PyTorch's headers."""

HOST_STRICT: Final = ("-Werror",)
KERNEL_STRICT: Final = ("-Werror=all-warnings", "-Xcompiler=-Werror")


@dataclass(frozen=True, slots=True)
class Command:
    """How one unit is compiled.

    Attributes:
        name: of its source, below csrc.
        program: the compiler.
        flags: that decide the object.
        paths: flags that only say where things are.
        unit: as the cache knows it.
        shares_header: whether it has the program, flags and paths of all that include
            `HEADER_OF_LAUNCHERS`, which may then be compiled once for all of them.
    """

    name: str
    program: Path
    flags: tuple[str, ...]
    paths: tuple[str, ...]
    unit: Unit
    shares_header: bool = False


def commands(
    csrc: Path, sources: Sources, tools: Toolchain, digests: Path, *, strict: bool, lineinfo: bool
) -> list[Command]:
    """One command per unit, kernels first: they take longest.

    Kernels see no PyTorch, so that a new PyTorch compiles none of them anew.
    """
    project = ("project", csrc)
    torch = ("torch", tools.torch.include.resolve())
    cuda = [("cuda" if i == 0 else f"cuda{i}", p) for i, p in enumerate(tools.cuda_include)]

    def command(
        name: str,
        program: Path,
        flags: tuple[str, ...],
        roots: Sequence[tuple[str, Path]],
        paths: tuple[str, ...],
        *,
        shares_header: bool = False,
    ) -> Command:
        unit = Unit(csrc / name, tools.identity, flags, (project, *roots))
        return Command(name, program, flags, paths, unit, shares_header)

    kernel_flags = (
        *KERNEL_FLAGS,
        f"-gencode={sources.gencode}",
        *(KERNEL_STRICT if strict else ()),
        *(("-lineinfo",) if lineinfo else ()),
    )
    host_flags = (*HOST_FLAGS, *(HOST_STRICT if strict else ()))
    compiler = tools.host_compiler
    launcher_flags = (*host_flags, "-include", HEADER_OF_LAUNCHERS)
    kernel_paths = (f"-ccbin={compiler}", "-I.")
    # Error messages of PyTorch's headers carry __FILE__: without the map the first builder's
    # folders would travel with the object.
    prefix = f"-ffile-prefix-map={tools.torch.include}=torch"
    host_roots = [torch, *cuda]
    host_paths = (prefix, *_includes(host_roots))
    table_roots = [("digests", digests)]
    return [
        *(
            command(name, tools.nvcc, kernel_flags, cuda, kernel_paths)
            for name in sources.kernel_sources
        ),
        *(
            command(name, compiler, launcher_flags, host_roots, host_paths, shares_header=True)
            for name in sources.host_sources
        ),
        command(DIGESTS_SOURCE, compiler, host_flags, table_roots, _includes(table_roots)),
    ]


def _includes(roots: Sequence[tuple[str, Path]]) -> tuple[str, ...]:
    # Naming a folder that the compiler searches anyway would reorder it and break #include_next.
    folders = [folder for _, folder in roots if folder != Path("/usr/include")]
    return ("-I.", *(word for folder in folders for word in ("-isystem", str(folder))))


class SharedHeader:
    """`HEADER_OF_LAUNCHERS`, compiled for the launchers that the cache lacks, if they are several.

    They include it first thing in any case, so that objects are the same bytes with and without.
    Where it does not compile, they read the text, and say themselves what is wrong with it.
    """

    ALONE: Final = 2
    """Launchers that read the text: for no more of them it would take longer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "shared"
        self._lock = threading.Lock()
        self._asked = 0
        self._headers: str | None = None

    def words(self) -> tuple[str, ...]:
        """Where a launcher's compiler finds it; this comes before all other folders."""
        return ("-I", str(self._folder))

    def headers(self, command: Command, runner: Runner, scratch: Path) -> str:
        """Headers in it, as a make rule has them: those of launchers leave them out.

        Empty where launchers read the text.
        """
        with self._lock:
            self._asked += 1
            if self._asked <= self.ALONE:
                return ""
            if self._headers is None:
                self._headers = self._compile(command, runner, scratch)
            return self._headers

    def _compile(self, command: Command, runner: Runner, scratch: Path) -> str:
        compiled = self._folder / f"{HEADER_OF_LAUNCHERS}.gch"
        compiled.parent.mkdir(parents=True)
        rule, empty = self._folder / "rule", self._folder / "empty.h"
        empty.touch()  # flags include the header itself, which as a main file would be warned of
        words = (
            *(str(command.program), *command.flags, *command.paths, "-x", "c++-header"),
            *("-MD", "-MF", str(rule), "-MT", "header", str(empty), "-o", str(compiled)),
        )
        run = runner.run(words, cwd=command.unit.roots[0][1], scratch=scratch)
        if run.code != 0:
            compiled.unlink(missing_ok=True)
            return ""
        _, *headers = prerequisites(rule.read_text("utf-8"))  # what is compiled comes first
        return " ".join(headers)


def compile_all(
    plan: Sequence[Command], folder: Path, cache: ObjectCache, jobs: int, progress: Progress
) -> dict[str, CachedObject]:
    """Obtain every object; the first failure or a Ctrl-C stops the compilers still running."""
    runner = Runner()
    header = SharedHeader(folder)

    def obtain(index: int, command: Command) -> CachedObject:
        return cache.obtain(
            command.unit,
            folder / f"{index}.o",
            lambda binary, rule: _compile(command, runner, folder, header, binary, rule),
            cancelled=runner.is_cancelled,
        )

    progress.start(len(plan))
    done: dict[str, CachedObject] = {}
    pool = ThreadPoolExecutor(jobs)
    try:  # Around the submissions, too: the first compiler may run before the last is submitted.
        futures = {pool.submit(obtain, i, command): command.name for i, command in enumerate(plan)}
        for future in as_completed(futures):
            result = done[futures[future]] = future.result()
            progress.unit_done(futures[future], cached=result.cached, seconds=result.report.seconds)
    except BaseException:
        runner.cancel()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return done


def _compile(
    command: Command,
    runner: Runner,
    scratch: Path,
    header: SharedHeader,
    binary: Path,
    rule: Path,
) -> Report:
    # The compiler runs inside csrc on relative names: __FILE__ and the dependency rule then read
    # the same in every clone.
    csrc = command.unit.roots[0][1]
    shared = header.headers(command, runner, scratch) if command.shares_header else ""
    words = (
        *(str(command.program), *command.flags),
        *(header.words() if shared else ()),
        *command.paths,
        *("-MD", "-MF", str(rule), "-MT", "unit", "-c", command.name, "-o", str(binary)),
    )
    run = runner.run(words, cwd=csrc, scratch=scratch)
    if run.code != 0:
        raise _compile_error(csrc / command.name, words, run)
    if shared:
        rule.write_text(f"{rule.read_text('utf-8').rstrip()} {shared}", "utf-8")
    return Report(
        seconds=round(run.seconds, 3),
        peak_bytes=run.peak_bytes,
        kernels=kernel_usage(run.text),
        warnings=warning_lines(run.text),
        cpu_seconds=round(run.cpu_seconds, 3),
    )


def _compile_error(source: Path, words: Sequence[str], run: Run) -> BuildError:
    noise = re.compile(r"ptxas info|\s+\d+ bytes stack frame")
    text = "\n".join(line for line in run.text.splitlines() if not noise.match(line))
    if run.code < 0 or "Killed" in run.text:
        return BuildError(
            f"{source}: the compiler was killed (exit code {run.code}), most likely for want of "
            f"memory\n{text}",
            remedy="fusegen build --jobs 1",
        )
    return BuildError(
        f"{source} does not compile (exit code {run.code}):\n{text}\n{shlex.join(words)}"
    )
