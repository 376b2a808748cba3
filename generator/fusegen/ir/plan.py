"""The plan of one module: straight-line programs over typed buffers.

The C++ launcher, the op schemas, the fakes, the reference, the tests and the README of a module are
all printed from this object, so they cannot drift apart.  Everything here is plain data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from .buffers import (
    Attribute,
    Buffer,
    JoinedTensor,
    Parameter,
    State,
    StateFill,
    padded_bytes,
)
from .dtypes import INTEGERS, DType
from .kernel import LayoutSpec
from .kernel_set import Kernel, KernelSet, KernelUnit
from .naming import QUANTIZE_INPUT, Cell, gradient
from .program import Direction, Program, own_type_argument
from .quantization import QuantizationSpec, Role
from .segments import Group
from .shapes import Const, Expr, add, first_factor, mul
from .step import Copy, Result, Rewriting, Step


class Status(str, Enum):
    """How a cell is provided on an architecture."""

    NATIVE = "native"
    EMULATED = "emulated"
    UNSUPPORTED = "unsupported"


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
        partial: buffers of which every rank has a partial sum.
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
        layout: of the copies; scales are in logical order, as no GEMM reads them.
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


@dataclass(frozen=True)  # without slots: what follows from it is computed once
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
        gradients: (argument, buffer of its gradient), in their order.  Several may have the same
            one, and one that comes in: the backward returns the tensor for each of them.
        arguments: of the forward: first input, required parameters, inputs, optional parameters,
            copies of the first input.
        outputs: names of the module's outputs.
        states: tensors kept between calls, by their names in the state dict.
        joined: tensors that several states, or several of what is saved, lie in.
        main_grads: (parameter, fp32 buffer of the caller's that its gradient goes to).
        attributes: scalar keywords.
        buffers: every buffer by name, in order of first use.
        directions: forward and backward, the halves of a training step; ``quantize_input``, which
            makes the copies of the first input, where calls may have it quantised; ``refresh``,
            which quantises the weights, where the module keeps them so; ``wgrad``, which gives
            gradients of weights after the backward, where they are delayed.
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
        input_copies: buffers of copies of the first input, which calls may have quantised.
        output_copies: buffers of the output's copies, which the module gives in its place.
        split: names of dimensions that a rank has a part of.
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
    gradients: tuple[tuple[str, str], ...]
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
    input_copies: tuple[str, ...] = ()
    output_copies: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    rewrites: tuple[Rewriting, ...] = field(default=(), compare=False)

    def direction(self, name: str) -> Direction | None:
        """The direction of a name, or None where the module has none."""
        return next((each for each in self.directions if each.name == name), None)

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Every direction of the module as a whole."""
        return tuple(each.whole(self._entering(each), self.leaving) for each in self.directions)

    def _entering(self, direction: Direction) -> tuple[str, ...]:
        """Arguments of a direction as its caller or autograd gives them; others have their ops'."""
        saved = (result.buffer for result in self.saved)
        entering = {
            "forward": self.arguments,
            "backward": (*map(gradient, self.outputs), *saved),
        }
        return entering.get(direction.name, ())

    def whole(self, direction: Direction) -> Program:
        """One of its directions as a whole."""
        return next(each for each in self.programs if each.name == direction.name)

    def _program(self, name: str) -> Program | None:
        return next((each for each in self.programs if each.name == name), None)

    @property
    def forward(self) -> Program:
        """The forward as a whole."""
        whole = self._program("forward")
        assert whole is not None, "a plan has a forward"
        return whole

    @property
    def backward(self) -> Program:
        """The backward as a whole."""
        whole = self._program("backward")
        assert whole is not None, "a plan has a backward"
        return whole

    @property
    def quantize_input(self) -> Program | None:
        """What makes the copies of an input that calls may have quantised, as a whole."""
        return self._program(QUANTIZE_INPUT)

    @property
    def refresh(self) -> Program | None:
        """What quantises weights that are kept so, as a whole."""
        return self._program("refresh")

    @property
    def wgrad(self) -> Program | None:
        """What gives delayed gradients of weights, as a whole."""
        return self._program("wgrad")

    @property
    def options(self) -> tuple[str, ...]:
        """Words of what was chosen for the module."""
        return Cell.parse(self.cell).options

    def returns_none(self, name: str) -> bool:
        """Whether absent results of a direction are None: a lone op may give empty tensors."""
        found = self.direction(name)
        return found is None or len(found.segments) > 1 or found.programs[0].returns_none

    @cached_property
    def leaving(self) -> tuple[str, ...]:
        """What directions give to others or to the caller, outputs first."""
        later = self.direction("wgrad")
        read = (a.buffer for p in (later.programs if later else ()) for a in p.arguments)
        saved = (result.buffer for result in self.saved)
        gradients = (name for _, name in self.gradients)
        return (*self.results, *self.input_copies, *saved, *gradients, *read)

    @property
    def exact_apart(self) -> bool:
        """Whether the forward in high precision is another function than its op."""
        whole = self.direction("forward")
        return bool(self.quantizations) or (whole is not None and len(whole.segments) > 1)

    @property
    def called_with(self) -> tuple[str, ...]:
        """Arguments of the module's function: those of the forward but for copies of an input."""
        return tuple(name for name in self.arguments if name not in self.input_copies)

    @property
    def results(self) -> tuple[str, ...]:
        """What the forward gives its caller: the outputs, or the copies of one."""
        return self.output_copies or self.outputs

    def copies_in(self, buffers: tuple[str, ...]) -> tuple[Copy, ...]:
        """The copies that lie in some of its buffers, in the order of these."""
        copies = {copy.data: copy for step in self.unmerged.steps for copy in step.copies}
        return tuple(copies[name] for name in buffers if name in copies)

    @property
    def differentiated(self) -> tuple[str, ...]:
        """Arguments that have a gradient."""
        return tuple(leaf for leaf, _ in self.gradients)

    @property
    def incoming(self) -> tuple[str, ...]:
        """Gradients of the outputs, which the caller gives; integers have none."""
        return tuple(map(gradient, self.outputs[: self.differentiable_outputs]))

    @property
    def differentiable_outputs(self) -> int:
        """How many outputs have a gradient: the first ones."""
        return sum(self.buffer(name).dtype not in INTEGERS for name in self.outputs)

    @property
    def passed_on(self) -> tuple[str, ...]:
        """Arguments whose gradient is one that comes in, so that no op gives it."""
        return tuple(leaf for leaf, name in self.gradients if name in self.incoming)

    @property
    def drawn(self) -> tuple[str, ...]:
        """Inputs of random bits, which the module draws where its caller gives none."""
        return tuple(name for name in self.inputs if self.buffer(name).drawn)

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """Inputs that a call may leave out."""
        return tuple(name for name in self.inputs if self.buffer(name).optional)

    @property
    def process_groups(self) -> tuple[Group, ...]:
        """Groups that its collectives are over, each once."""
        starts = (start for each in self.directions for start in each.starts)
        return tuple(dict.fromkeys(start.group for start in starts))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every step of every program."""
        return tuple(step for program in self.programs for step in program.steps)

    @cached_property
    def unmerged(self) -> ModulePlan:
        """The plan with the parts of every step in its place: what plain PyTorch runs."""
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
        return tuple(leaf for leaf, name in self.gradients if name in written)

    @property
    def left_for_wgrad(self) -> frozenset[str]:
        """Results of the backward that only the program ``wgrad`` reads again."""
        results = {result.buffer for result in self.backward.results}
        return frozenset(a.buffer for a in (self.wgrad.arguments if self.wgrad else ())) & results

    def attributes_of(self, program: Program) -> tuple[Attribute, ...]:
        """Scalars that a program takes; those with GEMMs and copies alone ask for none."""
        return self.attributes if program.name in ("forward", "backward") else ()

    def per_group(self, scale: str) -> bool:
        """Whether the scale of a history is one of several, so that a group without rows waits."""
        return self.buffer(scale).shape.dims != (Const(1),)

    def token_major(self, copy: Copy) -> bool:
        """Whether scales of neighbouring tokens are neighbours, as ``LayoutSpec`` says it."""
        spec = dict(self.quantizations)[copy.role]
        return self.layout.token_major and spec.along_tokens(copy.role, copy.orientation)

    def buffer(self, name: str) -> Buffer:
        """A buffer by name.  Raises KeyError for an unknown one."""
        return self._named[name]

    @cached_property
    def _named(self) -> dict[str, Buffer]:
        return {buffer.name: buffer for buffer in self.buffers}

    def own_type_argument(self, program: Program) -> str:
        """The argument of an op that tells what the module's own type is."""
        return own_type_argument(program.arguments, {each.name: each for each in self.buffers})

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
        """Rows of a tensor: name, first one, and how many; None is a vector.

        This is the one statement of their layout."""
        first = 0
        for name in tensor.parts:
            *leading, _ = self.buffer(name).shape.dims
            count = leading[0].value if leading and isinstance(leading[0], Const) else None
            yield name, first, count
            first += 1 if count is None else count

    def in_bytes(self, tensor: JoinedTensor) -> bool:
        """Whether a tensor's parts lie in it as bytes, not as rows."""
        return self.buffer(tensor.buffer).dtype is DType.UINT8

    def places(self, tensor: JoinedTensor) -> Iterator[tuple[str, Expr]]:
        """Where buffers begin in their tensor, in elements of it."""
        if not self.in_bytes(tensor):
            extent = self.buffer(tensor.buffer).shape.dims[-1]
            yield from ((name, mul(Const(first), extent)) for name, first, _ in self.rows(tensor))
            return
        begin: Expr = Const(0)
        for name in tensor.parts:
            yield name, begin
            begin = add(begin, padded_bytes(self.buffer(name)))

    @cached_property
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
        """The outermost dimension of the first input, all leading ones as one, or its first factor:
        T of T K rows.
        """
        return first_factor(self.buffer(self.inputs[0]).shape.flat[0])

    @property
    def is_identity(self) -> bool:
        """Whether the outputs are the inputs, so that there is nothing to run."""
        return not self.forward.steps

    @cached_property
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
