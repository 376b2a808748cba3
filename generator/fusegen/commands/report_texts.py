"""What a report states of bundles, in words and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from .. import __version__
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
from ..ir.naming import Cell
from ..ir.plan import ModulePlan
from ..passes.pipeline import resolve
from ..publish.changes import STATES
from ..publish.inputs import derivations
from ..publish.lock import read_lock
from .numbers import Numbers, bound_of, described
from .records import Record, evidence, measured_tables
from .report import BundleReport
from .reported import Reported, lacking


def context_of(
    found: Sequence[Reported],
    places: Sequence[Path],
    given: Mapping[str, int],
    known: Sequence[Record],
) -> ReportContext:
    """All of a page.

    Args:
        found: bundles, in their order.
        places: what the command line calls them.
        given: sizes by name; none for no numbers.
        known: records of benchmarks.
    """
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


def _bundle_text(found: Reported, given: Mapping[str, int]) -> BundleText:
    cells = tuple(
        cell_text(
            plan,
            found.anchor,
            _cell_facts(plan, found.library, lacking(plan, given) if given else ()),
            _plan_numbers(found.planned.numbers.get(plan.cell)),
        )
        for plan in found.plans
    )
    return BundleText(
        anchor=found.anchor,
        arch=found.arch.name,
        place=str(found.bundle),
        summary=found.arch.summary,
        facts=tuple(_bundle_facts(found)),
        cells=cells,
        kernels=kernel_tables(found.plans, found.anchor),
    )


def _bundle_facts(found: Reported) -> Iterator[Fact]:
    selection, bundle = found.planned.job.selection, found.bundle
    lock = read_lock(bundle)
    yield Fact("folder", str(bundle))
    yield Fact("ops", f"torch.ops.{selection.op_namespace}")
    yield Fact("written by", f"fusegen {lock.generator}" if lock else "an interrupted publish")
    yield Fact("files", files_of(found.state))
    if found.state.extensions:
        yield Fact("extensions", "; ".join(found.state.extensions))
    if selection.no_fusions:
        yield Fact("fusions left out", ", ".join(selection.no_fusions))
    if found.arch.has_kernels:
        counts = Counter(found.library.values())
        yield Fact("library", "; ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    if ran := evidence(bundle).run:
        yield Fact("evidence", ran)


def files_of(state: BundleReport) -> str:
    """How many files are in each state."""
    counts = Counter(STATES[change.kind] for change in state.changes)
    words = [f"{count} {what}" for what, count in counts.most_common()]
    if state.selection_changed or not state.changes.lock_current:
        words.append("the lock is stale")
    return ", ".join(words)


def _cell_facts(
    plan: ModulePlan, library: Mapping[str, str], missing: Sequence[str]
) -> Iterator[Fact]:
    if plan.cell in library:
        yield Fact("library", library[plan.cell])
    if missing:
        yield Fact("numbers", f"none: --sizes lacks {', '.join(missing)}")


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


def _support(found: Sequence[Reported]) -> Table:
    """A row per cell of any bundle, a column per bundle."""
    cells = sorted({Cell.parse(plan.cell) for each in found for plan in each.plans})
    columns = [_support_column(each, cells) for each in found]
    rows = tuple(
        TableRow(Item(str(cell)), tuple(column[cell] for column in columns)) for cell in cells
    )
    heads = ("module", *(_column_name(each, found) for each in found))
    return Table("What each bundle has, and how", heads, rows)


def _column_name(each: Reported, found: Sequence[Reported]) -> str:
    alike = [other for other in found if other.arch.name == each.arch.name]
    return each.arch.name if len(alike) == 1 else f"{each.arch.name} in {each.bundle}"


def _support_column(found: Reported, cells: Iterable[Cell]) -> dict[Cell, Item]:
    """What a bundle has of cells; of one that it has not, whether it could."""
    own = {Cell.parse(plan.cell): plan for plan in found.plans}
    known = {
        cell
        for cell in cells
        if cell.module in found.planned.specs.modules and cell.recipe in found.planned.specs.recipes
    }
    others = resolve(found.planned.specs, found.arch.name, known - own.keys(), derivations())
    column = {cell: Item("not in the bundle", style="absent") for cell in cells}
    for plan in others.modules:
        text = f"not in the bundle; it would be {plan.status.value}"
        column[Cell.parse(plan.cell)] = Item(text, style="absent")
    for each in others.unsupported:
        column[Cell.parse(each.cell)] = Item(f"unsupported: {each.reason}", style="unsupported")
    library, ran = found.library, evidence(found.bundle).cells
    for cell, plan in own.items():
        words = [plan.status.value, ran.get(str(cell), ""), _short(library.get(str(cell), ""))]
        href = f"#{found.anchor}-{plan.cell}"
        column[cell] = Item(", ".join(filter(None, words)), href=href, style=plan.status.value)
    return column


def _short(library: str) -> str:
    return library.partition(":")[0]


def _notes(found: Sequence[Reported]) -> Iterator[str]:
    yield (
        "native: instructions of the architecture multiply the operands as they are, or plain "
        "PyTorch does on the CPU. emulated: operands are quantised bit for bit and decoded to "
        "bfloat16 before they are multiplied, as there is no such instruction."
    )
    if any(evidence(each.bundle).cells for each in found):
        yield (
            "What ran, and where, is what the ledger of this checkout has of these kernels. "
            "changed since: some are others now than ran. PTX ran: a later GPU's driver compiled "
            "it. twin ran: with matrix instructions in software, on another GPU. compiled only: "
            "they have run on no GPU."
        )
    else:
        yield (
            "Whether kernels have run on a GPU is not known of these bundles: only the ledger of "
            "fusegen's own repository records it, of its own ones. Their tests come with them: "
            "python -m pytest in the folder of a bundle."
        )
    for each in found:
        if each.state.regenerates:
            yield (
                f"{each.bundle} is not what its specs give ({files_of(each.state)}); this page "
                f"shows what they give. See: fusegen check {each.bundle}"
            )
