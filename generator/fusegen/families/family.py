"""What a kernel family is: everything that is known of the device code behind one template.

Device code fixes some numbers that an architecture's spec states, too, and knows some formats and
scales only.  A family says which, once; a spec is held against it when it is loaded, lest a kernel
read memory otherwise than the spec says, and a plan asks it before it names a kernel.  Of users'
own templates nothing is known, so that their specs are taken at their word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, Self, TypeVar

from ..ir.dtypes import DType
from ..ir.kernel import GATED, EndScale, GemmKind, LayoutSpec, Store, Work
from ..ir.kernel_set import Variant
from ..ir.quantization import OPERANDS, Accumulation, Extent, Orientation, Role, Scaling
from ..steps.launch import Launch
from .contract import Contract, contract_of

HADAMARD = "hadamard"
"""Trait of a variant whose values are transformed before they are quantised."""

UNTRANSPOSED = "untransposed"
"""Trait of a variant that writes or reads columnwise copies which lie as the tensor does."""

ATOMS = "atoms"
"""Trait of a variant that writes or reads scales in atoms of 128 rows by 4 blocks."""


WHOLE_ROWS = tuple(each for each in Store if each not in GATED)
"""What may become of a GEMM whose threads have whatever columns its tiles give them."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a step asks of its kernels.

    Attributes:
        primitive: of the step.
        kind: of a GEMM.
        variant: formats, scales and store; None where the module's own type is all.
        history: amaxes that a delayed scale looks back on.
        gated_cost: operations for each element of an expression of halves of a GEMM's result.
    """

    primitive: str
    kind: GemmKind | None = None
    variant: Variant | None = None
    history: int = 0
    gated_cost: int = 0


class Offer(Protocol):
    """What a family can do, or as much of it as an architecture lists."""

    @property
    def implements(self) -> tuple[str, ...]: ...
    @property
    def formats(self) -> tuple[DType, ...]: ...
    @property
    def accumulations(self) -> tuple[Accumulation, ...]: ...
    @property
    def stores(self) -> tuple[Store, ...]: ...
    def scales(self, scaling: str) -> bool: ...


def offers(offer: Offer, demand: Demand) -> bool:
    """Whether primitive, formats, scalings, accumulation and store of a demand are listed."""
    variant = demand.variant or Variant((DType.IO,), (), ())
    ways = {each.value for each in offer.accumulations}
    return (
        demand.primitive in offer.implements
        and {*variant.formats} <= {*offer.formats}
        and all(offer.scales(scaling) for scaling in variant.scalings)
        and variant.store in offer.stores
        and (demand.variant is None or not ways or not ways.isdisjoint(variant.traits))
    )


@dataclass(frozen=True, slots=True)
class GemmScaling:
    """Scales of two operands that one GEMM reads.

    Attributes:
        tokens: of activations and of gradients.
        weights: of the weights beside them.
        accumulations: in which sums they are applied.
        token_major: whether the scales of tokens are read in token-major order only.
    """

    tokens: Scaling
    weights: Scaling
    accumulations: tuple[Accumulation, ...]
    token_major: bool = False

    def of(self, kind: GemmKind) -> tuple[str, str]:
        """Names of what the first and the second operand of a GEMM have."""
        roles = (OPERANDS[kind, slot][0] for slot in "ab")
        a, b = (self.weights if role is Role.WEIGHT else self.tokens for role in roles)
        return a.name, b.name


@dataclass(frozen=True, slots=True)
class LayoutNeeds:
    """How quantised copies are stored that device code reads or writes.

    Attributes:
        token_alignments: starts of groups in transposed copies; empty where it has none.
        token_major: names of scalings whose scales of tokens are read in token-major order only.
        scale_atoms: names of scalings whose scales are read in atoms only.
        transposed: formats whose columnwise copies may be.
        untransposed: formats whose columnwise copies may lie as the tensor does.
        pitch: bytes that rows are padded to.
    """

    token_alignments: tuple[int, ...] = ()
    token_major: tuple[str, ...] = ()
    scale_atoms: tuple[str, ...] = ()
    transposed: tuple[DType, ...] = (DType.E4M3, DType.E5M2, DType.E2M1)
    untransposed: tuple[DType, ...] = ()
    pitch: int = 16

    def reads(self, format: DType, layout: LayoutSpec) -> bool:
        """Whether columnwise copies of a format lie as they have to."""
        return format in (self.transposed if layout.transposes(format) else self.untransposed)

    def problems(
        self,
        template: str,
        layout: LayoutSpec,
        formats: tuple[DType, ...],
        scalings: tuple[str, ...],
    ) -> Iterator[tuple[str, str]]:
        """The key of a layout that is otherwise, and why that is wrong."""
        for format in formats:
            if not self.reads(format, layout):
                way = "as they lie" if layout.transposes(format) else "transposed"
                message = f"{template} reads columnwise copies of {format.value} {way}"
                yield "transposed", f"{message}; {_remedy(format, layout)}"
        if layout.pitch != self.pitch:
            yield "pitch", f"{template} has rows of {self.pitch} bytes, got {layout.pitch}"
        if self.token_alignments and layout.token_alignment not in self.token_alignments:
            words = " or ".join(map(str, self.token_alignments))
            yield (
                "token_alignment",
                f"{template} has groups that start at multiples of {words}, got"
                f" {layout.token_alignment}",
            )
        along = [scaling for scaling in scalings if scaling in self.token_major]
        if along and not layout.token_major:
            yield (
                "token_major",
                f"{template} reads scales of {along[0]} by token; say token_major: true",
            )
        atoms = [scaling for scaling in scalings if scaling in self.scale_atoms]
        for scaling in atoms:
            if scaling not in layout.scale_atoms:
                yield (
                    "scale_atoms",
                    f"{template} reads scales of {scaling} in atoms; list it in scale_atoms",
                )


def _remedy(format: DType, layout: LayoutSpec) -> str:
    """What of a layout is to be changed for a format whose copies lie the wrong way."""
    every = (DType.E4M3, DType.E5M2, DType.E2M1)
    listed = [each for each in every if layout.transposes(each) != (each is format)]
    return f"say transposed: [{', '.join(each.value for each in listed)}]"


Constants = tuple[tuple[str, int], ...]
"""Numbers by name that a kernel depends on: printed to its unit, and compared there with those that
the device code derives by itself."""


class Config(Protocol):
    """One configuration of a kernel, in the terms of its family: a validated, frozen dataclass.

    Its fields are what an architecture's spec says of a point.
    """

    @property
    def name(self) -> str:
        """A word, and numbers behind it: everything the configuration says."""
        ...

    @classmethod
    def parse(cls, name: str) -> Self:
        """Inverse of ``name``.  Raises ValueError for what is no name of one."""
        ...

    @property
    def work(self) -> Work:
        """What of a result is made at a time."""
        ...

    def cpp(self, limits: Mapping[str, int]) -> str:
        """Template arguments of the device code's configuration, for an architecture's limits."""
        ...


C = TypeVar("C", bound=Config)


def _no_lighter(config: Config) -> Iterator[Config]:
    """Of families whose configurations have nothing to give."""
    return iter(())


@dataclass(frozen=True, slots=True)
class Configured(Generic[C]):
    """What is known of a family that has configurations to choose among.

    Attributes:
        config: type of its configurations.
        limits: names of those of an architecture that configurations are laid out by.
        problems: why device code refuses a configuration, for a kind, a variant and limits.
        constants: that device code derives of a configuration, too, for the same; `SHARED_BYTES`
            is one of them.
        lighter: configurations that compute the same and take less of an SM, the next best first.
    """

    config: type[C]
    limits: tuple[str, ...]
    problems: Callable[[C, GemmKind, Variant, Mapping[str, int]], Iterator[str]]
    constants: Callable[[C, GemmKind, Variant, Mapping[str, int]], Constants]
    lighter: Callable[[C], Iterator[Config]] = _no_lighter


@dataclass(frozen=True)
class Family:
    """All that is known of the device code of one template.

    Attributes:
        name: what specs call it, and of the template of its units, ``csrc/<name>.cu.j2``.
        implements: primitives it has code for.
        launch: arguments of its kernels.
        summary: sentence of its dispatch headers; ``{kind}`` stands for the kind of a GEMM.
        device: header of device code that has ``launch_<name><Element>``; empty where units need
            more than an element type, and a template of their own.
        formats: element formats of what it reads and writes quantised; ``io`` for none.
        converts: how elements that it encodes or decodes may share scales.
        multiplies: how the operands of its GEMMs may share scales.
        stores: what may become of its GEMMs.
        ends: what its GEMMs may multiply by at their end, for operands decoded as codes.
        capability: least compute capability that has its instructions.
        arch: the only architecture whose instructions it uses; None for every later one, too.
        row_alignment: elements that innermost dimensions are multiples of.
        layout: of the copies that it reads or writes; None where it has none.
        transformed: what it has the Hadamard transform before.
        most_history: amaxes that a delayed scale may look back on.
        most_parts: parts that one launch of a step may have which joins some.
        configured: what is known of its configurations; None where one instantiation serves.
        too_many: ends and stores that no thread has the registers for together.
        most_gated_cost: operations for each element of an expression of halves of a result that
            threads have the registers for; None where they have those for any.
        enumerators: C++ names of scalings and accumulations that are not the words' own.
        contracts: what its compiled units have to be; of a unit the first that is of its variant.
    """

    name: str
    implements: tuple[str, ...]
    launch: Launch
    summary: str
    device: str = ""
    formats: tuple[DType, ...] = (DType.IO,)
    converts: tuple[Scaling, ...] = ()
    multiplies: tuple[GemmScaling, ...] = ()
    stores: tuple[Store, ...] = (Store.IO,)
    ends: tuple[EndScale, ...] = ()
    too_many: tuple[tuple[tuple[EndScale, ...], Store], ...] = ()
    most_gated_cost: int | None = None
    capability: tuple[int, int] = (8, 0)
    arch: str | None = None
    row_alignment: int = 1
    layout: LayoutNeeds | None = None
    transformed: tuple[Scaling, ...] = ()
    most_history: int = 0
    most_parts: int = 0
    configured: Configured[Any] | None = None
    enumerators: Mapping[str, str] = field(default_factory=dict)
    contracts: tuple[Contract, ...] = ()

    @cached_property
    def scalings(self) -> tuple[str, ...]:
        """Names of how elements may share scales."""
        both = [each for pair in self.multiplies for each in (pair.tokens, pair.weights)]
        return tuple(dict.fromkeys(each.name for each in (*self.converts, *both)))

    def scales(self, scaling: str) -> bool:
        """Whether elements may share scales so."""
        return scaling in self.scalings

    @cached_property
    def accumulations(self) -> tuple[Accumulation, ...]:
        """Of GEMMs of quantised operands; empty where sums are kept in fp32."""
        every = (way for pair in self.multiplies for way in pair.accumulations)
        return tuple(dict.fromkeys(every))

    def constants(
        self,
        config: Config | None,
        kind: GemmKind | None,
        variant: Variant | None,
        limits: Mapping[str, int],
    ) -> Constants:
        """What a unit states of its kernel, for device code to compare with what it derives.

        Args:
            config: where there are some to choose among.
            kind: of a GEMM.
            variant: formats, scales and store; None where the module's own type is all.
            limits: of the architecture.
        """
        stated = {"row_alignment": self.row_alignment} if self.row_alignment > 1 else {}
        if self.layout:
            stated["pitch"] = self.layout.pitch
            if len(self.layout.token_alignments) == 1:
                stated["token_alignment"] = self.layout.token_alignments[0]
        if self.most_history:
            stated["most_history"] = self.most_history
        if self.most_parts:
            stated["most_parts"] = self.most_parts
        if self.converts and variant:
            stated |= _scale_block(variant)
        if self.configured is None or config is None or kind is None:
            return tuple(stated.items())
        store = variant or Variant((DType.IO,), (), ())
        return (*stated.items(), *self.configured.constants(config, kind, store, limits))

    def contract(self, variant: Variant | None, point: str = "") -> Contract:
        """What a compiled unit of a variant, and of a configuration by name, has to be."""
        return contract_of(self.contracts, variant, point)

    def cannot_run_on(self, arch: str, capability: tuple[int, int]) -> str:
        """Why an architecture has not the instructions; empty where it has them."""
        if self.arch is not None and arch != self.arch:
            return f"uses instructions of {self.arch} alone"
        if capability < self.capability:
            needed, got = (".".join(map(str, each)) for each in (self.capability, capability))
            return f"needs compute capability {needed}, this is {got}"
        return ""

    def accepts(self, demand: Demand, layout: LayoutSpec | None = None) -> str | None:
        """What there is no device code for, such as ``fprop of tensor of input and row of weight``.

        Args:
            demand: of a step.
            layout: of the copies that it reads or writes; None where that does not matter.

        Returns:
            None where there is code for all of it.
        """
        variant = demand.variant or Variant((DType.IO,), (), ())
        words = "_".join(variant.scalings)
        if not (offers(self, demand) and {*variant.ends} <= {*self.ends}):
            return " of ".join(filter(None, (demand.primitive, str(variant))))
        if (variant.ends, variant.store) in self.too_many:
            return f"{demand.primitive} of {variant}, for which no thread has the registers"
        if self.most_gated_cost is not None and demand.gated_cost > self.most_gated_cost:
            return (
                f"an expression of {demand.gated_cost} operations for each element behind a GEMM,"
                f" {self.name} has the registers for {self.most_gated_cost}"
            )
        if demand.history > self.most_history:
            return (
                f"a history of {demand.history} amaxes, {self.name} keeps {self.most_history} at"
                " most"
            )
        if demand.kind and self.multiplies:
            stored = self._misplaced(demand.kind, variant, layout) if layout else None
            return self._accepts_gemm(demand.kind, variant) or stored
        if HADAMARD in variant.traits and words not in _names(self.transformed):
            names = ", ".join(_names(self.transformed)) or "nothing"
            return f"a transform before {words}, {self.name} has it before {names}"
        return None

    def _accepts_gemm(self, kind: GemmKind, variant: Variant) -> str | None:
        """Operands scale as one of the pairs does, in sums in which that pair is applied."""
        pairs = [pair for pair in self.multiplies if pair.of(kind) == variant.scalings]
        if not pairs:
            roles = (OPERANDS[kind, slot][0].value for slot in "ab")
            each = zip(variant.scalings, roles, strict=True)
            return f"{kind.value} of {' and '.join(f'{word} of {role}' for word, role in each)}"
        ways = {way.value for way in pairs[0].accumulations}
        if ways.isdisjoint(variant.traits):
            return f"{kind.value} of {variant.scalings[0]} in {'_'.join(variant.traits)} sums"
        return None

    def _misplaced(self, kind: GemmKind, variant: Variant, layout: LayoutSpec) -> str | None:
        """Scales of atoms are in atoms, and no others are; columnwise copies lie as is read."""
        for slot, format in zip("ab", variant.formats, strict=True):
            columnwise = OPERANDS[kind, slot][1] is Orientation.COLUMNWISE
            if columnwise and self.layout and not self.layout.reads(format, layout):
                way = "transposed" if layout.transposes(format) else "untransposed"
                return f"{kind.value} of {way} {format.value}"
        wanted = self.layout.scale_atoms if self.layout else ()
        for word in variant.scalings:
            if (word in wanted) != (word in layout.scale_atoms):
                order = "atoms, which not all scales of the recipe are in"
                words = f"in {order}" if word in wanted else "in logical order"
                return f"{kind.value} of {word}: {self.name} reads scales {words}"
        return None

    def enumerator(self, word: str) -> str:
        """C++ name of a scaling or an accumulation."""
        return self.enumerators.get(word, word)


def _scale_block(variant: Variant) -> dict[str, int]:
    """Rows and columns that share a scale in a copy that is made or read; 0 is all of them.

    Of codes that are decoded as they are, both are 0.
    """
    if not variant.scalings:
        return {"scale_rows": 0, "scale_columns": 0}
    rows, columns = _extents(variant.scalings[0])
    return {"scale_rows": rows, "scale_columns": columns}


def operand_blocks(variant: Variant) -> Constants:
    """Rows and columns that share a scale in each operand of a GEMM; 0 is all of them."""
    return tuple(
        (f"scale_{name}_{operand}", extent)
        for operand, word in zip("ab", variant.scalings, strict=True)
        for name, extent in zip(("rows", "columns"), _extents(word), strict=True)
    )


def _extents(word: str) -> tuple[int, int]:
    """Of a scaling's blocks; 0 is a whole dimension."""
    scaling = Scaling.parse(word)
    assert scaling is not None, word
    rows, columns = (0 if each is Extent.ALL else each for each in scaling.extents)
    return rows, columns


def _names(scalings: tuple[Scaling, ...]) -> tuple[str, ...]:
    return tuple(each.name for each in scalings)
