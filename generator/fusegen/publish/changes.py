"""What publishing a rendered bundle would do with each path on disk, and that as a patch."""

from __future__ import annotations

import difflib
import enum
import io
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from ..emit.fileset import Artifact, FileSet
from ..emit.polish import same_but_for_format
from ..spec.files import resolve
from .git import blob
from .lock import (
    Decided,
    FileRecord,
    Lock,
    Pending,
    digest,
    lock_of,
    read_lock,
    read_pending,
)
from .merge import conflicted
from .remedies import whole


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
    CONFLICT = "conflict"
    """Owned, and holds conflicts that a merge has left in it."""
    REFORMATTED = "reformatted"
    """Owned and changed by hand, in layout only."""
    MERGED = "merged"
    """Owned and changed by hand: it holds, or is to hold, that change besides the new output."""
    RELEASED = "released"
    """Not owned, or no longer: it belongs to whoever has the bundle."""
    UNKNOWN_EXISTS = "unknown_exists"
    """To be created, but something of unknown origin stands there."""
    OUTSIDE = "outside"
    """A symbolic link leads from this path out of the bundle."""

    @property
    def refused(self) -> bool:
        """Whether a file of this kind keeps publishing from writing anything."""
        return self in REASONS


REASONS: Mapping[ChangeKind, str] = {
    ChangeKind.EDITED: "changed by hand since fusegen wrote it",
    ChangeKind.CONFLICT: "holds conflicts that a merge has left in it",
    ChangeKind.REFORMATTED: "laid out anew since fusegen wrote it, with the same meaning",
    ChangeKind.UNKNOWN_EXISTS: "exists and was not written by fusegen",
    ChangeKind.OUTSIDE: "leads out of the bundle through a symbolic link",
}

STATES: Mapping[ChangeKind, str] = {
    ChangeKind.UNCHANGED: "pristine",
    ChangeKind.EDITED: "edited",
    ChangeKind.CONFLICT: "conflict",
    ChangeKind.REFORMATTED: "reformatted",
    ChangeKind.UPDATE: "stale",
    ChangeKind.CREATE: "missing",
    ChangeKind.PRUNE: "orphan",
    ChangeKind.UNKNOWN_EXISTS: "in the way",
    ChangeKind.OUTSIDE: "outside the bundle",
}
"""What a file is called before anything is done about it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One path.

    Attributes:
        path: relative to the bundle, `/`-separated.
        kind: what is to be done.
        before: bytes on disk, None where there is no readable file.
        after: bytes to publish, None where the path is no longer generated.
        decided: whether an `Edit` says so.
    """

    path: str
    kind: ChangeKind
    before: bytes | None
    after: bytes | None
    decided: bool = False

    @property
    def conflicted(self) -> bool:
        """Whether it leaves conflicts in the file."""
        return self.after is not None and conflicted(self.after)

    @property
    def writes(self) -> bool:
        """Whether publishing this changes what the path holds."""
        going = self.kind is ChangeKind.PRUNE
        return going if self.after is None else self.after != self.before


@dataclass(frozen=True, slots=True)
class Edit:
    """What becomes of a file that fusegen did not write; None stands for no file.

    It holds only as long as the file is what it was: otherwise publishing acts as without it.

    Attributes:
        before: what the file held when that was decided.
        after: what it is to hold.
    """

    before: bytes | None
    after: bytes | None


NO_EDITS: Mapping[str, Edit] = {}


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
                replace(
                    change, kind=ChangeKind.PRUNE if change.after is None else ChangeKind.UPDATE
                )
                if change.kind is ChangeKind.REFORMATTED
                else change
                for change in self.changes
            ),
        )

    @property
    def drifted(self) -> bool:
        """Whether disk and lock are anything but what publishing would leave."""
        still = (ChangeKind.UNCHANGED, ChangeKind.KEPT)
        settled = all(
            change.kind in still or (change.decided and not change.writes)
            for change in self.changes
        )
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
    ChangeKind.MERGED: "edited by hand and kept so",
    ChangeKind.RELEASED: "left to you",
    ChangeKind.EDITED: "edited by hand",
    ChangeKind.CONFLICT: "with conflicts",
    ChangeKind.REFORMATTED: "reformatted",
    ChangeKind.UNKNOWN_EXISTS: "in the way",
    ChangeKind.OUTSIDE: "outside the bundle",
}


