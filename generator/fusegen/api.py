"""What fusegen can do, as functions that return dataclasses and print nothing.

The command line parses, calls one of these, prints what came back and sets the exit code.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusegen import __version__, paths, selection
from fusegen.fileset import FileSet
from fusegen.load import SpecSet, load
from fusegen.lock import LOCK_NAME, read_lock
from fusegen.model.plan import ModulePlan, Status, Unsupported
from fusegen.model.predicate import Predicate
from fusegen.model.shapes import Binary, Const, Shape, Sym
from fusegen.model.specs import (
    AnySpec,
    ArchSpec,
    FusionSpec,
    ModuleSpec,
    RecipeSpec,
    SpecKind,
    TargetSpec,
)
from fusegen.naming import Cell
from fusegen.selection import Selection, SelectionError, UsageError, known

if TYPE_CHECKING:
    from fusegen.build import BuildReport, Progress
    from fusegen.demo import DemoResult
    from fusegen.publish import Changes
    from fusegen.render import Renderer
    from fusegen.schemas import SchemaChange
    from fusegen.toolchain import Toolchain

NATIVE = "native"
"""What stands for the architecture of the visible GPU where an arch is asked for."""

DEFAULT_OUT = Path("generated")


@dataclass(frozen=True, slots=True)
class Sources:
    """Folders to read besides the built-in ones."""

    specs: tuple[Path, ...] = ()
    templates: tuple[Path, ...] = ()

    @property
    def options(self) -> dict[str, Sequence[Path]]:
        """The folders by the option that names them."""
        return {"--specs": self.specs, "--templates": self.templates}


class _Inputs:
    """Specs and renderers by their extra folders; each set of folders is read once."""

    def __init__(self) -> None:
        self._specs: dict[tuple[Path, ...], SpecSet] = {}
        self._renderers: dict[tuple[Path, ...], Renderer] = {}

    def specs(self, extra: Iterable[Path]) -> SpecSet:
        folders = _besides(paths.builtin_specs(), extra)
        if folders not in self._specs:
            self._specs[folders] = load(folders)
        return self._specs[folders]

    def renderer(self, extra: Iterable[Path]) -> Renderer:
        from fusegen.render import Renderer

        folders = _besides(paths.builtin_templates(), extra)
        if folders not in self._renderers:
            self._renderers[folders] = Renderer(folders)
        return self._renderers[folders]


def _besides(builtin: Path, extra: Iterable[Path]) -> tuple[Path, ...]:
    """The built-in folder first, then the others, however they were written."""
    return (builtin, *(path for path in selection.merge_folders(extra) if path != builtin))


# list, validate


@dataclass(frozen=True, slots=True)
class Entry:
    """A spec as `list` shows it.

    Attributes:
        kind: folder of its kind, such as `ops`.
        name: what commands call it.
        summary: one line.
        file: where it stands.
        details: what else a choice may depend on, by name; JSON values.
    """

    kind: str
    name: str
    summary: str
    file: str
    details: Mapping[str, object]

    def to_json(self) -> dict[str, object]:
        """Name, summary, file and details in one object."""
        head: dict[str, object] = {"name": self.name, "summary": self.summary, "file": self.file}
        return head | dict(self.details)


def list_specs(kind: str | None = None, sources: Sources = Sources()) -> tuple[Entry, ...]:
    """The specs of one kind, named by its folder, or of all kinds.

    Raises:
        SpecError: the specs are wrong.
        UsageError: there is no such kind.
    """
    if kind is not None:
        known("kind", kind, [each.folder for each in SpecKind])
    specs = load_specs(sources)
    return tuple(
        Entry(
            each.folder, name, _summary(spec, specs), specs.source(each, name).file, _details(spec)
        )
        for each in SpecKind
        if kind in (None, each.folder)
        for name, spec in specs.of(each).items()
    )


def load_specs(sources: Sources = Sources()) -> SpecSet:
    """The built-in specs and those of the extra folders, checked.

    Raises:
        SpecError: with every problem of every file.
    """
    return _Inputs().specs(sources.specs)


def _summary(spec: AnySpec, specs: SpecSet) -> str:
    if isinstance(spec, ModuleSpec):
        return spec.summary or specs.ops[spec.op or ""].summary
    return spec.summary


def _details(spec: AnySpec) -> dict[str, object]:
    match spec:
        case ModuleSpec():
            ops = [item.op for item in spec.chain] or [spec.op]
            return {"class": spec.class_, "ops": ops}
        case RecipeSpec():
            return {"source": spec.source, "roles": [role.value for role in spec.roles]}
        case ArchSpec():
            capability = list(spec.capability) if spec.capability else None
            return {"capability": capability, "toolkit": spec.toolkit}
        case TargetSpec():
            return {
                "archs": list(spec.archs),
                "modules": list(spec.modules),
                "recipes": list(spec.recipes),
            }
        case FusionSpec():
            return {"pass": spec.pass_.value}
    return {}


# plan, explain


@dataclass(frozen=True, slots=True)
class Query:
    """Which cells `plan` shows. Empty means all, except that a target narrows everything."""

    targets: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A cell on an architecture, and what it would be made of."""

    module: str
    recipe: str
    arch: str
    status: str
    reason: str
    kernels: tuple[str, ...]
    saved: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """All fields."""
        return dataclasses.asdict(self)


