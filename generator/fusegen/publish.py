"""Compare a rendered bundle with the disk and bring the disk up to it, all or nothing.

A publish is prepared aside and then only rolled forward: the new contents are staged inside the
bundle, `fusegen.lock.next` records the state to reach with the old and new digest of each file, and
from there on files are replaced one by one, each atomically. Whoever comes next, after a crash at
any step, completes the same roll-forward. A file is pristine if either lock knows its digest, so a
half-done publish never looks like an edit by hand.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import filelock

from fusegen.fileset import Artifact, FileSet
from fusegen.lock import (
    LOCK_NAME,
    PENDING_NAME,
    FileRecord,
    Lock,
    Pending,
    digest,
    dump_lock,
    dump_pending,
    lock_of,
    read_lock,
    read_pending,
)
from fusegen.polish import same_but_for_format

# Inside the bundle: it is the one folder known to be writable and on the bundle's file system,
# without which a rename is a copy. pytest and packaging tools pass over names with a dot.
STAGING_NAME = ".fusegen.staging"

# Inside the bundle, not in the temporary folder of one user or host: a checkout may be shared. It
# is deleted before the lock is let go; waiters notice that and start over, so none is left behind.
MUTEX_NAME = ".fusegen.lockfile"

MUTEX_TIMEOUT_S = 60.0


class PublishError(Exception):
    """Publishing cannot go on; the message names the place and the remedy."""


class BusyError(PublishError):
    """Another process is publishing into the same bundle."""


class ChangeKind(enum.Enum):
    """What publishing would do with one path, or why it will not."""

    CREATE = "create"
    UPDATE = "update"
    UNCHANGED = "unchanged"
    PRUNE = "prune"
    """Owned, pristine, no longer generated: it is removed."""
    KEPT = "kept"
    """No longer generated, but pruning is off: it stays, and stays owned."""
    EDITED = "edited"
    """Owned and changed by hand."""
    REFORMATTED = "reformatted"
    """Owned and changed by hand, in layout only."""
    UNKNOWN_EXISTS = "unknown_exists"
    """To be created, but something of unknown origin stands there."""
    OUTSIDE = "outside"
    """A symbolic link leads from this path out of the bundle."""

    @property
    def refused(self) -> bool:
        """Whether a file of this kind keeps publishing from writing anything."""
        return self in _REASONS


_REASONS: Mapping[ChangeKind, str] = {
    ChangeKind.EDITED: "changed by hand since fusegen wrote it",
    ChangeKind.REFORMATTED: "laid out anew since fusegen wrote it, with the same meaning",
    ChangeKind.UNKNOWN_EXISTS: "exists and was not written by fusegen",
    ChangeKind.OUTSIDE: "leads out of the bundle through a symbolic link",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One path.

    Attributes:
        path: relative to the bundle, `/`-separated.
        kind: what is to be done.
        before: bytes on disk, None where there is no readable file.
        after: bytes to publish, None where the path is no longer generated.
    """

    path: str
    kind: ChangeKind
    before: bytes | None
    after: bytes | None


