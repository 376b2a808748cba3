"""`report`: a page about the modules of bundles, for people."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..build.library import stale_cells
from ..build.toolchain import BuildError
from ..emit.report.page import (
    BundleText,
    Fact,
    Item,
    PlanNumbers,
    ReportContext,
    StepNumbers,
    Table,
    TableRow,
    cell_text,
    kernel_tables,
)
from ..emit.text.quantities import in_bytes, in_seconds, with_prefix
from ..families.gpus import gpu_called
from ..ir.naming import Cell
from ..ir.plan import ModulePlan
from ..passes.pipeline import resolve
from ..publish.changes import STATES
from ..publish.folders import BUILTIN, Folders
from ..publish.inputs import Inputs, derivations
from ..publish.lock import read_lock
from ..publish.selection import bundles_at
from ..spec.arch import ArchSpec
from ..spec.cells import without_fusions
from ..spec.load import SpecSet
from ..spec.usage import UsageError
from .numbers import Numbers, bound_of, described, gpus_of, names_of_sizes, numbers, read_sizes
from .records import Record, evidence, measured_tables, records
from .rendering import compare
from .report import BundleReport
from .request import Job, recorded_jobs

DEFAULT = Path("fusegen-report.html")
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
        without_numbers: by cell, the sizes that it lacks.
    """

    path: Path
    size: int
    bundles: Mapping[Path, tuple[str, ...]]
    unlike: Mapping[Path, str]
    without_numbers: Mapping[str, tuple[str, ...]]

    def to_json(self) -> dict[str, object]:
        """All of it."""
        return {
            "path": str(self.path),
            "size": self.size,
            "bundles": [
                {"bundle": str(bundle), "cells": [*cells], "unlike": self.unlike.get(bundle, "")}
                for bundle, cells in self.bundles.items()
            ],
            "without_numbers": {cell: [*names] for cell, names in self.without_numbers.items()},
        }


@dataclass(frozen=True, slots=True)
class _Found:
    """A bundle, as it is to be reported.

    Attributes:
        anchor: of its part of the page.
        job: that would make it anew.
        state: of its files.
        specs: that it is made of.
        plans: of its cells.
        numbers: of those cells that have sizes.
        library: what became of it, by cell; one entry for all where it is the same.
    """

    anchor: str
    job: Job
    state: BundleReport
    specs: SpecSet
    plans: tuple[ModulePlan, ...]
    numbers: Mapping[str, Numbers]

    @property
    def arch(self) -> ArchSpec:
        return self.specs.archs[self.job.selection.arch]


