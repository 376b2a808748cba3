"""Jobs done in memory: every bundle rendered and compared with the disk, nothing written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ..emit.bundle import render_bundle
from ..emit.devices import Inner, one_interface
from ..emit.fileset import FileSet
from ..emit.manifest import MANIFEST, render_manifest
from ..emit.polish import polishing
from ..ir.naming import Cell
from ..ir.plan import Unsupported
from ..passes.contract import Observer
from ..passes.pipeline import Plan, resolve
from ..passes.verify import verify_pass
from ..publish import paths
from ..publish.changes import diff
from ..publish.folders import (
    relative_folders,
    used_extensions,
    used_specs,
    used_templates,
)
from ..publish.inputs import Inputs, derivations
from ..publish.remedies import removal
from ..publish.selection import Selection, UsedExtension, check_cells
from ..spec.cells import without_fusions
from ..spec.load import SpecSet
from ..spec.usage import UsageError
from .report import BundleReport
from .request import Job


@dataclass(frozen=True, slots=True)
class Rendered:
    """A job done in memory; the selection names only the cells and folders in use."""

    job: Job
    selection: Selection
    files: FileSet
    unsupported: tuple[Unsupported, ...]


def compare(
    jobs: Sequence[Job], inputs: Inputs, *, prune: bool, accept_format: bool, verify: bool
) -> list[tuple[BundleReport, FileSet]]:
    """Render every job and compare it with the disk; the bundles in a fat one come before it.

    Ruff works on a bundle while the next one is rendered, or the previous one compared.

    Raises:
        VerifyError: with ``verify``, the first pass that breaks a rule of the IR.
    """
    with ExitStack() as stack:
        pending = []
        for job in jobs:
            for rendered in _render(job, inputs, verify_pass if verify else None):
                pending.append((rendered, stack.enter_context(polishing(rendered.files))))
        return [
            (_report(rendered, files, prune=prune, accept_format=accept_format), files)
            for rendered, finish in pending
            for files in (finish(),)
        ]


def _render(job: Job, inputs: Inputs, observe: Observer | None) -> Iterator[Rendered]:
    specs = without_fusions(inputs.specs(job.specs), job.selection.no_fusions)
    check_cells(specs, job.selection, job.bundle, job.given)
    found = [_resolve(each, specs, observe) for each in job.all]
    if job.selection.is_fat:
        found = one_interface(found)
    *inner, own = found
    if job.strict and own.unsupported:
        raise UsageError("\n".join(_impossible(cell, job) for cell in own.unsupported))
    within = []
    for each, plan in zip(job.inner, inner, strict=True):
        rendered = _rendered(each, plan, specs, inputs, observe)
        within.append(Inner.of(specs.archs[each.selection.arch], plan, rendered.files))
        yield rendered
    yield _rendered(job, own, specs, inputs, observe, within)


def _resolve(job: Job, specs: SpecSet, observe: Observer | None) -> Plan:
    return resolve(specs, job.selection.own_arch, job.selection.cells, derivations(), observe)


def _rendered(
    job: Job,
    plan: Plan,
    specs: SpecSet,
    inputs: Inputs,
    observe: Observer | None,
    inner: Sequence[Inner] = (),
) -> Rendered:
    """A bundle of a plan, with the bundles in it; it needs what they need."""
    wanted = job.selection
    renderer, arch = inputs.renderer(job.templates), specs.archs[wanted.own_arch]
    files = FileSet()
    if plan.modules:
        files = render_bundle(plan.modules, arch, wanted.op_namespace, renderer, inner)
    others = resolve(specs, arch.name, wanted.digests, derivations(), observe)
    if wanted.digests:
        owners = tuple(module.cell for module in plan.modules)
        manifest = render_manifest(others, arch, wanted.op_namespace, renderer, owners)
        files = FileSet((*files.items(), (MANIFEST, manifest)))
    within = (cell for each in inner for cell in each.plan.modules)
    modules = (*within, *plan.modules, *others.modules)
    made_from = files.inputs.union(*(each.inputs for each in inner))
    extra_specs = [path for path in job.specs if path != paths.builtin_specs()]
    specs_in_use = used_specs(extra_specs, specs, modules, wanted.archs)
    templates_in_use = used_templates(
        [path for path in job.templates if path != paths.builtin_templates()], made_from
    )
    settled = replace(
        wanted,
        cells=tuple(Cell.parse(each.cell) for each in plan.modules),
        specs=relative_folders(job.bundle, specs_in_use),
        templates=relative_folders(job.bundle, templates_in_use),
        extensions=tuple(
            UsedExtension(each.name, each.package, each.version, each.digest)
            for each in used_extensions(specs, modules, made_from)
        ),
    )
    return Rendered(job, settled, files, plan.unsupported)


def _impossible(cell: Unsupported, job: Job) -> str:
    parsed = Cell.parse(cell.cell)
    text = f"{cell.cell} cannot be made for {cell.arch}: {cell.reason}"
    if parsed in job.given:
        return text
    return f"{text}; take it out: {removal(parsed, cell.arch, job.bundle)}"


def _report(
    rendered: Rendered, files: FileSet, *, prune: bool, accept_format: bool
) -> BundleReport:
    bundle, recorded = rendered.job.bundle, rendered.job.recorded
    changes = diff(files, bundle, prune=prune)
    if accept_format:
        changes = changes.accepting_format()
    nothing = not files and not bundle.exists()
    if nothing:
        changes = replace(changes, lock_current=True)
    return BundleReport(
        bundle=bundle,
        selection=rendered.selection,
        changes=changes,
        selection_changed=not nothing and recorded != rendered.selection,
        unsupported=rendered.unsupported,
        recorded=recorded,
    )
