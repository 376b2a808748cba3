"""`check`: bundles made anew in memory, and what differs on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..build.library import stale_cells
from ..build.toolchain import BuildError
from ..publish import paths
from ..publish.folders import BUILTIN, Folders
from ..publish.inputs import Inputs
from ..publish.lock import LOCK_NAME
from ..publish.selection import bundles_at, find_bundles
from ..spec import schema as schemas
from ..spec.usage import UsageError
from .rendering import compare
from .report import Generated
from .request import DEFAULT_OUT, recorded_jobs


def check(
    bundles: Sequence[Path] = (),
    out: Path = DEFAULT_OUT,
    folders: Folders = BUILTIN,
    *,
    verify: bool = False,
) -> Generated:
    """Regenerate bundles in memory, each from the selection in its lock, and compare.

    A library that was built is held against the sources that lie beside it.

    Args:
        bundles: bundles, or folders of bundles; by default all directly below `out` and, inside the
            checkout of fusegen, the JSON Schemas of the specs.
        verify: check the rules of the IR after every pass.

    Raises:
        SpecError, RenderError, LockError: as `generate`.
        UsageError: no bundle to check, or a recorded cell that cannot be made.
        VerifyError: with ``verify``, the first pass that breaks a rule.
    """
    stale: tuple[schemas.SchemaChange, ...] = ()
    in_checkout = not bundles and paths.inside_checkout(Path.cwd())
    if in_checkout:
        stale = schemas.diff(paths.builtin_specs())
    chosen = tuple(b for folder in bundles for b in bundles_at(folder)) or find_bundles(out)
    if not chosen and not in_checkout:
        raise UsageError(f"{out} holds no bundle to check; name the folders that hold {LOCK_NAME}")
    jobs = recorded_jobs(chosen, folders)
    compared = compare(jobs, Inputs(), prune=True, accept_format=False, verify=verify)
    reports = (replace(report, stale=_stale_cells(report.bundle)) for report, _ in compared)
    return Generated(tuple(reports), stale)


def _stale_cells(bundle: Path) -> dict[str, str]:
    try:
        return stale_cells(bundle)
    except BuildError:  # What says which sources there are was edited, which is a difference.
        return {}
