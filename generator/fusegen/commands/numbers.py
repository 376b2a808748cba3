"""Numbers of a plan at given sizes: bytes, operations, and the floors of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from ..emit.python.words import step_name
from ..emit.text.columns import aligned
from ..emit.text.quantities import in_bytes, in_seconds, with_prefix
from ..families.gpus import GPUS, Gpu, gpu_called
from ..ir.buffers import size_in_bytes
from ..ir.plan import ModulePlan
from ..ir.shapes import evaluate
from ..spec.arch import ArchSpec
from ..spec.usage import UsageError
from ..steps.footprint import backward_peak, held
from ..tuning.floors import Cost, Rates, costs, modes

LARGEST = 2**40
"""Of a size; what is made of a few of them still has 64 bits of a float to be printed from."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A plan at given sizes.

    Attributes:
        sizes: of every dimension by its symbol.
        gpu: whose floors are given; None for an architecture that is no GPU's.
        rates: of that, as its data sheet has them.
        costs: of the steps that run.
        saved: bytes that the forward keeps for the backward, inputs and parameters included.
        parameters: bytes of the parameters, without optional ones.
        held: bytes that the forward makes for the backward.
        peak: bytes at the worst moment of the backward: what was held, gradients, workspaces.
    """

    sizes: Mapping[str, int]
    gpu: Gpu | None
    rates: Rates | None
    costs: tuple[Cost, ...]
    saved: int
    parameters: int
    held: int
    peak: int

    def to_json(self) -> dict[str, object]:
        """All numbers: bytes, operations, and seconds where a GPU gives floors."""
        gpu = self.gpu and {
            "name": self.gpu.name,
            "bytes_per_second": self.gpu.bandwidth,
            "operations_per_second": {str(bits): rate for bits, rate in self.gpu.rates.items()},
        }
        return {
            "sizes": dict(self.sizes),
            "gpu": gpu,
            "parameters": self.parameters,
            "saved": self.saved,
            "held": self.held,
            "backward_peak": self.peak,
            "steps": [_step_json(cost, self.rates) for cost in self.costs],
        }

    def lines(self) -> Iterator[str]:
        """For people: a table of the steps, and sums of each direction."""
        yield "at " + ", ".join(f"{symbol} = {length}" for symbol, length in self.sizes.items())
        if self.gpu is not None:
            yield f"  floors of {described(self.gpu)}"
        yield "  all gradients are asked for, those of optional parameters excepted"
        yield f"  parameters {in_bytes(self.parameters)}, saved {in_bytes(self.saved)} at most"
        made, peak = in_bytes(self.held), in_bytes(self.peak)
        yield f"  made by the forward {made}, peak of the backward {peak}"
        rows: list[tuple[str, ...]] = [_HEAD if self.rates else _HEAD[:3]]
        for name, group in groupby(self.costs, lambda cost: cost.program.function):
            own = tuple(group)
            for each in own:
                bound = bound_of(each, self.rates) if self.rates else ""
                rows.append(_row(step_name(each.step, each.index), (each,), self.rates, bound))
            rows.append(_row(f"{name}, all steps", own, self.rates))
        yield from (f"  {line}" for line in aligned(rows))


_HEAD = ("step", "operations", "bytes", "floor", "bound by")


def _row(name: str, own: tuple[Cost, ...], rates: Rates | None, bound: str = "") -> tuple[str, ...]:
    operations = sum(each.operations for each in own)
    row = (name, with_prefix(operations, "FLOP"), in_bytes(sum(each.moved for each in own)))
    if rates is None:
        return row
    return (*row, in_seconds(sum(each.floor(rates) for each in own)), bound)


def bound_of(cost: Cost, rates: Rates) -> str:
    """What a step's floor is the time of."""
    return "operations" if cost.computing(rates) > cost.moving(rates) else "bytes"


def _step_json(cost: Cost, rates: Rates | None) -> dict[str, object]:
    data: dict[str, object] = {
        "program": cost.program.function,
        "step": step_name(cost.step, cost.index),
        "operations": cost.operations,
        "bytes": cost.moved,
    }
    if rates is not None:
        data |= {"floor_seconds": cost.floor(rates), "bound_by": bound_of(cost, rates)}
    return data


def described(gpu: Gpu) -> str:
    """A GPU and what its data sheet promises."""
    rates = (f"{rate / 1e12:.0f} TFLOP/s of {bits} bits" for bits, rate in gpu.rates.items())
    return f"{gpu.name}: {gpu.bandwidth / 1e9:.0f} GB/s, {', '.join(rates)}, by its data sheet"