def diff(
    files: FileSet, bundle: Path, *, prune: bool = True, edits: Mapping[str, Edit] = NO_EDITS
) -> Changes:
    """Say for each path what publishing `files` into `bundle` would do. Writes nothing.

    Raises:
        LockError: a lock of the bundle cannot be read.
    """
    return Disk(bundle).compare(files, prune=prune, edits=edits)


def unified_diff(changes: Changes) -> str:
    """What publishing would change, as one patch; empty where nothing changes.

    Paths begin with the name of the bundle's folder, or with that of the fat one that it is in, so
    that patches of bundles side by side can be joined. Refused files are shown too: `-` is the
    disk, `+` the new output.
    """
    silent = (ChangeKind.UNCHANGED, ChangeKind.KEPT, ChangeKind.OUTSIDE)
    # Made absolute because a bundle may be given as `.`, which has no name.
    bundle = Path(os.path.abspath(changes.bundle))
    folder = bundle.relative_to(whole(bundle).parent).as_posix()
    return "".join(
        patch(f"{folder}/{change.path}", change.before, change.after)
        for change in changes
        if change.kind not in silent
    )


def patch(path: str, before: bytes | None, after: bytes | None) -> str:
    """What changes in one file; None stands for no file."""
    lines = difflib.unified_diff(
        _lines(before),
        _lines(after),
        "/dev/null" if before is None else f"a/{path}",
        "/dev/null" if after is None else f"b/{path}",
    )
    # difflib leaves out the note that tools need to tell a file without a final newline.
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(data: bytes | None) -> list[str]:
    # Bytes that are not UTF-8 are shown as escapes: a diff is for reading.
    text = (data or b"").decode("utf-8", errors="backslashreplace")
    return list(io.StringIO(text, newline="\n"))


PRISTINE_NAME = ".fusegen.pristine"
"""Folder in a bundle with what fusegen wrote of files that hold a merge, named by git's blob ids.

No commit has that otherwise: only the merge was ever on the disk. The names have no suffix, so that
no formatter takes them for code.
"""


class Disk:
    """One look at a bundle: its locks, and which digests of a path are known to be ours.

    Attributes:
        bundle: its folder.
        lock: its lock, None where there is none.
    """

    def __init__(self, bundle: Path) -> None:
        self.bundle = bundle
        self.lock = read_lock(bundle)
        self._pending = read_pending(bundle)
        self._root = resolve(bundle)
        self._folders: dict[Path, bool] = {}

    def compare(
        self, files: FileSet, *, prune: bool, edits: Mapping[str, Edit] = NO_EDITS
    ) -> Changes:
        """One change per generated, owned or decided path."""
        generated = {path: self._generated(path, files[path]) for path in files}
        orphans = {path: self._orphan(path, prune=prune) for path in self._owned() - set(files)}
        changes = {path: change for path, change in {**generated, **orphans}.items() if change}
        for path, edit in edits.items():
            found = changes.get(path) or self._foreign(path, edit)
            if found:
                changes[path] = _decided(found, edit, generated=path in files)
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
            if change.before is not None and change.kind in _OVERWRITES and not change.decided
        }
        decided = {
            change.path: Decided(_digest(change.before), _digest(change.after))
            for change in changes
            if change.decided
        }
        merged = dict(sorted({**kept, **target.files}.items()))
        old = {**{path: carried[path] for path in carried if path not in merged}, **present}
        return Pending(Lock(target.generator, target.selection, merged), old, decided)

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
        before = read_file(self.bundle / path)
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
        return self._edited(path, before, after)

    def _edited(self, path: str, before: bytes, *after: bytes) -> ChangeKind:
        """How an owned file was changed by hand."""
        if conflicted(before):
            return ChangeKind.CONFLICT
        if any(_same_but_for_format(path, before, each) for each in after):
            return ChangeKind.REFORMATTED
        pristine = self.pristine(path, *after)
        same = pristine is not None and _same_but_for_format(path, before, pristine)
        return ChangeKind.REFORMATTED if same else ChangeKind.EDITED

    def pristine(self, path: str, *candidates: bytes) -> bytes | None:
        """What fusegen wrote there: a candidate, or what the bundle or git keeps; None if lost."""
        record = self.lock.files.get(path) if self.lock else None
        if record is None:
            return None
        found = itertools.chain(candidates, self._kept(record.blob))
        # A checkout, or a filter of the repository, may give another text than was published.
        return next((each for each in found if digest(each) == record.sha256), None)

    def _kept(self, name: str) -> Iterator[bytes]:
        """What the bundle, then git, keeps under the id of a blob."""
        for content in (read_file(self.bundle / PRISTINE_NAME / name), blob(self.bundle, name)):
            if content is not None:
                yield content

    def _foreign(self, path: str, edit: Edit) -> Change | None:
        """A path that is neither generated nor owned, where an edit puts something."""
        if self.leads_out(path):
            return Change(path, ChangeKind.OUTSIDE, None, edit.after)
        before = read_file(self.bundle / path)
        if before is None and edit.before is not None:
            return None
        kind = ChangeKind.CREATE if before is None else ChangeKind.UNKNOWN_EXISTS
        return Change(path, kind, before, edit.after)

    def _orphan(self, path: str, *, prune: bool) -> Change | None:
        """What becomes of an owned path that is no longer generated; None where it is gone."""
        if self.leads_out(path):
            return Change(path, ChangeKind.OUTSIDE, None, None)
        before = read_file(self.bundle / path)
        if before is None:
            return None
        if not prune:
            return Change(path, ChangeKind.KEPT, before, None)
        if digest(before) in self._known(path):
            return Change(path, ChangeKind.PRUNE, before, None)
        return Change(path, self._edited(path, before), before, None)

    def leads_out(self, path: str) -> bool:
        """Whether writing to this path would reach outside the bundle."""
        target = self.bundle / path
        if target.is_symlink() and not resolve(target).is_relative_to(self._root):
            return True
        folder = target.parent
        if folder not in self._folders:
            self._folders[folder] = not resolve(folder).is_relative_to(self._root)
        return self._folders[folder]


