"""Build a bundle: compile its units through the object cache and link one shared library.

The units, the namespace and the digests come from `csrc/sources.cmake`, the same file that the
bundle's CMakeLists.txt reads. The library is `lib/<namespace>.so`; it says of each cell what it was
built from, and beside it a record says what it was linked from, so that a build without changes
links nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from ..emit.digests import Digests, Tree, read_library, sources_digest, table
from ..spec.files import named, read, resolve
from .objcache import CachedObject, Cancelled, KernelUsage, ObjectCache, Report, Unit, default_root
from .toolchain import BuildError, Toolchain, find_toolchain

# The tests hold these three lists against templates/static/csrc/CMakeLists.txt.
HOST_FLAGS: Final = (
    "-std=c++17",
    "-O3",
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
    "--expt-relaxed-constexpr",  # CuTe calls constexpr functions of the standard library
    "-fmad=false",  # the plan says where results are rounded; contractions differ by context
    "-Xptxas=-v",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
)
LINK_FLAGS: Final = (
    "-shared",
    "-Wl,--version-script=exports.map",
    "-Wl,--exclude-libs,ALL",
    "-Wl,--no-undefined",
    # The linker would drop libtorch, which nothing names: but it is libtorch that pulls in the
    # CUDA half of PyTorch, where the weak symbols of stable.h are found.
    "-Wl,--no-as-needed",
)
LINK_LIBRARIES: Final = ("-ltorch", "-ltorch_cpu", "-lc10", "-lcudart_static")
# What the static CUDA runtime itself needs.
SYSTEM_LIBRARIES: Final = ("-Wl,--as-needed", "-lpthread", "-ldl", "-lrt")

HOST_STRICT: Final = ("-Werror",)
KERNEL_STRICT: Final = ("-Werror=all-warnings", "-Xcompiler=-Werror")

DIGESTS_SOURCE: Final = "digests.cpp"
DIGESTS_TABLE: Final = "digests.inc"
EXPORTS: Final = "exports.map"

# nvcc on one unit of CUTLASS kernels takes up to this much memory.
BYTES_PER_JOB: Final = 4 * 2**30


class Progress(Protocol):
    """Hears how a build goes on. Every call comes from the thread that called `build`."""

    def start(self, total: int) -> None:
        """`total` units are to be compiled or found in the cache."""

    def unit_done(self, name: str, *, cached: bool, seconds: float) -> None:
        """One unit is ready; `seconds` is the time its compilation took, now or when cached."""

    def link_done(self, library: Path, *, cached: bool) -> None:
        """The library is in place; `cached` if nothing had changed."""


class Silent:
    """Progress for callers that show none."""

    def start(self, total: int) -> None:
        """See Progress."""

    def unit_done(self, name: str, *, cached: bool, seconds: float) -> None:
        """See Progress."""

    def link_done(self, library: Path, *, cached: bool) -> None:
        """See Progress."""


@dataclass(frozen=True, slots=True)
class CellUnits:
    """A cell: its digest, and the units it is compiled from."""

    digest: str
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sources:
    """What `sources.cmake` says. Paths are relative to `csrc`, separated by `/`."""

    namespace: str
    gencode: str
    cells: Mapping[str, CellUnits]

    @property
    def host_sources(self) -> tuple[str, ...]:
        """The launchers."""
        return self._units(".cpp")

    @property
    def kernel_sources(self) -> tuple[str, ...]:
        """The kernels, each once."""
        return self._units(".cu")

    def _units(self, suffix: str) -> tuple[str, ...]:
        units = (unit for cell in self.cells.values() for unit in cell.units)
        return tuple(dict.fromkeys(unit for unit in units if unit.endswith(suffix)))

    @property
    def code(self) -> str:
        """The architecture that the kernels are compiled for, such as "sm_90a"."""
        return self.gencode.rpartition("code=")[2]


@dataclass(frozen=True, slots=True)
class UnitReport:
    """One unit of a build: its path below csrc, whether the cache had it, how it compiled."""

    name: str
    cached: bool
    report: Report


@dataclass(frozen=True, slots=True)
class BuildReport:
    """A finished build. `linked` is false if the library was up to date; `seconds` is wall time."""

    library: Path
    linked: bool
    seconds: float
    toolchain: str
    units: tuple[UnitReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return asdict(self) | {"library": str(self.library)}


def build(
    bundle: Path,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    toolchain: Toolchain | None = None,
    cache: ObjectCache | None = None,
    strict: bool = True,
    lineinfo: bool = False,
) -> BuildReport:
    """Compile and link the library of one bundle.

    Args:
        bundle: the folder that holds `csrc/`; the library is written to its `lib/`.
        jobs: units compiled at a time; by default bound by processors and by memory.
        progress: hears of every finished unit.
        toolchain: compilers and headers; by default searched for in the environment.
        cache: where objects are kept; by default the user's cache folder.
        strict: treat every compiler warning as an error.
        lineinfo: map machine code to source lines, for profilers.

    Raises:
        BuildError: something is missing, malformed or does not compile. The library of an earlier
            build is left as it was.
    """
    if jobs is not None and jobs < 1:
        raise BuildError(f"jobs is {jobs}, but at least 1 unit must be compiled at a time")
    started = time.monotonic()
    csrc = resolve(bundle) / "csrc"
    sources = read_sources(csrc / "sources.cmake")
    _check_files(csrc, sources)
    tools = find_toolchain() if toolchain is None else toolchain
    tools.require(sources.code)
    cache = ObjectCache(default_root()) if cache is None else cache
    progress = Silent() if progress is None else progress
    digests = _digests(csrc, sources)
    library = bundle / "lib" / f"{sources.namespace}.so"
    # A compiler that was just killed may still be writing there.
    with tempfile.TemporaryDirectory(prefix="fusegen-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder).resolve()
        plan = _commands(
            csrc, sources, tools, _write_table(scratch, digests), strict=strict, lineinfo=lineinfo
        )
        workers = min(jobs or default_jobs(), len(plan))
        objects = _compile_all(plan, scratch, cache, workers, progress)
        if _digests(csrc, sources) != digests:
            raise BuildError(
                f"{csrc}: a file was changed while it was compiled",
                remedy=f"fusegen build {bundle}",
            )
        linked = _link(csrc, library, [objects[c.name] for c in plan], tools)
    progress.link_done(library, cached=not linked)
    cache.prune()
    return BuildReport(
        library=library,
        linked=linked,
        seconds=time.monotonic() - started,
        toolchain=tools.describe(),
        units=tuple(
            UnitReport(c.name, objects[c.name].cached, objects[c.name].report) for c in plan
        ),
    )


def _digests(csrc: Path, sources: Sources) -> dict[str, Digests]:
    """What the library is to say of each cell, with the sources as they lie on the disk."""

    def content(path: str) -> bytes | None:
        file = csrc / path
        return file.read_bytes() if file.is_file() else None

    tree = Tree(content)
    return {
        name: Digests(cell.digest, sources_digest(tree, cell.units, sources.gencode))
        for name, cell in sources.cells.items()
    }


def _write_table(scratch: Path, digests: Mapping[str, Digests]) -> Path:
    """The folder with the table that `digests.cpp` includes."""
    folder = scratch / "digests"
    folder.mkdir()
    path = folder / DIGESTS_TABLE
    with named(path):
        path.write_text(table(digests), "ascii")
    os.utime(path, (0, 0))  # Nobody edits it, so its age need not keep the object from the cache.
    return folder


def stale_cells(bundle: Path) -> dict[str, str]:
    """The cells that a bundle's library was not built from, each with what is wrong.

    Empty where the bundle has no library.

    Raises:
        BuildError: `sources.cmake` is malformed.
    """
    csrc = bundle / "csrc"
    if not (csrc / "sources.cmake").is_file():
        return {}
    sources = read_sources(csrc / "sources.cmake")
    library = bundle / "lib" / f"{sources.namespace}.so"
    if not library.is_file():
        return {}
    built = read_library(library)
    if built is None:
        return dict.fromkeys(sources.cells, "it does not say from what")
    wanted = _digests(csrc, sources)
    found = {name: _difference(digests, built.get(name)) for name, digests in wanted.items()}
    found |= dict.fromkeys(built.keys() - wanted.keys(), "not in the bundle any more")
    return {name: what for name, what in sorted(found.items()) if what}


def _difference(wanted: Digests, built: Digests | None) -> str:
    if built is None:
        return "not in the library"
    if built.cell != wanted.cell:
        return "generated anew since"
    return "" if built.sources == wanted.sources else "other sources"


def default_jobs() -> int:
    """As many units at a time as processors and free memory allow, and at least one."""
    return max(1, min(len(os.sched_getaffinity(0)), _available_bytes() // BYTES_PER_JOB))


def _available_bytes() -> int:
    """Free memory of the machine or, where that is less, of this process's control group."""
    meminfo = Path("/proc/meminfo").read_text("ascii")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(match[1]) * 1024 if match else BYTES_PER_JOB
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text("ascii"))
        return min(available, limit - int((group / "memory.current").read_text("ascii")))
    except (OSError, ValueError):  # no control group, or the limit is "max"
        return available


