"""What becomes of the files of a bundle that were edited by hand, where the bundle is made anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from .. import __version__
from ..publish.changes import Change, ChangeKind, Changes, Disk, Edit
from ..publish.git import GitError
from ..publish.lock import digest
from ..publish.merge import merge
from ..publish.publish import PublishError


class OnEdit(Enum):
    """What an upgrade does with an edited file for which there is new output."""

    REFUSE = "refuse"
    MERGE = "merge"
    TAKE_NEW = "take-new"


@dataclass(frozen=True, slots=True)
class Decisions:
    """What becomes of edited files.

    Attributes:
        edits: by path; a file for which there is none keeps everything from being published.
        lost: files that cannot be merged, because nobody has what fusegen wrote there.
    """

    edits: Mapping[str, Edit]
    lost: tuple[str, ...]


def decide(
    changes: Changes, policy: OnEdit, rendered_again: Mapping[str, bytes] | None = None
) -> Decisions:
    """What becomes of each edited file of a bundle.

    Args:
        changes: from which files that differ in layout only are gone.
        rendered_again: pristine contents by path, where git may have lost them.

    Raises:
        PublishError: a file cannot be merged; git is missing.
    """
    disk = Disk(changes.bundle)
    edits: dict[str, Edit] = {}
    lost: list[str] = []
    for change in changes.of(ChangeKind.EDITED, ChangeKind.CONFLICT):
        if policy is OnEdit.TAKE_NEW:
            edits[change.path] = Edit(change.before, change.after)
        elif not _is_stale(change, disk):
            edits[change.path] = Edit(change.before, change.before)
        elif policy is OnEdit.MERGE and change.kind is ChangeKind.EDITED:
            merged = _merged(change, disk, rendered_again or {})
            if merged is None:
                lost.append(change.path)
            else:
                edits[change.path] = Edit(change.before, merged)
    return Decisions(edits, tuple(lost))


def _is_stale(change: Change, disk: Disk) -> bool:
    """Whether there is other output for an owned file than when it was written."""
    recorded = disk.lock.files.get(change.path) if disk.lock else None
    return change.after is None or recorded is None or digest(change.after) != recorded.sha256


def _merged(change: Change, disk: Disk, rendered_again: Mapping[str, bytes]) -> bytes | None:
    """The edit and the new output in one; None where the base of the merge is lost.

    An edited file that is no longer generated stays as it is.
    """
    assert change.before is not None and disk.lock is not None, "an edited file is owned"
    if change.after is None:
        return change.before
    again = rendered_again.get(change.path)
    base = disk.pristine(change.path, *([again] if again is not None else []))
    if base is None:
        return None
    try:
        versions = (disk.lock.generator, __version__)
        return merge(change.before, base, change.after, versions)
    except GitError as error:
        raise PublishError(
            f"{disk.bundle / change.path}: cannot be merged: {error}; nothing was written"
        ) from None
