"""What is known of a kind of step: one ``StepDef`` per kind, and nothing of a kind elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.shapes import Expr
from ..ir.step import Step
from ..ir.words import AttributeType
from .copies import Formats, Results
from .launch import Launch


class Trait(str, Enum):
    """What generic code may ask of a kind of step.

    GEMM multiplies two operands, and reads quantised copies of them where a recipe says so.
    SUMS_ROWS adds up all rows, or those of each group.  QUANTIZES makes copies of a tensor, DECODES
    goes back from one to 16 bits.  PRINTED has its math in an expression, from which references and
    kernels are printed; DERIVED, too, and that expression is the derivative of an op's.
    COPIES_MEMORY gives the bytes of its operand, as they were before it changes or in other
    dimensions: PyTorch and CUDA do that themselves, without a function of the reference or a
    kernel.  RECOMPUTED gives the same bits again from what it reads, in one pass over memory, so
    that a backward may run it instead of the forward saving what it gives.  OBSERVES leaves numbers
    for people: no step runs for its sake.  MOVES_STATE moves the state of delayed scaling on, and
    nothing else.  JOINS does several steps of one kind, none of which waits for another.  COMMUTES
    gives the same bits where its first two operands change places.  LOOPS runs several steps of any
    kinds for a chunk of the rows at a time: what it launches are those.  ROUNDS gives its operand
    in another type: of a part of it a part, of a partial sum a partial sum.  CANCELS gives
    differences of values that may be nearly equal.
    """

    GEMM = "gemm"
    SUMS_ROWS = "sums_rows"
    QUANTIZES = "quantizes"
    DECODES = "decodes"
    PRINTED = "printed"
    DERIVED = "derived"
    COPIES_MEMORY = "copies_memory"
    RECOMPUTED = "recomputed"
    OBSERVES = "observes"
    MOVES_STATE = "moves_state"
    JOINS = "joins"
    COMMUTES = "commutes"
    LOOPS = "loops"
    ROUNDS = "rounds"
    CANCELS = "cancels"


Rule = Mapping[str, str]
"""Dimensions by slot, such as ``{"a": "T... K", "b": "N K", "out": "T... N"}``.

