"""`upgrade`: bundles brought up to this fusegen, with the edits that people made in them."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from .. import __version__
from ..emit.fileset import FileSet
from ..publish.changes import NO_EDITS, Change, ChangeKind, Edit, diff, read_file
from ..publish.folders import BUILTIN, Folders, recorded_folders, relative_folders
from ..publish.git import GitError, uncommitted
from ..publish.inputs import Inputs
from ..publish.lock import LOCK_NAME, Lock, dump_lock, read_lock
from ..publish.publish import PublishError, generating
from ..publish.remedies import regeneration, whole
from ..publish.selection import bundles_at
from ..spec.usage import UsageError, command_line
from .edits import OnEdit, decide
from .generate import require_inside, roll_forward, write_bundle
from .rendering import compare
from .report import BundleReport, Generated
from .request import recorded_jobs, selection_of


def upgrade(
    folder: Path,
    on_edit: OnEdit = OnEdit.REFUSE,
    folders: Folders = BUILTIN,
    *,
    old_fusegen: str | None = None,
    verify: bool = False,
) -> Generated:
    """Make bundles anew, all or none, and carry over what people changed in them.

    The base of a merge is what fusegen wrote: git has it where it was committed once. Files that
    differ in layout only are overwritten; an edited file for which there is no new output stays.

    Args:
        folder: a bundle, or a folder of bundles; one in a fat bundle stands for that.
        on_edit: what becomes of an edited file for which there is new output.
        folders: to read besides the built-in and the recorded ones.
        old_fusegen: command that runs the fusegen that wrote the bundles, such as
            ``uvx fusegen==0.1.0``; it writes again what git has lost.
        verify: check the rules of the IR after every pass.

    Returns:
        what was done; where files are refused nothing was, and where there are conflicts these
        stand in the files.

    Raises:
        SpecError, RenderError, LockError, UsageError, VerifyError: as `check`.
        PublishError: a file that would change is not committed, or cannot be merged.
    """
    folder = whole(folder)
    bundles = bundles_at(folder)
    require_inside(folder, bundles)
    with generating(bundles[0].parent):
        rolled_forward = roll_forward(bundles)
        jobs = recorded_jobs(bundles, folders)
        compared = compare(jobs, Inputs(), prune=True, accept_format=True, verify=verify)
        planned = [
            _with_edits(report, files, _edits(report, on_edit, folders, old_fusegen))
            for report, files in compared
        ]
        found = Generated(tuple(report for report, _, _ in planned))
        if found.refused:
            return found
        for report in found.bundles:
            _require_committed(report)
        return Generated(
            tuple(
                write_bundle(
                    report, files, edits=edits, rolled_forward=report.bundle in rolled_forward
                )
                for report, files, edits in planned
            )
        )


def conflicts(done: Generated) -> tuple[tuple[Path, Change], ...]:
    """Files, each with its bundle, that await a decision: conflicts, and edited orphans."""
    return tuple(
        (report.bundle, change)
        for report in done.bundles
        for change in report.changes.of(ChangeKind.MERGED, ChangeKind.RELEASED)
        if change.kind is ChangeKind.RELEASED or change.conflicted
    )


def _with_edits(
    report: BundleReport, files: FileSet, edits: Mapping[str, Edit]
) -> tuple[BundleReport, FileSet, Mapping[str, Edit]]:
    changes = diff(files, report.bundle, edits=edits).accepting_format()
    return replace(report, changes=changes), files, edits


def _edits(
    report: BundleReport, on_edit: OnEdit, folders: Folders, old_fusegen: str | None
) -> Mapping[str, Edit]:
    if not report.changes.refused:
        return NO_EDITS
    found = decide(report.changes, on_edit)
    if found.lost and old_fusegen:
        again = _rendered_again(report.bundle, found.lost, folders, old_fusegen)
        found = decide(report.changes, on_edit, again)
    if found.lost:
        raise PublishError(_lost(report.bundle, found.lost))
    return found.edits


def _lost(bundle: Path, paths: Sequence[str]) -> str:
    lock = read_lock(bundle)
    version = lock.generator if lock else "<version>"
    return "\n".join(
        (
            f"{bundle}: what fusegen {version} wrote is needed to merge these edits, and git does "
            "not have it; nothing was written",
            *(f"  {path}" for path in paths),
            "Ways out:",
            "  - name a command that runs that version, to write it again: --old-fusegen "
            f'"uvx fusegen=={version}"; the specs must be what they were then',
            "  - take the new output in the place of the edits: --on-edit take-new",
        )
    )


def _rendered_again(
    bundle: Path, paths: Sequence[str], folders: Folders, command: str
) -> dict[str, bytes]:
    """Files as another fusegen writes them into an empty bundle of the same selection.

    Raises:
        PublishError: the command fails.
    """
    lock = read_lock(bundle)
    assert lock is not None, "a file that was edited is owned"
    with TemporaryDirectory(prefix="fusegen-") as name:
        copy = Path(name).resolve() / bundle.name
        copy.mkdir()
        recorded = selection_of(bundle)
        specs = recorded_folders(bundle, recorded.specs)
        templates = recorded_folders(bundle, recorded.templates)
        moved = {
            "specs": list(relative_folders(copy, specs)),
            "templates": list(relative_folders(copy, templates)),
        }
        empty = Lock(lock.generator, {**lock.selection, **moved}, {})
        (copy / LOCK_NAME).write_text(dump_lock(empty), encoding="utf-8")
        words = [*_words(command), "generate", "--out", str(copy.parent)]
        # Named, too: a lock outside of their repository is not trusted with folders.
        for option, given in Folders(
            (*specs, *folders.specs), (*templates, *folders.templates)
        ).options.items():
            words += [word for folder in given for word in (option, str(folder.resolve()))]
        try:
            done = subprocess.run(words, capture_output=True, check=False)
        except OSError as error:
            raise PublishError(f"--old-fusegen: {words[0]}: {error.strerror}") from None
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", errors="replace").strip()
            raise PublishError(f"--old-fusegen: `{shlex.join(words)}` failed:\n{said}")
        contents = {path: read_file(copy / path) for path in paths}
        return {path: content for path, content in contents.items() if content is not None}


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--old-fusegen: {command}: {error}") from None


def _require_committed(report: BundleReport) -> None:
    """Refuse to change what git could not give back.

    Raises:
        PublishError: naming what is not committed; or there is no git.
    """
    lock = read_lock(report.bundle)
    if not report.regenerates and lock is not None and lock.generator == __version__:
        return
    paths = [change.path for change in report.changes if change.writes]
    try:
        dirty = uncommitted(report.bundle, [*paths, LOCK_NAME])
    except GitError as error:
        raise PublishError(
            f"{report.bundle}: an upgrade is to be reviewed, and to be undone, by git, and {error};"
            " where nothing was edited, this does the same without:"
            f" {regeneration([report.bundle], {})}"
        ) from None
    if dirty:
        shown = ", ".join(dirty[:5]) + (f" and {len(dirty) - 5} more" if len(dirty) > 5 else "")
        again = command_line("upgrade", whole(report.bundle))
        raise PublishError(
            f"{report.bundle}: an upgrade would change files that are not committed: {shown}; "
            f"commit or stash them, then run `{again}` again"
        )
