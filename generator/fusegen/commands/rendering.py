"""Jobs done in memory: every bundle rendered and compared with the disk, nothing written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ..emit.bundle import render_bundle
from ..emit.fileset import FileSet
from ..emit.manifest import MANIFEST, render_manifest
from ..emit.polish import polishing
from ..ir.naming import Cell
from ..ir.plan import Unsupported
from ..passes.contract import Observer
from ..passes.pipeline import resolve
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
    """Render every job and compare it with the disk.

    Ruff works on a bundle while the next one is rendered, or the previous one compared.

    Raises:
        VerifyError: with ``verify``, the first pass that breaks a rule of the IR.
    """
    with ExitStack() as stack:
        pending = []
        for job in jobs:
            rendered = _render(job, inputs, verify_pass if verify else None)
            pending.append((rendered, stack.enter_context(polishing(rendered.files))))
        return [
            (_report(rendered, files, prune=prune, accept_format=accept_format), files)
            for rendered, finish in pending
            for files in (finish(),)
        ]


def _render(job: Job, inputs: Inputs, observe: Observer | None) -> Rendered:
    wanted = job.selection
    specs = without_fusions(inputs.specs(job.specs), wanted.no_fusions)
    check_cells(specs, wanted, job.bundle, job.given)
    plan = resolve(specs, wanted.arch, wanted.cells, derivations(), observe)
    if job.strict and plan.unsupported:
        raise UsageError("\n".join(_impossible(cell, job) for cell in plan.unsupported))
    renderer, arch = inputs.renderer(job.templates), specs.archs[wanted.arch]
    files, plans = FileSet(), plan.modules
    if plan.modules:
        files = render_bundle(plan.modules, arch, wanted.op_namespace, renderer)
    if wanted.digests:
        others = resolve(specs, wanted.arch, wanted.digests, derivations(), observe)
        owners = tuple(module.cell for module in plan.modules)
        manifest = render_manifest(others, arch, wanted.op_namespace, renderer, owners)
        files = FileSet((*files.items(), (MANIFEST, manifest)))
        plans = (*plans, *others.modules)
    specs_in_use = used_specs(
        [path for path in job.specs if path != paths.builtin_specs()], specs, plans
    )
    templates_in_use = used_templates(
        [path for path in job.templates if path != paths.builtin_templates()], files
    )
    settled = replace(
        wanted,
        cells=tuple(Cell.parse(each.cell) for each in plan.modules),
        specs=relative_folders(job.bundle, specs_in_use),
        templates=relative_folders(job.bundle, templates_in_use),
        extensions=tuple(
            UsedExtension(each.name, each.package, each.version, each.digest)
            for each in used_extensions(specs, plans, files)
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
    return BundleReport(
        bundle=bundle,
        selection=rendered.selection,
        changes=changes,
        selection_changed=recorded != rendered.selection,
        unsupported=rendered.unsupported,
        recorded=recorded,
    )