@dataclass(frozen=True, slots=True)
class Changes:
    """The difference between a rendered bundle and the disk.

    Attributes:
        bundle: folder compared with.
        changes: one per path that is generated or owned, sorted by path.
        lock_current: whether `fusegen.lock` records exactly the rendered files and owners.
        interrupted: whether a publish was cut short and awaits its roll-forward.
    """

    bundle: Path
    changes: tuple[Change, ...]
    lock_current: bool
    interrupted: bool

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def of(self, *kinds: ChangeKind) -> tuple[Change, ...]:
        """The changes of the given kinds."""
        return tuple(change for change in self.changes if change.kind in kinds)

    @property
    def counts(self) -> Mapping[ChangeKind, int]:
        """How many paths there are of each kind, zeros included."""
        found = Counter(change.kind for change in self.changes)
        return {kind: found[kind] for kind in ChangeKind}

    @property
    def refused(self) -> tuple[Change, ...]:
        """The changes that keep everything from being published."""
        return tuple(change for change in self.changes if change.kind.refused)

    def accepting_format(self) -> Changes:
        """The same, with files that differ in layout only to be overwritten, not refused."""
        return replace(
            self,
            changes=tuple(
                replace(change, kind=ChangeKind.UPDATE)
                if change.kind is ChangeKind.REFORMATTED
                else change
                for change in self.changes
            ),
        )

    @property
    def drifted(self) -> bool:
        """Whether disk and lock are anything but what publishing would leave."""
        still = (ChangeKind.UNCHANGED, ChangeKind.KEPT)
        settled = all(change.kind in still for change in self.changes)
        return not settled or not self.lock_current or self.interrupted

    def summary(self) -> str:
        """One line, such as `42 files: 3 updated, 1 created, 0 removed, 38 unchanged`."""
        counts = self.counts
        total = sum(change.after is not None for change in self.changes)
        parts = [f"{counts[kind]} {word}" for kind, word in _WORDS.items()]
        parts += [f"{counts[k]} {word}" for k, word in _RARE_WORDS.items() if counts[k]]
        return f"{total} {'file' if total == 1 else 'files'}: {', '.join(parts)}"

    def to_json(self) -> dict[str, object]:
        """`{"changes": [{"path": ..., "kind": ...}]}`, without the unchanged files."""
        return {
            "changes": [
                {"path": change.path, "kind": change.kind.value}
                for change in self.changes
                if change.kind is not ChangeKind.UNCHANGED
            ]
        }