def report(
    folders_of_bundles: Sequence[Path],
    out: Path = DEFAULT,
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
    bundles = [bundle for folder in folders_of_bundles for bundle in bundles_at(folder)]
    jobs, inputs = recorded_jobs(bundles, folders), Inputs()
    given = read_sizes(sizes) if sizes else {}
    compared = compare(jobs, inputs, prune=True, accept_format=False, verify=False)
    found = [
        _found(f"b{number}", job, state, inputs, given, gpu)
        for number, (job, (state, _)) in enumerate(zip(jobs, compared, strict=True), 1)
    ]
    _require_sizes(found, given)
    _require_gpu(found, gpu, sizes)
    context = _context(found, folders_of_bundles, given, records(results))
    text = inputs.renderer(()).render("report/page.html.j2", context)
    data = text.encode("utf-8")
    _write(out, data)
    return Report(
        out,
        len(data),
        {each.job.bundle: tuple(plan.cell for plan in each.plans) for each in found},
        {each.job.bundle: _files(each.state) for each in found if each.state.regenerates},
        _without_numbers(found, given),
    )


def _require_report(out: Path) -> None:
    if out.is_dir():
        raise UsageError(f"--out {out}: is a folder; name a file in it")
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
    """All of it or, where the disk is full or the process ends, nothing."""
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


def _found(
    anchor: str,
    job: Job,
    state: BundleReport,
    inputs: Inputs,
    given: Mapping[str, int],
    gpu: str | None,
) -> _Found:
    selection = job.selection
    specs = without_fusions(inputs.specs(job.specs), selection.no_fusions)
    plans = resolve(specs, selection.arch, selection.cells, derivations()).modules
    arch = specs.archs[selection.arch]
    at_sizes = {
        plan.cell: numbers(plan, arch, own, gpu if _runs(plan, arch, gpu) else None)
        for plan in plans
        if given and not _lacking(plan, given)
        for own in (_own(plan, given),)
    }
    return _Found(anchor, job, state, specs, plans, at_sizes)


# ---- sizes and GPUs: those of many modules, of which each takes its own


def _own(plan: ModulePlan, given: Mapping[str, int]) -> dict[str, int]:
    called = names_of_sizes(plan)
    return {name: size for name, size in given.items() if name in called}


def _lacking(plan: ModulePlan, given: Mapping[str, int]) -> tuple[str, ...]:
    """Dimensions of a plan that no size is given of."""
    there = {names_of_sizes(plan)[name] for name in _own(plan, given)}
    return tuple(f"{d.symbol} ({d.keyword})" for d in plan.dims if d.symbol not in there)


def _runs(plan: ModulePlan, arch: ArchSpec, gpu: str | None) -> bool:
    return gpu is not None and gpu_called(gpu) in gpus_of(plan, arch)


def _without_numbers(
    found: Iterable[_Found], given: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    cells = {plan.cell: plan for each in found for plan in each.plans}
    lacking = {cell: _lacking(plan, given) for cell, plan in cells.items()} if given else {}
    return {cell: names for cell, names in lacking.items() if names}


def _require_sizes(found: Iterable[_Found], given: Mapping[str, int]) -> None:
    plans = [plan for each in found for plan in each.plans]
    known = {name for plan in plans for name in names_of_sizes(plan)}
    for name in given:
        if name not in known:
            names = ", ".join(sorted(known))
            raise UsageError(f"--sizes: no module has a dimension {name!r}; known: {names}")
    if given and all(_lacking(plan, given) for plan in plans):
        names = "; ".join(
            sorted({f"{plan.module} lacks {', '.join(_lacking(plan, given))}" for plan in plans})
        )
        raise UsageError(f"--sizes: no module has all of its sizes: {names}")


def _require_gpu(found: Iterable[_Found], gpu: str | None, sizes: str | None) -> None:
    """Refuse a GPU that runs none of the modules.

    Raises:
        UsageError: that, or there are no sizes.
    """
    if gpu is None:
        return
    if not sizes:
        raise UsageError("--gpu goes with --sizes: floors are those of sizes")
    each_of = [(each, plan) for each in found for plan in each.plans]
    if not any(_runs(plan, each.arch, gpu) for each, plan in each_of):
        there = {g.name: None for each, plan in each_of for g in gpus_of(plan, each.arch)}
        what = f"what runs them: {', '.join(there)}" if there else "they are no GPU's"
        raise UsageError(f"--gpu: {gpu!r} runs none of the modules; {what}")


# ---- texts


def _context(
    found: Sequence[_Found],
    places: Sequence[Path],
    given: Mapping[str, int],
    known: Sequence[Record],
) -> ReportContext:
    provided = [(Cell.parse(plan.cell), each.arch) for each in found for plan in each.plans]
    return ReportContext(
        place=", ".join(map(str, places)),
        generator=__version__,
        count=sum(len(each.plans) for each in found),
        sizes=", ".join(f"{name} = {size}" for name, size in given.items()),
        bundles=tuple(_bundle_text(each, given) for each in found),
        support=_support(found),
        notes=tuple(_notes(found)),
        measured=measured_tables(known, provided),
    )


def _bundle_text(found: _Found, given: Mapping[str, int]) -> BundleText:
    library = _library(found)
    cells = tuple(
        cell_text(
            plan,
            found.anchor,
            _cell_facts(plan, library, _lacking(plan, given) if given else ()),
            _plan_numbers(found.numbers.get(plan.cell)),
        )
        for plan in found.plans
    )
    return BundleText(
        anchor=found.anchor,
        arch=found.arch.name,
        place=str(found.job.bundle),
        summary=found.arch.summary,
        facts=tuple(_bundle_facts(found)),
        cells=cells,
        kernels=kernel_tables(found.plans, found.anchor),
    )


def _bundle_facts(found: _Found) -> Iterator[Fact]:
    selection, bundle = found.job.selection, found.job.bundle
    lock = read_lock(bundle)
    yield Fact("folder", str(bundle))
    yield Fact("ops", f"torch.ops.{selection.op_namespace}")
    yield Fact("written by", f"fusegen {lock.generator}" if lock else "an interrupted publish")
    yield Fact("files", _files(found.state))
    if found.state.extensions:
        yield Fact("extensions", "; ".join(found.state.extensions))
    if selection.no_fusions:
        yield Fact("fusions left out", ", ".join(selection.no_fusions))
    if found.arch.has_kernels:
        counts = Counter(_library(found).values())
        yield Fact("library", "; ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    if ran := evidence(bundle).run:
        yield Fact("evidence", ran)


def _files(state: BundleReport) -> str:
    """How many files are in each state."""
    counts = Counter(STATES[change.kind] for change in state.changes)
    words = [f"{count} {what}" for what, count in counts.most_common()]
    if state.selection_changed or not state.changes.lock_current:
        words.append("the lock is stale")
    return ", ".join(words)


def _cell_facts(
    plan: ModulePlan, library: Mapping[str, str], lacking: Sequence[str]
) -> Iterator[Fact]:
    if plan.cell in library:
        yield Fact("library", library[plan.cell])
    if lacking:
        yield Fact("numbers", f"none: --sizes lacks {', '.join(lacking)}")


def _library(found: _Found) -> dict[str, str]:
    """Of every cell with kernels, whether the bundle's library has it."""
    cells = [plan.cell for plan in found.plans if plan.kernel_sets]
    selection, bundle = found.job.selection, found.job.bundle
    if not cells:
        return {}
    if not (bundle / "lib" / f"{selection.op_namespace}.so").is_file():
        return dict.fromkeys(cells, f"not built: fusegen build {bundle}")
    try:
        stale = stale_cells(bundle)
    except BuildError as error:
        return dict.fromkeys(cells, f"cannot be told: {error}")
    return {cell: stale.get(cell, "built from these sources") for cell in cells}


def _plan_numbers(found: Numbers | None) -> PlanNumbers:
    if found is None:
        return PlanNumbers()
    facts = [
        Fact("at", ", ".join(f"{symbol} = {size}" for symbol, size in found.sizes.items())),
        Fact("parameters take", in_bytes(found.parameters)),
        Fact("saved", f"{in_bytes(found.saved)} at most"),
    ]
    if found.gpu:
        facts.append(Fact("floors of", described(found.gpu)))
    steps = {}
    for name in dict.fromkeys(cost.program.name for cost in found.costs):
        own = [cost for cost in found.costs if cost.program.name == name]
        weights = [c.floor(found.rates) if found.rates else c.moved for c in own]
        total = sum(weights) or 1
        for cost, weight in zip(own, weights, strict=True):
            steps[name, cost.index] = StepNumbers(
                with_prefix(cost.operations, "FLOP") if cost.operations else "",
                in_bytes(cost.moved),
                in_seconds(cost.floor(found.rates)) if found.rates else "",
                bound_of(cost, found.rates) if found.rates else "",
                round(100 * weight / total),
            )
        floor = sum(c.floor(found.rates) for c in own) if found.rates else None
        words = [
            with_prefix(sum(c.operations for c in own), "FLOP"),
            in_bytes(sum(c.moved for c in own)),
            *([f"{in_seconds(floor)} at least"] if floor is not None else []),
        ]
        facts.append(Fact(name, ", ".join(words)))
    return PlanNumbers(found.sizes, tuple(facts), steps)


# ---- support


def _support(found: Sequence[_Found]) -> Table:
    """A row per cell of any bundle, a column per bundle."""
    cells = sorted({Cell.parse(plan.cell) for each in found for plan in each.plans})
    columns = [_support_column(each, cells) for each in found]
    rows = tuple(
        TableRow(Item(str(cell)), tuple(column[cell] for column in columns)) for cell in cells
    )
    heads = ("module", *(_column_name(each, found) for each in found))
    return Table("What each bundle has, and how", heads, rows)


def _column_name(each: _Found, found: Sequence[_Found]) -> str:
    alike = [other for other in found if other.arch.name == each.arch.name]
    return each.arch.name if len(alike) == 1 else f"{each.arch.name} in {each.job.bundle}"


def _support_column(found: _Found, cells: Iterable[Cell]) -> dict[Cell, Item]:
    """What a bundle has of cells; of one that it has not, whether it could."""
    own = {Cell.parse(plan.cell): plan for plan in found.plans}
    known = {
        cell
        for cell in cells
        if cell.module in found.specs.modules and cell.recipe in found.specs.recipes
    }
    others = resolve(found.specs, found.arch.name, known - own.keys(), derivations())
    column = {cell: Item("not in the bundle", style="absent") for cell in cells}
    for plan in others.modules:
        text = f"not in the bundle; it would be {plan.status.value}"
        column[Cell.parse(plan.cell)] = Item(text, style="absent")
    for each in others.unsupported:
        column[Cell.parse(each.cell)] = Item(f"unsupported: {each.reason}", style="unsupported")
    library, ran = _library(found), evidence(found.job.bundle).cells
    for cell, plan in own.items():
        words = [plan.status.value, ran.get(str(cell), ""), _short(library.get(str(cell), ""))]
        href = f"#{found.anchor}-{plan.cell}"
        column[cell] = Item(", ".join(filter(None, words)), href=href, style=plan.status.value)
    return column


def _short(library: str) -> str:
    return library.partition(":")[0]


def _notes(found: Sequence[_Found]) -> Iterator[str]:
    yield (
        "native: instructions of the architecture multiply the operands as they are, or plain "
        "PyTorch does on the CPU. emulated: operands are quantised bit for bit and decoded to "
        "bfloat16 before they are multiplied, as there is no such instruction."
    )
    if any(evidence(each.job.bundle).cells for each in found):
        yield "What ran, and where, is what the ledger of this checkout has of these kernels."
    else:
        yield (
            "Whether kernels have run on a GPU is not known of these bundles: only the ledger of "
            "fusegen's own repository records it, of its own ones. Their tests come with them: "
            "python -m pytest in the folder of a bundle."
        )
    for each in found:
        if each.state.regenerates:
            yield (
                f"{each.job.bundle} is not what its specs give ({_files(each.state)}); this page "
                f"shows what they give. See: fusegen check {each.job.bundle}"
            )