# ---- sources.cmake


_TOKEN: Final = re.compile(
    r"(?P<blank>[ \t\r\n]+|#[^\n]*)|(?P<paren>[()])"
    r'|"(?P<quoted>[^"\\$;]*)"|(?P<bare>[^\s()"#\\$;]+)'
)
_RULES: Final[Mapping[str, tuple[bool, str, str]]] = {
    # name: (is a list, pattern of a value, how people call such a value)
    "FUSEGEN_NAMESPACE": (False, r"[A-Za-z_][A-Za-z0-9_]*", "an identifier"),
    "FUSEGEN_GENCODE": (
        False,
        r"arch=compute_\d+[af]?,code=sm_\d+[af]?",
        "arch=compute_<n>,code=sm_<n>",
    ),
    "FUSEGEN_CELLS": (True, r"[A-Za-z_][A-Za-z0-9_]*", "an identifier"),
}
_CELL_RULES: Final[Mapping[str, tuple[bool, str, str]]] = {
    "FUSEGEN_DIGEST_": (False, r"[0-9a-f]{64}", "a hash of 64 hexadecimal digits"),
    "FUSEGEN_UNITS_": (
        True,
        r"(\w[\w.-]*/)*\w[\w.-]*\.(cpp|cu)",
        "a relative path to a .cpp or .cu file",
    ),
}
"""The same for what is stated of each cell, by the begin of the name."""