def plan(query: Query = Query(), sources: Sources = Sources()) -> tuple[PlanRow, ...]:
    """Plan cells and write nothing; sorted by architecture, module and recipe.

    Raises:
        SpecError: the specs are wrong.
        UsageError: an unknown name, a target together with other names, `native` without a GPU.
    """
    from fusegen.resolve import resolve

    specs = load_specs(sources)
    _targets_or_names(query.targets, (*query.archs, *query.modules, *query.recipes))
    if query.targets:
        wanted = selection.target_cells(specs, query.targets)
    else:
        modules = [known("module", name, specs.modules) for name in query.modules]
        recipes = [known("recipe", name, specs.recipes) for name in query.recipes]
        cells = selection.product(modules or specs.modules, recipes or specs.recipes)
        archs = [_arch(name, specs) for name in query.archs] or list(specs.archs)
        wanted = {arch: cells for arch in archs}
    rows: list[PlanRow] = []
    for arch, cells in sorted(wanted.items()):
        found = resolve(specs, arch, cells)
        rows += map(_plan_row, found.modules)
        rows += map(_unsupported_row, found.unsupported)
    return tuple(sorted(rows, key=lambda row: (row.arch, row.module, row.recipe)))


def _targets_or_names(targets: Sequence[str], names: Sequence[str]) -> None:
    if targets and names:
        raise UsageError(
            "--target names archs, modules and recipes at once; leave out --arch, --module and "
            "--recipe, or --target"
        )


def _plan_row(plan: ModulePlan) -> PlanRow:
    return PlanRow(
        plan.module,
        plan.recipe,
        plan.arch,
        plan.status.value,
        plan.reason,
        tuple(kernel.name for kernel in plan.kernels),
        tuple(result.buffer for result in plan.saved),
    )


def _unsupported_row(cell: Unsupported) -> PlanRow:
    status = Status.UNSUPPORTED.value
    return PlanRow(cell.module, cell.recipe, cell.arch, status, cell.reason, (), ())


@dataclass(frozen=True, slots=True)
class Explanation:
    """One cell on one architecture: the plan and its text, or why there is none.

    Attributes:
        row: status and reason.
        lines: for people.
        plan: the whole plan, None for an unsupported cell.
    """

    row: PlanRow
    lines: tuple[str, ...]
    plan: ModulePlan | None

    def to_json(self) -> dict[str, object]:
        """The row, the text and the plan; formulas and conditions as text."""
        return self.row.to_json() | {"text": list(self.lines), "plan": _plain(self.plan)}


def explain(module: str, recipe: str, arch: str, sources: Sources = Sources()) -> Explanation:
    """What one module does, keeps, runs and costs, or why it cannot be made.

    Raises:
        SpecError: the specs are wrong.
        UsageError: an unknown name, or `native` without a GPU.
    """
    from fusegen.emit.explain import explain as explain_plan
    from fusegen.resolve import resolve

    specs = load_specs(sources)
    cell = Cell(known("module", module, specs.modules), known("recipe", recipe, specs.recipes))
    found = resolve(specs, _arch(arch, specs), [cell])
    if found.unsupported:
        row = _unsupported_row(found.unsupported[0])
        return Explanation(row, (f"{cell} on {row.arch}: {row.status} ({row.reason})",), None)
    made = found.modules[0]
    return Explanation(_plan_row(made), tuple(explain_plan(made)), made)