def numbers(
    plan: ModulePlan, arch: ArchSpec, sizes: Mapping[str, int], gpu: str | None = None
) -> Numbers:
    """A plan at sizes.

    Args:
        plan: of a module.
        arch: that it is for.
        sizes: of all its dimensions, by symbol or by keyword.
        gpu: whose floors are given; by default one that the architecture is for.

    Raises:
        UsageError: a dimension without a size, or a size of none; a GPU that is not known, or
            that does not run the architecture.
    """
    lengths = sizes_of(plan, sizes)
    chosen = _gpu(plan, arch, gpu)
    saved = (plan.buffer(result.buffer) for result in plan.saved)
    made = map(plan.buffer, held(plan))
    parameters = (plan.buffer(parameter.buffer) for parameter in plan.parameters)
    return Numbers(
        lengths,
        chosen,
        None if chosen is None else Rates.promised(chosen, plan),
        tuple(costs(plan, lengths)),
        sum(evaluate(size_in_bytes(each), lengths) for each in saved),
        sum(evaluate(size_in_bytes(each), lengths) for each in parameters if not each.optional),
        sum(evaluate(size_in_bytes(each), lengths) for each in made),
        backward_peak(plan, lengths),
    )


def read_sizes(text: str) -> dict[str, int]:
    """Sizes by the names that a command line such as `T=65536,E=128,H=2048,F=768` has for them.

    Raises:
        UsageError: one is given twice, or no number.
    """
    found: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, number = (word.strip() for word in part.partition("="))
        if name in found:
            raise UsageError(_twice(name))
        if not number.isdecimal() or not 1 <= int(number) <= LARGEST:
            raise UsageError(f"--sizes: expected {name}=<number from 1 to 2^40>, got {part!r}")
        found[name] = int(number)
    return found


def _twice(name: str) -> str:
    return f"--sizes: {name} is given twice"


def names_of_sizes(plan: ModulePlan) -> dict[str, str]:
    """What sizes of a plan may be called, and the symbol of each."""
    called = {dim.keyword: dim.symbol for dim in plan.dims}
    return called | {dim.symbol: dim.symbol for dim in plan.dims}


def sizes_of(plan: ModulePlan, sizes: Mapping[str, int]) -> dict[str, int]:
    """Every dimension's size by its symbol.

    Raises:
        UsageError: one is missing, unknown, or given by both of its names.
    """
    called = names_of_sizes(plan)
    wanted = ", ".join(f"{dim.symbol} ({dim.keyword})" for dim in plan.dims)
    found: dict[str, int] = {}
    for name, size in sizes.items():
        symbol = called.get(name)
        if symbol is None:
            raise UsageError(f"--sizes: {plan.cell} has no dimension {name!r}; known: {wanted}")
        if symbol in found:
            raise UsageError(_twice(name))
        found[symbol] = size
    missing = [f"{dim.symbol} ({dim.keyword})" for dim in plan.dims if dim.symbol not in found]
    if missing:
        raise UsageError(f"--sizes: {plan.cell} has {wanted}; add {', '.join(missing)}")
    return {dim.symbol: found[dim.symbol] for dim in plan.dims}


def gpus_of(plan: ModulePlan, arch: ArchSpec) -> tuple[Gpu, ...]:
    """GPUs that run a plan, and whose rates of all of its GEMMs are known."""
    wanted = {mode.bits for mode in modes(plan)}
    return tuple(g for g in GPUS if arch.runs_on(g.capability) and wanted <= g.rates.keys())


def _gpu(plan: ModulePlan, arch: ArchSpec, word: str | None) -> Gpu | None:
    """The GPU of a name, or the one that stands for an architecture."""
    fit = gpus_of(plan, arch)
    if word is None:
        part = next((gpu for gpu in fit if arch.name.endswith(f"_{gpu.name}")), None)
        return part or next(iter(fit), None)
    named = _one_of(fit, arch)
    gpu = gpu_called(word)
    if gpu is None:
        raise UsageError(f"--gpu: {word!r} is not known; {named}")
    if gpu not in fit:
        raise UsageError(f"--gpu: {gpu.name} does not run {arch.name}; {named}")
    return gpu


def _one_of(fit: Iterable[Gpu], arch: ArchSpec) -> str:
    names = ", ".join(gpu.name for gpu in fit)
    return f"what runs it: {names}" if names else f"{arch.name} is no GPU's, so leave --gpu out"
