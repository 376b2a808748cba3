"""The plan of one module: straight-line programs over typed buffers.

The C++ launcher, the op schemas, the fakes, the reference, the tests and the README of a module are
all printed from this object, so they cannot drift apart.  Everything here is plain data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from .dtypes import DType
from .kernel import GemmKind, LayoutSpec, Store
from .names import prefixed
from .naming import Cell
from .predicate import Predicate
from .quantization import Orientation, QuantizationSpec, Role
from .segments import Group, Start, Wait
from .shapes import Const, Expr, Shape
from .words import AttributeType, Init

LIKE = "like"
"""Slot of a tensor of which nothing but its sizes is read."""


class Status(str, Enum):
    """How a cell is provided on an architecture."""

    NATIVE = "native"
    EMULATED = "emulated"
    UNSUPPORTED = "unsupported"


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
class Buffer:
    """A tensor of a plan.

    Attributes:
        name: identifier in every language.
        dtype: element type; ``io`` is known at run time.
        shape: row-major.
        role: what a recipe quantises it as.
        optional: may be absent.
    """

    name: str
    dtype: DType
    shape: Shape
    role: Role | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the module.

    Attributes:
        buffer: name of its buffer and function argument.
        path: name in the state dict.
        init: how it is filled.
        fan_in: number of inputs per output, which sets the bound of a uniform fill.
        quantized: the module has its copies alone; in its place stands a tensor without memory.
    """

    buffer: str
    path: str
    init: Init
    fan_in: Expr
    quantized: bool = False