def _plain(value: Any) -> Any:
    """A plan as JSON values."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Shape | Predicate | Binary | Const | Sym):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


# the visible GPU


def visible_capability(env: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Compute capability of the first GPU that a program of this user sees, or None.

    The driver's own tool is asked: loading CUDA would cost seconds and a context.
    """
    env = os.environ if env is None else env
    first = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first in ("", "-1", "NoDevFiles"):
        return None
    program = shutil.which("nvidia-smi", path=env.get("PATH", ""))
    if program is None:
        return None
    # Parts of a GPU have names the tool does not take here; the whole GPU's answer serves.
    device = [f"--id={first}"] if first.isdigit() or first.startswith("GPU-") else []
    words = [program, "--query-gpu=compute_cap", "--format=csv,noheader", *device]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    major, dot, minor = done.stdout.split("\n")[0].strip().partition(".")
    if done.returncode or not (dot and major.isdigit() and minor.isdigit()):
        return None
    return int(major), int(minor)


def arch_of(capability: tuple[int, int] | None, specs: SpecSet) -> str | None:
    """The architecture for a GPU; the one with the longest name (sm_90a, not sm_90) of several."""
    names = [name for name, arch in specs.archs.items() if arch.capability == capability]
    return max(names, key=len) if capability and names else None


def _arch(name: str, specs: SpecSet) -> str:
    if name != NATIVE:
        return known("arch", name, [*specs.archs, NATIVE])
    capability = visible_capability()
    found = arch_of(capability, specs)
    if found is None:
        why = (
            "there is no visible NVIDIA GPU"
            if capability is None
            else f"the GPU has capability {capability[0]}.{capability[1]}, which no arch states"
        )
        raise UsageError(f"--arch native: {why}; name one of: {', '.join(specs.archs)}")
    return found


