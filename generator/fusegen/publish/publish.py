"""Bring a bundle on disk up to what was rendered, all or nothing.

A publish is prepared aside and then only rolled forward: the new contents are staged inside the
bundle, `fusegen.lock.next` records the state to reach with the old and new digest of each file, and
from there on files are replaced one by one, each atomically. Whoever comes next, after a crash at
any step, completes the same roll-forward. A file is pristine if either lock knows its digest, so a
half-done publish never looks like an edit by hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import filelock

from ..emit.fileset import FileSet
from ..spec.files import named
from ..spec.usage import command_line
from .changes import (
    NO_EDITS,
    PRISTINE_NAME,
    REASONS,
    ChangeKind,
    Changes,
    Disk,
    Edit,
    obstructed,
    read_file,
)
from .lock import (
    LOCK_NAME,
    PENDING_NAME,
    Lock,
    Pending,
    digest,
    dump_lock,
    dump_pending,
    git_blob,
    lock_of,
    read_pending,
)
from .remedies import regeneration

# Inside the bundle: it is the one folder known to be writable and on the bundle's file system,
# without which a rename is a copy. pytest and packaging tools pass over names with a dot.
STAGING_NAME = ".fusegen.staging"

# Inside the bundle, not in the temporary folder of one user or host: a checkout may be shared. It
# is deleted before the lock is let go; waiters notice that and start over, so none is left behind.
MUTEX_NAME = ".fusegen.lockfile"

MUTEX_TIMEOUT_S = 60.0
GENERATE_TIMEOUT_S = 600.0
"""Who generates holds the folder of bundles while it renders, which takes longer."""

# Threads that wait for the disk at once.
_WAITING = 8


class PublishError(Exception):
    """Publishing cannot go on; the message names the place and the remedy."""


class BusyError(PublishError):
    """Another process is publishing into the same bundle."""


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
        with named(path):
            path.write_bytes(data)

    def fsync(self, path: Path) -> None:
        """Make a file's content, or the names in a folder, safe against power loss."""
        if os.name == "nt" and path.is_dir():
            return  # Windows cannot open a folder, and keeps names safe by itself.
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            with named(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def fsync_all(self, paths: Sequence[Path]) -> None:
        """`fsync` of many, side by side: a disk waits for several as long as for one."""
        with ThreadPoolExecutor(_WAITING) as waiting:
            for _ in waiting.map(self.fsync, paths):
                pass

    def replace(self, staged: Path, target: Path) -> None:
        """Move a file over another, atomically."""
        os.replace(staged, target)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link."""
        path.unlink()

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


DISK = Filesystem()


def publish(
    files: FileSet,
    bundle: Path,
    selection: Mapping[str, object],
    generator_version: str,
    *,
    prune: bool = True,
    accept_format: bool = False,
    edits: Mapping[str, Edit] = NO_EDITS,
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
        edits: what becomes of files that fusegen did not write, by path.

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
        disk = Disk(bundle)
        changes = disk.compare(files, prune=prune, edits=edits)
        if accept_format:
            changes = changes.accepting_format()
        if changes.refused:
            raise RefusedError(changes)
        pending = disk.pending(changes, lock_of(files, selection, generator_version))
        if changes.drifted or disk.lock is None or not _same_lock(pending.lock, disk.lock):
            _stage(changes, bundle, filesystem)
            _keep_pristine(changes, files, bundle, filesystem)
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


def _check_usable(bundle: Path) -> None:
    """Refuse a bundle that is no folder, or in which one of our own names leads elsewhere."""
    if os.path.lexists(bundle) and not bundle.is_dir():
        raise PublishError(f"{bundle}: expected a folder, got something else; move it away")
    for name in (LOCK_NAME, PENDING_NAME, STAGING_NAME, MUTEX_NAME, PRISTINE_NAME):
        if (bundle / name).is_symlink():
            raise PublishError(
                f"{bundle / name}: is a symbolic link, and writing through it could reach outside "
                "the bundle; remove the link and run the command again"
            )


def _same_lock(left: Lock, right: Lock) -> bool:
    # As text: JSON has no tuples, so a selection read back need not equal the one given.
    return dump_lock(left) == dump_lock(right)


@contextlib.contextmanager
def generating(out: Path) -> Iterator[None]:
    """Keep every other `generate` out of a folder of bundles, which is made if it is not there.

    What a lock records may be read, changed and published within: nobody else does so meanwhile.

    Raises:
        BusyError: another process kept generating into this folder for ten minutes.
        PublishError: the folder is no folder, or holds a link in the place of the mutex.
    """
    missing = not out.exists()
    _check_usable(out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with _exclusive(out, GENERATE_TIMEOUT_S):
            yield
    finally:
        if missing:
            with contextlib.suppress(OSError):
                out.rmdir()  # Only where nothing came to be in it.


@contextlib.contextmanager
def _exclusive(folder: Path, timeout: float | None = None) -> Iterator[None]:
    """Keep every other process out of a folder, and leave no trace of having done so."""
    path = folder / MUTEX_NAME
    timeout = MUTEX_TIMEOUT_S if timeout is None else timeout
    mutex = filelock.FileLock(path, timeout=timeout)
    try:
        mutex.acquire()
    except filelock.Timeout:
        raise BusyError(
            f"{folder}: another fusegen has been publishing here for {timeout:.0f} s; wait "
            f"for it or end it, then run the command again (the lock is {path})"
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
    """Write every new content aside, safe on disk, before the first file is touched.

    The wait for the disk comes after the last write: most files are on their way to it by then.
    """
    staging = bundle / STAGING_NAME
    filesystem.mkdir(staging)
    try:
        written = []
        for change in changes:
            if change.after is not None and change.writes:
                written.append(_staged(bundle, change.path))
                filesystem.write(written[-1], change.after)
        filesystem.fsync_all(written)
        filesystem.fsync(staging)
    except BaseException:
        # A full disk or Ctrl-C: nothing was promised yet, so leave nothing behind.
        _remove_staging(bundle, filesystem)
        raise


def _keep_pristine(changes: Changes, files: FileSet, bundle: Path, filesystem: Filesystem) -> None:
    """Put aside what was rendered where a merge is written: the base of the next one."""
    for change in changes.of(ChangeKind.MERGED):
        text = files[change.path].text
        name = f"{PRISTINE_NAME}/{git_blob(text.encode('utf-8'))}"
        if not (bundle / name).exists():
            filesystem.mkdir(bundle / PRISTINE_NAME)
            _write_over(bundle, name, text, filesystem)


def _drop_pristine(lock: Lock, bundle: Path, filesystem: Filesystem) -> None:
    """Remove what was put aside of files that are pristine by now, or no longer owned."""
    folder = bundle / PRISTINE_NAME
    if not folder.is_dir():
        return
    needed = {
        record.blob
        for path, record in lock.files.items()
        if (content := read_file(bundle / path)) is None or digest(content) != record.sha256
    }
    for path in sorted(folder.iterdir()):
        if path.name not in needed and path.is_file():
            filesystem.unlink(path)
    if not any(folder.iterdir()):
        filesystem.rmdir(folder)


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
    disk = Disk(bundle)
    leaving = {path for path in _leaving(pending) if _awaits(path, pending, bundle)}
    for path in _coming(pending):
        if disk.leads_out(path):
            return False
        if _awaits(path, pending, bundle):
            if not (bundle / path).is_file() and obstructed(path, bundle, leaving):
                return False
            staged = read_file(_staged(bundle, path))
            if staged is None or digest(staged) != pending.goal(path):
                return False
    return not any(disk.leads_out(path) for path in _leaving(pending))


def _leaving(pending: Pending) -> list[str]:
    return [path for path in pending.paths if pending.goal(path) is None]


def _coming(pending: Pending) -> list[str]:
    return [path for path in pending.paths if pending.goal(path) is not None]


def _awaits(path: str, pending: Pending, bundle: Path) -> bool:
    return pending.awaits(path, read_file(bundle / path))


def _roll_forward(pending: Pending, bundle: Path, filesystem: Filesystem) -> None:
    """Bring every file to the pending state, then the lock; may be cut short and repeated.

    Files that go are first: a new file may need a folder where one of them stands, or the reverse.
    """
    touched = {bundle}
    for path in _leaving(pending):
        if (bundle / path).is_file() and _awaits(path, pending, bundle):
            filesystem.unlink(bundle / path)
        # Also where the file is gone: a publish may have been cut short between the two.
        touched.add(_remove_empty(bundle, (bundle / path).parent, filesystem))
    for path in _coming(pending):
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
    _drop_pristine(pending.lock, bundle, filesystem)
    filesystem.unlink(bundle / PENDING_NAME)
    _remove_staging(bundle, filesystem)


def _write_over(bundle: Path, name: str, text: str, filesystem: Filesystem) -> None:
    staged = _staged(bundle, name)
    filesystem.mkdir(staged.parent)
    filesystem.write(staged, text.encode("utf-8"))
    filesystem.fsync(staged)
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
            *(f"  {change.path:<{width}}  {REASONS[change.kind]}" for change in refused),
            "Ways out:",
            *(
                f"  - {way}"
                for way in _ways_out(changes.bundle, {change.kind for change in refused})
            ),
        )
    )


def _ways_out(bundle: Path, kinds: set[ChangeKind]) -> list[str]:
    again = regeneration([bundle], {})
    ways = []
    if ChangeKind.EDITED in kinds:
        ways.append(
            "keep the change and take the new output besides: commit it to git, and run "
            f"`{command_line('upgrade', bundle, '--on-edit', 'merge')}`"
        )
    if ChangeKind.CONFLICT in kinds:
        ways.append("resolve the conflicts, which stand between <<<<<<< and >>>>>>>, and commit")
    ways += [
        "keep the change where it lasts: make it in the spec or template, delete or move away the "
        f"files above, and run `{again}`",
        f"take the new output: delete the files above, or restore them with git, and run `{again}`",
    ]
    if kinds == {ChangeKind.REFORMATTED}:
        ways.append(f"overwrite what differs in layout only: `{again} --accept-format`")
    if ChangeKind.OUTSIDE in kinds:
        ways.append("replace a link that leads out of the bundle by a real folder or file")
    return ways
