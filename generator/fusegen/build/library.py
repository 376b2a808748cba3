"""Build a bundle: compile its units through the object cache and link one shared library.

The units, the namespace and the digests come from `csrc/sources.cmake`, the same file that the
bundle's CMakeLists.txt reads. The library is `lib/<namespace>.so`; it says of each cell what it was
built from, and beside it a record says what it was linked from, so that a build without changes
links nothing.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ..emit.digests import Digests, Tree, read_library, sources_digest, table
from ..spec.files import named, resolve
from ..spec.usage import command_line
from .compilation import commands, compile_all
from .link import link
from .objcache import ObjectCache, Report, default_root
from .progress import Progress, Silent
from .sources import Sources, check_files, read_sources
from .toolchain import BuildError, Toolchain, find_toolchain

DIGESTS_TABLE: Final = "digests.inc"

# nvcc on one unit takes up to this much memory.
BYTES_PER_JOB: Final = 4 * 2**30


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
    check_files(csrc, sources)
    tools = find_toolchain() if toolchain is None else toolchain
    tools.require(sources.code)
    cache = ObjectCache(default_root()) if cache is None else cache
    progress = Silent() if progress is None else progress
    digests = _digests(csrc, sources)
    library = bundle / "lib" / f"{sources.namespace}.so"
    # A compiler that was just killed may still be writing there.
    with tempfile.TemporaryDirectory(prefix="fusegen-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder).resolve()
        plan = commands(
            csrc, sources, tools, _write_table(scratch, digests), strict=strict, lineinfo=lineinfo
        )
        workers = min(jobs or default_jobs(), len(plan))
        objects = compile_all(plan, scratch, cache, workers, progress)
        if _digests(csrc, sources) != digests:
            raise BuildError(
                f"{csrc}: a file was changed while it was compiled",
                remedy=command_line("build", bundle),
            )
        linked = link(csrc, library, [objects[c.name] for c in plan], tools)
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


def is_current(bundle: Path) -> bool:
    """Whether a bundle has a library, and that of the sources beside it, wherever it was built.

    Raises:
        BuildError: `sources.cmake` is missing or malformed.
    """
    sources = read_sources(bundle / "csrc" / "sources.cmake")
    return (bundle / "lib" / f"{sources.namespace}.so").is_file() and not stale_cells(bundle)


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