# generate


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate. Without target, module and recipe: what the locks record.

    Attributes:
        out: folder that holds one bundle per architecture.
        targets: selections that replace those of the bundles they name.
        archs, modules, recipes: cells to add; archs alone narrow what is regenerated.
        remove: take the named cells away instead.
        namespace: new prefix of the bundles' namespaces; the recorded or default one if None.
        sources: folders to read besides the built-in and the recorded ones.
    """

    out: Path = DEFAULT_OUT
    targets: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    remove: bool = False
    namespace: str | None = None
    sources: Sources = Sources()


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
    """

    bundle: Path
    selection: Selection
    changes: Changes
    selection_changed: bool
    unsupported: tuple[Unsupported, ...]
    written: bool = False
    rolled_forward: bool = False

    @property
    def drifted(self) -> bool:
        """Whether disk and lock were anything but what publishing leaves."""
        return self.changes.drifted or self.selection_changed

    def to_json(self) -> dict[str, object]:
        """Everything but the contents of files."""
        return {
            "bundle": str(self.bundle),
            "arch": self.selection.arch,
            "namespace": self.selection.op_namespace,
            "cells": [str(cell) for cell in self.selection.cells],
            "unsupported": [_unsupported_row(cell).to_json() for cell in self.unsupported],
            "drifted": self.drifted,
            "selection_changed": self.selection_changed,
            "interrupted": self.changes.interrupted,
            "written": self.written,
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
    from fusegen import schemas
    from fusegen.publish import recover

    writing = policy is Policy.WRITE
    bundles = _touched(request)
    rolled_forward = {b for b in bundles if writing and b.is_dir() and recover(b)}
    inputs = _Inputs()
    wishes = _wishes(request, inputs)
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


def _touched(request: Request) -> tuple[Path, ...]:
    return selection.find_bundles(request.out)


def _nothing(request: Request) -> str:
    return (
        f"{request.out} holds no bundle to regenerate; name what to make: fusegen generate "
        "--target <target>, or --arch <arch> --module <module> --recipe <recipe>"
    )


def _wishes(request: Request, inputs: _Inputs) -> tuple[_Wish, ...]:
    """The bundles of a request, in sorted order."""
    _targets_or_names(request.targets, (*request.archs, *request.modules, *request.recipes))
    if request.namespace is not None:
        selection.check_prefix(request.namespace)
    if request.targets:
        wishes = list(_target_wishes(request, inputs))
    elif request.modules or request.recipes:
        wishes = list(_cell_wishes(request, inputs))
    elif request.remove:
        raise UsageError("--remove: say what: --arch, --module and --recipe, or --target")
    else:
        wishes = list(_recorded_wishes(request, inputs))
    renamed = (_renamed(wish, request.namespace) for wish in wishes)
    return tuple(sorted(renamed, key=lambda wish: wish.bundle))


def _renamed(wish: _Wish, namespace: str | None) -> _Wish:
    if namespace is None:
        return wish
    return replace(wish, selection=replace(wish.selection, namespace=namespace))


def _target_wishes(request: Request, inputs: _Inputs) -> Iterator[_Wish]:
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


def _cell_wishes(request: Request, inputs: _Inputs) -> Iterator[_Wish]:
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
    for arch in dict.fromkeys(request.archs):
        if arch == NATIVE:
            arch = _arch(arch, inputs.specs(request.sources.specs))
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


def _recorded_wishes(request: Request, inputs: _Inputs) -> Iterator[_Wish]:
    """The bundles below `out`, as recorded; only those of the named archs, if any are named."""
    wanted = list(dict.fromkeys(request.archs))
    if NATIVE in wanted:
        native = _arch(NATIVE, inputs.specs(request.sources.specs))
        wanted = [native if arch == NATIVE else arch for arch in wanted]
    found = {bundle: _selection_of(bundle) for bundle in selection.find_bundles(request.out)}
    present = {recorded.arch for recorded in found.values()}
    for arch in wanted:
        if arch not in present:
            known("arch", arch, inputs.specs(request.sources.specs).archs)
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
        UsageError: a recorded folder is gone, and the request neither names another nor removes.
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
        joined.append(selection.merge_folders([f for f in folders if f not in gone], more))
    return _Wish(bundle, wanted, recorded, joined[0], joined[1], given)


def _compare(
    wishes: Sequence[_Wish], inputs: _Inputs, *, prune: bool, accept_format: bool
) -> list[tuple[BundleReport, FileSet]]:
    """Render every wish and compare it with the disk.

    Polishing waits for ruff, so it runs beside the rendering of the next bundle.
    """
    from fusegen.polish import polish

    with ThreadPoolExecutor(max_workers=max(1, len(wishes))) as pool:
        pending = []
        for wish in wishes:
            rendered = _render(wish, inputs)
            pending.append((rendered, pool.submit(polish, rendered.files)))
        polished = [(rendered, future.result()) for rendered, future in pending]
    return [
        (_report(rendered, files, prune=prune, accept_format=accept_format), files)
        for rendered, files in polished
    ]


def _render(wish: _Wish, inputs: _Inputs) -> _Rendered:
    from fusegen.bundle import render_bundle
    from fusegen.resolve import resolve

    wanted = wish.selection
    specs = inputs.specs(wish.specs)
    selection.check_cells(specs, wanted, wish.bundle, wish.given)
    plan = resolve(specs, wanted.arch, wanted.cells)
    if wish.strict and plan.unsupported:
        raise UsageError("\n".join(_impossible(cell, wish) for cell in plan.unsupported))
    renderer = inputs.renderer(wish.templates)
    files = FileSet()
    if plan.modules:
        files = render_bundle(
            plan.modules, specs.archs[wanted.arch], wanted.op_namespace, renderer
        )
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
    from fusegen.publish import diff

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
    from fusegen.publish import publish

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
    return replace(
        report, written=True, rolled_forward=rolled_forward or done.rolled_forward
    )


def _remove_empty_bundle(bundle: Path) -> None:
    """Take away the lock of a bundle that owns nothing any more, and its folder if that is empty."""
    lock = read_lock(bundle)
    if lock is not None and not lock.files:
        (bundle / LOCK_NAME).unlink()
        if not any(bundle.iterdir()):
            bundle.rmdir()


# check


def check(
    bundles: Sequence[Path] = (), out: Path = DEFAULT_OUT, sources: Sources = Sources()
) -> Generated:
    """Regenerate bundles in memory, each from the selection in its lock, and compare.

    Args:
        bundles: folders that hold a lock; by default all directly below `out` and, inside the
            checkout of fusegen, the JSON Schemas of the specs.

    Raises:
        SpecError, RenderError, LockError: as `generate`.
        UsageError: no bundle to check, or a recorded cell that cannot be made.
    """
    from fusegen import schemas

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
    reports = _compare(wishes, _Inputs(), prune=True, accept_format=False)
    return Generated(tuple(report for report, _ in reports), stale)


# build


def find_tools(bundles: Sequence[Path]) -> Toolchain:
    """The compilers and headers a build of these bundles would use.

    Raises:
        BuildError: one of the bundles has nothing to build, or a tool is missing.
    """
    from fusegen.build import read_sources
    from fusegen.toolchain import find_toolchain

    for bundle in bundles:
        read_sources(bundle / "csrc" / "sources.cmake")
    return find_toolchain()


def build(
    bundle: Path,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    toolchain: Toolchain | None = None,
) -> BuildReport:
    """Compile and link the library of one bundle; see `fusegen.build.build`."""
    from fusegen.build import build as build_bundle

    return build_bundle(bundle, jobs=jobs, progress=progress, toolchain=toolchain)


# demo

DEMO_MODULE, DEMO_RECIPE = "grouped_mlp", "bf16"


def demo_folder() -> Path:
    """Where `demo` keeps its bundles: in the user's cache folder, so that nothing is littered."""
    from fusegen.objcache import default_root

    return default_root() / "demo"


@dataclass(frozen=True, slots=True)
class DemoBundle:
    """A bundle that the demo can run, and the architecture it is for."""

    folder: Path
    arch: str


def prepare_demo(
    arch: str | None = None,
    *,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
    sources: Sources = Sources(),
) -> DemoBundle:
    """Generate the module of the demo and, if its architecture has kernels, build it.

    Args:
        arch: architecture; by default that of the visible GPU, and `cpu` where there is none or
            where its kernels cannot be built.
        out: folder for the bundle; `demo_folder()` by default.
        say: hears what is being done.
        progress: hears of the build.

    Raises:
        UsageError: an unknown arch, or `native` without a GPU.
        BuildError: a named arch cannot be built.
        RefusedError: the bundle was edited by hand.
    """
    from fusegen.toolchain import BuildError

    specs = load_specs(sources)
    folder = out or demo_folder()
    chosen = _arch(arch, specs) if arch else arch_of(visible_capability(), specs) or "cpu"
    bundle = _demo_bundle(chosen, folder, sources, say)
    if not specs.archs[chosen].has_kernels:
        return DemoBundle(bundle, chosen)
    try:
        tools = find_tools([bundle])
        say(f"building with {tools.describe()}")
        build(bundle, toolchain=tools, progress=progress)
    except BuildError as error:
        if arch:
            raise
        say(f"the kernels for {chosen} cannot be built, so the demo runs on the CPU: {error}")
        return DemoBundle(_demo_bundle("cpu", folder, sources, say), "cpu")
    return DemoBundle(bundle, chosen)


def demo(
    ready: DemoBundle,
    *,
    steps: int | None = None,
    output: Path = Path("demo.png"),
    as_json: bool = False,
) -> DemoResult:
    """Train with a prepared bundle; shows progress and prints the comparison.

    Raises:
        DemoError: PyTorch or the GPU is missing, or the output cannot be drawn.
    """
    from fusegen.demo import run_demo

    return run_demo(ready.folder, ready.arch, steps=steps, output=output, as_json=as_json)


def _demo_bundle(
    arch: str, folder: Path, sources: Sources, say: Callable[[str], None]
) -> Path:
    from fusegen.publish import RefusedError

    request = Request(
        out=folder,
        archs=(arch,),
        modules=(DEMO_MODULE,),
        recipes=(DEMO_RECIPE,),
        sources=sources,
    )
    done = generate(request)
    if done.refused:
        raise RefusedError(done.refused[0].changes)
    say(f"generated {done.bundles[0].bundle}")
    return done.bundles[0].bundle
