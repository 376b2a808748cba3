"""Generate and check: a request becomes selections, rendered bundles, and what differs on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__, paths, selection
from .emit.fileset import FileSet
from .files import resolve
from .gpu import NATIVE, arch_named
from .ir.naming import Cell
from .ir.plan import Unsupported
from .publish.lock import LOCK_NAME, read_lock
from .queries import unsupported_row
from .selection import Selection, SelectionError, UsageError, spec_named
from .sources import BUILTIN, Inputs, Sources, derivations
from .spec.kinds import SpecKind

if TYPE_CHECKING:
    from .publish.changes import Change, Changes
    from .spec.schema import SchemaChange

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
        sources: folders to read besides the built-in and the recorded ones.
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
    sources: Sources = BUILTIN
    no_fusions: tuple[str, ...] | None = None


class Policy(Enum):
    """What `generate` does with the difference it finds."""

    WRITE = "write"
    COMPARE = "compare"


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
    """

    bundle: Path
    selection: Selection
    changes: Changes
    selection_changed: bool
    unsupported: tuple[Unsupported, ...]
    written: bool = False
    rolled_forward: bool = False
    stale: Mapping[str, str] = field(default_factory=dict)

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
        from .publish.changes import ChangeKind

        return tuple(c for c in self.changes if c.kind is not ChangeKind.UNCHANGED)

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
            "written": self.written,
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