class StateFill(str, Enum):
    """What a state tensor starts as.

    SEED is a random seed and an offset of 0; COPY is a copy of a weight, which the program
    ``refresh`` makes, so that a state dict that has the weight has no need of it.  RECORD is zeros
    that steps write over for people alone: every call may do so, and no state dict needs it.
    """

    ZEROS = "zeros"
    ONES = "ones"
    SEED = "seed"
    COPY = "copy"
    RECORD = "record"


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that a module keeps between calls and an op changes in place.

    Attributes:
        buffer: name of its buffer and function argument.
        path: name in the state dict.
        fill: what it starts as.
    """

    buffer: str
    path: str
    fill: StateFill


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """Buffers that lie as rows of one tensor, which ops take, change or give in their place.

    Attributes:
        buffer: of the tensor: fp32 ``[rows, E]``, also the function's argument.
        parts: the buffers, one behind the other: ``[n, E]`` is n rows, ``[E]`` is one;
            E is the number of groups, or of numbers in a record.
    """

    buffer: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Attribute:
    """A scalar keyword of the module's function."""

    name: str
    type: AttributeType
    default: float | int | bool | str


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
        source: buffer it was made from.
        role: decides its format.
        orientation: along which dimension its blocks run.
        data: codes.
        scale: stored scale factors.
        amax: of the tensor or its groups, where the format keeps it.
        groups: buffer of the group sizes, where rows are grouped.
    """

    source: str
    role: Role
    orientation: Orientation
    data: str
    scale: str
    amax: str | None = None
    groups: str | None = None

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

    def input(self, slot: str) -> str | None:
        """The buffer in an input slot, or None."""
        return next((operand.buffer for operand in self.inputs if operand.slot == slot), None)

    def wanted(self, buffer: str) -> tuple[str, ...]:
        """Flags that ask for a result; empty where it is written whenever the step runs."""
        return next((r.when for r in self.output_when if r.buffer == buffer), ())

    @property
    def updates(self) -> tuple[str, ...]:
        """State that it moves on: changed from what it was, not just written."""
        return tuple(name for name in self.mutates if name in self.reads)

    @property
    def out(self) -> str:
        """The first result."""
        return self.outputs[0].buffer

    @property
    def reads(self) -> tuple[str, ...]:
        """Buffers read, each once."""
        return tuple(dict.fromkeys(operand.buffer for operand in self.inputs))

    @property
    def loads(self) -> tuple[str, ...]:
        """Buffers of which elements are read, each once; others tell lengths alone."""
        return tuple(dict.fromkeys(o.buffer for o in self.inputs if o.slot != LIKE))

    @property
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


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor argument of a program; conditional ones are None unless a flag asks for them.

    ``mutated`` ones are changed in place; they stand last.
    """

    buffer: str
    optional: bool
    when: tuple[str, ...] = ()
    mutated: bool = False


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a dimension is read from: candidate (tensor, axis, divisor), the first present counts.

    Axis counts from the end (-1 is innermost); None is the product of the leading dimensions, of
    which ``trailing`` gives how many are not leading.
    """

    symbol: str
    sources: tuple[tuple[str, int | None, int], ...]


class CheckKind(str, Enum):
    """What an argument check compares."""

    RANK = "rank"
    IO_DTYPE = "io_dtype"
    SAME_DTYPE = "same_dtype"
    DTYPE = "dtype"
    DEVICE = "device"
    SIZE = "size"
    MULTIPLE = "multiple"
    CONTIGUOUS = "contiguous"


@dataclass(frozen=True, slots=True)
class Check:
    """One argument check, printed to Python and C++ with the same words.

    Attributes:
        kind: what is compared.
        tensor: argument it is about.
        optional: skipped where the argument is None.
        reference: the argument it must agree with (dtype, device).
        axis: from the end, for SIZE.
        expr: expected size or, for MULTIPLE, the size itself.
        number: expected rank or divisor.
        exact: for RANK: False allows more dimensions.
        dtype: expected element type.
        label: how the message calls the dimension or the shape.
    """

    kind: CheckKind
    tensor: str
    optional: bool = False
    reference: str | None = None
    axis: int = 0
    expr: Expr | None = None
    number: int = 0
    exact: bool = True
    dtype: DType = DType.IO
    label: str = ""


@dataclass(frozen=True, slots=True)
class Program:
    """One op of a module.

    Attributes:
        name: of its direction: ``forward``, ``backward``, ``refresh`` or ``wgrad``.
        arguments: tensors in schema order; the first one gives device, dtype and leading shape.
        flags: gradient flags in schema order; of ``refresh``, whether state moves on.
        results: tensors returned.
        steps: in order.
        bindings: dimensions the steps need.
        checks: of the arguments.
        part: which of several ops of its direction it is, counted from 1; 0 where it is alone.
        when: its direction calls it if any of these flags is set; empty is always.
    """

    name: str
    arguments: tuple[Argument, ...]
    flags: tuple[str, ...]
    results: tuple[Result, ...]
    steps: tuple[Step, ...]
    bindings: tuple[Binding, ...]
    checks: tuple[Check, ...]
    part: int = 0
    when: tuple[str, ...] = ()

    @property
    def function(self) -> str:
        """What its function is called: ``forward``, or ``forward_2`` where there are several."""
        return f"{self.name}_{self.part}" if self.part else self.name

    @property
    def takes(self) -> tuple[str, ...]:
        """What it reads or changes."""
        return tuple(argument.buffer for argument in self.arguments)

    @property
    def gives(self) -> tuple[str, ...]:
        """What it makes."""
        return tuple(result.buffer for result in self.results)

    @property
    def workspace(self) -> tuple[str, ...]:
        """Buffers that live inside the call, in the order in which steps write them."""
        outside = {argument.buffer for argument in self.arguments}
        outside |= {result.buffer for result in self.results}
        written = (n for step in self.steps for n in step.writes if n not in step.mutates)
        return tuple(dict.fromkeys(name for name in written if name not in outside))

    def lifetime(self, name: str) -> tuple[int, int]:
        """The first and the last step that touch a buffer, counted from 1."""
        touching = [i for i, s in enumerate(self.steps, 1) if name in (*s.reads, *s.writes)]
        return touching[0], touching[-1]

    @property
    def unmerged(self) -> Program:
        """The same with the parts of every step in its place: what plain PyTorch runs."""
        return replace(self, steps=tuple(p for step in self.steps for p in step.parts or (step,)))

    @property
    def mutated(self) -> tuple[str, ...]:
        """Arguments that are changed in place, in order."""
        return tuple(argument.buffer for argument in self.arguments if argument.mutated)

    def updated_when(self, step: Step) -> tuple[str, ...]:
        """Flags under which a step changes its state: a forward without grad leaves it alone."""
        return self.flags if self.name in ("forward", "refresh") else step.when

    @property
    def returns_none(self) -> bool:
        """Whether absent results are None.

        An op that mutates returns empty tensors instead: functionalisation knows optional results
        of functional ops only."""
        return not self.mutated


Segment = Program | Start | Wait
"""What a direction consists of."""


@dataclass(frozen=True, slots=True)
class Direction:
    """Segments that run in their order: ops, and what starts collectives and waits for them.

    What is in a buffer crosses from one op to another only as a result of the one and an argument
    of the other.

    Attributes:
        name: ``forward``, ``backward``, ``refresh`` or ``wgrad``.
        segments: in order.
    """

    name: str
    segments: tuple[Segment, ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        """Its ops."""
        return tuple(each for each in self.segments if isinstance(each, Program))

    @property
    def starts(self) -> tuple[Start, ...]:
        """Where collectives start."""
        return tuple(each for each in self.segments if isinstance(each, Start))

    @property
    def made(self) -> dict[str, tuple[str, ...]]:
        """What ops and collectives give, and the flags under which it is there."""
        found: dict[str, tuple[str, ...]] = {}
        sources: dict[str, tuple[str, ...]] = {}
        for each in self.segments:
            match each:
                case Program():
                    found |= {r.buffer: r.when or each.when for r in each.results}
                case Start():
                    sources[each.future] = each.sources
                case Wait():
                    of = zip(each.results, sources.get(each.future, ()), strict=False)
                    found |= {name: found.get(source) or each.when for name, source in of}
        return found

    @property
    def unmerged(self) -> Direction:
        """The same with the parts of every step in its place."""
        return replace(
            self,
            segments=tuple(s.unmerged if isinstance(s, Program) else s for s in self.segments),
        )

    def whole(self, leaving: tuple[str, ...]) -> Program:
        """All of it as one: what goes in and comes out, and the steps of its ops.

        Its checks are those that every call makes.

        Args:
            leaving: what is read after it, in the order of its results; what only its own segments
                read is no result of it.
        """
        first, *others = self.programs
        if not others and len(self.segments) == 1:
            return first
        programs, made = (first, *others), self.made
        taken: dict[str, Argument] = {}
        for each in (argument for program in programs for argument in program.arguments):
            known = taken.get(each.buffer, each)
            if each.buffer not in made:
                taken[each.buffer] = replace(
                    known,
                    optional=known.optional and each.optional,
                    mutated=known.mutated or each.mutated,
                )
        bindings = {b.symbol: b for p in reversed(programs) for b in p.bindings}
        always = (program for program in programs if not program.when)
        checks = (c for program in always for c in program.checks if c.tensor in taken)
        return replace(
            first,
            arguments=tuple(sorted(taken.values(), key=lambda argument: argument.mutated)),
            flags=tuple(dict.fromkeys(flag for p in programs for flag in p.flags)),
            results=tuple(Result(n, made[n]) for n in dict.fromkeys(leaving) if n in made),
            steps=tuple(step for program in programs for step in program.steps),
            bindings=tuple(bindings.values()),
            checks=tuple(dict.fromkeys(checks)),
            part=0,
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """What a kernel of quantised tensors is instantiated for, besides the module's own type.

    Attributes:
        formats: of its quantised operands or results, in slot order.
        scalings: how their elements share scales.
        traits: accumulation of a product; rounding and transforms of a quantisation.
        store: what becomes of a product.
    """

    formats: tuple[DType, ...]
    scalings: tuple[str, ...]
    traits: tuple[str, ...]
    store: Store = Store.IO

    def __str__(self) -> str:
        words = (format.value for format in self.formats if format is not DType.IO)
        stored = () if self.store is Store.IO else (self.store.value,)
        return "_".join((*words, *dict.fromkeys(self.scalings), *self.traits, *stored))


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
        kind: of a product.
        point: name of a product's configuration.
        config: its C++ template arguments.
        constants: numbers that the device code derives, too, by name.
        pointwise: math of a pointwise kernel.
        variant: formats and scales of a kernel of quantised tensors.
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


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """Use the kernels of a point where the predicate holds."""

    predicate: Predicate
    point: str
    kernels: tuple[tuple[DType, str], ...]


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Kernels that can run one kind of step, and the ordered rules that choose.

    Attributes:
        name: of the dispatch function and its header.
        template: name of its templates.
        kind: of a product.
        units: every configuration, each with all of its instantiations.
        row_alignment: elements that innermost dimensions must be multiples of.
        rules: in order, the last one unconditional.
    """

    name: str
    template: str
    kind: GemmKind | None
    units: tuple[KernelUnit, ...]
    rules: tuple[SelectionRule, ...]
    row_alignment: int = 1

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every instantiation."""
        return tuple(kernel for unit in self.units for kernel in unit.kernels)


@dataclass(frozen=True, slots=True)
class Dimension:
    """A symbol of a module, its constructor keyword, and whether a parameter's shape uses it."""

    symbol: str
    keyword: str
    constructor: bool


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative Frobenius errors a test accepts."""

    gemm: float
    end_to_end: float
    float32: float


@dataclass(frozen=True, slots=True)
class Sharding:
    """One way to split a module over ranks: each runs the ops, unchanged, on its shards.

    Attributes:
        symbol: dimension that is split.
        axes: (buffer, axis) that are split, leading dimensions counted as one axis; all other
            buffers are whole on every rank.
        partial: buffers of which every rank has a summand.
        unit: number that the dimension of a shard is a multiple of, so that no block with a scale
            of its own lies on two ranks.
        gradients: whether it holds for calls that ask for gradients, too.
    """

    symbol: str
    axes: tuple[tuple[str, int], ...]
    partial: tuple[str, ...]
    unit: int
    gradients: bool

    def axis(self, buffer: str) -> int | None:
        """The axis of a buffer that is split, if any."""
        return next((axis for name, axis in self.axes if name == buffer), None)


class Form(str, Enum):
    """How the rows of a tensor that is quantised by itself belong together."""

    DENSE = "dense"
    STACK = "stack"
    GROUPED = "grouped"


@dataclass(frozen=True, slots=True)
class Conversion:
    """An op that puts a tensor into a role's format: part of the public function ``quantize``.

    Attributes:
        role: whose format.
        form: of the tensor.
        layout: of the copies; scales are in logical order, as no product reads them.
        buffers: of the program.
        copies: rowwise, then columnwise.
        amax: buffer of the largest elements, where one scale spans the tensor or group.
        program: its flags ask for an orientation each.
        shardings: how it may be split over ranks.
    """

    role: Role
    form: Form
    layout: LayoutSpec
    buffers: tuple[Buffer, ...]
    copies: tuple[Copy, ...]
    amax: str | None
    program: Program
    shardings: tuple[Sharding, ...] = ()


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Everything a generated module states.

    Attributes:
        cell: ``<module>__<recipe>``, also the file name.
        module, recipe, arch: what it was made from.
        status, reason: how it is provided.
        summary: one line.
        class_name: of the ``nn.Module``.
        dims: symbols and keywords.
        inputs: names of the module's inputs in call order.
        parameters: in state-dict order.
        differentiated: arguments that have a gradient, in their order.
        arguments: of the function: first input, required parameters, inputs, optional parameters.
        outputs: names of the module's outputs.
        states: tensors kept between calls, by their names in the state dict.
        joined: tensors that several states, or several of what is saved, lie in.
        main_grads: (parameter, fp32 buffer of the caller's that its gradient goes to).
        attributes: scalar keywords.
        buffers: every buffer by name, in order of first use.
        directions: forward and backward, the halves of a training step; ``refresh``, which
            quantises the weights, where the module keeps them so; ``wgrad``, which gives gradients
            of weights after the backward, where they are delayed.
        saved: what the backward reads of the forward, each with the flags that ask for it.
        kernel_sets: kernels of the steps.
        exact: forward steps without quantisation, what the recipe's error is measured against.
        exact_outputs: what they leave the outputs in.
        quantizations: how each role is quantised.
        layout: of quantised copies.
        conversions: what its functions ``quantize`` and ``dequantize`` offer.
        shardings: how the module may be split over ranks, besides not at all.
        tolerance: of its tests.
        sources: spec files it was made from.
        rewrites: where fusions applied and why not elsewhere, for people: no part of what the plan
            is, so that plans which differ in nothing else are equal.
    """

    cell: str
    module: str
    recipe: str
    arch: str
    status: Status
    reason: str
    summary: str
    class_name: str
    dims: tuple[Dimension, ...]
    inputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    differentiated: tuple[str, ...]
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    states: tuple[State, ...]
    joined: tuple[JoinedTensor, ...]
    main_grads: tuple[tuple[str, str], ...]
    attributes: tuple[Attribute, ...]
    buffers: tuple[Buffer, ...]
    directions: tuple[Direction, ...]
    saved: tuple[Result, ...]
    kernel_sets: tuple[KernelSet, ...]
    exact: tuple[Step, ...]
    exact_outputs: tuple[str, ...]
    quantizations: tuple[tuple[Role, QuantizationSpec], ...]
    layout: LayoutSpec
    conversions: tuple[Conversion, ...]
    tolerance: Tolerance
    sources: tuple[str, ...]
    shardings: tuple[Sharding, ...] = ()
    rewrites: tuple[Rewriting, ...] = field(default=(), compare=False)

    def direction(self, name: str) -> Direction | None:
        """The direction of a name, or None where the module has none."""
        return next((each for each in self.directions if each.name == name), None)

    def _whole(self, name: str) -> Program | None:
        found = self.direction(name)
        return found.whole(self.leaving) if found else None

    @property
    def forward(self) -> Program:
        """The forward as a whole."""
        whole = self._whole("forward")
        assert whole is not None, "a plan has a forward"
        return whole

    @property
    def backward(self) -> Program:
        """The backward as a whole."""
        whole = self._whole("backward")
        assert whole is not None, "a plan has a backward"
        return whole

    @property
    def refresh(self) -> Program | None:
        """What quantises weights that are kept so, as a whole."""
        return self._whole("refresh")

    @property
    def wgrad(self) -> Program | None:
        """What gives delayed gradients of weights, as a whole."""
        return self._whole("wgrad")

    @property
    def options(self) -> tuple[str, ...]:
        """Words of what was chosen for the module."""
        return Cell.parse(self.cell).options

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every direction of the module as a whole."""
        return tuple(each.whole(self.leaving) for each in self.directions)

    def returns_none(self, name: str) -> bool:
        """Whether absent results of a direction are None: a lone op may give empty tensors."""
        found = self.direction(name)
        return found is None or len(found.segments) > 1 or found.programs[0].returns_none

    @property
    def leaving(self) -> tuple[str, ...]:
        """What directions give to others or to the caller, outputs first."""
        later = self.direction("wgrad")
        read = (a.buffer for p in (later.programs if later else ()) for a in p.arguments)
        saved = (result.buffer for result in self.saved)
        gradients = (prefixed("d", leaf) for leaf in self.differentiated)
        return (*self.outputs, *saved, *gradients, *read)

    @property
    def process_groups(self) -> tuple[Group, ...]:
        """Groups that its collectives are over, each once."""
        starts = (start for each in self.directions for start in each.starts)
        return tuple(dict.fromkeys(start.group for start in starts))

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every step of every program."""
        return tuple(step for program in self.programs for step in program.steps)

    @property
    def unmerged(self) -> ModulePlan:
        """The plan with the parts of every step in its place, the same for every architecture."""
        return replace(self, directions=tuple(each.unmerged for each in self.directions))

    @property
    def caches(self) -> tuple[str, ...]:
        """Buffers of weights that are kept quantised."""
        return tuple(state.buffer for state in self.states if state.fill is StateFill.COPY)

    @property
    def quantized(self) -> tuple[Parameter, ...]:
        """Parameters that the module has as quantised copies alone."""
        return tuple(parameter for parameter in self.parameters if parameter.quantized)

    @property
    def records(self) -> tuple[str, ...]:
        """Buffers of statistics, of one copy each."""
        return tuple(state.buffer for state in self.states if state.fill is StateFill.RECORD)

    @property
    def record_tensors(self) -> tuple[str, ...]:
        """Tensors of statistics, as ops take them."""
        return tuple(dict.fromkeys(map(self.tensor_with, self.records)))

    @property
    def delayed(self) -> tuple[str, ...]:
        """Parameters whose gradients wait for the program ``wgrad``."""
        later = self.direction("wgrad")
        if later is None:
            return ()
        written = {name for p in later.programs for step in p.steps for name in step.writes}
        written.update(later.made)
        own = dict(self.main_grads)
        names = {leaf: own.get(leaf, prefixed("d", leaf)) for leaf in self.differentiated}
        return tuple(leaf for leaf, name in names.items() if name in written)

    @property
    def left_for_wgrad(self) -> frozenset[str]:
        """Results of the backward that only the program ``wgrad`` reads again."""
        results = {result.buffer for result in self.backward.results}
        return frozenset(a.buffer for a in (self.wgrad.arguments if self.wgrad else ())) & results

    @property
    def gradients(self) -> frozenset[str]:
        """Names of all gradients, those that go to the caller's buffers included."""
        return frozenset(prefixed("d", leaf) for leaf in self.differentiated)

    def attributes_of(self, program: Program) -> tuple[Attribute, ...]:
        """Scalars that a program takes; those with products and copies alone ask for none."""
        return () if program.name in ("refresh", "wgrad") else self.attributes

    def per_group(self, scale: str) -> bool:
        """Whether the scale of a history is one of several, so that a group without rows waits."""
        return self.buffer(scale).shape.dims != (Const(1),)

    def token_major(self, copy: Copy) -> bool:
        """Whether scales of neighbouring tokens are neighbours, as ``LayoutSpec`` says it."""
        spec = dict(self.quantizations)[copy.role]
        return self.layout.token_major and spec.along_tokens(copy.role, copy.orientation)

    def buffer(self, name: str) -> Buffer:
        """A buffer by name.  Raises KeyError for an unknown one."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(name)

    def state(self, name: str) -> State:
        """The state in a buffer.  Raises KeyError for a buffer without one."""
        return {state.buffer: state for state in self.states}[name]

    @property
    def kept(self) -> tuple[str, ...]:
        """Tensors kept between calls as ops take them, function keywords: states, some in one."""
        return tuple(dict.fromkeys(self.tensor_with(each.buffer) for each in self.states))

    def tensor_with(self, name: str) -> str:
        """The tensor that ops take for a buffer: that of several it lies in, or its own."""
        return next((each.buffer for each in self.joined if name in each.parts), name)

    def joined_tensor(self, name: str) -> JoinedTensor | None:
        """The tensor of several buffers that a buffer is; None where it is another one."""
        return next((each for each in self.joined if each.buffer == name), None)

    def joined_of(self, program: Program) -> tuple[JoinedTensor, ...]:
        """Those that a program takes, in the order of its arguments."""
        found = (self.joined_tensor(argument.buffer) for argument in program.arguments)
        return tuple(each for each in found if each)

    def given_in(self, program: Program) -> dict[str, Result]:
        """Buffers that a program gives as rows of one result, and that result."""
        found = ((self.joined_tensor(result.buffer), result) for result in program.results)
        return {part: result for tensor, result in found if tensor for part in tensor.parts}

    def rows(self, tensor: JoinedTensor) -> Iterator[tuple[str, int, int | None]]:
        """Where buffers lie in their tensor: name, first row, and number of rows; None is a vector.

        This is the one statement of their layout."""
        first = 0
        for name in tensor.parts:
            *leading, _ = self.buffer(name).shape.dims
            count = leading[0].value if leading and isinstance(leading[0], Const) else None
            yield name, first, count
            first += 1 if count is None else count

    @property
    def groups(self) -> str | None:
        """The input that holds the rows per group, where rows are grouped."""
        read = {
            o.buffer for s in (*self.exact, *self.steps) for o in s.inputs if o.slot == "groups"
        }
        return next((name for name in self.inputs if name in read), None)

    @property
    def group_axis(self) -> Expr | None:
        """The number of groups, which their sizes have as their length."""
        return self.buffer(self.groups).shape.dims[0] if self.groups else None

    @property
    def token_axis(self) -> Expr:
        """The outermost dimension of the first input, all leading ones as one."""
        return self.buffer(self.inputs[0]).shape.flat[0]

    @property
    def is_identity(self) -> bool:
        """Whether the outputs are the inputs, so that there is nothing to run."""
        return not self.forward.steps

    @property
    def ops(self) -> tuple[tuple[ModulePlan, Program], ...]:
        """Every op: a program with steps, and the plan that its names are of."""
        programs = (program for each in self.directions for program in each.programs)
        own = [(self, each) for each in programs if each.steps]
        return (*own, *((self.of(each), each.program) for each in self.conversions))

    def of(self, conversion: Conversion) -> ModulePlan:
        """The plan as a conversion's program sees it."""
        inputs = tuple(argument.buffer for argument in conversion.program.arguments)
        return replace(
            self,
            buffers=conversion.buffers,
            inputs=inputs,
            attributes=(),
            layout=conversion.layout,
            shardings=conversion.shardings,
        )

    @property
    def units(self) -> tuple[KernelUnit, ...]:
        """Every translation unit of kernels, each once."""
        return tuple({unit.name: unit for each in self.kernel_sets for unit in each.units}.values())

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel instantiation, each once."""
        return tuple(kernel for unit in self.units for kernel in unit.kernels)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A cell that cannot be made, why, and which statement rules it out."""

    cell: str
    module: str
    recipe: str
    arch: str
    reason: str
