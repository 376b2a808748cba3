"""What the passes hand to each other: a module's programs before they are complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from ..ir.buffers import Attribute, Buffer, JoinedTensor, Parameter, State
from ..ir.dtypes import INTEGERS, DType
from ..ir.kernel import LayoutSpec
from ..ir.kernel_set import KernelSet
from ..ir.naming import QUANTIZE_INPUT, gradient, need
from ..ir.plan import Conversion, Sharding
from ..ir.program import Direction, Program
from ..ir.quantization import QuantizationSpec, Role
from ..ir.segments import Collective, Exchange
from ..ir.shapes import Expr
from ..ir.step import AttributeValue, Result, Rewriting, Step
from ..spec.op import OpSpec


class NotPossible(Exception):
    """This cell cannot be made; the message is the reason people read."""


class Property(str, Enum):
    """What holds of a draft, once a pass has made it so.

    EXPANDED: the ops' forward steps are there.  DIFFERENTIATED: so are those of the backward.
    MATH: pointwise steps have their programs.  EXACT: the forward in high precision is on record.
    QUANTIZED: GEMMs read what the recipe says.  FLAGGED: each backward step has the flags under
    which it runs, and each is needed.  SAVED: what the forward leaves for the backward is settled.
    KERNELS: every step has the kernels that run it.  PROGRAMS: the steps are in programs, with
    arguments and results.  CUT: collectives have their places between ops.
    """

    EXPANDED = "expanded"
    DIFFERENTIATED = "differentiated"
    MATH = "math"
    EXACT = "exact"
    QUANTIZED = "quantized"
    FLAGGED = "flagged"
    SAVED = "saved"
    KERNELS = "kernels"
    PROGRAMS = "programs"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class Instance:
    """An op within a module.

    Attributes:
        item: its prefix; empty for a module of one op.
        op: its spec.
        tensors: the op's tensor names -> the module's buffers; without results that are aliases.
        dims: what names in the op's shapes stand for, in the module's symbols.
        attributes: the op's scalars -> the module's, or the value of a static one.
        recompute: whether the backward makes its results again.
    """

    item: str
    op: OpSpec
    tensors: Mapping[str, str]
    dims: Mapping[str, Expr]
    attributes: Mapping[str, AttributeValue]
    recompute: bool = False

    @property
    def results(self) -> tuple[str, ...]:
        """Outputs of the op that its steps write."""
        return tuple(name for name in self.op.outputs if name in self.tensors)

    @property
    def label(self) -> str:
        """How people see it: its prefix, or the op's name."""
        return self.item or self.op.name


