"""`report`: a page about the modules of bundles, for people."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..publish.folders import BUILTIN, Folders
from ..publish.inputs import Inputs
from ..publish.selection import bundles_at
from ..spec.usage import UsageError
from .records import records
from .rendering import compare
from .report_texts import context_of, files_of
from .reported import given_sizes, planned, reported, require_gpu, require_sizes, without_numbers
from .request import recorded_jobs

BEGINNING = "<!doctype html>\n<!-- A report of fusegen. -->\n"
"""Of a page, by which one is told from a file that is not to be written over."""


@dataclass(frozen=True, slots=True)
class Report:
    """A page that was written.

    Attributes:
        path: of it.
        size: in bytes.
        bundles: that it is about, each with its cells.
        unlike: bundles that are not what their specs give, which is what the page shows, and how.
        lacking: by cell, the sizes that it lacks.
    """

    path: Path
    size: int
    bundles: Mapping[Path, tuple[str, ...]]
    unlike: Mapping[Path, str]
    lacking: Mapping[str, tuple[str, ...]]

    def to_json(self) -> dict[str, object]:
        """All of it."""
        return {
            "path": str(self.path),
            "size": self.size,
            "bundles": [
                {"bundle": str(bundle), "cells": [*cells], "unlike": self.unlike.get(bundle)}
                for bundle, cells in self.bundles.items()
            ],
            "without_numbers": {cell: [*names] for cell, names in self.lacking.items()},
        }


def report(
    folders_of_bundles: Sequence[Path],
    out: Path,
    folders: Folders = BUILTIN,
    *,
    sizes: str | None = None,
    gpu: str | None = None,
    results: Path | None = None,
) -> Report:
    """Write a page about the modules of bundles: their plans, their support, what was measured.

    Args:
        folders_of_bundles: bundles, or folders of them.
        out: file to write; one that is no report is not written over.
        folders: to read besides the built-in and the recorded ones.
        sizes: of dimensions, such as `T=65536,D=4096`, for numbers beside the formulas.
        gpu: whose floors the numbers have; one that the architecture is for if None.
        results: folder with records of benchmarks; that of the checkout, if there is one, if None.

    Raises:
        SpecError, RenderError, LockError: as `check`.
        UsageError: no bundle, sizes or a GPU of none of the modules, a file that is no report.
    """
    _require_report(out)
    given = given_sizes(sizes, gpu)
    bundles = [bundle for folder in folders_of_bundles for bundle in bundles_at(folder)]
    jobs, inputs = recorded_jobs(bundles, folders), Inputs()
    each = [one for job in jobs for one in job.all]
    known = records(results)
    plans = [planned(job, inputs, given, gpu) for job in each]
    require_sizes(plans, given)
    require_gpu(plans, gpu)
    states = compare(jobs, inputs, prune=True, accept_format=False, verify=False)
    found = [
        reported(f"b{number}", own, state)
        for number, (own, (state, _)) in enumerate(zip(plans, states, strict=True), 1)
    ]
    context = context_of(found, folders_of_bundles, given, known)
    text = inputs.renderer(()).render("report/page.html.j2", context)
    data = text.encode("utf-8", "replace")  # names of folders need not be text
    _write(out, data)
    return Report(
        out,
        len(data),
        {each.bundle: tuple(plan.cell for plan in each.plans) for each in found},
        {each.bundle: files_of(each.state) for each in found if each.state.regenerates},
        without_numbers(plans, given),
    )


def _require_report(out: Path) -> None:
    """Refuse a place where no page can be, or where something else is.

    Raises:
        UsageError: that, and what is there.
    """
    if out.exists() and not out.is_file():
        raise UsageError(f"--out {out}: is a folder or a device; name a file")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}; make it first")
    if out.exists():
        with open(out, "rb") as file:
            if file.read(len(BEGINNING)) != BEGINNING.encode():
                raise UsageError(
                    f"--out {out}: exists and is no report of fusegen, so it is not written over; "
                    "name another file, or remove it"
                )


def _write(out: Path, data: bytes) -> None:
    """All of it or, where something goes wrong, nothing: a reader finds the old page or the new."""
    handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    staged = Path(name)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        staged.chmod(0o666 & ~mask)  # as any other file; a temporary one is its owner's alone
        staged.replace(out)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