A name is one size throughout a step, ``T...`` any number of leading ones, and ``K/8`` the eighth of
one that is rounded up, in a slot behind those that have K itself.  A slot that a rule
does not name is no operand there.
"""


@dataclass(frozen=True, slots=True)
class AttributeDef:
    """A scalar of a kind of step, which its function of the reference has by this name.

    Attributes:
        name: in specs and plans.
        type: of its value.
        kinds: variants that have it; empty where all do.
        words: what a string may be; launches are printed with it, so that the op's attribute is
            static.
        range: least and largest value of an integer that launches are printed with; None for any.
    """

    name: str
    type: AttributeType
    kinds: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    range: tuple[int, int] | None = None

    @property
    def fixed(self) -> bool:
        """Whether its value is known when a module is generated."""
        return bool(self.words) or self.range is not None

    def unfit(self, value: object) -> str:
        """What is wrong with a value of the right type; empty where nothing is."""
        if self.words and value not in self.words:
            return f"expected {' | '.join(self.words)}, got {value!r}"
        if self.range and isinstance(value, int) and not self.range[0] <= value <= self.range[1]:
            least, largest = self.range
            return f"expected a number from {least} to {largest}, got {value}"
        return ""


@dataclass(frozen=True, slots=True)
class Reference:
    """The function of the reference, normative for every architecture.

    Attributes:
        function: ``steps.gemm``: the module as references import it, and the name, behind which
            the kind of the step stands where it has one.
        slots: operands that it takes, those of quantised copies included.
        of_copies: the function that takes quantised copies; empty where there is none.
    """

    function: str
    slots: frozenset[str]
    of_copies: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class StepDef:
    """A kind of step.

    Attributes:
        name: in specs and plans.
        operands: slots that a step of an op fills.
        optional: slots that it may leave out.
        needed: those of them that a variant may not leave out.
        results: slots of results; a step may leave out all but the first.
        kinds: variants; empty where there is one only.
        attributes: scalars, all that a variant has given; a printed kind has those of its
            expression.
        shapes: rule of the dimensions by kind, None where there are no kinds.  Empty for steps
            that passes write.
        infer: its results by slot, where operands and the formats of copies decide them; None where
            ``shapes`` or an expression do.
        dtypes: types that operands and results may have by slot, where it is not the module's own
            alone.
        indices: operands that hold numbers of a size's elements, by slot: columns that are looked
            up, such as classes.
        inverse: operands that are maps, each the inverse of another operand: place j has i where
            place i of the other has j, and -1 where no place has.
        counted: operands that have how often each index is in another operand.
        divisible: sizes that hold another one, or a formula of others and of integer attributes, a
            whole number of times.
        least: sizes that are as large as a formula of integer attributes, or larger.
        equal: sizes that are a formula of others and of integer attributes.
        independent: dimensions of the rule along which it computes every part of its results from
            the same part of its operands alone, so that ranks may have shards of them.
        linear: operands in each of which its results are linear, all others being as they are: of
            partial sums it gives partial sums.
        moves: the operand whose rows or elements it puts where other operands say; empty where it
            moves none.  Of rows of some groups it gives tokens what these have for them.
        named: the operand each row of which names all rows of `moves` that a row of the result is
            of, so that it may be asked for some of its rows; empty where there is no such one.
        in_place: results that may lie in the memory of an operand, by slot: each element of that is
            read by nobody but who writes the same element, before it does.
        sums: results that are added up along those dimensions: of shards they are partial sums.
        scratch: memory that its kernels need beside operands and results, by slot.
        neutral: values of attributes with which the first result is the first operand, bit for bit.
        traits: what generic code may ask.
        reference: its function; None where it has none.
        formula: of a step, the expression of its slots that its kernel is printed from, evaluated
            in the order it is written in; None where kernels are not, or an op has the expression.
        sizes: what a launch is given by name: a dimension of the rule, 1 where its kind has none.
        flops: floating-point operations of a step that has its sizes.
        launch: the arguments of its kernel; None where it has none.
        parts: rows of kinds that it does in one kernel, each in order, or the one kind of all that
            it joins; the reference runs those.
    """

    name: str
    operands: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    needed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    results: tuple[str, ...] = ("out",)
    kinds: tuple[str, ...] = ()
    attributes: tuple[AttributeDef, ...] = ()
    shapes: Mapping[str | None, Rule] = field(default_factory=dict)
    infer: Callable[[Step, Mapping[str, Buffer], Formats], Results] | None = None
    dtypes: Mapping[str, tuple[DType, ...]] = field(default_factory=dict)
    indices: Mapping[str, str] = field(default_factory=dict)
    inverse: Mapping[str, str] = field(default_factory=dict)
    counted: Mapping[str, str] = field(default_factory=dict)
    divisible: Mapping[str, str] = field(default_factory=dict)
    least: Mapping[str, str] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    independent: tuple[str, ...] = ()
    linear: tuple[str, ...] = ()
    moves: str = ""
    named: str = ""
    in_place: Mapping[str, str] = field(default_factory=dict)
    sums: tuple[str, ...] = ()
    scratch: Callable[[Step, Mapping[str, Buffer], Formats], Results] | None = None
    neutral: Mapping[str, float] = field(default_factory=dict)
    traits: frozenset[Trait] = frozenset()
    reference: Reference | None = None
    formula: Callable[[Step], str] | None = None
    sizes: Mapping[str, str] = field(default_factory=dict)
    flops: Callable[[Step], Expr] | None = None
    launch: Callable[[Step], Launch] | None = None
    parts: tuple[tuple[str, ...], ...] = ()

    def function(self, kind: str | None = None, *, of_copies: bool = False) -> str:
        """What references call, of the kind of a step; the twin for quantised copies if asked for.

        Raises:
            ValueError: the reference has no function for it.
        """
        if self.reference is None:
            raise ValueError(f"the reference has no function for {self.name}")
        twin = self.reference.of_copies if of_copies else ""
        return "_".join(filter(None, (twin or self.reference.function, kind)))

    def required(self, kind: str | None) -> tuple[str, ...]:
        """Slots of operands that a step of a variant has."""
        return (*self.operands, *self.needed.get(kind or "", ()))

    def attributes_of(self, kind: str | None) -> tuple[AttributeDef, ...]:
        """Scalars that a step of a variant has."""
        return tuple(each for each in self.attributes if not each.kinds or kind in each.kinds)

    def types(self, slot: str) -> tuple[DType, ...]:
        """Types that an operand or a result may have, quantised copies apart."""
        return self.dtypes.get(slot, (DType.IO,))

    @property
    def dimensions(self) -> frozenset[str]:
        """Names of the rule."""
        rules = (rule for kind in self.shapes.values() for rule in kind.values())
        names = (name for rule in rules for name in rule.split() if "/" not in name)
        return frozenset(name.removesuffix("...") for name in names)

    @property
    def of_passes(self) -> bool:
        """Whether passes alone write it: its operands follow from what it stands for."""
        return not self.shapes

    @property
    def slots(self) -> tuple[str, ...]:
        """Slots of operands in their order, those that may be left out last."""
        return (*self.operands, *self.optional)

    def slots_of(self, kind: str | None) -> tuple[str, ...]:
        """Slots of operands, those that a variant has first: the order in which specs name them."""
        return self._first_of(kind, self.slots)

    def results_of(self, kind: str | None) -> tuple[str, ...]:
        """Slots of results, those that a variant has first."""
        return self._first_of(kind, self.results)

    def _first_of(self, kind: str | None, slots: tuple[str, ...]) -> tuple[str, ...]:
        rule = self.shapes.get(kind, {})
        return tuple(sorted(slots, key=lambda slot: slot not in rule))

    @property
    def in_groups(self) -> bool:
        """Whether its rows are in groups."""
        return "groups" in self.operands

    @property
    def adds_all_rows(self) -> bool:
        """Whether a result has no rows any more, whatever rows there are."""
        rowless = (not rule["out"].startswith("T") for rule in self.shapes.values())
        return not self.in_groups and any(rowless)
