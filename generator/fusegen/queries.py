"""Questions that write nothing: which specs exist, what would be made of them, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .gpu import arch_named
from .ir.naming import Cell
from .ir.plan import ModulePlan, Status, Unsupported
from .ir.predicate import Predicate
from .ir.shapes import Binary, Const, Shape, Sym
from .passes.expand import chain_of
from .selection import (
    known,
    product,
    spec_named,
    target_cells,
    targets_or_names,
    with_options,
    without_fusions,
)
from .sources import BUILTIN, Sources, derivations, load_specs, validate_specs
from .spec.arch import ArchSpec
from .spec.fusion import FusionSpec
from .spec.kinds import AnySpec, SpecKind
from .spec.load import SpecSet
from .spec.module import ModuleSpec
from .spec.recipe import RecipeSpec
from .spec.target import TargetSpec


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


def list_specs(kind: str | None = None, sources: Sources = BUILTIN) -> tuple[Entry, ...]:
    """The specs of one kind, named by its folder, or of all kinds; not those that are wrong.

    Raises:
        SpecError: a folder is not there.
        UsageError: there is no such kind.
    """
    if kind is not None:
        known("kind", kind, [each.folder for each in SpecKind])
    return _entries(load_specs(sources), kind)


def validate(sources: Sources = BUILTIN) -> tuple[Entry, ...]:
    """The specs of all kinds, none of which is wrong.

    Raises:
        SpecError: with every problem of every file.
    """
    return _entries(validate_specs(sources), None)


def _entries(specs: SpecSet, kind: str | None) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            each.folder, name, _summary(spec, specs), specs.source(each, name).file, _details(spec)
        )
        for each in SpecKind
        if kind in (None, each.folder)
        for name, spec in specs.of(each).items()
    )


def _summary(spec: AnySpec, specs: SpecSet) -> str:
    if isinstance(spec, ModuleSpec):
        return spec.summary or specs.ops[spec.op or ""].summary
    return spec.summary


def _details(spec: AnySpec) -> dict[str, object]:
    match spec:
        case ModuleSpec():
            ops = [item.op for item in chain_of(spec)]
            options = {option.value: list(words) for option, words in spec.options.items()}
            return {"class": spec.class_, "ops": ops, "options": options}
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
                "options": list(spec.options),
            }
        case FusionSpec():
            return {"pass": spec.pass_.value}
    return {}


@dataclass(frozen=True, slots=True)
class Query:
    """Which cells `plan` shows. Empty means all, except that a target narrows everything."""

    targets: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


EVERYTHING = Query()


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
    options: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """All fields; options only where there are some."""
        fields = dataclasses.asdict(self)
        return fields if self.options else {k: v for k, v in fields.items() if k != "options"}


def plan(query: Query = EVERYTHING, sources: Sources = BUILTIN) -> tuple[PlanRow, ...]:
    """Plan cells and write nothing; sorted by architecture, module and recipe.

    Raises:
        SpecError: the specs are wrong.
        UsageError: an unknown name, a target together with other names, `native` without a GPU.
    """
    from .passes.pipeline import resolve

    specs = load_specs(sources)
    named = (*query.archs, *query.modules, *query.recipes, *query.options)
    targets_or_names(query.targets, named)
    if query.targets:
        wanted = target_cells(specs, query.targets)
    else:
        modules = [spec_named(specs, SpecKind.MODULES, name) for name in query.modules]
        recipes = [spec_named(specs, SpecKind.RECIPES, name) for name in query.recipes]
        cells = product(modules or specs.modules, recipes or specs.recipes)
        cells = with_options(specs, cells, query.options)
        archs = [arch_named(name, specs) for name in query.archs] or list(specs.archs)
        wanted = dict.fromkeys(archs, cells)
    rows: list[PlanRow] = []
    for arch, cells in sorted(wanted.items()):
        found = resolve(specs, arch, cells, derivations())
        rows += map(_plan_row, found.modules)
        rows += map(unsupported_row, found.unsupported)
    return tuple(sorted(rows, key=lambda row: (row.arch, row.module, row.recipe)))


def _plan_row(plan: ModulePlan) -> PlanRow:
    return PlanRow(
        plan.module,
        plan.recipe,
        plan.arch,
        plan.status.value,
        plan.reason,
        tuple(kernel.name for kernel in plan.kernels),
        tuple(result.buffer for result in plan.saved),
        Cell.parse(plan.cell).options,
    )


def unsupported_row(cell: Unsupported) -> PlanRow:
    """A cell that cannot be made, as a row."""
    status = Status.UNSUPPORTED.value
    options = Cell.parse(cell.cell).options
    return PlanRow(cell.module, cell.recipe, cell.arch, status, cell.reason, (), (), options)


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


def explain(
    module: str,
    recipe: str,
    arch: str,
    sources: Sources = BUILTIN,
    options: Sequence[str] = (),
    no_fusions: Sequence[str] = (),
) -> Explanation:
    """What one module does, keeps, runs and costs, and what fusions did, or why it cannot be made.

    Args:
        no_fusions: fusions to leave out.

    Raises:
        SpecError: the specs are wrong.
        UsageError: an unknown name, or `native` without a GPU.
    """
    from .emit.text.explain import explain as explain_plan
    from .emit.text.explain import explain_rewrites
    from .passes.pipeline import resolve

    specs = load_specs(sources)
    cell = Cell(
        spec_named(specs, SpecKind.MODULES, module), spec_named(specs, SpecKind.RECIPES, recipe)
    )
    cells = with_options(specs, [cell], options)
    left_out = [spec_named(specs, SpecKind.FUSIONS, name) for name in no_fusions]
    specs = without_fusions(specs, left_out)
    found = resolve(specs, arch_named(arch, specs), cells, derivations())
    if found.unsupported:
        row = unsupported_row(found.unsupported[0])
        name = found.unsupported[0].cell
        return Explanation(row, (f"{name} on {row.arch}: {row.status} ({row.reason})",), None)
    made = found.modules[0]
    lines = (*explain_plan(made), *explain_rewrites(made, left_out))
    return Explanation(_plan_row(made), lines, made)


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
