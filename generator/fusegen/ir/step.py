"""A step of a program: what it reads and writes, and how a pointwise one does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from .dtypes import DType
from .quantization import Orientation, Role
from .shapes import Expr

LIKE = "like"
"""Slot of a tensor of which nothing but its sizes is read."""


class Access(str, Enum):
    """How a pointwise kernel indexes an operand: per element, by half, per row or per column.

    Halves of a row are whole, or alternate in blocks of 32 columns.
    """

    FULL = "full"
    FIRST_HALF = "first_half"
    SECOND_HALF = "second_half"
    FIRST_OF_32 = "first_of_32"
    SECOND_OF_32 = "second_of_32"
    ROW = "row"
    COLUMN = "column"


INTERLEAVED = {
    Access.FIRST_HALF: Access.FIRST_OF_32,
    Access.SECOND_HALF: Access.SECOND_OF_32,
}
"""Whole halves to those that alternate."""

FIRSTS = (Access.FIRST_HALF, Access.FIRST_OF_32)
HALVES = (*INTERLEAVED, *INTERLEAVED.values())
INTERLEAVE = 32
"""Columns of a block of halves that alternate."""


@dataclass(frozen=True, slots=True)
class PointwiseOperand:
    """A symbol of a pointwise program and where its value comes from or goes to.

    Attributes:
        degree: of an operand, the power that results grow with, and by which its errors do.
        jumps: whether a result jumps where the operand changes its sign.
    """

    symbol: str
    buffer: str
    access: Access
    dtype: DType
    degree: int = 1
    jumps: bool = False


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Math of a pointwise step, printed.

    Attributes:
        kernel: base name of the kernel, shared by every module that uses the op.
        operands: values read, one per symbol.
        results: values written, one per symbol; row access means summed over the row.
        attributes: scalars by symbol.
        cuda: statements in CUDA C++ over floats, results last.
        torch: statements in PyTorch over fp32 tensors, results last.
        formula: for people.
        columns: elements of a row that one symbol runs over.
        rows: number of rows.
        cost: operations per element.
        grouped: whether results are zero in the rows past the groups that the step names.
    """

    kernel: str
    operands: tuple[PointwiseOperand, ...]
    results: tuple[PointwiseOperand, ...]
    attributes: tuple[str, ...]
    cuda: tuple[str, ...]
    torch: tuple[str, ...]
    formula: str
    rows: Expr
    columns: Expr
    cost: int
    grouped: bool = False

    @property
    def interleaved(self) -> bool:
        """Whether halves of an operand or a result alternate in blocks."""
        alternating = (*INTERLEAVED.values(),)
        return any(each.access in alternating for each in (*self.operands, *self.results))


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor result of a program; conditional ones are None unless a flag asks for them."""

    buffer: str
    when: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """One quantised copy of a tensor: the buffers it consists of.

    Attributes:
        original: buffer it was made from.
        role: decides its format.
        orientation: along which dimension its blocks run.
        data: codes.
        scale: stored scale factors.
        amax: of the tensor or its groups, where the format keeps it.
        groups: buffer of the group sizes, where rows are grouped.
        atoms: whether scales lie in atoms, as ``LayoutSpec.scale_atoms`` has it.
        untransposed: whether its blocks run along the rows of data that lies as the tensor does.
    """

    original: str
    role: Role
    orientation: Orientation
    data: str
    scale: str
    amax: str | None = None
    groups: str | None = None
    atoms: bool = False
    untransposed: bool = False

    @property
    def buffers(self) -> tuple[str, ...]:
        """Its buffers, data first."""
        return (self.data, self.scale, *([self.amax] if self.amax else []))


@dataclass(frozen=True, slots=True)
class Operand:
    """A buffer in a slot of a step."""

    slot: str
    buffer: str


@dataclass(frozen=True, slots=True)
class AttributeRef:
    """A scalar of the module, whose value a call tells."""

    name: str


AttributeValue = float | int | bool | str | AttributeRef


@dataclass(frozen=True, slots=True)
class Chunks:
    """How a step runs its parts: one behind the other for a chunk of the rows, chunk by chunk.

    Operands and results whose outermost dimension is that of the rows are read and written by rows;
    what all rows share is read whole by every chunk.

    Attributes:
        symbol: the dimension of all rows.
        rows: of a chunk; the last one may have fewer.
        memory: tensors between the parts, each with the buffer that has a chunk of it.
        adding: parts whose result is a sum over all rows, as they run from the second chunk on:
            added to what is there.
    """

    symbol: str
    rows: int
    memory: tuple[tuple[str, str], ...]
    adding: tuple[Step, ...] = ()

    def later(self, part: Step) -> Step:
        """What runs in the place of a part from the second chunk on."""
        return next((each for each in self.adding if each.writes == part.writes), part)


@dataclass(frozen=True)  # no slots: it remembers what it reads and writes, as passes always ask
class Step:
    """One step of a program.

    Attributes:
        primitive: what it does: the name of a kind in ``steps``.
        kind: variant of the primitive.
        item: chain item it came from.
        inputs: operands by slot.
        outputs: results by slot.
        when: it runs if any of these flags is set; empty is always.
        output_when: flags of results that only some of them ask for; the others are not listed.
        sizes: rows (or tokens), columns and K of a GEMM, for selection rules.
        kernels: name of the kernel set that runs it; None on cpu.
        alignment: elements that its innermost dimensions must be multiples of.
        pointwise: math of a pointwise step.
        copies: quantised copies that it reads or, for ``quantize``, writes.
        rule: fusion that made it.
        lane: 0 is the caller's stream; others fork and join inside the call.
        mutates: buffers changed in place.
        flops: floating-point operations.
        parts: the steps that it does in one kernel, in order; none where it is a step of its own.
        attributes: scalars by the name that its kind or its expression has for each.
        chunks: how it runs its parts, where that is for a chunk of the rows at a time.
        leaves: whether rows of its results that no group has stay as they are, since nobody reads
            them.
    """

    primitive: str
    kind: str | None
    item: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    when: tuple[str, ...] = ()
    output_when: tuple[Result, ...] = ()
    sizes: tuple[tuple[str, Expr], ...] = ()
    kernels: str | None = None
    alignment: int = 1
    pointwise: Pointwise | None = None
    copies: tuple[Copy, ...] = ()
    rule: str | None = None
    lane: int = 0
    mutates: tuple[str, ...] = ()
    flops: Expr | None = None
    parts: tuple[Step, ...] = ()
    attributes: tuple[tuple[str, AttributeValue], ...] = ()
    chunks: Chunks | None = None
    leaves: bool = False

    def input(self, slot: str) -> str | None:
        """The buffer in an input slot, or None."""
        return next((operand.buffer for operand in self.inputs if operand.slot == slot), None)

    def wanted(self, buffer: str) -> tuple[str, ...]:
        """Flags that ask for a result; empty where it is written whenever the step runs."""
        return next((r.when for r in self.output_when if r.buffer == buffer), ())

    def asking(self, buffer: str) -> tuple[str, ...]:
        """Flags under which an operand is read: by a kernel of several steps, for each of them."""
        readers = [part.when for part in self.parts if buffer in part.reads]
        if not readers or () in readers:
            return self.when
        return tuple(dict.fromkeys(flag for when in readers for flag in when))

    @property
    def updates(self) -> tuple[str, ...]:
        """State that it moves on: changed from what it was, not just written."""
        return tuple(name for name in self.mutates if name in self.reads)

    @property
    def out(self) -> str:
        """The first result."""
        return self.outputs[0].buffer

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Buffers read, each once."""
        return tuple(dict.fromkeys(operand.buffer for operand in self.inputs))

    @cached_property
    def loads(self) -> tuple[str, ...]:
        """Buffers of which elements are read, each once; others tell lengths alone."""
        return tuple(dict.fromkeys(o.buffer for o in self.inputs if o.slot != LIKE))

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Buffers written."""
        return tuple(operand.buffer for operand in self.outputs)


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Where a rule put steps in the place of others, or why it did not.

    Attributes:
        rule: its name.
        place: the steps that its pattern found; empty where it found none.
        reason: why they stay; empty where they were replaced.
    """

    rule: str
    place: str
    reason: str = ""