def read_sources(path: Path) -> Sources:
    """Read `sources.cmake`: statements `set(NAME value...)`, comments, nothing else.

    Raises:
        BuildError: naming file, line and column, what was expected and what was found.
    """
    try:
        text = read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BuildError(
            f"{path}: byte {error.start} is not UTF-8", remedy="fusegen generate"
        ) from None
    except FileNotFoundError:
        raise BuildError(
            f"{path} does not exist: this is not a bundle with kernels (a bundle for cpu has "
            "nothing to build)",
            remedy="fusegen generate --arch <arch> --module <module> --recipe <recipe>",
        ) from None
    values = dict(_statements(path, text))
    for name in _rules(values.get("FUSEGEN_CELLS", ())):
        if name not in values:
            raise BuildError(
                f"{path}: expected a statement set({name} ...), found none",
                remedy="fusegen generate",
            )
    return Sources(
        namespace=values["FUSEGEN_NAMESPACE"][0],
        gencode=values["FUSEGEN_GENCODE"][0],
        cells={
            cell: CellUnits(values[f"FUSEGEN_DIGEST_{cell}"][0], values[f"FUSEGEN_UNITS_{cell}"])
            for cell in values["FUSEGEN_CELLS"]
        },
    )


def _rules(cells: Sequence[str]) -> dict[str, tuple[bool, str, str]]:
    """The rules of all statements of a file that names these cells."""
    of_cells = {f"{begin}{cell}": rule for cell in cells for begin, rule in _CELL_RULES.items()}
    return {**_RULES, **of_cells}


