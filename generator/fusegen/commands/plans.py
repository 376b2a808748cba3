"""What would be made of cells, and why: `plan` and `explain`, which write nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..build.gpu import arch_named
from ..emit.text.explain import explain as explain_plan
from ..emit.text.explain import explain_rewrites
from ..emit.text.fold import fold
from ..ir.naming import Cell
from ..ir.plan import ModulePlan, Status, Unsupported
from ..ir.predicate import Predicate
from ..ir.shapes import Binary, Const, Shape, Sym
from ..ir.text import text
from ..passes.contract import Pass
from ..passes.draft import Draft, NotPossible
from ..passes.pipeline import PASSES, context_of, resolve, run_passes
from ..passes.verify import verify_pass
from ..publish.folders import BUILTIN, Folders, load_specs
from ..publish.inputs import derivations
from ..spec.cells import product, target_cells, targets_or_names, with_options, without_fusions
from ..spec.kinds import SpecKind
from ..spec.load import SpecSet
from ..spec.offers import not_offered
from ..spec.serving import ALL, CPU, all_archs
from ..spec.usage import UsageError, known, spec_named
from .numbers import Numbers, numbers, read_sizes


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


def plan(query: Query = EVERYTHING, folders: Folders = BUILTIN) -> tuple[PlanRow, ...]:
    """Plan cells and write nothing; sorted by architecture, module and recipe.

    Raises:
        SpecError: the specs are wrong.
        UsageError: an unknown name, a target together with other names, `native` without a GPU.
    """
    specs = load_specs(folders)
    named = (*query.archs, *query.modules, *query.recipes, *query.options)
    targets_or_names(query.targets, named)
    if query.targets:
        named_by = target_cells(specs, query.targets)
        wanted = _each_arch(specs, {arch: cells.every for arch, cells in named_by.items()})
    else:
        modules = [spec_named(specs, SpecKind.MODULES, name) for name in query.modules]
        recipes = [spec_named(specs, SpecKind.RECIPES, name) for name in query.recipes]
        cells = product(modules or specs.modules, recipes or specs.recipes)
        cells = with_options(specs, cells, query.options)
        archs = [n if n == ALL else arch_named(n, specs) for n in query.archs] or list(specs.archs)
        wanted = _each_arch(specs, dict.fromkeys(archs, cells))
    rows: list[PlanRow] = []
    for arch, cells in sorted(wanted.items()):
        found = resolve(specs, arch, cells, derivations())
        rows += map(_plan_row, found.modules)
        rows += map(unsupported_row, found.unsupported)
    return tuple(sorted(rows, key=lambda row: (row.arch, row.module, row.recipe)))


def _each_arch(specs: SpecSet, wanted: Mapping[str, Iterable[Cell]]) -> dict[str, tuple[Cell, ...]]:
    """The cells of each architecture, which are those of `all`, too."""
    found: dict[str, set[Cell]] = {}
    for arch, cells in wanted.items():
        for each in (CPU, *all_archs(specs)) if arch == ALL else (arch,):
            found.setdefault(each, set()).update(cells)
    return {arch: tuple(sorted(cells)) for arch, cells in found.items()}


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
        lines: for people, of 100 letters at most; a single word may be longer.
        plan: the whole plan, None for an unsupported cell.
        numbers: at given sizes, None where there are none.
    """

    row: PlanRow
    lines: tuple[str, ...]
    plan: ModulePlan | None
    numbers: Numbers | None = None

    def to_json(self) -> dict[str, object]:
        """The row, the text and the plan; formulas and conditions as text."""
        numbers = {} if self.numbers is None else {"numbers": self.numbers.to_json()}
        text = {"text": list(self.lines), "plan": _plain(self.plan)}
        return self.row.to_json() | text | numbers


def explain(
    module: str,
    recipe: str,
    arch: str,
    folders: Folders = BUILTIN,
    options: Sequence[str] = (),
    no_fusions: Sequence[str] = (),
    *,
    verify: bool = False,
    sizes: str | None = None,
    gpu: str | None = None,
) -> Explanation:
    """What one module does, keeps, runs and costs, and what fusions did, or why it cannot be made.

    Args:
        no_fusions: fusions to leave out.
        sizes: of all dimensions, such as `T=65536,D=4096`, for numbers beside the formulas.
        gpu: whose floors the numbers have; one that the architecture is for if None.

    Raises:
        SpecError: the specs are wrong.
        UsageError: an unknown name, `native` without a GPU, or sizes that are not the module's.
        VerifyError: with ``verify``, the first pass that breaks a rule of the IR.
    """
    specs = load_specs(folders)
    cells = [_cell(specs, module, recipe, options)]
    left_out = [spec_named(specs, SpecKind.FUSIONS, name) for name in no_fusions]
    specs = without_fusions(specs, left_out)
    observe = verify_pass if verify else None
    named = arch_named(arch, specs)
    found = resolve(specs, named, cells, derivations(), observe)
    if found.unsupported:
        row = unsupported_row(found.unsupported[0])
        name = found.unsupported[0].cell
        line = f"{name} on {row.arch}: {row.status} ({row.reason})"
        return Explanation(row, tuple(fold(line)), None)
    made = found.modules[0]
    lines = (*explain_plan(made), *explain_rewrites(made, left_out))
    if sizes is None:
        return Explanation(_plan_row(made), lines, made)
    at_sizes = numbers(made, specs.archs[named], read_sizes(sizes), gpu)
    return Explanation(_plan_row(made), (*lines, "", *at_sizes.lines()), made, at_sizes)


def draft_after(
    after: str,
    module: str,
    recipe: str,
    arch: str,
    folders: Folders = BUILTIN,
    options: Sequence[str] = (),
    no_fusions: Sequence[str] = (),
    *,
    verify: bool = False,
) -> str:
    """The draft of one module after a pass, as text that ``ir.text.parse`` reads back.

    Raises:
        SpecError: the specs are wrong.
        UsageError: an unknown name, a pass that does not run for the module, or a module that
            cannot be made up to there.
        VerifyError: with ``verify``, the first pass that breaks a rule of the IR.
    """
    known("pass", after, [each.name for each in PASSES])
    specs = load_specs(folders)
    cell = _cell(specs, module, recipe, options)
    left_out = [spec_named(specs, SpecKind.FUSIONS, name) for name in no_fusions]
    specs = without_fusions(specs, left_out)
    seen: dict[str, Draft] = {}

    def observe(done: Pass, before: Draft, draft: Draft) -> None:
        seen[done.name] = draft
        if verify:
            verify_pass(done, before, draft)

    reason = ""
    try:
        run_passes(context_of(specs, cell, arch_named(arch, specs), derivations()), observe)
    except NotPossible as error:
        reason = str(error)
    if after in seen:
        return text(seen[after])
    if reason:
        raise UsageError(f"{cell} on {arch} cannot be made up to the pass {after!r}: {reason}")
    words = next(each.options for each in PASSES if each.name == after)
    offered = [word for word in words if not not_offered(word, specs.modules[module], specs.ops)]
    remedy = (
        f"choose it with --option {' or '.join(offered)}"
        if offered
        else f"no option of {module!r} chooses it"
    )
    raise UsageError(f"the pass {after!r} does not run for {cell}: {remedy}")


def _cell(specs: SpecSet, module: str, recipe: str, options: Sequence[str]) -> Cell:
    """The one cell that names and options stand for.  Raises UsageError for an unknown name."""
    cell = Cell(
        spec_named(specs, SpecKind.MODULES, module), spec_named(specs, SpecKind.RECIPES, recipe)
    )
    (found,) = with_options(specs, [cell], options)
    return found


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
