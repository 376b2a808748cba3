"""`fusegen.lock`: which files of a bundle fusegen owns, and in which pristine state."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..emit.fileset import FileSet, PathError, check_path
from ..spec.files import read

LOCK_NAME = "fusegen.lock"
PENDING_NAME = "fusegen.lock.next"
LOCK_VERSION = 1

_BLOB = re.compile(r"[0-9a-f]{40}")


class LockError(Exception):
    """A lock that cannot be read; the message names the file and the remedy."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The pristine state of one file.

    Attributes:
        sha256: hex digest of the whole file.
        blob: the id git gives these bytes, so that `git cat-file blob` returns the pristine text
            as the base of a three-way merge.
        owners: the cells that need the file, sorted.
    """

    sha256: str
    blob: str
    owners: tuple[str, ...]

    @classmethod
    def of(cls, data: bytes, owners: tuple[str, ...]) -> FileRecord:
        """The record of a file that holds `data`."""
        return cls(digest(data), git_blob(data), tuple(sorted(set(owners))))


@dataclass(frozen=True, slots=True)
class Lock:
    """The state of a bundle after a whole publish.

    Attributes:
        generator: version of fusegen that wrote it.
        selection: what was asked for, as JSON; this module does not look inside.
        files: record of every owned file by path.
    """

    generator: str
    selection: Mapping[str, object]
    files: Mapping[str, FileRecord]


@dataclass(frozen=True, slots=True)
class Decided:
    """What becomes of a file that fusegen did not write, as digests; None where there is no file.

    Attributes:
        before: what it held when that was decided.
        after: what it is to hold.
    """

    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Pending:
    """A publish under way: the lock it leads to, and the hashes a file may still have instead.

    Attributes:
        lock: the state to reach.
        old: per path, digests that the file had before; a path that is not in `lock` is to go.
        decided: files that are to hold something else than `lock` says, or that it does not name.
    """

    lock: Lock
    old: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    decided: Mapping[str, Decided] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, ...]:
        """Everything that is to be written, is to go, or is to stay as it is; sorted."""
        return tuple(sorted({*self.lock.files, *self.old, *self.decided}))

    def goal(self, path: str) -> str | None:
        """The digest that a file is to have, None where it is to go."""
        if path in self.decided:
            return self.decided[path].after
        return self.lock.files[path].sha256 if path in self.lock.files else None

    def awaits(self, path: str, content: bytes | None) -> bool:
        """Whether a file that holds this still is to be brought to its goal.

        Any other content was put there by hand after a crash; it stays, and shows as an edit.
        """
        have = None if content is None else digest(content)
        if path in self.decided:
            return have == self.decided[path].before and have != self.goal(path)
        return have is None or (have != self.goal(path) and have in self.old.get(path, ()))


def digest(data: bytes) -> str:
    """Hex sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def git_blob(data: bytes) -> str:
    """The object id git gives a file that holds `data` (sha1 over `blob <size>`, NUL, bytes)."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def lock_of(files: FileSet, selection: Mapping[str, object], generator: str) -> Lock:
    """The lock of a bundle that holds exactly `files`."""
    records = {path: FileRecord.of(item.data, item.owners) for path, item in files.items()}
    return Lock(generator, selection, records)


def dump_lock(lock: Lock) -> str:
    """JSON with sorted keys and one line per file, so that two branches merge line by line."""
    return _dump(lock, {})


def dump_pending(pending: Pending) -> str:
    """Like `dump_lock`, with the old digests behind it, and the decided ones where there are."""
    tables: dict[str, Mapping[str, object]] = {
        "old": {path: list(old) for path, old in pending.old.items()}
    }
    if pending.decided:
        tables["decided"] = {
            path: {"before": each.before, "after": each.after}
            for path, each in pending.decided.items()
        }
    return _dump(pending.lock, tables)


def read_lock(bundle: Path) -> Lock | None:
    """The lock of a bundle, or None where nothing was ever published.

    Raises:
        LockError: not JSON, merge conflict, unknown version, wrong fields, path out of the bundle.
    """
    try:
        return _Reader(bundle / LOCK_NAME, _RESTORE).lock()
    except FileNotFoundError:
        return None


def read_pending(bundle: Path) -> Pending | None:
    """The state of an interrupted publish, or None where none was interrupted.

    Raises:
        LockError: as `read_lock`.
    """
    try:
        return _Reader(bundle / PENDING_NAME, _DROP).pending()
    except FileNotFoundError:
        return None


_RESTORE = (
    "restore it from version control, or delete it and make the bundle again, by `fusegen generate`"
    " with what it is to hold: files that equal the new output are taken over, the others are named"
)
_DROP = "delete it and run the command again"


def _dump(lock: Lock, tables: Mapping[str, Mapping[str, object]]) -> str:
    files = {path: _record_json(record) for path, record in lock.files.items()}
    selection = json.dumps(lock.selection, indent=2, sort_keys=True, ensure_ascii=False)
    members = [
        f'"version": {LOCK_VERSION}',
        f'"generator": {json.dumps(lock.generator, ensure_ascii=False)}',
        '"selection": ' + selection.replace("\n", "\n  "),
        *(f'"{name}": {_table(table)}' for name, table in {"files": files, **tables}.items()),
    ]
    return "{\n  " + ",\n  ".join(members) + "\n}\n"


def _table(rows: Mapping[str, object]) -> str:
    lines = [
        f"    {json.dumps(key, ensure_ascii=False)}: "
        + json.dumps(rows[key], sort_keys=True, ensure_ascii=False)
        for key in sorted(rows)
    ]
    return "{\n" + ",\n".join(lines) + "\n  }" if lines else "{}"


def _record_json(record: FileRecord) -> dict[str, object]:
    return {"sha256": record.sha256, "blob": record.blob, "owners": list(record.owners)}


class _Reader:
    """Reads one lock file field by field; every error names the file, the field and the remedy."""

    def __init__(self, file: Path, remedy: str) -> None:
        self._file = file
        self._remedy = remedy
        self._root = self._mapping(self._parse(), "the file")
        self._check_version()

    def lock(self) -> Lock:
        self._only(self._root, {"version", "generator", "selection", "files"}, "the file")
        return self._lock()

    def pending(self) -> Pending:
        known = {"version", "generator", "selection", "files", "old", "decided"}
        self._only(self._root, known, "the file")
        old = self._mapping(self._root.get("old"), "old")
        decided = self._mapping(self._root.get("decided", {}), "decided")
        return Pending(
            self._lock(),
            {self._path(path): self._strings(old[path], path) for path in old},
            {self._path(path): self._decided(path, decided[path]) for path in decided},
        )

    def _lock(self) -> Lock:
        files = self._mapping(self._root.get("files"), "files")
        return Lock(
            generator=self._string(self._root.get("generator"), "generator"),
            selection=self._mapping(self._root.get("selection"), "selection"),
            files={self._path(path): self._record(path, files[path]) for path in files},
        )

    def _record(self, path: str, value: object) -> FileRecord:
        record = self._mapping(value, path)
        self._only(record, {"sha256", "blob", "owners"}, path)
        return FileRecord(
            sha256=self._string(record.get("sha256"), f"{path}: sha256"),
            blob=self._blob(record.get("blob"), f"{path}: blob"),
            owners=self._strings(record.get("owners"), f"{path}: owners"),
        )

    def _decided(self, path: str, value: object) -> Decided:
        facts = self._mapping(value, path)
        self._only(facts, {"before", "after"}, path)
        digests = {
            name: None if facts.get(name) is None else self._string(facts[name], f"{path}: {name}")
            for name in ("before", "after")
        }
        return Decided(**digests)

    def _parse(self) -> object:
        try:
            text = read(self._file).decode("utf-8")
            return json.loads(text, object_pairs_hook=self._unique)
        except UnicodeDecodeError as error:
            raise self._error(f"not UTF-8 ({error.reason} at byte {error.start})") from None
        except json.JSONDecodeError as error:
            if any(line.startswith(("<<<<<<<", ">>>>>>>")) for line in text.splitlines()):
                raise self._error("holds an unresolved merge conflict; take either side") from None
            where = f"line {error.lineno}, column {error.colno}"
            raise self._error(f"not valid JSON ({error.msg} at {where})") from None
        except RecursionError:
            raise self._error("not a lock (nested too deep)") from None
        except ValueError:
            raise self._error("not a lock (a number has too many digits)") from None

    def _unique(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        # A merge that kept one line of each side is valid JSON; the last would silently win.
        members = dict(pairs)
        if len(members) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise self._error(f"holds {', '.join(map(repr, twice))} twice")
        return members

    def _check_version(self) -> None:
        version = self._root.get("version")
        if version != LOCK_VERSION or isinstance(version, bool):
            writer = self._root.get("generator")
            raise LockError(
                f"{self._file}: lock version {version!r}, written by fusegen {writer}; this "
                f"fusegen reads version {LOCK_VERSION}; use fusegen {writer} or newer here"
            )

    def _only(self, value: Mapping[str, object], known: set[str], where: str) -> None:
        unknown = sorted(set(value) - known)
        if unknown:
            raise self._error(f"unknown key {unknown[0]!r} in {where}")

    def _path(self, path: str) -> str:
        try:
            check_path(path)
        except PathError as error:
            raise self._error(str(error)) from None
        return path

    def _mapping(self, value: object, where: str) -> dict[str, object]:
        if not isinstance(value, dict):
            raise self._error(f"expected an object as {where}, got {_kind(value)}")
        return value

    def _string(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise self._error(f"expected a string as {where}, got {_kind(value)}")
        return value

    def _blob(self, value: object, where: str) -> str:
        blob = self._string(value, where)
        if not _BLOB.fullmatch(blob):
            raise self._error(f"expected 40 hexadecimal digits as {where}, got {blob!r}")
        return blob

    def _strings(self, value: object, where: str) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise self._error(f"expected a list of strings as {where}, got {_kind(value)}")
        return tuple(self._string(item, where) for item in value)

    def _error(self, what: str) -> LockError:
        return LockError(f"{self._file}: {what}; {self._remedy}")


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
