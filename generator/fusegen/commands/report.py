"""What a `generate` or `check` found of each bundle, and did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ..ir.plan import Unsupported
from ..publish.changes import Change, ChangeKind, Changes
from ..publish.selection import Selection
from ..spec.schema import SchemaChange
from .plans import unsupported_row


@dataclass(frozen=True, slots=True)
class BundleReport:
    """One bundle of a `generate` or `check`.

    Attributes:
        bundle: its folder.
        selection: what it is, or would be, made of.
        changes: the difference to the disk, found before anything was written.
        selection_changed: whether the lock records, or recorded, another selection.
        unsupported: cells of a target that cannot be made.
        written: whether the disk was brought up to it.
        rolled_forward: whether a publish that had been cut short was completed first.
        stale: cells that the built library is not of, each with what is wrong; a `check` looks.
        recorded: the selection of the lock; None where there is none.
    """

    bundle: Path
    selection: Selection
    changes: Changes
    selection_changed: bool
    unsupported: tuple[Unsupported, ...]
    written: bool = False
    rolled_forward: bool = False
    stale: Mapping[str, str] = field(default_factory=dict)
    recorded: Selection | None = None

    @property
    def extensions(self) -> tuple[str, ...]:
        """What is said of each extension that is another one than the lock records."""
        before = {each.name: each for each in self.recorded.extensions} if self.recorded else {}
        after = {each.name: each for each in self.selection.extensions}
        return tuple(
            f"extension {before.get(name, 'none')} when it was made, {after.get(name, 'none')} now"
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        )

    @property
    def regenerates(self) -> bool:
        """Whether disk and lock were anything but what publishing leaves."""
        return self.changes.drifted or self.selection_changed

    @property
    def drifted(self) -> bool:
        """Whether files, lock or library are not what the specs give."""
        return self.regenerates or bool(self.stale)

    @property
    def differing(self) -> tuple[Change, ...]:
        """The changes, without the files that stay as they are."""
        return tuple(c for c in self.changes if c.kind is not ChangeKind.UNCHANGED)

    @property
    def cells_written(self) -> tuple[str, ...]:
        """Cells with a file of their own that was created or updated; none before writing."""
        kinds = (ChangeKind.CREATE, ChangeKind.UPDATE)
        changed = self.changes.of(*kinds) if self.written else ()
        stems = {PurePosixPath(change.path).stem.removeprefix("test_") for change in changed}
        return tuple(name for name in map(str, self.selection.cells) if name in stems)

    def to_json(self) -> dict[str, object]:
        """Everything but the contents of files."""
        return {
            "bundle": str(self.bundle),
            "arch": self.selection.arch,
            "namespace": self.selection.op_namespace,
            "cells": [str(cell) for cell in self.selection.cells],
            "unsupported": [unsupported_row(cell).to_json() for cell in self.unsupported],
            "drifted": self.drifted,
            "selection_changed": self.selection_changed,
            "interrupted": self.changes.interrupted,
            "refused": bool(self.changes.refused),
            "written": self.written,
            "cells_written": list(self.cells_written),
            "stale": dict(self.stale),
            **self.changes.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Generated:
    """What a `generate` or `check` found and did.

    Attributes:
        bundles: in sorted order.
        schemas: schema files of the checkout that differ, or differed.
    """

    bundles: tuple[BundleReport, ...]
    schemas: tuple[SchemaChange, ...] = ()

    @property
    def drifted(self) -> bool:
        """Whether anything differs from what generating gives."""
        return any(report.drifted for report in self.bundles) or bool(self.schemas)

    @property
    def refused(self) -> tuple[BundleReport, ...]:
        """Bundles with files that are not fusegen's to change; if any, nothing was written."""
        return tuple(report for report in self.bundles if report.changes.refused)

    def to_json(self) -> dict[str, object]:
        """Everything but the contents of files."""
        return {
            "bundles": [report.to_json() for report in self.bundles],
            "schemas": [{"path": str(c.path), "kind": c.kind} for c in self.schemas],
        }