@dataclass(frozen=True, slots=True)
class Draft:
    """A module on its way to a plan.

    Attributes:
        instances: ops in order.
        buffers: by name, in order of first use.
        inputs, outputs: buffers of the module.
        constants: inputs without a gradient.
        emulated: why GEMMs of quantised copies read them decoded; empty where none does.
        parameters: of all ops in order.
        attributes: scalar keywords.
        forward, backward: steps.
        quantize_input: steps that quantise the first input, where callers may give it quantised.
        input_copies: buffers of its copies, which the forward takes then.
        output_copies: buffers of the output's copies, which the module gives in its place.
        refresh: steps that quantise weights which the module keeps so.
        wgrad: steps that give gradients of weights after the backward.
        states: tensors that steps change in place.
        joined: tensors that several states, or several of what is saved, lie in.
        main_grads: parameters and the buffers of the caller's that their gradients go to.
        collectives: what ranks exchange within a direction, in order.
        exchanges: what they do with tensors that enter and leave it.
        split: names of dimensions that a rank has a part of.
        gradients: (leaf, buffer of its gradient) that the backward can be asked for; several may
            have the same one, or one that comes in, which no step of the backward writes.
        exact: the forward of a recipe without roles, which errors are measured against.
        exact_outputs: the buffers of its outputs.
        quantizations: how each role is quantised.
        layout: of quantised copies.
        saved: what the forward leaves for the backward.
        programs: forward, backward, quantize_input, refresh and wgrad; once they are there, all
            steps are in them.
        directions: these cut into segments; once they are there, all programs are in them.
        kernel_sets: what runs the steps.
        conversions: ops of the public function ``quantize``.
        shardings: ways in which ranks may run the ops on shards.
        holds: what the passes have made true of it.
        rewrites: where rules applied, and why not elsewhere.
    """

    instances: tuple[Instance, ...]
    buffers: Mapping[str, Buffer]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    attributes: tuple[Attribute, ...]
    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    quantize_input: tuple[Step, ...] = ()
    input_copies: tuple[str, ...] = ()
    output_copies: tuple[str, ...] = ()
    refresh: tuple[Step, ...] = ()
    wgrad: tuple[Step, ...] = ()
    states: tuple[State, ...] = ()
    joined: tuple[JoinedTensor, ...] = ()
    main_grads: tuple[tuple[str, str], ...] = ()
    collectives: tuple[Collective, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    split: tuple[str, ...] = ()
    gradients: tuple[tuple[str, str], ...] = ()
    constants: frozenset[str] = frozenset()
    emulated: str = ""
    exact: tuple[Step, ...] = ()
    exact_outputs: tuple[str, ...] = ()
    saved: tuple[Result, ...] = ()
    programs: tuple[Program, ...] = ()
    directions: tuple[Direction, ...] = ()
    kernel_sets: tuple[KernelSet, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    shardings: tuple[Sharding, ...] = ()
    quantizations: tuple[tuple[Role, QuantizationSpec], ...] = ()
    layout: LayoutSpec = field(default_factory=LayoutSpec)
    holds: frozenset[Property] = frozenset()
    rewrites: tuple[Rewriting, ...] = ()

    def program(self, name: str) -> Program | None:
        """The program of a name, or None where the module has none."""
        return next((program for program in self.programs if program.name == name), None)

    def tensor_with(self, name: str) -> str:
        """The tensor that ops take for a buffer: that of several it lies in, or its own."""
        return next((each.buffer for each in self.joined if name in each.parts), name)

    def in_bytes(self, name: str) -> bool:
        """Whether a buffer is one in which others lie as their bytes."""
        return (
            name in {each.buffer for each in self.joined}
            and self.buffers[name].dtype is DType.UINT8
        )

    @property
    def results(self) -> tuple[str, ...]:
        """What the forward gives its caller: the outputs, or the copies of one."""
        return self.output_copies or self.outputs

    @property
    def incoming(self) -> tuple[str, ...]:
        """Gradients of the outputs, which the caller gives; integers have none."""
        own = (name for name in self.outputs if self.buffers[name].dtype not in INTEGERS)
        return tuple(map(gradient, own))

    @property
    def computed(self) -> dict[str, tuple[str, ...]]:
        """Gradients that steps give, each once, and the flags of the leaves that have it."""
        found: dict[str, tuple[str, ...]] = {}
        for leaf, name in self.gradients:
            if name not in self.incoming:
                found[name] = (*found.get(name, ()), need(leaf))
        return found

    def received(self, direction: str) -> frozenset[str]:
        """What collectives of a direction give."""
        own = (each for each in self.collectives if each.direction == direction)
        return frozenset(name for each in own for name in each.results)

    def packed(self, programs: Iterable[Program]) -> Draft:
        """The draft with all of its steps in programs."""
        given = tuple(programs)
        return replace(
            self,
            programs=given,
            forward=(),
            backward=(),
            quantize_input=(),
            refresh=(),
            wgrad=(),
        )

    @property
    def unpacked(self) -> Draft:
        """The draft with the steps of its programs where they were before."""
        steps = {program.name: program.steps for program in self.programs}
        return replace(
            self,
            forward=steps.get("forward", ()),
            backward=steps.get("backward", ()),
            quantize_input=steps.get(QUANTIZE_INPUT, ()),
            refresh=steps.get("refresh", ()),
            wgrad=steps.get("wgrad", ()),
        )

    def with_buffers(self, new: Mapping[str, Buffer]) -> Draft:
        """The draft with more buffers."""
        return replace(self, buffers={**self.buffers, **new})

    @property
    def called_with(self) -> tuple[str, ...]:
        """Tensors of the module's function: those of the forward but for copies of an input."""
        return tuple(name for name in self.arguments if name not in self.input_copies)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The forward's tensors: first input, required parameters, other inputs, optional ones,
        copies of the first input.
        """
        parameters = [parameter.buffer for parameter in self.parameters]
        required = [name for name in parameters if not self.buffers[name].optional]
        optional = [name for name in parameters if self.buffers[name].optional]
        return (self.inputs[0], *required, *self.inputs[1:], *optional, *self.input_copies)


EMPTY = Draft((), {}, (), (), (), ())
"""A module before its first pass."""
