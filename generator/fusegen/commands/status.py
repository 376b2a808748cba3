"""`status`: what state every file of a bundle is in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..publish.changes import STATES, ChangeKind
from ..publish.folders import BUILTIN, Folders
from ..publish.inputs import Inputs
from ..publish.lock import LOCK_NAME, read_lock
from ..publish.selection import bundles_at
from .rendering import compare
from .report import BundleReport
from .request import recorded_jobs

PRISTINE = STATES[ChangeKind.UNCHANGED]
STALE = STATES[ChangeKind.UPDATE]


@dataclass(frozen=True, slots=True)
class BundleStatus:
    """One bundle.

    Attributes:
        bundle: its folder.
        namespace: of its ops.
        generator: version of fusegen that wrote it; None where its first publish was cut short.
        files: state of each file by path, `changes.STATES` has them; the lock's where it is stale.
    """

    bundle: Path
    namespace: str
    generator: str | None
    files: Mapping[str, str]

    @property
    def clean(self) -> bool:
        """Whether every file is as fusegen wrote it, and would write it today."""
        return set(self.files.values()) <= {PRISTINE}

    @property
    def counts(self) -> Mapping[str, int]:
        """How many files are in each state, the frequent ones first."""
        return dict(Counter(self.files.values()).most_common())

    def to_json(self) -> dict[str, object]:
        """All of it, without the files that are pristine."""
        return {
            "bundle": str(self.bundle),
            "namespace": self.namespace,
            "generator": self.generator,
            "clean": self.clean,
            "counts": dict(self.counts),
            "files": [
                {"path": path, "state": state}
                for path, state in self.files.items()
                if state != PRISTINE
            ],
        }


@dataclass(frozen=True, slots=True)
class Status:
    """Bundles in sorted order; `generator` is the version of fusegen that looked."""

    bundles: tuple[BundleStatus, ...]
    generator: str = __version__

    @property
    def clean(self) -> bool:
        """Whether all of them are."""
        return all(each.clean for each in self.bundles)

    def to_json(self) -> dict[str, object]:
        """All of it."""
        return {
            "generator": self.generator,
            "clean": self.clean,
            "bundles": [each.to_json() for each in self.bundles],
        }


def status(folders_of_bundles: Sequence[Path], folders: Folders = BUILTIN) -> Status:
    """The state of every file that fusegen owns, or would write, in these bundles.

    Args:
        folders_of_bundles: bundles, or folders of them.
        folders: to read besides the built-in and the recorded ones.

    Raises:
        SpecError, RenderError, LockError, UsageError: as `check`.
    """
    bundles = [bundle for folder in folders_of_bundles for bundle in bundles_at(folder)]
    jobs = recorded_jobs(bundles, folders)
    compared = compare(jobs, Inputs(), prune=True, accept_format=False, verify=False)
    found = (report for report, _ in compared if [*report.changes] or report.bundle.exists())
    return Status(tuple(map(_status, found)))


def _status(report: BundleReport) -> BundleStatus:
    files = {change.path: STATES[change.kind] for change in report.changes}
    if report.regenerates and set(files.values()) <= {PRISTINE}:
        files[LOCK_NAME] = STALE
    lock = read_lock(report.bundle)
    return BundleStatus(
        report.bundle, report.selection.op_namespace, lock.generator if lock else None, files
    )
