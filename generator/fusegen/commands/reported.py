"""A bundle as a report shows it: its plans, their numbers, its files and its library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..build.library import stale_cells
from ..build.toolchain import BuildError
from ..families.gpus import gpu_called
from ..ir.plan import ModulePlan
from ..passes.pipeline import resolve
from ..publish.inputs import Inputs, derivations
from ..publish.selection import check_cells
from ..spec.arch import ArchSpec
from ..spec.cells import without_fusions
from ..spec.load import SpecSet
from ..spec.usage import UsageError
from .numbers import Numbers, gpus_of, names_of_sizes, numbers, read_sizes
from .report import BundleReport
from .request import Job


@dataclass(frozen=True, slots=True)
class Planned:
    """A bundle and the plans of its cells.

    Attributes:
        job: that would make it anew.
        specs: that it is made of.
        plans: of its cells.
        numbers: of those cells that have sizes.
    """

    job: Job
    specs: SpecSet
    plans: tuple[ModulePlan, ...]
    numbers: Mapping[str, Numbers]

    @property
    def arch(self) -> ArchSpec:
        """What it is for."""
        return self.specs.archs[self.job.selection.own_arch]


@dataclass(frozen=True, slots=True)
class Reported:
    """All that is to be said of a bundle, but for the words.

    Attributes:
        anchor: of its part of the page.
        planned: what it is made of.
        state: of its files.
        library: of every cell with kernels, whether the bundle's library has it.
    """

    anchor: str
    planned: Planned
    state: BundleReport
    library: Mapping[str, str]

    @property
    def bundle(self) -> Path:
        """Its folder."""
        return self.planned.job.bundle

    @property
    def plans(self) -> tuple[ModulePlan, ...]:
        """Of its cells."""
        return self.planned.plans

    @property
    def arch(self) -> ArchSpec:
        """What it is for."""
        return self.planned.arch


def planned(job: Job, inputs: Inputs, given: Mapping[str, int], gpu: str | None) -> Planned:
    """The plans of a bundle's cells, and their numbers.

    Args:
        job: that would make it anew.
        inputs: specs and what is derived of them.
        given: sizes by name; none for no numbers.
        gpu: whose floors the numbers have where it runs a module.

    Raises:
        UsageError: the specs no longer have a cell, or a dimension has two sizes.
    """
    selection = job.selection
    specs = without_fusions(inputs.specs(job.specs), selection.no_fusions)
    check_cells(specs, selection, job.bundle)
    plans = resolve(specs, selection.own_arch, selection.cells, derivations()).modules
    arch = specs.archs[selection.own_arch]
    at_sizes = {
        plan.cell: numbers(plan, arch, _own(plan, given), gpu if runs(plan, arch, gpu) else None)
        for plan in plans
        if given and not lacking(plan, given)
    }
    return Planned(job, specs, plans, at_sizes)


def reported(anchor: str, own: Planned, state: BundleReport) -> Reported:
    """A bundle with the state of its files and its library."""
    return Reported(anchor, own, state, _library(own))


def _library(own: Planned) -> dict[str, str]:
    """Of every cell with kernels, whether the bundle's library has it."""
    cells = [plan.cell for plan in own.plans if plan.kernel_sets]
    selection, bundle = own.job.selection, own.job.bundle
    if not cells:
        return {}
    if not (bundle / "lib" / f"{selection.op_namespace}.so").is_file():
        return dict.fromkeys(cells, f"not built: fusegen build {bundle}")
    try:
        stale = stale_cells(bundle)
    except BuildError as error:
        return dict.fromkeys(cells, f"cannot be told: {error}")
    return {cell: stale.get(cell, "built from these sources") for cell in cells}


# ---- sizes and GPUs: those of many modules, of which each takes its own


def given_sizes(sizes: str | None, gpu: str | None) -> dict[str, int]:
    """Sizes of a command line by name; none where it has none.

    Raises:
        UsageError: they cannot be read, or there is a GPU without them.
    """
    if sizes is None:
        if gpu is not None:
            raise UsageError("--gpu goes with --sizes: floors are those of sizes")
        return {}
    given = read_sizes(sizes)
    if not given:
        raise UsageError(f"--sizes: expected sizes such as T=65536, got {sizes!r}")
    return given


def _own(plan: ModulePlan, given: Mapping[str, int]) -> dict[str, int]:
    called = names_of_sizes(plan)
    return {name: size for name, size in given.items() if name in called}


def lacking(plan: ModulePlan, given: Mapping[str, int]) -> tuple[str, ...]:
    """Dimensions of a plan that no size is given of."""
    there = {names_of_sizes(plan)[name] for name in _own(plan, given)}
    return tuple(f"{d.symbol} ({d.keyword})" for d in plan.dims if d.symbol not in there)


def runs(plan: ModulePlan, arch: ArchSpec, gpu: str | None) -> bool:
    """Whether a GPU of that name runs a plan, and has all rates that its floors need."""
    return gpu is not None and gpu_called(gpu) in gpus_of(plan, arch)


def without_numbers(
    found: Iterable[Planned], given: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    """By cell, the sizes that it has no numbers for want of."""
    plans = (plan for each in found for plan in each.plans if given)
    names = {plan.cell: lacking(plan, given) for plan in plans}
    return {cell: missing for cell, missing in names.items() if missing}


def require_sizes(found: Iterable[Planned], given: Mapping[str, int]) -> None:
    """Refuse sizes that no module has, or too few for any.

    Raises:
        UsageError: that, and which there are.
    """
    plans = [plan for each in found for plan in each.plans]
    known = {name for plan in plans for name in names_of_sizes(plan)}
    for name in given:
        if name not in known:
            names = ", ".join(sorted(known))
            raise UsageError(f"--sizes: no module has a dimension {name!r}; known: {names}")
    if given and all(lacking(plan, given) for plan in plans):
        names = "; ".join(
            sorted({f"{plan.module} lacks {', '.join(lacking(plan, given))}" for plan in plans})
        )
        raise UsageError(f"--sizes: no module has all of its sizes: {names}")


def require_gpu(found: Iterable[Planned], gpu: str | None) -> None:
    """Refuse a GPU that runs none of the modules.

    Raises:
        UsageError: that, and which do.
    """
    if gpu is None:
        return
    each_of = [(each, plan) for each in found for plan in each.plans]
    if not any(runs(plan, each.arch, gpu) for each, plan in each_of):
        there = {g.name: None for each, plan in each_of for g in gpus_of(plan, each.arch)}
        what = f"what runs them: {', '.join(there)}" if there else "they are no GPU's"
        raise UsageError(f"--gpu: {gpu!r} runs none of the modules; {what}")
