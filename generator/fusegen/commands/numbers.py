"""Numbers of a plan at given sizes: bytes, operations, and the floors of a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from ..emit.python.words import step_name
from ..emit.text.columns import aligned
from ..families.gpus import GPUS, Gpu, gpu_called
from ..ir.buffers import size_in_bytes
from ..ir.plan import ModulePlan
from ..ir.shapes import evaluate
from ..spec.arch import ArchSpec
from ..spec.usage import UsageError
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
    """

    sizes: Mapping[str, int]
    gpu: Gpu | None
    rates: Rates | None
    costs: tuple[Cost, ...]
    saved: int
    parameters: int

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
            "steps": [_step_json(cost, self.rates) for cost in self.costs],
        }

    def lines(self) -> Iterator[str]:
        """For people: a table of the steps, and sums of each direction."""
        yield "at " + ", ".join(f"{symbol} = {length}" for symbol, length in self.sizes.items())
        if self.gpu is not None:
            yield f"  floors of {_described(self.gpu)}"
        yield "  all gradients are asked for, those of optional parameters excepted"
        yield f"  parameters {in_bytes(self.parameters)}, saved {in_bytes(self.saved)} at most"
        rows: list[tuple[str, ...]] = [_HEAD if self.rates else _HEAD[:3]]
        for name, group in groupby(self.costs, lambda cost: cost.program.function):
            own = tuple(group)
            for each in own:
                bound = _bound(each, self.rates) if self.rates else ""
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


def _bound(cost: Cost, rates: Rates) -> str:
    return "operations" if cost.computing(rates) > cost.moving(rates) else "bytes"


def _step_json(cost: Cost, rates: Rates | None) -> dict[str, object]:
    data: dict[str, object] = {
        "program": cost.program.function,
        "step": step_name(cost.step, cost.index),
        "operations": cost.operations,
        "bytes": cost.moved,
    }
    if rates is not None:
        data |= {"floor_seconds": cost.floor(rates), "bound_by": _bound(cost, rates)}
    return data


def _described(gpu: Gpu) -> str:
    rates = (f"{rate / 1e12:.0f} TFLOP/s of {bits} bits" for bits, rate in gpu.rates.items())
    return f"{gpu.name}: {gpu.bandwidth / 1e9:.0f} GB/s, {', '.join(rates)}, by its data sheet"


def numbers(plan: ModulePlan, arch: ArchSpec, sizes: str, gpu: str | None = None) -> Numbers:
    """A plan at sizes such as `T=65536,E=128,H=2048,F=768`.

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
    held = (plan.buffer(parameter.buffer) for parameter in plan.parameters)
    return Numbers(
        lengths,
        chosen,
        None if chosen is None else Rates.promised(chosen, plan),
        tuple(costs(plan, lengths)),
        sum(evaluate(size_in_bytes(each), lengths) for each in saved),
        sum(evaluate(size_in_bytes(each), lengths) for each in held if not each.optional),
    )


def sizes_of(plan: ModulePlan, text: str) -> dict[str, int]:
    """Every dimension's size by its symbol.

    Raises:
        UsageError: one is missing, unknown, given twice, or no number.
    """
    called = {dim.keyword: dim.symbol for dim in plan.dims}
    called |= {dim.symbol: dim.symbol for dim in plan.dims}
    wanted = ", ".join(f"{dim.symbol} ({dim.keyword})" for dim in plan.dims)
    found: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, number = (word.strip() for word in part.partition("="))
        symbol = called.get(name)
        if symbol is None:
            raise UsageError(f"--sizes: {plan.cell} has no dimension {name!r}; known: {wanted}")
        if symbol in found:
            raise UsageError(f"--sizes: {name} is given twice")
        if not number.isdecimal() or not 1 <= int(number) <= LARGEST:
            raise UsageError(f"--sizes: expected {name}=<number from 1 to 2^40>, got {part!r}")
        found[symbol] = int(number)
    missing = [f"{dim.symbol} ({dim.keyword})" for dim in plan.dims if dim.symbol not in found]
    if missing:
        raise UsageError(f"--sizes: {plan.cell} has {wanted}; add {', '.join(missing)}")
    return {dim.symbol: found[dim.symbol] for dim in plan.dims}


def _gpu(plan: ModulePlan, arch: ArchSpec, word: str | None) -> Gpu | None:
    """The GPU of a name, or the one that stands for an architecture."""
    wanted = {mode.bits for mode in modes(plan)}
    fit = [gpu for gpu in GPUS if arch.runs_on(gpu.capability) and wanted <= gpu.rates.keys()]
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


# ---- numbers for people


def with_prefix(number: float, unit: str) -> str:
    """`1.23 TFLOP`; no more than four digits."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while number >= 999.5 and len(prefixes) > 1:
        number, prefixes = number / 1000, prefixes[1:]
    digits = 0 if number >= 99.5 or number == int(number) else 1 if number >= 9.95 else 2
    return f"{number:.{digits}f} {prefixes[0]}{unit}"


def in_bytes(number: int) -> str:
    """Bytes, in powers of 1000."""
    return with_prefix(number, "B")


def in_seconds(seconds: float) -> str:
    """`0.04 ns`, `12.3 us` or `4.56 ms`."""
    micro = seconds * 1e6
    if micro >= 999.5:
        return f"{micro / 1000:.2f} ms"
    if micro < 0.995:
        return f"{micro * 1000:.3g} ns"
    return f"{micro:.1f} us" if micro >= 9.95 else f"{micro:.2f} us"
