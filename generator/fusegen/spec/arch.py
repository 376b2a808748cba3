"""Architectures: what kernels there are, and which one runs when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from pydantic import StringConstraints
from pydantic.dataclasses import dataclass

from ..ir.dtypes import DType
from ..ir.fields import STRICT, Positive
from ..ir.kernel import GemmKind, LayoutSpec, Store
from ..ir.predicate import Predicate
from ..ir.quantization import Accumulation
from .fields import ARCH, GENCODE, VERSION, Edition, Line, Name, PredicateField, StepName
from .points import Point


@dataclass(frozen=True, slots=True, config=STRICT)
class RuleSpec:
    """Use a point where the conditions hold; the last rule of a list has none."""

    use: Name
    when: PredicateField = Predicate(())


@dataclass(frozen=True, slots=True, config=STRICT)
class KindSpec:
    """Configurations of one kind of product and the ordered rules that choose among them."""

    points: tuple[Point, ...]
    select: tuple[RuleSpec, ...]


@dataclass(frozen=True, slots=True, config=STRICT)
class FamilySpec:
    """A family of kernels that implements primitives on an architecture.

    Attributes:
        implements: primitives.
        formats: element formats of its quantised operands; ``io`` for none.
        scalings: how their elements share scales, as ``QuantizationSpec.scaling`` says it.
        accumulations: of its products of quantised operands; empty for any.
        stores: what may become of its products.
        template: name of its templates, where it is not the family's own.
        row_alignment: innermost dimensions are multiples of this many elements.
        kinds: configurations per kind; empty where one instantiation serves.
    """

    implements: tuple[StepName, ...]
    formats: tuple[DType, ...] = (DType.IO,)
    scalings: tuple[Name, ...] = ()
    accumulations: tuple[Accumulation, ...] = ()
    stores: tuple[Store, ...] = (Store.IO,)
    template: Name | None = None
    row_alignment: Positive = 1
    kinds: Mapping[GemmKind, KindSpec] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, config=STRICT)
class ArchSpec:
    """A GPU architecture, or ``cpu``: the reference alone.

    Attributes:
        capability: compute capability, None for cpu.
        gencode: what nvcc is told.
        toolkit: oldest CUDA toolkit that knows the architecture.
        limits: hardware limits by name, which families were written for.
        layout: of quantised copies.
        kernels: families by name.
    """

    edition: Edition
    arch: Annotated[str, StringConstraints(pattern=ARCH)]
    summary: Line
    capability: tuple[int, int] | None = None
    gencode: Annotated[str, StringConstraints(pattern=GENCODE)] | None = None
    toolkit: Annotated[str, StringConstraints(pattern=VERSION)] | None = None
    limits: Mapping[Name, int] = field(default_factory=dict)
    layout: LayoutSpec = LayoutSpec()
    kernels: Mapping[Name, FamilySpec] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.arch

    @property
    def has_kernels(self) -> bool:
        """Whether modules are compiled for it, rather than run as the reference."""
        return self.gencode is not None
