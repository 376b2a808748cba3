"""What a request asks for: the bundles to make, each with its selection and its folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..build.gpu import NATIVE, arch_named
from ..extensions import installed
from ..ir.naming import Cell
from ..publish.folders import (
    BUILTIN,
    Folders,
    distrust,
    foreign_folders,
    merge_folders,
    recorded_folders,
)
from ..publish.inputs import Inputs
from ..publish.lock import LOCK_NAME
from ..publish.remedies import out_option
from ..publish.selection import (
    Selection,
    SelectionError,
    check_prefix,
    find_bundles,
    read_selection,
    without,
)
from ..spec.cells import product, target_cells, targets_or_names, with_options
from ..spec.kinds import SpecKind
from ..spec.serving import ALL, all_archs
from ..spec.usage import UsageError, spec_named

DEFAULT_OUT = Path("generated")


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate. Without target, module and recipe: what the locks record.

    Attributes:
        out: folder that holds one bundle per architecture.
        targets: selections that replace those of the bundles they name.
        archs, modules, recipes: cells to add; archs alone narrow what is regenerated.
        options: choices of the modules named, all of them for each.
        remove: take the named cells away instead.
        namespace: new prefix of the bundles' namespaces; the recorded or default one if None.
        folders: folders to read besides the built-in and the recorded ones.
        no_fusions: fusions that the bundles leave out, and no others; those recorded if None.
    """

    out: Path = DEFAULT_OUT
    targets: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    remove: bool = False
    namespace: str | None = None
    folders: Folders = BUILTIN
    no_fusions: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A bundle to make: its selection so far, the folders it may need, and who asks for what.

    Attributes:
        recorded: the selection of its lock, None for a new bundle.
        specs, templates: extra folders, recorded and given.
        given: cells of the request itself.
        strict: whether a given cell that cannot be made is an error, not a note.
        inner: those of the bundles in a fat one.
    """

    bundle: Path
    selection: Selection
    recorded: Selection | None
    specs: tuple[Path, ...]
    templates: tuple[Path, ...]
    given: frozenset[Cell] = field(default_factory=frozenset)
    strict: bool = True
    inner: tuple[Job, ...] = ()

    @property
    def all(self) -> tuple[Job, ...]:
        """The jobs of all bundles that it makes, in the order in which they are written."""
        return (*self.inner, self)


def jobs_of(request: Request, inputs: Inputs) -> tuple[Job, ...]:
    """The bundles of a request, in sorted order."""
    targets_or_names(
        request.targets, (*request.archs, *request.modules, *request.recipes, *request.options)
    )
    if request.namespace is not None:
        check_prefix(request.namespace)
    if request.targets:
        jobs = list(_targetjobs_of(request, inputs))
    elif request.modules or request.recipes or request.options:
        jobs = list(_celljobs_of(request, inputs))
    elif request.remove:
        raise UsageError("--remove: say what: --arch, --module and --recipe, or --target")
    else:
        jobs = list(_recordedjobs_of(request, inputs))
    renamed = [_renamed(job, request.namespace) for job in jobs]
    if request.no_fusions is not None:
        renamed = [_without_fusions(job, request.no_fusions, inputs) for job in renamed]
    return tuple(sorted(map(_with_inner, renamed), key=lambda job: job.bundle))


def _renamed(job: Job, namespace: str | None) -> Job:
    if namespace is None:
        return job
    return replace(job, selection=replace(job.selection, namespace=namespace))


def _without_fusions(job: Job, names: tuple[str, ...], inputs: Inputs) -> Job:
    """The bundle without these fusions.

    Raises:
        UsageError: an unknown one.
    """
    specs = inputs.specs(job.specs)
    known = tuple(sorted({spec_named(specs, SpecKind.FUSIONS, name) for name in names}))
    return replace(job, selection=replace(job.selection, no_fusions=known))


def _targetjobs_of(request: Request, inputs: Inputs) -> Iterator[Job]:
    specs = inputs.specs(request.folders.specs)
    for arch, cells in target_cells(specs, request.targets).items():
        bundle = _bundle_of(arch, request.out)
        try:
            recorded = read_selection(bundle)
        except SelectionError:
            recorded = None  # It is about to be replaced.
        if request.remove:
            here = [c for c in cells.every if recorded and c in recorded.every]
            yield _changed(request, bundle, arch, recorded, here)
        else:
            start = Selection(arch, recorded.namespace) if recorded else Selection(arch)
            new = replace(start, cells=cells.files, digests=cells.digests)
            if arch == ALL:
                new = replace(new, archs=all_archs(specs))
            yield Job(
                bundle,
                new,
                recorded,
                merge_folders(request.folders.specs),
                merge_folders(request.folders.templates),
                frozenset(cells.every),
                strict=False,
            )


def _celljobs_of(request: Request, inputs: Inputs) -> Iterator[Job]:
    missing = [
        f"--{name}"
        for name, words in (
            ("arch", request.archs),
            ("module", request.modules),
            ("recipe", request.recipes),
        )
        if not words
    ]
    if missing:
        raise UsageError(f"--arch, --module and --recipe go together; add {' and '.join(missing)}")
    cells = product(request.modules, request.recipes)
    if request.options:
        specs = inputs.specs(request.folders.specs)
        cells = with_options(specs, cells, request.options)
    for arch in dict.fromkeys(request.archs):
        if arch == NATIVE:
            arch = arch_named(arch, inputs.specs(request.folders.specs))
        bundle = _bundle_of(arch, request.out)
        recorded = read_selection(bundle) if bundle.is_dir() else None
        job = _changed(request, bundle, arch, recorded, cells)
        if arch == ALL and not request.remove:
            known = all_archs(inputs.specs(request.folders.specs))
            archs = tuple(sorted({*job.selection.archs, *known}))
            job = replace(job, selection=replace(job.selection, archs=archs))
        yield job


def _changed(
    request: Request,
    bundle: Path,
    arch: str,
    recorded: Selection | None,
    cells: Sequence[Cell],
) -> Job:
    """A bundle with cells added or taken away."""
    before = recorded or Selection(arch)
    if request.remove:
        if recorded is None:
            raise UsageError(f"--remove: {bundle} holds no bundle, so there is nothing to remove")
        after = without(before, cells, bundle)
        given: frozenset[Cell] = frozenset()
    else:
        after = before.adding(cells)
        given = frozenset(cells)
    return job_for(request, bundle, after, recorded, given)


def _recordedjobs_of(request: Request, inputs: Inputs) -> Iterator[Job]:
    """The bundles below `out`, as recorded; only those of the named archs, if any are named."""
    wanted = list(dict.fromkeys(request.archs))
    if NATIVE in wanted:
        native = arch_named(NATIVE, inputs.specs(request.folders.specs))
        wanted = [native if arch == NATIVE else arch for arch in wanted]
    found = {bundle: selection_of(bundle) for bundle in find_bundles(request.out)}
    present = {recorded.arch for recorded in found.values()}
    for arch in wanted:
        if arch not in present:
            spec_named(inputs.specs(request.folders.specs), SpecKind.ARCHS, arch, (ALL,))
            raise UsageError(
                f"--arch {arch}: {request.out} holds no bundle for it yet; say what to make with "
                "--module and --recipe"
            )
    for bundle, recorded in found.items():
        if not wanted or recorded.arch in wanted:
            yield job_for(request, bundle, recorded, recorded)


def recorded_jobs(bundles: Sequence[Path], folders: Folders) -> tuple[Job, ...]:
    """The jobs that make bundles anew, each from the selection in its lock; sorted."""
    return tuple(
        _with_inner(job_for(Request(folders=folders), bundle, recorded, recorded))
        for bundle in sorted(set(bundles))
        for recorded in [selection_of(bundle)]
    )


def _with_inner(job: Job) -> Job:
    """The job of a fat bundle with those of the bundles in it, which follow from its selection.

    Each is to have all of its cells, so that what an architecture learns to make comes with the
    next fusegen.  A bundle of an architecture that it no longer has is to have none.
    """
    if not job.selection.is_fat:
        return job
    whole = job.selection
    before = job.recorded.archs if job.recorded else ()
    inner = [
        replace(
            job,
            bundle=job.bundle / arch,
            selection=replace(
                whole, arch=arch, archs=(), cells=whole.cells if arch in whole.archs else ()
            ),
            recorded=_readable(job.bundle / arch),
            strict=False,
        )
        for arch in sorted({*whole.archs, *before})
    ]
    return replace(job, inner=tuple(inner))


def _readable(bundle: Path) -> Selection | None:
    """The recorded selection, which only says what has changed since."""
    try:
        return read_selection(bundle)
    except SelectionError:
        return None


def selection_of(bundle: Path) -> Selection:
    found = read_selection(bundle)
    if found is None:
        raise UsageError(f"{bundle}: is not a bundle, it holds no {LOCK_NAME}")
    return found


def _bundle_of(arch: str, out: Path) -> Path:
    """The bundle of an architecture: the one whose lock names it, else the folder of its name."""
    for bundle in find_bundles(out):
        try:
            found = read_selection(bundle)
        except SelectionError:
            continue
        if found and found.arch == arch and bundle.name != arch and not (out / arch).is_dir():
            return bundle
    return out / arch


def job_for(
    request: Request,
    bundle: Path,
    wanted: Selection,
    recorded: Selection | None,
    given: frozenset[Cell] = frozenset(),
) -> Job:
    """Join the recorded extra folders with those of the request.

    Raises:
        UsageError: a recorded extension is not installed; or a recorded folder is gone, and the
            request neither names another nor removes; or it lies elsewhere, and the request does
            not name it.
    """
    if recorded and not request.remove:
        _require_extensions(recorded, bundle)
    tolerant = request.remove or bool(request.folders.specs or request.folders.templates)
    joined: list[tuple[Path, ...]] = []
    for option, written, more in (
        ("--specs", wanted.specs, request.folders.specs),
        ("--templates", wanted.templates, request.folders.templates),
    ):
        folders = recorded_folders(bundle, written)
        gone = [folder for folder in folders if not folder.is_dir()]
        if gone and not tolerant:
            raise UsageError(
                f"{bundle / LOCK_NAME} records the folder {gone[0]}, which does not exist; "
                f"restore it, or say where it is now with {option}"
            )
        present = [folder for folder in folders if folder not in gone]
        foreign = foreign_folders(bundle, present, more)
        if foreign and not request.remove:
            raise UsageError(distrust(bundle, option, foreign))
        present = [folder for folder in present if folder not in foreign]
        joined.append(merge_folders(present, more))
    return Job(bundle, wanted, recorded, joined[0], joined[1], given)


def _require_extensions(recorded: Selection, bundle: Path) -> None:
    """Refuse to make cells anew without an extension that they were made with.

    Raises:
        UsageError: naming its package.
    """
    present = {each.name for each in installed()}
    for each in recorded.extensions:
        if each.name not in present:
            raise UsageError(
                f"{bundle / LOCK_NAME} records extension {each.name!r} of package {each.package}"
                f" {each.version}, which is not installed: pip install"
                f" {each.package}=={each.version}, or take its modules out with"
                f" fusegen generate --remove --arch {recorded.arch} --module <module>"
                f" --recipe <recipe>{out_option(bundle.parent)}"
            )
