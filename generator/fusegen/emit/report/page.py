"""What the page of a report states: frozen texts, which its template lays out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ...ir.buffers import size_in_bytes
from ...ir.kernel_set import KernelSet
from ...ir.plan import ModulePlan
from ...ir.program import Program
from ...ir.segments import Start, Wait
from ...ir.shapes import evaluate
from ..text.explain import buffer_rows, rewrite_rows, rule_rows, saved_row, step_rows
from ..text.quantities import in_bytes
from .graph import drawings
from .layout import Drawing


@dataclass(frozen=True, slots=True)
class Item:
    """A place of a table.

    Attributes:
        text: of it.
        number: that stands above the text, which is its formula; empty for none.
        href: where it leads; empty for nowhere.
        style: a class of the style sheet.
        share: length of its bar, in percent; None for no bar.
    """

    text: str
    number: str = ""
    href: str = ""
    style: str = ""
    share: int | None = None

    @property
    def has_bar(self) -> bool:
        """Whether a bar stands behind the text."""
        return self.share is not None


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row: what it is of, the rest, and the anchor that leads here, if there is one."""

    name: Item
    items: tuple[Item, ...]
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        caption: what it shows.
        heads: of columns.
        rows: of it.
        folded: whether it is closed at first.
    """

    caption: str
    heads: tuple[str, ...]
    rows: tuple[TableRow, ...]
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Fact:
    """A term and what it is."""

    term: str
    text: str


@dataclass(frozen=True, slots=True)
class CellText:
    """A module of a bundle under a recipe.

    Attributes:
        anchor: unique in the page.
        name: of the cell.
        status: native or emulated.
        summary: of the module.
        words: that the filter looks at.
        facts: about it.
        drawings: of its plan.
        tables: the same, and more, in words.
    """

    anchor: str
    name: str
    status: str
    summary: str
    words: str
    facts: tuple[Fact, ...]
    drawings: tuple[Drawing, ...]
    tables: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class BundleText:
    """A bundle.

    Attributes:
        anchor: unique in the page.
        arch: that it is for.
        place: its folder.
        summary: of the architecture.
        facts: about it.
        cells: in their order.
        kernels: sets of kernels and the rules that choose among them, without those of the CPU.
    """

    anchor: str
    arch: str
    place: str
    summary: str
    facts: tuple[Fact, ...]
    cells: tuple[CellText, ...]
    kernels: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class ReportContext:
    """All of a report.

    Attributes:
        place: what it is about, as the command line names it.
        generator: version of fusegen.
        count: of modules.
        sizes: that numbers are at; empty where there are none.
        bundles: in sorted order.
        support: what is provided how, by module and bundle.
        notes: on the support.
        measured: tables of records; none where there are no records of these modules.
    """

    place: str
    generator: str
    count: int
    sizes: str
    bundles: tuple[BundleText, ...]
    support: Table
    notes: tuple[str, ...]
    measured: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """What a step costs at given sizes, for people.

    Attributes:
        operations, moved: with their units.
        floor: the least time; empty where no GPU is known.
        bound: what that is the time of.
        share: of the floor of its direction, or of its bytes where there is none; percent.
    """

    operations: str
    moved: str
    floor: str
    bound: str
    share: int

    @property
    def floor_words(self) -> str:
        """The least time and what bounds it; without a GPU, the share of the bytes."""
        return f"{self.floor}, {self.bound}" if self.floor else f"{self.share} % of bytes"

    @property
    def line(self) -> str:
        """In one line."""
        return ", ".join(filter(None, (self.operations, self.moved, self.floor)))


@dataclass(frozen=True, slots=True)
class PlanNumbers:
    """A plan at given sizes.

    Attributes:
        lengths: of dimensions, by symbol; none where there are no numbers.
        facts: about all of it.
        steps: by direction and place in all of it, counted from 1.
    """

    lengths: Mapping[str, int] = field(default_factory=dict)
    facts: tuple[Fact, ...] = ()
    steps: Mapping[tuple[str, int], StepNumbers] = field(default_factory=dict)


def cell_text(plan: ModulePlan, bundle: str, facts: Iterable[Fact], found: PlanNumbers) -> CellText:
    """A cell's part of the page.

    Args:
        plan: of it.
        bundle: anchor of the bundle.
        facts: about its state.
        found: its numbers.
    """
    costs = {place: each.line for place, each in found.steps.items()}
    words = [plan.cell, plan.arch, plan.status.value, plan.summary]
    words += (f"{step.primitive} {step.kernels or ''} {step.rule or ''}" for step in plan.steps)
    return CellText(
        anchor=f"{bundle}-{plan.cell}",
        name=plan.cell,
        status=plan.status.value,
        summary=plan.summary,
        words=" ".join(dict.fromkeys(" ".join(words).lower().split())),
        facts=(*_facts(plan), *facts, *found.facts),
        drawings=tuple(drawings(plan, costs)),
        tables=tuple(_tables(plan, bundle, found)),
    )


def _facts(plan: ModulePlan) -> Iterator[Fact]:
    yield Fact("class", plan.class_name)
    yield Fact("status", f"{plan.status.value}: {plan.reason}")
    yield Fact("sizes", ", ".join(f"{dim.symbol} {dim.keyword}" for dim in plan.dims))
    for name, buffers in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        yield Fact(name, ", ".join(f"{n} {plan.buffer(n).shape}" for n in buffers))
    if plan.parameters:
        paths = (f"{each.path} {plan.buffer(each.buffer).shape}" for each in plan.parameters)
        yield Fact("parameters", ", ".join(paths))
    if plan.options:
        yield Fact("options", ", ".join(plan.options))
    if plan.is_identity:
        yield Fact("plan", "nothing to run: the outputs are the inputs")


def _tables(plan: ModulePlan, bundle: str, found: PlanNumbers) -> Iterator[Table]:
    if not plan.is_identity:
        yield from _step_tables(plan, bundle, found)
        yield _saved_table(plan, found)
        yield _buffer_table(plan, found)
    rewrites = [_plain(row) for row in rewrite_rows(plan)]
    if rewrites:
        applied = sum(row.items[-1].text == "applied" for row in rewrites)
        caption = f"Fusions: {applied} of {len(rewrites)} applied"
        heads = ("fusion", "where", "outcome")
        yield Table(caption, heads, tuple(rewrites), folded=True)


def _plain(texts: tuple[str, ...]) -> TableRow:
    first, *others = texts
    return TableRow(Item(first), tuple(map(Item, others)))


_STEP = ("operations", "bytes", "reads and writes", "kernel", "runs if", "fusion")


def _step_heads(found: PlanNumbers) -> tuple[str, ...]:
    return ("step", *(["floor"] if found.lengths else []), *_STEP)


def _step_tables(plan: ModulePlan, bundle: str, found: PlanNumbers) -> Iterator[Table]:
    for direction in plan.directions:
        rows: list[TableRow] = []
        place = 0
        for segment in direction.segments:
            match segment:
                case Program():
                    for index, step in enumerate(segment.steps, 1):
                        place += 1
                        own = found.steps.get((direction.name, place))
                        texts = step_rows(plan, segment, step, index)
                        rows += _step_rows(texts, _op(segment), bundle, found, own)
                case Start() | Wait():
                    rows.append(_exchange_row(segment, found))
        if rows:
            name = f"Steps of the {direction.name}"
            yield Table(name, _step_heads(found), tuple(rows))
    for each in plan.conversions:
        own_plan, program = plan.of(each), each.program
        texts = (
            row
            for index, step in enumerate(program.steps, 1)
            for row in step_rows(own_plan, program, step, index)
        )
        rows = [*_step_rows(texts, "", bundle, PlanNumbers(), None)]
        name = f"Steps of quantize(role={each.role.value!r}), {each.form.value}"
        yield Table(name, _step_heads(PlanNumbers()), tuple(rows), folded=True)


def _op(program: Program) -> str:
    """What tells an op from the others of its direction; nothing where it is alone."""
    return program.function if program.part else ""


def _step_rows(
    texts: Iterable[tuple[str, ...]],
    function: str,
    bundle: str,
    found: PlanNumbers,
    numbers: StepNumbers | None,
) -> Iterator[TableRow]:
    """The row of a step, and of what it runs in a loop; the first has the numbers of all."""
    floor = _floor(numbers)
    for comment, kernels, flops, moved, when, rule in texts:
        name, _, rest = comment.partition(": ")
        href = f"#{_anchor_of(kernels, bundle)}" if kernels and " then " not in kernels else ""
        items = (
            *([floor] if found.lengths else []),
            Item(flops, numbers.operations if numbers else ""),
            Item(moved, numbers.moved if numbers else "", style="wide"),
            Item(rest, style="wide"),
            Item(kernels, href=href, style="wide"),
            Item(when.removeprefix("if ") or "always"),
            Item(rule.removeprefix("rule ")),
        )
        yield TableRow(Item(f"{function} {name}".lstrip()), items)
        numbers, floor = None, Item("")


def _floor(found: StepNumbers | None) -> Item:
    if found is None:
        return Item("not asked for")
    return Item(found.floor_words, style="number", share=found.share)


def _exchange_row(segment: Start | Wait, found: PlanNumbers) -> TableRow:
    names = f"{', '.join(segment.takes)} -> {', '.join(segment.gives)}"
    name = f"start {segment.kind}" if isinstance(segment, Start) else "wait"
    when = " or ".join(segment.when) or "always"
    floor = [Item("")] if found.lengths else []
    items = (*floor, Item(""), Item(""), Item(names, style="wide"), Item(""), Item(when), Item(""))
    return TableRow(Item(name), items)


def _saved_table(plan: ModulePlan, found: PlanNumbers) -> Table:
    rows = []
    for result in plan.saved:
        name, size, when = saved_row(plan, result)
        buffer = plan.buffer(name)
        shape = f"{buffer.shape} {buffer.dtype.value}"
        items = (Item(shape), Item(size, _bytes(plan, name, found)), Item(when.removeprefix("if ")))
        rows.append(TableRow(Item(name), items))
    heads = ("tensor", "shape and type", "bytes", "kept if")
    many = len(rows) or "nothing"
    return Table(f"Saved for the backward: {many}", heads, tuple(rows), folded=True)


def _buffer_table(plan: ModulePlan, found: PlanNumbers) -> Table:
    rows = []
    for name, shape, kind, size, place in buffer_rows(plan):
        items = (Item(shape), Item(kind), Item(size, _bytes(plan, name, found)), Item(place))
        rows.append(TableRow(Item(name), items))
    heads = ("tensor", "shape", "type", "bytes", "what it is")
    return Table(f"Tensors: {len(rows)}", heads, tuple(rows), folded=True)


def _bytes(plan: ModulePlan, name: str, found: PlanNumbers) -> str:
    """Of a tensor at given sizes; empty where there are none."""
    if not found.lengths:
        return ""
    return in_bytes(evaluate(size_in_bytes(plan.buffer(name)), found.lengths))


def kernel_tables(plans: Iterable[ModulePlan], bundle: str) -> tuple[Table, ...]:
    """Every set of kernels of a bundle, once, in one table."""
    sets = {each.name: each for plan in plans for each in plan.kernel_sets}
    rows = [row for name in sorted(sets) for row in _kernel_rows(sets[name], bundle)]
    if not rows:
        return ()
    heads = ("kernels", "used where, the first that holds", "configuration")
    caption = f"Kernels: {len(sets)} sets, and the rules that choose among them"
    return (Table(caption, heads, tuple(rows), folded=True),)


def _kernel_rows(kernels: KernelSet, bundle: str) -> Iterator[TableRow]:
    anchor = _anchor_of(kernels.name, bundle)
    for when, *candidates in rule_rows(kernels):
        chosen = f"the least of {'; '.join(candidates)}" if len(candidates) > 1 else candidates[0]
        yield TableRow(Item(kernels.name), (Item(when), Item(chosen)), anchor)
        anchor = ""


def _anchor_of(kernels: str, bundle: str) -> str:
    return f"{bundle}-kernels-{kernels}"
