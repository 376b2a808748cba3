"""A cache of compiled objects, addressed by what went into them.

An object is found in two steps. A *manifest*, addressed by compiler, flags and source text, lists
for every earlier compilation the headers it read, each as a name relative to its include root with
the hash of its text. The entry whose headers read the same today names the *object*. So a warm
lookup runs no compiler, and a clone in another folder, or on another machine, hits as well.

Layout under the cache folder, which any number of processes may share:

    manifests/<key>.json   entries: header names and hashes, object key
    objects/<key>.o        written before its record
    objects/<key>.json     the record: size and hash of the object, and how its compilation went
    locks/<prefix>.lock    held while a unit is compiled, so that nobody compiles it twice
    tmp/                   files on their way to their place by os.replace
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from ..spec.files import named

FORMAT: Final = "1"
DEFAULT_LIMIT: Final = 4 * 2**30
HEADER_SUFFIXES: Final = frozenset({".h", ".hpp", ".cuh", ".inl", ".inc"})

_LOCK_POLL_SECONDS: Final = 0.1
# A temporary file this old was left by a process that died.
_STALE_SECONDS: Final = 24 * 3600
# Entries of one manifest: versions of its headers that are still worth remembering.
_MAX_ENTRIES: Final = 32


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """What ptxas says of one kernel. Memory in bytes; `shared` is the statically declared part."""

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True, slots=True)
class Report:
    """How a compilation went.

    Attributes:
        seconds: of wall time.
        peak_bytes: memory of its largest process.
        kernels: what ptxas says of them.
        warnings: lines of compilers.
        cpu_seconds: of all its processes; None of an object that was kept before this was.
    """

    seconds: float
    peak_bytes: int
    kernels: tuple[KernelUsage, ...]
    warnings: tuple[str, ...]
    cpu_seconds: float | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Report:
        """Inverse of `dataclasses.asdict`, also after a trip through JSON."""
        taken = value.get("cpu_seconds")
        return cls(
            seconds=float(value["seconds"]),
            peak_bytes=int(value["peak_bytes"]),
            kernels=tuple(KernelUsage(**kernel) for kernel in value["kernels"]),
            warnings=tuple(value["warnings"]),
            cpu_seconds=None if taken is None else float(taken),
        )


@dataclass(frozen=True, slots=True)
class Unit:
    """One translation unit, as far as its object depends on it.

    Args:
        source: the file to compile.
        compiler: text that identifies the compilers by version.
        flags: everything on the command line that can change the object, free of paths.
        roots: include folders, free of symbolic links, by a name that is the same on every
            machine, in search order; the first is the project's own, whose files may come and go
            between two builds.
    """

    source: Path
    compiler: str
    flags: tuple[str, ...]
    roots: tuple[tuple[str, Path], ...]


# Compiles a unit: writes the object and the make rule of its dependencies to the two paths.
Compile = Callable[[Path, Path], Report]


@dataclass(frozen=True, slots=True)
class CachedObject:
    """An object in place, the hash of its bytes, and how it was made."""

    path: Path
    sha256: str
    cached: bool
    report: Report


class Cancelled(Exception):
    """The build was given up while this unit waited for another builder."""


def default_root(env: Mapping[str, str] | None = None) -> Path:
    """The user's cache folder.

    FUSEGEN_CACHE_DIR, else fusegen below XDG_CACHE_HOME, else ~/.cache/fusegen.
    """
    env = os.environ if env is None else env
    if env.get("FUSEGEN_CACHE_DIR"):
        return Path(env["FUSEGEN_CACHE_DIR"])
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "fusegen"
    return Path.home() / ".cache" / "fusegen"


class ObjectCache:
    """The cache in one folder. An instance serves one build: it remembers the hashes of files."""

    def __init__(self, root: Path, *, limit: int = DEFAULT_LIMIT) -> None:
        self._root = root / f"v{FORMAT}"
        self._limit = limit
        self._born = time.time_ns()
        self._hashes: dict[Path, str] = {}
        self._trees: dict[Path, dict[str, list[str]]] = {}
        for name in ("manifests", "objects", "locks", "tmp"):
            (self._root / name).mkdir(parents=True, exist_ok=True)

    def obtain(
        self,
        unit: Unit,
        target: Path,
        compile_unit: Compile,
        *,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> CachedObject:
        """Place the unit's object at `target`, compiling it only if no builder has done so before.

        Raises Cancelled if `cancelled()` turns true while another builder holds the unit, and
        whatever `compile_unit` raises; nothing is stored then.
        """
        key = self._manifest_key(unit)
        found = self._lookup(unit, key, target)
        if found is not None:
            return found
        with self._locked(key, cancelled):
            return self._lookup(unit, key, target) or self._compile(unit, key, target, compile_unit)

    def prune(self) -> int:
        """Remove the objects unused for longest until the cache is within its limit.

        Returns the number of bytes removed. Objects in use are safe: builders link or copy them.
        """
        try:
            with FileLock(self._root / "prune.lock", timeout=0):
                return self._prune_to(self._limit)
        except Timeout:
            return 0  # another process is at it

    def _manifest_key(self, unit: Unit) -> str:
        parts = (FORMAT, unit.compiler, *unit.flags, unit.source.suffix, self._hash(unit.source))
        return _digest("\0".join(parts))

    def _lookup(self, unit: Unit, key: str, target: Path) -> CachedObject | None:
        for entry in self._entries(key):
            headers = entry["headers"]
            if self._matches(unit, headers) and self._shadows(unit, headers) == entry["shadows"]:
                found = self._load(str(entry["object"]), target)
                if found is not None:
                    return found
        return None

    def _entries(self, key: str) -> list[dict[str, Any]]:
        """The entries of a manifest; none if it is missing or damaged."""
        try:
            entries = json.loads((self._root / "manifests" / f"{key}.json").read_text("utf-8"))
            return [
                {name: entry[name] for name in ("headers", "shadows", "object")}
                for entry in entries
            ]
        except (OSError, ValueError, TypeError, KeyError):
            return []

    def _matches(self, unit: Unit, headers: Iterable[Sequence[str]]) -> bool:
        roots = dict(unit.roots)
        try:
            return all(self._hash(_path_of(name, roots)) == sha for name, sha in headers)
        except (OSError, KeyError):
            return False

    def _load(self, key: str, target: Path) -> CachedObject | None:
        """The object `key`, verified against its record; a damaged one is removed."""
        binary, record = self._object_paths(key)
        try:
            said = json.loads(record.read_text("utf-8"))
            report = Report.from_json(said["report"])
            _place(binary, target)
            sha = _hash_file(target)
            if sha == said["sha256"] and target.stat().st_size == said["size"]:
                os.utime(record)  # the time of last use, by which prune() chooses
                return CachedObject(target, sha, cached=True, report=report)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError):
            pass
        for path in (record, binary):
            path.unlink(missing_ok=True)
        return None

    def _compile(self, unit: Unit, key: str, target: Path, run: Compile) -> CachedObject:
        with tempfile.TemporaryDirectory(dir=self._root / "tmp") as folder:
            binary, rule = Path(folder) / "unit.o", Path(folder) / "unit.d"
            report = run(binary, rule)
            sha, size = _hash_file(binary), binary.stat().st_size
            read = dependencies(rule.read_text("utf-8"), unit.roots[0][1])
            _place(binary, target)
            # A file edited since this cache was opened may differ from the text that was hashed or
            # from the one that the compiler read. Such an object serves this build alone.
            if all(path.stat().st_mtime_ns < self._born for path in read):
                record = {"sha256": sha, "size": size, "report": asdict(report)}
                self._store(unit, key, read, binary, record)
        return CachedObject(target, sha, cached=False, report=report)

    def _store(
        self, unit: Unit, key: str, read: list[Path], binary: Path, record: Mapping[str, Any]
    ) -> None:
        own = unit.source.resolve()
        headers = sorted(
            {(_name_of(path, unit.roots), self._hash(path)) for path in read if path != own}
        )
        shadows = self._shadows(unit, headers)
        object_key = _digest(json.dumps([key, headers, shadows]))
        kept, described = self._object_paths(object_key)
        os.replace(binary, kept)
        self._write(described, record)
        entry = {"headers": headers, "shadows": shadows, "object": object_key}
        earlier = [e for e in self._entries(key) if e["object"] != object_key]
        self._write(self._root / "manifests" / f"{key}.json", [entry, *earlier][:_MAX_ENTRIES])

    def _shadows(self, unit: Unit, headers: Iterable[Sequence[str]]) -> list[str]:
        """The files that could stand in front of a header this unit reads.

        A header that did not exist at the time of the compilation is in no dependency list, yet
        may be found first today. It can only be one with the same last name in the project's own
        folder, or one at the same place under another root.
        """
        own_label, own_folder = unit.roots[0]
        tree = self._tree(own_folder)
        found: set[str] = set()
        for name, _ in headers:
            label, _, place = str(name).partition(":")
            last = place.rpartition("/")[2]
            found.update(f"{own_label}:{same}" for same in tree.get(last, ()))
            if label:
                found.update(
                    f"{other}:{place}"
                    for other, folder in unit.roots[1:]
                    if other != label and os.path.isfile(f"{folder}/{place}")
                )
        return sorted(found)

    def _tree(self, folder: Path) -> dict[str, list[str]]:
        """The headers below a folder: last name -> places relative to the folder."""
        if folder not in self._trees:
            tree: dict[str, list[str]] = {}
            for path in sorted(folder.rglob("*")):
                if path.suffix in HEADER_SUFFIXES:
                    tree.setdefault(path.name, []).append(path.relative_to(folder).as_posix())
            self._trees[folder] = tree
        return self._trees[folder]

    def _hash(self, path: Path) -> str:
        if path not in self._hashes:
            self._hashes[path] = _hash_file(path)
        return self._hashes[path]

    def _object_paths(self, key: str) -> tuple[Path, Path]:
        folder = self._root / "objects"
        return folder / f"{key}.o", folder / f"{key}.json"

    def _write(self, path: Path, value: object) -> None:
        handle, name = tempfile.mkstemp(dir=self._root / "tmp")
        with named(path), os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(value, stream, indent=1)
        os.replace(name, path)

    @contextmanager
    def _locked(self, key: str, cancelled: Callable[[], bool]) -> Iterator[None]:
        # A fixed set of lock files: removing one that others wait on would let two of them in.
        lock = FileLock(self._root / "locks" / f"{key[:3]}.lock")
        while True:
            try:
                lock.acquire(timeout=_LOCK_POLL_SECONDS)
                break
            except Timeout:
                if cancelled():
                    raise Cancelled from None
        try:
            yield
        finally:
            lock.release()

    def _prune_to(self, limit: int) -> int:
        now = time.time()
        for left in (self._root / "tmp").iterdir():
            if now - _modified(left) > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
        records = sorted((self._root / "objects").glob("*.json"), key=_modified)
        total = sum(_size(path) + _size(path.with_suffix(".o")) for path in records)
        removed = 0
        for record in records:
            if total - removed <= limit:
                break
            for path in (record, record.with_suffix(".o")):
                removed += _size(path)
                path.unlink(missing_ok=True)
        if removed:
            self._prune_manifests()
        return removed

    def _prune_manifests(self) -> None:
        """Drop manifests that name no object any more; the next build writes them anew."""
        for path in (self._root / "manifests").glob("*.json"):
            entries = self._entries(path.stem)
            if not any(self._object_paths(str(e["object"]))[1].exists() for e in entries):
                path.unlink(missing_ok=True)


def prerequisites(rule: str) -> list[str]:
    """Those of a make rule as gcc and nvcc write it, quoted as they are there, in its order."""
    _, colon, rest = rule.replace("\\\n", " ").partition(": ")
    if not colon:
        raise ValueError(f"not a dependency rule: {rule[:80]!r}")
    return re.findall(r"(?:\\.|[^\s\\])+", rest)


def dependencies(rule: str, folder: Path) -> list[Path]:
    """The prerequisites of a make rule, resolved against `folder`.

    Each file once, in the order of first appearance.
    """
    names = [re.sub(r"\\(.)", r"\1", word.replace("$$", "$")) for word in prerequisites(rule)]
    return list(dict.fromkeys((folder / name).resolve() for name in names))


def _name_of(path: Path, roots: Sequence[tuple[str, Path]]) -> str:
    """`label:place` below the innermost root that holds the file; `:/absolute` outside of all."""
    inside = [
        (len(folder.parts), label, path.relative_to(folder).as_posix())
        for label, folder in roots
        if path.is_relative_to(folder)
    ]
    if not inside:
        return f":{path.as_posix()}"
    _, label, place = max(inside)
    return f"{label}:{place}"


def _path_of(name: str, roots: Mapping[str, Path]) -> Path:
    label, _, place = name.partition(":")
    return roots[label] / place if label else Path(place)


def _place(source: Path, target: Path) -> None:
    """Give `target` the contents of `source`, without a moment at which it is half there.

    A hard link costs nothing and keeps the object alive if another process prunes the cache.
    """
    staged = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    staged.unlink(missing_ok=True)
    try:
        os.link(source, staged)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, staged)
    os.replace(staged, target)
    # Renaming one link of a file over another link of it does nothing, by POSIX.
    staged.unlink(missing_ok=True)


def _hash_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