def _statements(path: Path, text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The statements of the file, each checked against its rule."""
    tokens = _tokens(path, text)
    rules = _rules(())
    seen: set[str] = set()
    for start, word in tokens:
        if word != "set" or next(tokens, (0, ""))[1] != "(":
            raise _malformed(path, text, start, "expected `set(`", word)
        at, name = next(tokens, (start, "the end of the file"))
        if name not in rules or name in seen:
            expected = "expected one of " + ", ".join(n for n in rules if n not in seen)
            raise _malformed(path, text, at, expected, name)
        seen.add(name)
        values: list[str] = []
        for at, value in tokens:
            if value == ")":
                break
            if not re.fullmatch(rules[name][1], value) or value in values:
                expected = f"{name}: expected {rules[name][2]}, each once"
                raise _malformed(path, text, at, expected, value)
            values.append(value)
        else:
            raise _malformed(path, text, len(text), f"{name}: expected `)`", "the end of the file")
        if not rules[name][0] and len(values) != 1:
            raise _malformed(path, text, at, f"{name}: expected one value", f"{len(values)}")
        if name == "FUSEGEN_CELLS":
            rules = _rules(values)
        yield name, tuple(values)


def _tokens(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Offset and text of every word and parenthesis."""
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _malformed(path, text, at, "expected a word, a string or a parenthesis", text[at])
        if match["blank"] is None:
            yield at, next(v for v in match.group("paren", "quoted", "bare") if v is not None)
        at = match.end()


def _malformed(path: Path, text: str, offset: int, expected: str, found: str) -> BuildError:
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    return BuildError(
        f"{path}:{line}:{column}: {expected}, found {found!r}", remedy="fusegen generate"
    )


def _check_files(csrc: Path, sources: Sources) -> None:
    names = (*sources.host_sources, *sources.kernel_sources, DIGESTS_SOURCE, EXPORTS)
    missing = [name for name in names if not (csrc / name).is_file()]
    if missing:
        raise BuildError(
            f"{csrc / 'sources.cmake'} needs files that do not exist: {', '.join(missing)}",
            remedy="fusegen generate",
        )


# ---- compiling


@dataclass(frozen=True, slots=True)
class _Command:
    """How one unit is compiled. `flags` decide the object; `paths` only say where things are."""

    name: str
    program: Path
    flags: tuple[str, ...]
    paths: tuple[str, ...]
    unit: Unit


def _commands(
    csrc: Path, sources: Sources, tools: Toolchain, digests: Path, *, strict: bool, lineinfo: bool
) -> list[_Command]:
    """One command per unit, kernels first: they take longest.

    Kernels see no PyTorch, so that a new PyTorch compiles none of them anew.
    """
    project = ("project", csrc)
    torch = ("torch", tools.torch.include.resolve())
    cutlass = ("cutlass", tools.cutlass_include.resolve())
    cuda = [("cuda" if i == 0 else f"cuda{i}", p) for i, p in enumerate(tools.cuda_include)]

    def command(
        name: str,
        program: Path,
        flags: tuple[str, ...],
        roots: Sequence[tuple[str, Path]],
        paths: tuple[str, ...],
    ) -> _Command:
        unit = Unit(csrc / name, tools.identity, flags, (project, *roots))
        return _Command(name, program, flags, paths, unit)

    kernel_flags = (
        *KERNEL_FLAGS,
        f"-gencode={sources.gencode}",
        *(KERNEL_STRICT if strict else ()),
        *(("-lineinfo",) if lineinfo else ()),
    )
    host_flags = (*HOST_FLAGS, *(HOST_STRICT if strict else ()))
    kernel_paths = (f"-ccbin={tools.host_compiler}", *_includes([cutlass]))
    # Error messages of PyTorch's headers carry __FILE__: without the map the first builder's
    # folders would travel with the object.
    prefix = f"-ffile-prefix-map={tools.torch.include}=torch"
    host_roots = [torch, cutlass, *cuda]
    host_paths = (prefix, *_includes(host_roots))
    table_roots = [("digests", digests)]
    return [
        *(
            command(name, tools.nvcc, kernel_flags, [cutlass, *cuda], kernel_paths)
            for name in sources.kernel_sources
        ),
        *(
            command(name, tools.host_compiler, host_flags, host_roots, host_paths)
            for name in sources.host_sources
        ),
        command(
            DIGESTS_SOURCE, tools.host_compiler, host_flags, table_roots, _includes(table_roots)
        ),
    ]


def _includes(roots: Sequence[tuple[str, Path]]) -> tuple[str, ...]:
    # Naming a folder that the compiler searches anyway would reorder it and break #include_next.
    folders = [folder for _, folder in roots if folder != Path("/usr/include")]
    return ("-I.", *(word for folder in folders for word in ("-isystem", str(folder))))


def _compile_all(
    plan: Sequence[_Command], folder: Path, cache: ObjectCache, jobs: int, progress: Progress
) -> dict[str, CachedObject]:
    """Obtain every object; the first failure or a Ctrl-C stops the compilers still running."""
    runner = _Runner()

    def obtain(index: int, command: _Command) -> CachedObject:
        return cache.obtain(
            command.unit,
            folder / f"{index}.o",
            lambda binary, rule: _compile(command, runner, folder, binary, rule),
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


def _compile(command: _Command, runner: _Runner, scratch: Path, binary: Path, rule: Path) -> Report:
    # The compiler runs inside csrc on relative names: __FILE__ and the dependency rule then read
    # the same in every clone.
    csrc = command.unit.roots[0][1]
    words = (
        *(str(command.program), *command.flags, *command.paths),
        *("-MD", "-MF", str(rule), "-MT", "unit", "-c", command.name, "-o", str(binary)),
    )
    run = runner.run(words, cwd=csrc, scratch=scratch)
    if run.code != 0:
        raise _compile_error(csrc / command.name, words, run)
    return Report(
        seconds=round(run.seconds, 3),
        peak_bytes=run.peak_bytes,
        kernels=kernel_usage(run.text),
        warnings=warning_lines(run.text),
    )


def _compile_error(source: Path, words: Sequence[str], run: _Run) -> BuildError:
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


_USAGE: Final = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'"
    r"|(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
    r"|Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?"
)


def kernel_usage(text: str) -> tuple[KernelUsage, ...]:
    """Read the report of `ptxas -v`: one entry per kernel, in the order of the report.

    Functions that are no kernels have a stack line but no registers of their own; they are skipped.
    """
    found: list[KernelUsage] = []
    name, stack = "", (0, 0, 0)
    for match in _USAGE.finditer(text):
        if match["name"] is not None:
            name, stack = match["name"], (0, 0, 0)
        elif match["stack"] is not None:
            stack = (int(match["stack"]), int(match["stores"]), int(match["loads"]))
        elif name:
            registers, shared = int(match["registers"]), int(match["shared"] or 0)
            found.append(KernelUsage(name, registers, *stack, shared=shared))
            name = ""
    return tuple(found)


def warning_lines(text: str) -> tuple[str, ...]:
    """The lines of a compiler's output that warn, ptxas's notes on lost performance among them."""
    pattern = re.compile(r"\bwarning\b\s*[:#]|Potential Performance Loss", re.IGNORECASE)
    return tuple(line.strip() for line in text.splitlines() if pattern.search(line))


@dataclass(frozen=True, slots=True)
class _Run:
    """A finished process: exit code, everything it printed, wall seconds, peak memory."""

    code: int
    text: str
    seconds: float
    peak_bytes: int


class _Runner:
    """Runs compilers from several threads and can stop them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._running: set[int] = set()

    def is_cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Stop every process and start no further one."""
        with self._lock:
            self._cancelled = True
            for pid in self._running:
                os.killpg(pid, signal.SIGKILL)

    def run(self, words: Sequence[str], *, cwd: Path, scratch: Path) -> _Run:
        """Run to the end. Raises Cancelled if the build was given up meanwhile."""
        started = time.monotonic()
        env = os.environ | {"LC_ALL": "C", "TMPDIR": str(scratch)}
        with tempfile.TemporaryFile(dir=scratch) as output:
            with self._lock:
                if self._cancelled:
                    raise Cancelled
                # A session of its own: nvcc's many children are stopped together.
                process = subprocess.Popen(
                    words,
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process.pid)
            # The process is reaped under the lock, so that cancel() never signals a reused id.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                self._running.discard(process.pid)
                if self._cancelled:
                    raise Cancelled
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        return _Run(process.returncode, text, time.monotonic() - started, usage.ru_maxrss * 1024)


# ---- linking


def _link(csrc: Path, library: Path, objects: Sequence[CachedObject], tools: Toolchain) -> bool:
    """Link the library unless it was linked from just these inputs. True if it was linked."""
    record = library.with_suffix(".link.json")
    key = _link_key(csrc, objects, tools)
    if _is_current(library, record, key):
        return False
    library.parent.mkdir(exist_ok=True)
    staged = library.with_name(f"{library.name}.{os.getpid()}.tmp")
    words = (
        *(str(tools.host_compiler), *LINK_FLAGS, "-o", str(staged.resolve())),
        *(str(item.path) for item in objects),
        *(f"-L{tools.torch.library}", f"-L{tools.cuda_library}"),
        *(*LINK_LIBRARIES, *SYSTEM_LIBRARIES),
    )
    runner = _Runner()
    try:
        run = runner.run(words, cwd=csrc, scratch=objects[0].path.parent)
        if run.code != 0:
            raise BuildError(
                f"{library} does not link (exit code {run.code}):\n{run.text}\n{shlex.join(words)}"
            )
        said = {"inputs": key, "library": _sha256(staged)}
        os.replace(staged, library)
        _write_atomically(record, json.dumps(said) + "\n")
    except BaseException:
        runner.cancel()
        raise
    finally:
        staged.unlink(missing_ok=True)
    return True


def _link_key(csrc: Path, objects: Sequence[CachedObject], tools: Toolchain) -> str:
    parts = (
        *(item.sha256 for item in objects),
        *(*LINK_FLAGS, *LINK_LIBRARIES, *SYSTEM_LIBRARIES),
        tools.identity,
        _sha256(csrc / EXPORTS),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _is_current(library: Path, record: Path, key: str) -> bool:
    try:
        said = json.loads(read(record))
        return bool(said["inputs"] == key and said["library"] == _sha256(library))
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _write_atomically(path: Path, text: str) -> None:
    staged = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with named(staged):
        staged.write_text(text, "utf-8")
    os.replace(staged, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
