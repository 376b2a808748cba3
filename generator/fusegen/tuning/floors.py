"""The least time that a module's plan allows: each step's operations and bytes at given rates.

Every recipe is held against its own plan. GEMMs take the longer of their operations, at the rate of
a dense GEMM of the same formats, and of their bytes; all other steps take their bytes, each operand
read and each result written once, at the bandwidth of memory. A scale that is known only after all
of a tensor was read asks for reading it again, which is not counted; nor are whole tiles.

All gradients are asked for but those of optional parameters, such as biases, which are absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..families.gpus import Gpu
from ..ir import dtypes
from ..ir.buffers import size_in_bytes
from ..ir.dtypes import DType
from ..ir.kernel import Store
from ..ir.kernel_set import Variant
from ..ir.plan import ModulePlan
from ..ir.program import Program
from ..ir.shapes import evaluate
from ..ir.step import Step
from ..steps import is_gemm

QUANTISED = (DType.E4M3, DType.E5M2)


@dataclass(frozen=True)
class Mode:
    """What the rate of a GEMM depends on.

    Attributes:
        formats: of the operands in FP8, a's and b's; none: 16 bits.
        fast: whether sums stay in the instruction's own accumulator.
    """

    formats: tuple[DType, ...] = ()
    fast: bool = False

    def __str__(self) -> str:
        words = [each.value for each in self.formats]
        return "_".join([*words, "fast" if self.fast else "split"]) if words else "bf16"

    @property
    def bits(self) -> int:
        """Of an element of the wider operand."""
        return max(map(dtypes.bits, self.formats), default=dtypes.bits(DType.IO))


@dataclass(frozen=True)
class Rates:
    """Of a machine: operations per second by mode, and bytes of a copy per second."""

    gemms: Mapping[Mode, float]
    copy: float

    @classmethod
    def promised(cls, gpu: Gpu, plan: ModulePlan) -> Rates:
        """What the data sheet of a GPU says of the modes of a plan's GEMMs, which it all has."""
        return cls({mode: gpu.rates[mode.bits] for mode in modes(plan)}, gpu.bandwidth)


@dataclass(frozen=True)
class Cost:
    """Of one step.

    Attributes:
        program: that it belongs to.
        index: its place in that, from 1.
        step: itself.
        operations: floating-point operations.
        gemms: those of its GEMMs by mode; of a step that runs in a loop, all of its parts'.
        moved: bytes read and written.
    """

    program: Program
    index: int
    step: Step
    operations: int
    gemms: Mapping[Mode, int]
    moved: int

    def computing(self, rates: Rates) -> float:
        """Seconds that the operations of GEMMs take at least; 0 for another step."""
        return sum(operations / rates.gemms[mode] for mode, operations in self.gemms.items())

    def moving(self, rates: Rates) -> float:
        """Seconds that its bytes take at least."""
        return self.moved / rates.copy

    def floor(self, rates: Rates) -> float:
        """Seconds that it takes at least."""
        return max(self.computing(rates), self.moving(rates))


def modes(plan: ModulePlan) -> set[Mode]:
    """Whose rates a floor needs."""
    steps = (step for program in plan.programs for step in program.steps)
    return {mode_of(plan, gemm) for step in steps for gemm in _gemms(step)}


def costs(plan: ModulePlan, lengths: Mapping[str, int]) -> Iterator[Cost]:
    """Of every step of every direction that runs, in their order.

    Args:
        plan: of a module.
        lengths: of every dimension by its symbol.
    """
    programs, absent = plan.programs, _absent(plan)
    given = {result.buffer for program in programs for result in program.results}
    for program in programs:
        for index, step in enumerate(program.steps, 1):
            if step.when and {*step.when} <= absent:
                continue
            read = {name for name in step.loads if not plan.buffer(name).optional}
            left = {*_left(program, step, given, absent)}
            added_to = [step.writes[0]] if adds(plan, step) else []  # which is read as well
            moved = (size_in_bytes(plan.buffer(name)) for name in (*(read | left), *added_to))
            bytes_ = sum(evaluate(size, lengths) for size in moved)
            gemms: Counter[Mode] = Counter()
            for gemm in _gemms(step):
                gemms[mode_of(plan, gemm)] += _operations(gemm, lengths)
            yield Cost(program, index, step, _operations(step, lengths), gemms, bytes_)


def _gemms(step: Step) -> tuple[Step, ...]:
    """The GEMMs that a step consists of: itself, or those of its parts that it runs in a loop."""
    if is_gemm(step):
        return (step,)
    return tuple(part for part in step.parts if is_gemm(part)) if step.chunks else ()


def _operations(step: Step, lengths: Mapping[str, int]) -> int:
    return evaluate(step.flops, lengths) if step.flops is not None else 0


def mode_of(plan: ModulePlan, step: Step) -> Mode:
    """Of a GEMM; one whose operands are decoded first, or that no kernel runs, has 16 bits."""
    variant = _variant(plan, step)
    if variant is None or not variant.formats or not {*variant.formats} <= {*QUANTISED}:
        return Mode()
    return Mode(variant.formats, "fast" in variant.traits)


def adds(plan: ModulePlan, step: Step) -> bool:
    """Whether a GEMM is added to what its result holds."""
    variant = _variant(plan, step)
    return variant is not None and variant.store in (Store.ADD, Store.ADD_IO)


def _variant(plan: ModulePlan, step: Step) -> Variant | None:
    """What a step asks of its kernels; None where nothing is compiled."""
    found = (each for each in plan.kernel_sets if each.name == step.kernels)
    return next((each.units[0].variant for each in found), None)


def _absent(plan: ModulePlan) -> set[str]:
    """Flags of gradients of parameters that are absent: biases."""
    absent = (p.buffer for p in plan.parameters if plan.buffer(p.buffer).optional)
    return {f"need_d{name}" for name in absent}


def _left(program: Program, step: Step, given: set[str], absent: set[str]) -> Iterator[str]:
    """What a step leaves to others: not its own scratch, nor what nobody asks for.

    Args:
        given: results of all directions.
        absent: flags of gradients that nobody asks for.
    """
    read = {name for other in program.steps if other is not step for name in other.loads}
    flags = {result.buffer: result.when for result in step.output_when}
    for name in step.writes:
        wanted = flags.get(name, ())
        if name in given | read | {*step.mutates} and not (wanted and {*wanted} <= absent):
            yield name