_OVERWRITES = (
    ChangeKind.UPDATE,
    ChangeKind.UNCHANGED,
    ChangeKind.PRUNE,
)


def _decided(found: Change, edit: Edit, *, generated: bool) -> Change:
    """What an edit makes of a change: nothing where the file is no longer what it was."""
    if found.kind is ChangeKind.OUTSIDE or found.before != edit.before:
        return found
    if edit.after is None:
        kind = ChangeKind.PRUNE
    elif not generated:
        kind = ChangeKind.RELEASED
    else:
        kind = ChangeKind.UPDATE if edit.after == found.after else ChangeKind.MERGED
    return Change(found.path, kind, edit.before, edit.after, decided=True)


def _digest(content: bytes | None) -> str | None:
    return None if content is None else digest(content)


def _mark_obstructed(changes: dict[str, Change], bundle: Path) -> None:
    pruned = {path for path, change in changes.items() if change.kind is ChangeKind.PRUNE}
    for path, change in changes.items():
        creates = change.before is None and change.kind in (ChangeKind.CREATE, ChangeKind.RELEASED)
        if creates and obstructed(path, bundle, pruned):
            changes[path] = replace(change, kind=ChangeKind.UNKNOWN_EXISTS)


def obstructed(path: str, bundle: Path, pruned: set[str]) -> bool:
    """Whether something that pruning will not take away stands where a new file is to go."""
    parents = [str(parent) for parent in PurePosixPath(path).parents]
    if any(parent not in pruned and _is_no_folder(bundle / parent) for parent in parents):
        return True
    target = bundle / path
    if not target.is_dir() or target.is_symlink():
        return os.path.lexists(target)
    # Folders alone hold nothing to lose; a publish that was cut short may have left them.
    inside = {entry.relative_to(bundle).as_posix() for entry in target.rglob("*") if _holds(entry)}
    return not inside <= pruned


def _is_no_folder(path: Path) -> bool:
    return os.path.lexists(path) and not path.is_dir()


def _holds(entry: Path) -> bool:
    return entry.is_symlink() or not entry.is_dir()


def read_file(path: Path) -> bytes | None:
    """Content of a file, or None where there is no file."""
    return path.read_bytes() if path.is_file() else None


def _same_but_for_format(path: str, before: bytes, after: bytes) -> bool:
    try:
        return same_but_for_format(path, before.decode("utf-8"), after.decode("utf-8"))
    except UnicodeDecodeError:
        return False
