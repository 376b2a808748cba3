"""Compiled kernels of a module, and how the dispatch chooses among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .dtypes import DType
from .kernel import EndScale, GemmKind, Store, WaveTime, Work
from .predicate import Predicate, SizeVariable
from .step import Pointwise


@dataclass(frozen=True, slots=True)
class Variant:
    """What a kernel of quantised tensors is instantiated for, besides the module's own type.

    Attributes:
        formats: of its quantised operands or results, in slot order.
        scalings: how their elements share scales.
        traits: accumulation of a GEMM; rounding and transforms of a quantisation.
        store: what becomes of a GEMM.
        ends: what a GEMM of decoded operands multiplies by at its end, for each of them; empty
            where it has no scales of theirs.
    """

    formats: tuple[DType, ...]
    scalings: tuple[str, ...]
    traits: tuple[str, ...]
    store: Store = Store.IO
    ends: tuple[EndScale, ...] = ()

    def __str__(self) -> str:
        words = (format.value for format in self.formats if format is not DType.IO)
        stored = () if self.store is Store.IO else (self.store.value,)
        ends = (end.value for end in self.ends)
        return "_".join((*words, *dict.fromkeys(self.scalings), *self.traits, *ends, *stored))


@dataclass(frozen=True, slots=True)
class EpilogueMath:
    """An expression of the result of a GEMM.

    Attributes:
        math: printed.
        of: indices of its operands that are the result, or what the expression before it gives:
            one, or the first and the second half of its rows.
    """

    math: Pointwise
    of: tuple[int, ...]

    @property
    def name(self) -> str:
        """What kernels are called by: the expression's, and of which operand, if it has others."""
        operands = self.math.operands
        alike = self.gated or len(operands) == 1
        return self.math.kernel if alike else f"{self.math.kernel}_of_{operands[self.of[0]].symbol}"

    @property
    def gated(self) -> bool:
        """Whether it is of both halves of the result's rows."""
        return len(self.of) > 1


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel instantiation: a function of its unit, by its name and element type."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class KernelUnit:
    """One translation unit: a configuration, instantiated for every element type that it serves.

    Types share a unit, because a compiler spends most of its time on headers, once per unit.

    Attributes:
        name: also of the file.
        template: name of its templates.
        kernels: one per element type.
        kind: of a GEMM.
        point: name of a GEMM's configuration.
        config: its C++ template arguments.
        constants: numbers that the device code derives, too, by name.
        pointwise: math of a pointwise kernel.
        variant: formats and scales of a kernel of quantised tensors.
        epilogue: expressions that the result of a GEMM goes through, in their order.
    """

    name: str
    template: str
    kernels: tuple[Kernel, ...]
    kind: GemmKind | None = None
    point: str = ""
    config: str = ""
    constants: tuple[tuple[str, int], ...] = ()
    pointwise: Pointwise | None = None
    variant: Variant | None = None
    epilogue: tuple[EpilogueMath, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration that a rule may choose.

    Attributes:
        point: name of a GEMM's configuration.
        kernels: by element type.
        time: estimate of it, where there are others.
        work: that the estimate counts; None where there is none.
    """

    point: str
    kernels: tuple[tuple[DType, str], ...]
    time: WaveTime | None = None
    work: Work | None = None

    @property
    def words(self) -> str:
        """How its time is estimated."""
        time, work = self.time, self.work
        assert time and work
        tiles = f"{work.rows} x {work.columns} on {work.sms / work.clusters:g} SMs"
        along = f"{time.wave} + {time.k} * k / 1024"
        return f"{time.launch} + waves * ({along}) ns; {tiles}"


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """Use a configuration where the predicate holds, on a device that has the memory.

    Attributes:
        predicate: on the sizes of a launch.
        candidates: of which the one with the least estimate is used; most rules have one.
        shared_bytes: that the device must let a CTA have, or a later rule is used; 0 where every
            GPU that runs the code does.
    """

    predicate: Predicate
    candidates: tuple[Candidate, ...]
    shared_bytes: int = 0

    @property
    def words(self) -> str:
        """When it is used, such as ``columns >= 1024 and shared_memory >= 116736``."""
        memory = f"shared_memory >= {self.shared_bytes}" if self.shared_bytes else ""
        sizes = str(self.predicate) if self.predicate.conditions or not memory else ""
        return " and ".join(filter(None, (sizes, memory)))

    @property
    def points(self) -> tuple[str, ...]:
        """Configurations that it may choose."""
        return tuple(each.point for each in self.candidates)

    def choose(self, sizes: Mapping[SizeVariable, int]) -> Candidate:
        """The configuration with the least estimate; the first of several."""
        if len(self.candidates) == 1:
            return self.candidates[0]
        return min(self.candidates, key=lambda each: _estimate(each, sizes))


def _estimate(candidate: Candidate, sizes: Mapping[SizeVariable, int]) -> int:
    assert candidate.time and candidate.work
    return candidate.time.of(candidate.work, sizes)


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Kernels that can run one kind of step, and the ordered rules that choose.

    Attributes:
        name: of the dispatch function and its header.
        template: name of its templates.
        kind: of a GEMM.
        units: every configuration, each with all of its instantiations.
        row_alignment: elements that innermost dimensions must be multiples of.
        rules: in order, the last one unconditional, on any device, too.
        measured: whether they follow from measurements, and not from a model.
    """

    name: str
    template: str
    kind: GemmKind | None
    units: tuple[KernelUnit, ...]
    rules: tuple[SelectionRule, ...]
    row_alignment: int = 1
    measured: bool = True

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every instantiation."""
        return tuple(kernel for unit in self.units for kernel in unit.kernels)

    def point(self, sizes: Mapping[SizeVariable, int]) -> str:
        """The configuration that the first rule which holds chooses, given the memory for it."""
        rule = next(each for each in self.rules if each.predicate.holds(sizes))
        return rule.choose(sizes).point