@dataclass(frozen=True, slots=True)
class _Wish:
    """A bundle to make: its selection so far, the folders it may need, and who asks for what.

    Attributes:
        recorded: the selection of its lock, None for a new bundle.
        specs, templates: extra folders, recorded and given.
        given: cells of the request itself.
        strict: whether a given cell that cannot be made is an error, not a note.
    """

    bundle: Path
    selection: Selection
    recorded: Selection | None
    specs: tuple[Path, ...]
    templates: tuple[Path, ...]
    given: frozenset[Cell] = field(default_factory=frozenset)
    strict: bool = True


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A wish fulfilled in memory; the selection names only the cells and folders in use."""

    wish: _Wish
    selection: Selection
    files: FileSet
    unsupported: tuple[Unsupported, ...]


def generate(
    request: Request,
    policy: Policy = Policy.WRITE,
    *,
    prune: bool = True,
    accept_format: bool = False,
) -> Generated:
    """Render the bundles a request names and bring the disk up to them, all or none of them.

    Inside the checkout of fusegen, a request that names nothing also writes the JSON Schemas of
    the specs.

    Args:
        prune: remove owned files that are no longer generated, instead of keeping them owned.
        accept_format: overwrite files that differ from the new output in layout only.

    Raises:
        SpecError: the specs are wrong.
        RenderError: a template is wrong.
        UsageError: an unknown name, a combination without meaning, or a cell that cannot be made.
        PublishError: a bundle is busy or not usable.
        LockError: a lock cannot be read.
    """
    with _alone(request.out, policy):
        return _generate(request, policy is Policy.WRITE, prune, accept_format)


def _alone(out: Path, policy: Policy) -> AbstractContextManager[None]:
    """From reading what locks record to publishing, nobody else may change it."""
    from .publish.publish import generating

    return generating(out) if policy is Policy.WRITE else nullcontext()


def _generate(request: Request, writing: bool, prune: bool, accept_format: bool) -> Generated:
    from .publish.publish import PublishError, recover
    from .spec import schema as schemas

    bundles = selection.find_bundles(request.out)
    inside = [b for b in bundles if b.is_dir() and not _leads_out(b)]
    rolled_forward = {b for b in inside if writing and recover(b)}
    inputs = Inputs()
    wishes = _wishes(request, inputs)
    for wish in wishes:
        if _leads_out(wish.bundle):
            raise PublishError(
                f"{wish.bundle}: a symbolic link leads from here out of {request.out}, where "
                "nothing is to be written; put a folder in its place, or name the folder above the "
                "one that it leads to with --out"
            )
    everything = not (request.targets or request.archs)
    stale: tuple[SchemaChange, ...] = ()
    if everything and paths.inside_checkout(Path.cwd()):
        stale = schemas.diff(paths.builtin_specs())
    if not wishes and not stale:
        raise UsageError(_nothing(request))
    reports = _compare(wishes, inputs, prune=prune, accept_format=accept_format)
    found = Generated(tuple(report for report, _ in reports), stale)
    if not writing or found.refused:
        return found
    if stale:
        schemas.write(paths.builtin_specs())
    return Generated(
        tuple(
            _publish(report, files, prune, accept_format, report.bundle in rolled_forward)
            for report, files in reports
        ),
        stale,
    )


def _leads_out(bundle: Path) -> bool:
    return bundle.is_symlink() and not resolve(bundle).is_relative_to(resolve(bundle.parent))


def _nothing(request: Request) -> str:
    return (
        f"{request.out} holds no bundle to regenerate; name what to make: fusegen generate "
        "--target <target>, or --arch <arch> --module <module> --recipe <recipe>"
    )


def _wishes(request: Request, inputs: Inputs) -> tuple[_Wish, ...]:
    """The bundles of a request, in sorted order."""
    selection.targets_or_names(
        request.targets, (*request.archs, *request.modules, *request.recipes, *request.options)
    )
    if request.namespace is not None:
        selection.check_prefix(request.namespace)
    if request.targets:
        wishes = list(_target_wishes(request, inputs))
    elif request.modules or request.recipes or request.options:
        wishes = list(_cell_wishes(request, inputs))
    elif request.remove:
        raise UsageError("--remove: say what: --arch, --module and --recipe, or --target")
    else:
        wishes = list(_recorded_wishes(request, inputs))
    renamed = [_renamed(wish, request.namespace) for wish in wishes]
    if request.no_fusions is not None:
        renamed = [_without_fusions(wish, request.no_fusions, inputs) for wish in renamed]
    return tuple(sorted(renamed, key=lambda wish: wish.bundle))


def _renamed(wish: _Wish, namespace: str | None) -> _Wish:
    if namespace is None:
        return wish
    return replace(wish, selection=replace(wish.selection, namespace=namespace))


def _without_fusions(wish: _Wish, names: tuple[str, ...], inputs: Inputs) -> _Wish:
    """The bundle without these fusions.

    Raises:
        UsageError: an unknown one.
    """
    specs = inputs.specs(wish.specs)
    known = tuple(sorted({spec_named(specs, SpecKind.FUSIONS, name) for name in names}))
    return replace(wish, selection=replace(wish.selection, no_fusions=known))


def _target_wishes(request: Request, inputs: Inputs) -> Iterator[_Wish]:
    specs = inputs.specs(request.sources.specs)
    for arch, cells in selection.target_cells(specs, request.targets).items():
        bundle = _bundle_of(arch, request.out)
        try:
            recorded = selection.read_selection(bundle)
        except SelectionError:
            recorded = None  # It is about to be replaced.
        if request.remove:
            here = [c for c in cells if recorded and c in recorded.cells]
            yield _changed(request, bundle, arch, recorded, here)
        else:
            start = Selection(arch, recorded.namespace) if recorded else Selection(arch)
            new = replace(start, cells=cells)
            yield _Wish(
                bundle,
                new,
                recorded,
                selection.merge_folders(request.sources.specs),
                selection.merge_folders(request.sources.templates),
                frozenset(cells),
                strict=False,
            )


def _cell_wishes(request: Request, inputs: Inputs) -> Iterator[_Wish]:
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
    cells = selection.product(request.modules, request.recipes)
    if request.options:
        specs = inputs.specs(request.sources.specs)
        cells = selection.with_options(specs, cells, request.options)
    for arch in dict.fromkeys(request.archs):
        if arch == NATIVE:
            arch = arch_named(arch, inputs.specs(request.sources.specs))
        bundle = _bundle_of(arch, request.out)
        recorded = selection.read_selection(bundle) if bundle.is_dir() else None
        yield _changed(request, bundle, arch, recorded, cells)


def _changed(
    request: Request,
    bundle: Path,
    arch: str,
    recorded: Selection | None,
    cells: Sequence[Cell],
) -> _Wish:
    """A bundle with cells added or taken away."""
    before = recorded or Selection(arch)
    if request.remove:
        if recorded is None:
            raise UsageError(f"--remove: {bundle} holds no bundle, so there is nothing to remove")
        after = selection.without(before, cells, bundle)
        given: frozenset[Cell] = frozenset()
    else:
        after = replace(before, cells=tuple(sorted({*before.cells, *cells})))
        given = frozenset(cells)
    return _wish(request, bundle, after, recorded, given)


def _recorded_wishes(request: Request, inputs: Inputs) -> Iterator[_Wish]:
    """The bundles below `out`, as recorded; only those of the named archs, if any are named."""
    wanted = list(dict.fromkeys(request.archs))
    if NATIVE in wanted:
        native = arch_named(NATIVE, inputs.specs(request.sources.specs))
        wanted = [native if arch == NATIVE else arch for arch in wanted]
    found = {bundle: _selection_of(bundle) for bundle in selection.find_bundles(request.out)}
    present = {recorded.arch for recorded in found.values()}
    for arch in wanted:
        if arch not in present:
            spec_named(inputs.specs(request.sources.specs), SpecKind.ARCHS, arch)
            raise UsageError(
                f"--arch {arch}: {request.out} holds no bundle for it yet; say what to make with "
                "--module and --recipe"
            )
    for bundle, recorded in found.items():
        if not wanted or recorded.arch in wanted:
            yield _wish(request, bundle, recorded, recorded)


def _selection_of(bundle: Path) -> Selection:
    found = selection.read_selection(bundle)
    if found is None:
        raise UsageError(f"{bundle}: is not a bundle, it holds no {LOCK_NAME}")
    return found


def _bundle_of(arch: str, out: Path) -> Path:
    """The bundle of an architecture: the one whose lock names it, else the folder of its name."""
    for bundle in selection.find_bundles(out):
        try:
            found = selection.read_selection(bundle)
        except SelectionError:
            continue
        if found and found.arch == arch and bundle.name != arch and not (out / arch).is_dir():
            return bundle
    return out / arch


def _wish(
    request: Request,
    bundle: Path,
    wanted: Selection,
    recorded: Selection | None,
    given: frozenset[Cell] = frozenset(),
) -> _Wish:
    """Join the recorded extra folders with those of the request.

    Raises:
        UsageError: a recorded folder is gone, and the request neither names another nor removes; or
            it lies elsewhere, and the request does not name it.
    """
    tolerant = request.remove or bool(request.sources.specs or request.sources.templates)
    joined: list[tuple[Path, ...]] = []
    for option, written, more in (
        ("--specs", wanted.specs, request.sources.specs),
        ("--templates", wanted.templates, request.sources.templates),
    ):
        folders = selection.recorded_folders(bundle, written)
        gone = [folder for folder in folders if not folder.is_dir()]
        if gone and not tolerant:
            raise UsageError(
                f"{bundle / LOCK_NAME} records the folder {gone[0]}, which does not exist; "
                f"restore it, or say where it is now with {option}"
            )
        present = [folder for folder in folders if folder not in gone]
        foreign = selection.foreign_folders(bundle, present, more)
        if foreign and not request.remove:
            raise UsageError(selection.distrust(bundle, option, foreign))
        present = [folder for folder in present if folder not in foreign]
        joined.append(selection.merge_folders(present, more))
    return _Wish(bundle, wanted, recorded, joined[0], joined[1], given)


def _compare(
    wishes: Sequence[_Wish], inputs: Inputs, *, prune: bool, accept_format: bool
) -> list[tuple[BundleReport, FileSet]]:
    """Render every wish and compare it with the disk.

    Ruff works on a bundle while the next one is rendered, or the previous one compared.
    """
    from .emit.polish import polishing

    with ExitStack() as stack:
        pending = []
        for wish in wishes:
            rendered = _render(wish, inputs)
            pending.append((rendered, stack.enter_context(polishing(rendered.files))))
        return [
            (_report(rendered, files, prune=prune, accept_format=accept_format), files)
            for rendered, finish in pending
            for files in (finish(),)
        ]


def _render(wish: _Wish, inputs: Inputs) -> _Rendered:
    from .emit.bundle import render_bundle
    from .passes.pipeline import resolve

    wanted = wish.selection
    specs = selection.without_fusions(inputs.specs(wish.specs), wanted.no_fusions)
    selection.check_cells(specs, wanted, wish.bundle, wish.given)
    plan = resolve(specs, wanted.arch, wanted.cells, derivations())
    if wish.strict and plan.unsupported:
        raise UsageError("\n".join(_impossible(cell, wish) for cell in plan.unsupported))
    renderer = inputs.renderer(wish.templates)
    files = FileSet()
    if plan.modules:
        files = render_bundle(plan.modules, specs.archs[wanted.arch], wanted.op_namespace, renderer)
    specs_in_use = selection.used_specs(
        [path for path in wish.specs if path != paths.builtin_specs()], specs, plan.modules
    )
    templates_in_use = selection.used_templates(
        [path for path in wish.templates if path != paths.builtin_templates()], files
    )
    settled = replace(
        wanted,
        cells=tuple(Cell.parse(each.cell) for each in plan.modules),
        specs=selection.relative_folders(wish.bundle, specs_in_use),
        templates=selection.relative_folders(wish.bundle, templates_in_use),
    )
    return _Rendered(wish, settled, files, plan.unsupported)


def _impossible(cell: Unsupported, wish: _Wish) -> str:
    parsed = Cell.parse(cell.cell)
    text = f"{cell.cell} cannot be made for {cell.arch}: {cell.reason}"
    if parsed in wish.given:
        return text
    return f"{text}; take it out: {selection.removal(parsed, cell.arch, wish.bundle)}"


def _report(
    rendered: _Rendered, files: FileSet, *, prune: bool, accept_format: bool
) -> BundleReport:
    from .publish.changes import diff

    bundle, recorded = rendered.wish.bundle, rendered.wish.recorded
    changes = diff(files, bundle, prune=prune)
    if accept_format:
        changes = changes.accepting_format()
    return BundleReport(
        bundle=bundle,
        selection=rendered.selection,
        changes=changes,
        selection_changed=recorded != rendered.selection,
        unsupported=rendered.unsupported,
    )


def _publish(
    report: BundleReport, files: FileSet, prune: bool, accept_format: bool, rolled_forward: bool
) -> BundleReport:
    from .publish.publish import publish

    if not files and not report.bundle.is_dir():
        return report
    done = publish(
        files,
        report.bundle,
        report.selection.to_json(),
        __version__,
        prune=prune,
        accept_format=accept_format,
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


def check(
    bundles: Sequence[Path] = (), out: Path = DEFAULT_OUT, sources: Sources = BUILTIN
) -> Generated:
    """Regenerate bundles in memory, each from the selection in its lock, and compare.

    A library that was built is held against the sources that lie beside it.

    Args:
        bundles: folders that hold a lock; by default all directly below `out` and, inside the
            checkout of fusegen, the JSON Schemas of the specs.

    Raises:
        SpecError, RenderError, LockError: as `generate`.
        UsageError: no bundle to check, or a recorded cell that cannot be made.
    """
    from .spec import schema as schemas

    stale: tuple[SchemaChange, ...] = ()
    in_checkout = not bundles and paths.inside_checkout(Path.cwd())
    if in_checkout:
        stale = schemas.diff(paths.builtin_specs())
    chosen = tuple(bundles) or selection.find_bundles(out)
    if not chosen and not in_checkout:
        raise UsageError(f"{out} holds no bundle to check; name the folders that hold {LOCK_NAME}")
    wishes = [
        _wish(Request(sources=sources), bundle, recorded, recorded)
        for bundle in sorted(set(chosen))
        for recorded in [_selection_of(bundle)]
    ]
    compared = _compare(wishes, Inputs(), prune=True, accept_format=False)
    reports = (replace(report, stale=_stale_cells(report.bundle)) for report, _ in compared)
    return Generated(tuple(reports), stale)


def _stale_cells(bundle: Path) -> dict[str, str]:
    from .build.library import stale_cells
    from .build.toolchain import BuildError

    try:
        return stale_cells(bundle)
    except BuildError:  # What says which sources there are was edited, which is a difference.
        return {}