_WORDS: Mapping[ChangeKind, str] = {
    ChangeKind.UPDATE: "updated",
    ChangeKind.CREATE: "created",
    ChangeKind.PRUNE: "removed",
    ChangeKind.UNCHANGED: "unchanged",
}
_RARE_WORDS: Mapping[ChangeKind, str] = {
    ChangeKind.KEPT: "no longer generated but kept",
    ChangeKind.EDITED: "edited by hand",
    ChangeKind.REFORMATTED: "reformatted",
    ChangeKind.UNKNOWN_EXISTS: "in the way",
    ChangeKind.OUTSIDE: "outside the bundle",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What a publish did.

    Attributes:
        changes: the difference it found and resolved.
        rolled_forward: whether it first completed a publish that had been cut short.
    """

    changes: Changes
    rolled_forward: bool

    @property
    def counts(self) -> Mapping[ChangeKind, int]:
        """As `Changes.counts`."""
        return self.changes.counts

    def summary(self) -> str:
        """As `Changes.summary`, and whether an interrupted publish was completed first."""
        note = "; an interrupted publish was completed first" if self.rolled_forward else ""
        return self.changes.summary() + note

    def to_json(self) -> dict[str, object]:
        """As `Changes.to_json`."""
        return self.changes.to_json()


class RefusedError(PublishError):
    """Publishing would lose something that fusegen did not write. Nothing was written.

    Attributes:
        changes: the whole difference; `changes.refused` are the files at fault.
    """

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        super().__init__(_refusal(changes))


class Filesystem:
    """The operations that publishing changes the disk with, one method each.

    Publishing holds no other handle to the disk for writing, so a caller can count, log or fail
    every step.
    """

    def mkdir(self, path: Path) -> None:
        """Create a folder and those above it; an existing one is fine."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        """Write a new file, not yet safe against power loss."""
        path.write_bytes(data)

    def fsync(self, path: Path) -> None:
        """Make a file's content, or the names in a folder, safe against power loss."""
        if os.name == "nt" and path.is_dir():
            return  # Windows cannot open a folder, and keeps names safe by itself.
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        """Move a file over another, atomically."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link."""
        path.unlink()

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


DISK = Filesystem()


def diff(files: FileSet, bundle: Path, *, prune: bool = True) -> Changes:
    """Say for each path what publishing `files` into `bundle` would do. Writes nothing.

    Raises:
        LockError: a lock of the bundle cannot be read.
    """
    return _Disk(bundle).compare(files, prune=prune)


def publish(
    files: FileSet,
    bundle: Path,
    selection: Mapping[str, object],
    generator_version: str,
    *,
    prune: bool = True,
    accept_format: bool = False,
    filesystem: Filesystem = DISK,
) -> Report:
    """Make `bundle` hold `files` and a lock that says so.

    Unchanged files keep their modification time, unknown ones are never touched, and folders left
    empty by pruning go. If nothing differs, nothing is written.

    Args:
        selection: recorded in the lock as it is; JSON values only.
        generator_version: recorded in the lock.
        prune: remove owned files that are no longer generated, instead of keeping them owned.
        accept_format: overwrite files that differ from the new output in layout only.

    Raises:
        RefusedError: some file is not ours to overwrite; nothing was written.
        BusyError: another process kept publishing into this bundle for a minute.
        LockError: a lock of the bundle cannot be read.
        PublishError: the bundle, or a name that publishing needs in it, is not what it must be.
    """
    _check_usable(bundle)
    filesystem.mkdir(bundle)
    with _exclusive(bundle):
        rolled_forward = _recover(bundle, filesystem)
        disk = _Disk(bundle)
        changes = disk.compare(files, prune=prune)
        if accept_format:
            changes = changes.accepting_format()
        if changes.refused:
            raise RefusedError(changes)
        pending = disk.pending(changes, lock_of(files, selection, generator_version))
        if changes.drifted or disk.lock is None or not _same_lock(pending.lock, disk.lock):
            _stage(changes, bundle, filesystem)
            _record(pending, bundle, filesystem)
            _roll_forward(pending, bundle, filesystem)
    return Report(changes, rolled_forward)


def recover(bundle: Path, *, filesystem: Filesystem = DISK) -> bool:
    """Complete a publish that was cut short and remove what it staged; True if there was one.

    Does nothing, and takes no lock, where nothing was interrupted. If the staged contents are gone,
    files stay as they are, old or new, all of them pristine, until the next publish.

    Raises:
        BusyError: another process kept publishing into this bundle for a minute.
        LockError: the pending lock cannot be read.
    """
    _check_usable(bundle)
    if not (bundle / PENDING_NAME).exists() and not (bundle / STAGING_NAME).exists():
        return False
    with _exclusive(bundle):
        return _recover(bundle, filesystem)


def unified_diff(changes: Changes) -> str:
    """What publishing would change, as one patch; empty where nothing changes.

    Refused files are shown too: `-` is the disk, `+` the new output.
    """
    silent = (ChangeKind.UNCHANGED, ChangeKind.KEPT, ChangeKind.OUTSIDE)
    return "".join(_patch(change) for change in changes if change.kind not in silent)


def _patch(change: Change) -> str:
    lines = difflib.unified_diff(
        _lines(change.before),
        _lines(change.after),
        "/dev/null" if change.before is None else f"a/{change.path}",
        "/dev/null" if change.after is None else f"b/{change.path}",
    )
    # difflib leaves out the note that tools need to tell a file without a final newline.
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(data: bytes | None) -> list[str]:
    # Bytes that are not UTF-8 are shown as escapes: a diff is for reading.
    text = (data or b"").decode("utf-8", errors="backslashreplace")
    return list(io.StringIO(text, newline="\n"))


class _Disk:
    """One look at a bundle: its locks, and which digests of a path are known to be ours."""

    def __init__(self, bundle: Path) -> None:
        self.bundle = bundle
        self.lock = read_lock(bundle)
        self._pending = read_pending(bundle)
        self._root = bundle.resolve()
        self._folders: dict[Path, bool] = {}

    def compare(self, files: FileSet, *, prune: bool) -> Changes:
        """One change per generated or owned path."""
        generated = {path: self._generated(path, files[path]) for path in files}
        orphans = {path: self._orphan(path, prune=prune) for path in self._owned() - set(files)}
        changes = {path: change for path, change in {**generated, **orphans}.items() if change}
        _mark_obstructed(changes, self.bundle)
        expected = lock_of(files, {}, "").files
        kept = {path for path, change in changes.items() if change.kind is ChangeKind.KEPT}
        recorded = self.lock.files if self.lock else None
        return Changes(
            bundle=self.bundle,
            changes=tuple(changes[path] for path in sorted(changes)),
            lock_current=recorded is not None
            and {path: recorded[path] for path in recorded if path not in kept} == expected,
            interrupted=self._pending is not None,
        )

    def pending(self, changes: Changes, target: Lock) -> Pending:
        """The publish that resolves `changes`, with kept orphans still owned."""
        kept = {change.path: self._kept_record(change) for change in changes.of(ChangeKind.KEPT)}
        # Orphans of a publish that cannot be completed: its empty folders are still to be removed.
        carried = self._pending.old if self._pending else {}
        present = {
            change.path: tuple(sorted(self._known(change.path) | {digest(change.before)}))
            for change in changes
            if change.before is not None and change.kind in _OVERWRITES
        }
        merged = dict(sorted({**kept, **target.files}.items()))
        old = {**{path: carried[path] for path in carried if path not in merged}, **present}
        return Pending(Lock(target.generator, target.selection, merged), old)

    def _kept_record(self, change: Change) -> FileRecord:
        """The record of an orphan that stays; of its pristine state even where it was edited."""
        records = [lock.files[change.path] for lock in self._locks() if change.path in lock.files]
        content = change.before or b""
        if records and digest(content) not in self._known(change.path):
            return records[-1]
        return FileRecord.of(content, records[-1].owners if records else ())

    def _locks(self) -> list[Lock]:
        pending = [self._pending.lock] if self._pending else []
        return [*pending, *([self.lock] if self.lock else [])]

    def _owned(self) -> set[str]:
        interrupted = set(self._pending.old) if self._pending else set()
        return interrupted.union(*(lock.files for lock in self._locks()))

    def _known(self, path: str) -> set[str]:
        known = {lock.files[path].sha256 for lock in self._locks() if path in lock.files}
        return known | set(self._pending.old.get(path, ()) if self._pending else ())

    def _generated(self, path: str, artifact: Artifact) -> Change:
        after = artifact.data
        if self.leads_out(path):
            return Change(path, ChangeKind.OUTSIDE, None, after)
        before = _read(self.bundle / path)
        return Change(path, self._kind(path, before, after), before, after)

    def _kind(self, path: str, before: bytes | None, after: bytes) -> ChangeKind:
        if before is None:
            return ChangeKind.CREATE
        if before == after:
            return ChangeKind.UNCHANGED
        known = self._known(path)
        if digest(before) in known:
            return ChangeKind.UPDATE
        if not known:
            return ChangeKind.UNKNOWN_EXISTS
        same = _same_but_for_format(path, before, after)
        return ChangeKind.REFORMATTED if same else ChangeKind.EDITED

    def _orphan(self, path: str, *, prune: bool) -> Change | None:
        """What becomes of an owned path that is no longer generated; None where it is gone."""
        if self.leads_out(path):
            return Change(path, ChangeKind.OUTSIDE, None, None)
        before = _read(self.bundle / path)
        if before is None:
            return None
        if not prune:
            return Change(path, ChangeKind.KEPT, before, None)
        pristine = digest(before) in self._known(path)
        return Change(path, ChangeKind.PRUNE if pristine else ChangeKind.EDITED, before, None)

    def leads_out(self, path: str) -> bool:
        """Whether writing to this path would reach outside the bundle."""
        target = self.bundle / path
        if target.is_symlink() and not target.resolve().is_relative_to(self._root):
            return True
        folder = target.parent
        if folder not in self._folders:
            self._folders[folder] = not folder.resolve().is_relative_to(self._root)
        return self._folders[folder]


_OVERWRITES = (
    ChangeKind.UPDATE,
    ChangeKind.UNCHANGED,
    ChangeKind.PRUNE,
)


def _mark_obstructed(changes: dict[str, Change], bundle: Path) -> None:
    pruned = {path for path, change in changes.items() if change.kind is ChangeKind.PRUNE}
    for path, change in changes.items():
        if change.kind is ChangeKind.CREATE and _obstructed(path, bundle, pruned):
            changes[path] = replace(change, kind=ChangeKind.UNKNOWN_EXISTS)


def _obstructed(path: str, bundle: Path, pruned: set[str]) -> bool:
    """Whether something that pruning will not take away stands where a new file is to go."""
    parents = [str(parent) for parent in PurePosixPath(path).parents]
    if any(parent not in pruned and (bundle / parent).is_file() for parent in parents):
        return True
    target = bundle / path
    if not target.is_dir() or target.is_symlink():
        return os.path.lexists(target)
    # Folders alone hold nothing to lose; a publish that was cut short may have left them.
    inside = {entry.relative_to(bundle).as_posix() for entry in target.rglob("*") if _holds(entry)}
    return not inside <= pruned


def _holds(entry: Path) -> bool:
    return entry.is_symlink() or not entry.is_dir()


def _read(path: Path) -> bytes | None:
    """Content of a file, or None where there is no file."""
    return path.read_bytes() if path.is_file() else None


def _same_but_for_format(path: str, before: bytes, after: bytes) -> bool:
    try:
        return same_but_for_format(path, before.decode("utf-8"), after.decode("utf-8"))
    except UnicodeDecodeError:
        return False


def _check_usable(bundle: Path) -> None:
    """Refuse a bundle that is no folder, or in which one of our own names leads elsewhere."""
    if os.path.lexists(bundle) and not bundle.is_dir():
        raise PublishError(f"{bundle}: expected a folder, got something else; move it away")
    for name in (LOCK_NAME, PENDING_NAME, STAGING_NAME, MUTEX_NAME):
        if (bundle / name).is_symlink():
            raise PublishError(
                f"{bundle / name}: is a symbolic link, and writing through it could reach outside "
                "the bundle; remove the link and run `fusegen generate` again"
            )


def _same_lock(left: Lock, right: Lock) -> bool:
    # As text: JSON has no tuples, so a selection read back need not equal the one given.
    return dump_lock(left) == dump_lock(right)


@contextlib.contextmanager
def _exclusive(bundle: Path) -> Iterator[None]:
    """Keep every other process out of the bundle, and leave no trace of having done so."""
    path = bundle / MUTEX_NAME
    mutex = filelock.FileLock(path, timeout=MUTEX_TIMEOUT_S)
    try:
        mutex.acquire()
    except filelock.Timeout:
        raise BusyError(
            f"{bundle}: another fusegen has been publishing here for {MUTEX_TIMEOUT_S:.0f} s; wait "
            f"for it or end it, then run `fusegen generate` again (the lock is {path})"
        ) from None
    try:
        yield
    finally:
        # Before release, while no other process can hold it; Windows does so itself, after.
        with contextlib.suppress(OSError):
            path.unlink()
        mutex.release()


def _staged(bundle: Path, path: str) -> Path:
    # One flat folder, whose names are short whatever the path.
    return bundle / STAGING_NAME / hashlib.sha256(path.encode("utf-8")).hexdigest()


def _stage(changes: Changes, bundle: Path, filesystem: Filesystem) -> None:
    """Write every new content aside, safe on disk, before the first file is touched."""
    staging = bundle / STAGING_NAME
    filesystem.mkdir(staging)
    try:
        for change in changes:
            if change.after is not None and change.after != change.before:
                _write(_staged(bundle, change.path), change.after, filesystem)
        filesystem.fsync(staging)
    except BaseException:
        # A full disk or Ctrl-C: nothing was promised yet, so leave nothing behind.
        _remove_staging(bundle, filesystem)
        raise


def _record(pending: Pending, bundle: Path, filesystem: Filesystem) -> None:
    """From here on the publish is decided: whoever comes next completes it."""
    _write_over(bundle, PENDING_NAME, dump_pending(pending), filesystem)


def _recover(bundle: Path, filesystem: Filesystem) -> bool:
    pending = read_pending(bundle)
    if pending is not None and _can_roll_forward(pending, bundle):
        _roll_forward(pending, bundle, filesystem)
        return True
    _remove_staging(bundle, filesystem)
    return False


def _can_roll_forward(pending: Pending, bundle: Path) -> bool:
    """Whether each content still to be put in place is staged whole, and its place is free."""
    disk = _Disk(bundle)
    leaving = {path for path in _orphans(pending) if _awaits(path, pending, bundle)}
    for path, record in pending.lock.files.items():
        if disk.leads_out(path):
            return False
        if _awaits(path, pending, bundle):
            if not (bundle / path).is_file() and _obstructed(path, bundle, leaving):
                return False
            staged = _read(_staged(bundle, path))
            if staged is None or digest(staged) != record.sha256:
                return False
    return not any(disk.leads_out(path) for path in pending.old)


def _orphans(pending: Pending) -> list[str]:
    return sorted(set(pending.old) - set(pending.lock.files))


def _awaits(path: str, pending: Pending, bundle: Path) -> bool:
    """Whether a file still has an old content, or is still missing.

    Any other content was put there by hand after the crash; it stays, and shows as an edit.
    """
    content = _read(bundle / path)
    if content is None:
        return True
    have = digest(content)
    new = pending.lock.files[path].sha256 if path in pending.lock.files else None
    return have != new and have in pending.old.get(path, ())


def _roll_forward(pending: Pending, bundle: Path, filesystem: Filesystem) -> None:
    """Bring every file to the pending state, then the lock; may be cut short and repeated.

    Orphans go first: a new file may need a folder where one of them stands, or the reverse.
    """
    touched = {bundle}
    for path in _orphans(pending):
        if (bundle / path).is_file() and _awaits(path, pending, bundle):
            filesystem.unlink(bundle / path)
        # Also where the file is gone: a publish may have been cut short between the two.
        touched.add(_remove_empty(bundle, (bundle / path).parent, filesystem))
    for path in pending.lock.files:
        if _awaits(path, pending, bundle):
            target = bundle / path
            filesystem.mkdir(target.parent)
            _remove_folders(target, filesystem)
            filesystem.replace(_staged(bundle, path), target)
            touched.add(target.parent)
    for folder in sorted(folder for folder in touched if folder.is_dir()):
        filesystem.fsync(folder)
    # Written anew, not renamed from the pending lock: that one also holds the old digests, and the
    # committed lock must not depend on what was there before.
    _write_over(bundle, LOCK_NAME, dump_lock(pending.lock), filesystem)
    filesystem.unlink(bundle / PENDING_NAME)
    _remove_staging(bundle, filesystem)


def _write(path: Path, data: bytes, filesystem: Filesystem) -> None:
    filesystem.write(path, data)
    filesystem.fsync(path)


def _write_over(bundle: Path, name: str, text: str, filesystem: Filesystem) -> None:
    staged = _staged(bundle, name)
    filesystem.mkdir(staged.parent)
    _write(staged, text.encode("utf-8"), filesystem)
    filesystem.replace(staged, bundle / name)
    filesystem.fsync(bundle)


def _remove_staging(bundle: Path, filesystem: Filesystem) -> None:
    staging = bundle / STAGING_NAME
    if staging.is_dir():
        for path in sorted(staging.iterdir()):
            filesystem.unlink(path)
        filesystem.rmdir(staging)


def _remove_folders(folder: Path, filesystem: Filesystem) -> None:
    """Remove a folder that holds nothing but folders, where a file is to go."""
    if folder.is_dir() and not folder.is_symlink():
        for entry in sorted(folder.iterdir()):
            _remove_folders(entry, filesystem)
        filesystem.rmdir(folder)


def _remove_empty(bundle: Path, folder: Path, filesystem: Filesystem) -> Path:
    """Remove the folders that pruning emptied, not the bundle itself; return the first to stay."""
    while folder != bundle:
        if folder.is_symlink():
            break
        if folder.is_dir():
            if any(folder.iterdir()):
                break
            filesystem.rmdir(folder)
        folder = folder.parent
    return folder


def _refusal(changes: Changes) -> str:
    refused = changes.refused
    width = max(len(change.path) for change in refused)
    plural = "file is" if len(refused) == 1 else "files are"
    return "\n".join(
        (
            f"{changes.bundle}: {len(refused)} {plural} not ours to change; nothing was written",
            *(f"  {change.path:<{width}}  {_REASONS[change.kind]}" for change in refused),
            "Ways out:",
            *(f"  - {way}" for way in _ways_out({change.kind for change in refused})),
        )
    )


def _ways_out(kinds: set[ChangeKind]) -> list[str]:
    ways = [
        "keep the change where it lasts: make it in the spec or template, delete or move away the "
        "files above, and run `fusegen generate` again",
        "take the new output: delete the files above, or restore them with git, and run "
        "`fusegen generate` again",
    ]
    if ChangeKind.REFORMATTED in kinds:
        ways.append("overwrite what differs in layout only: `fusegen generate --accept-format`")
    if ChangeKind.OUTSIDE in kinds:
        ways.append("replace a link that leads out of the bundle by a real folder or file")
    return ways
