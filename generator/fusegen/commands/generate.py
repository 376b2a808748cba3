"""`generate`: brings the disk up to what a request asks for, all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import Enum
from pathlib import Path

from .. import __version__
from ..emit.fileset import FileSet
from ..publish import paths
from ..publish.changes import NO_EDITS, Edit
from ..publish.inputs import Inputs
from ..publish.lock import LOCK_NAME, read_lock
from ..publish.publish import PublishError, generating, publish, recover
from ..publish.remedies import is_fat
from ..publish.selection import find_bundles
from ..spec import schema as schemas
from ..spec.files import resolve
from ..spec.usage import UsageError
from .rendering import compare
from .report import BundleReport, Generated
from .request import Request, jobs_of


class Policy(Enum):
    """What `generate` does with the difference it finds."""

    WRITE = "write"
    COMPARE = "compare"


def generate(
    request: Request,
    policy: Policy = Policy.WRITE,
    *,
    prune: bool = True,
    accept_format: bool = False,
    verify: bool = False,
) -> Generated:
    """Render the bundles a request names and bring the disk up to them, all or none of them.

    Inside the checkout of fusegen, a request that names nothing also writes the JSON Schemas of
    the specs.

    Args:
        prune: remove owned files that are no longer generated, instead of keeping them owned.
        accept_format: overwrite files that differ from the new output in layout only.
        verify: check the rules of the IR after every pass.

    Raises:
        SpecError: the specs are wrong.
        RenderError: a template is wrong.
        UsageError: an unknown name, a combination without meaning, or a cell that cannot be made.
        PublishError: a bundle is busy or not usable.
        LockError: a lock cannot be read.
        VerifyError: with ``verify``, the first pass that breaks a rule; nothing is written.
    """
    with _alone(request.out, policy):
        return _generate(request, policy is Policy.WRITE, prune, accept_format, verify)


def _alone(out: Path, policy: Policy) -> AbstractContextManager[None]:
    """From reading what locks record to publishing, nobody else may change it."""
    return generating(out) if policy is Policy.WRITE else nullcontext()


def _generate(
    request: Request, writing: bool, prune: bool, accept_format: bool, verify: bool
) -> Generated:
    require_outside(request.out)
    bundles = find_bundles(request.out)
    inside = [b for b in bundles if b.is_dir() and not _leads_out(b)]
    rolled_forward = roll_forward(inside) if writing else frozenset()
    inputs = Inputs()
    jobs = jobs_of(request, inputs)
    require_inside(request.out, [each.bundle for job in jobs for each in job.all])
    everything = not (request.targets or request.archs)
    stale: tuple[schemas.SchemaChange, ...] = ()
    if everything and paths.inside_checkout(Path.cwd()):
        stale = schemas.diff(paths.builtin_specs())
    if not jobs and not stale:
        raise UsageError(_nothing(request))
    reports = compare(jobs, inputs, prune=prune, accept_format=accept_format, verify=verify)
    found = Generated(tuple(report for report, _ in reports), stale)
    if not writing or found.refused:
        return found
    if stale:
        schemas.write(paths.builtin_specs())
    return Generated(
        tuple(
            write_bundle(
                report,
                files,
                prune=prune,
                accept_format=accept_format,
                rolled_forward=report.bundle in rolled_forward,
            )
            for report, files in reports
        ),
        stale,
    )


def roll_forward(bundles: Iterable[Path]) -> frozenset[Path]:
    """Complete what was cut short in bundles and in those in them; which that were."""
    found = [each for bundle in bundles for each in (*find_bundles(bundle), bundle)]
    return frozenset(each for each in found if not _leads_out(each) and recover(each))


def require_outside(out: Path) -> None:
    """Refuse a fat bundle where bundles are to be put: those in it are made with it alone.

    Raises:
        UsageError: naming the folder above it.
    """
    if is_fat(out):
        raise UsageError(
            f"{out}: is a bundle for all architectures, and what is in it follows from it; name "
            f"the folder that it is in: {out.parent}"
        )


def require_inside(out: Path, bundles: Iterable[Path]) -> None:
    """Refuse to write to bundles of a folder that lie elsewhere; one that is named itself may.

    Raises:
        PublishError: naming the link.
    """
    for bundle in bundles:
        if bundle != out and _leads_out(bundle):
            raise PublishError(
                f"{bundle}: a symbolic link leads from here out of {out}, where nothing is to be "
                "written; put a folder in its place, or name what it leads to instead"
            )


def _leads_out(bundle: Path) -> bool:
    return bundle.is_symlink() and not resolve(bundle).is_relative_to(resolve(bundle.parent))


def _nothing(request: Request) -> str:
    return (
        f"{request.out} holds no bundle to regenerate; name what to make: fusegen generate "
        "--target <target>, or --arch <arch> --module <module> --recipe <recipe>"
    )


def write_bundle(
    report: BundleReport,
    files: FileSet,
    *,
    prune: bool = True,
    accept_format: bool = True,
    edits: Mapping[str, Edit] = NO_EDITS,
    rolled_forward: bool = False,
) -> BundleReport:
    """Bring a bundle up to what was reported of it.

    Raises:
        PublishError: as `publish`.
    """
    if not files and not report.bundle.is_dir():
        return report
    done = publish(
        files,
        report.bundle,
        report.selection.to_json(),
        __version__,
        prune=prune,
        accept_format=accept_format,
        edits=edits,
    )
    if not files:
        _remove_empty_bundle(report.bundle)
    return replace(report, written=True, rolled_forward=rolled_forward or done.rolled_forward)


def _remove_empty_bundle(bundle: Path) -> None:
    """Take away the lock of a bundle that owns nothing any more, and the folder if it is empty."""
    lock = read_lock(bundle)
    if lock is not None and not lock.files:
        (bundle / LOCK_NAME).unlink()
        if not any(bundle.iterdir()):
            bundle.rmdir()
