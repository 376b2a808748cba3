"""Architectures: what kernels there are, and which one runs when."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from typing import Annotated

from pydantic import StringConstraints
from pydantic.dataclasses import dataclass

from ..families.limits import CAPABILITIES, hardware_limits
from ..ir.dtypes import DType
from ..ir.fields import STRICT, Positive
from ..ir.kernel import GemmKind, LayoutSpec, Store, WaveTime
from ..ir.predicate import Predicate
from ..ir.quantization import Accumulation
from .fields import ARCH, GENCODE, VERSION, Edition, Line, Name, PredicateField, StepName
from .points import Point


@dataclass(frozen=True, slots=True, config=STRICT)
class RuleSpec:
    """Use a point where the conditions hold; the last rule of a list has none.

    Attributes:
        use: name of the point.
        when: conditions on sizes, such as ``{rows: {ge: 4096}}``; all of them hold.
        least: in its place, estimates of several points, of which the least is used.
    """

    use: Name | None = None
    when: PredicateField = Predicate(())
    least: Mapping[Name, WaveTime] = field(default_factory=dict)

    @property
    def points(self) -> tuple[str, ...]:
        """Names of those that it may use."""
        return (self.use,) if self.use is not None else tuple(self.least)


@dataclass(frozen=True, slots=True, config=STRICT)
class KindSpec:
    """Configurations of one kind of GEMM and the ordered rules that choose among them.

    Attributes:
        points: configurations that are compiled.
        select: rules; the first that holds chooses.
        measured: whether the rules follow from measurements; ``false`` where they are from a model,
            until ``bench --sweep`` finds others.
    """

    points: tuple[Point, ...]
    select: tuple[RuleSpec, ...]
    measured: bool = True


class Reach(str, Enum):
    """GPUs that run an architecture's code, beside those of its own compute capability.

    As the CUDA C++ programming guide has it, "Binary compatibility" and "PTX compatibility".
    """

    NONE = "none"
    MINOR = "minor"
    """Later minor versions of the same major one."""
    LATER = "later"
    """All later ones, which compile its PTX when it is loaded."""


class Every(str, Enum):
    """In place of a list: all that device code can be instantiated for."""

    ANY = "any"


@dataclass(frozen=True, slots=True, config=STRICT)
class FamilySpec:
    """A family of kernels that implements primitives on an architecture.

    Attributes:
        implements: kinds of steps that it runs.
        formats: element formats of its quantised operands; ``io`` for none.
        scalings: how their elements share scales, as ``QuantizationSpec.scaling`` says it, or
            ``any``.
        accumulations: of its GEMMs of quantised operands; empty for any.
        stores: what may become of its GEMMs.
        template: name of its templates, where it is not the family's own.
        row_alignment: innermost dimensions are multiples of this many elements.
        kinds: configurations per kind; empty where one instantiation serves.
    """

    implements: tuple[StepName, ...]
    formats: tuple[DType, ...] = (DType.IO,)
    scalings: tuple[Name, ...] | Every = ()
    accumulations: tuple[Accumulation, ...] = ()
    stores: tuple[Store, ...] = (Store.IO,)
    template: Name | None = None
    row_alignment: Positive = 1
    kinds: Mapping[GemmKind, KindSpec] = field(default_factory=dict)

    def scales(self, scaling: str) -> bool:
        """Whether elements may share scales so."""
        return isinstance(self.scalings, Every) or scaling in self.scalings


def isa_of(name: str) -> str:
    """The instruction set in an architecture's name: all but the word of a part of its own."""
    return "_".join(name.split("_")[:2])


def capability_of(name: str) -> tuple[int, int] | None:
    """The compute capability in an architecture's name; None where there is none, as in ``cpu``."""
    digits = re.fullmatch(r"sm_([0-9]*)([0-9])[af]?", isa_of(name))
    return (int(digits[1] or 0), int(digits[2])) if digits else None


@dataclass(frozen=True, slots=True, config=STRICT)
class ArchSpec:
    """A GPU architecture, or ``cpu``: the reference alone.

    Attributes:
        arch: its name; parts with the same instructions and other rules, such as an H20 beside an
            H100, have a word behind it: ``sm_90a_h20``.
        gencode: what nvcc is told.
        toolkit: oldest CUDA toolkit that knows the architecture.
        limits: hardware limits by name, which families were written for.
        layout: of quantised copies.
        kernels: families by name.
    """

    edition: Edition
    arch: Annotated[str, StringConstraints(pattern=ARCH)]
    summary: Line
    gencode: Annotated[str, StringConstraints(pattern=GENCODE)] | None = None
    toolkit: Annotated[str, StringConstraints(pattern=VERSION)] | None = None
    limits: Mapping[Name, int] = field(default_factory=dict)
    layout: LayoutSpec = LayoutSpec()
    kernels: Mapping[Name, FamilySpec] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.arch

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability, as its name says it; None where nothing is compiled for it."""
        return capability_of(self.arch) if self.has_kernels else None

    @property
    def isa(self) -> str:
        """What its code is compiled for, ``sm_90a`` of ``sm_90a_h20``, too."""
        return isa_of(self.arch)

    @property
    def reach(self) -> Reach:
        """Which GPUs run its code, beside its own; that of ``sm_90a`` is tied to one capability."""
        if self.isa[-1:].isalpha():
            return Reach.NONE
        return Reach.LATER if ",compute_" in (self.gencode or "") else Reach.MINOR

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether GPUs of a compute capability run its code."""
        own = self.capability
        if own is None or capability < own:
            return False
        match self.reach:
            case Reach.NONE:
                return capability == own
            case Reach.MINOR:
                return capability[0] == own[0]
            case Reach.LATER:
                return True

    @property
    def least_limits(self) -> Mapping[str, int]:
        """The least of each of its limits among the GPUs that run its code.

        Later ones may have less: a CTA of 8.0 may have 163 KiB of shared memory, one of 8.6 99.
        """
        met = [hardware_limits(each) for each in CAPABILITIES if self.runs_on(each)]
        return {
            name: min((own, *(limits.get(name, own) for limits in met)))
            for name, own in self.limits.items()
        }

    @property
    def has_kernels(self) -> bool:
        """Whether modules are compiled for it, rather than run as the reference."""
        return self.gencode is not None
