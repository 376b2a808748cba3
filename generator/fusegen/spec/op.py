"""Ops: tensors, steps or an expression, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema
from pydantic.dataclasses import dataclass

from ..ir.dtypes import INTEGERS, DType
from ..ir.fields import STRICT
from ..ir.quantization import Role
from ..ir.shapes import Expr, Shape
from ..ir.step import Access
from ..ir.words import AttributeType, Broadcast, Init
from ..steps import SHIPPED, definition
from .diagnostics import did_you_mean
from .fields import Edition, Line, Name, Scalar, ShapeField, Symbol, problem_at, step_name


@dataclass(frozen=True, slots=True, config=STRICT)
class TensorSpec:
    """A tensor of an op.

    Attributes:
        shape: ``[T, 2 * D]``; ``T...`` stands for any number of leading dimensions.
        role: what a recipe quantises it as; None is never quantised.
        dtype: ``io`` is the module's own type.
        differentiable: whether a gradient can flow into it; integers do not say it, for none can.
        optional: may be None at run time: a parameter, or an input without a gradient.
        init: for parameters.
        init_if: what it is instead where a static attribute is true, by the attribute's name.
        halves: names of the two halves of the last dimension in a pointwise expression.
        interleave: attribute that, when positive, interleaves the halves in blocks of that many.
        broadcast: repeats along rows or columns of a pointwise expression.
        drawn: random bits, which a module draws where its caller gives none.
        chunk: of an internal tensor and its gradient, how many rows of the outermost dimension
            kernels have in memory at a time, at most: all steps that touch them run for a chunk of
            the rows, one behind the other, and a backward makes the tensor again.
    """

    shape: ShapeField
    role: Role | None = None
    dtype: DType = DType.IO
    differentiable: bool = True
    optional: bool = False
    init: Init | None = None
    init_if: Mapping[Name, Init] = field(default_factory=dict)
    halves: tuple[Name, Name] | None = None
    interleave: Name | None = None
    broadcast: Broadcast | None = None
    drawn: bool = False
    chunk: int | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient can flow into it."""
        return self.differentiable and self.dtype not in INTEGERS


@dataclass(frozen=True, slots=True, config=STRICT)
class AttributeSpec:
    """A scalar of an op, a keyword of the generated function.

    Attributes:
        type: of the value.
        default: used where the caller says nothing.
        static: fixed when the module is generated instead of at run time.
        range: least and largest value; None for any.
        in_eval: what modules call the function with outside training; None for what they have.
    """

    type: AttributeType
    default: Scalar
    static: bool = False
    range: tuple[float, float] | None = None
    in_eval: float | None = None

    @property
    def may_count(self) -> bool:
        """Whether shapes may hold it."""
        return self.static and self.type is AttributeType.INT


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One step of an op's program, as written: primitive, kind, tensors by slot, attributes.

    The value of an attribute is a number, or the name of an attribute of the op.
    """

    primitive: str
    kind: str | None
    slots: tuple[tuple[str, str], ...]
    attributes: tuple[tuple[str, float | int | bool | str], ...] = ()

    def get(self, slot: str) -> str | None:
        """The tensor in a slot, or None."""
        return dict(self.slots).get(slot)


def _step(value: object) -> object:
    if isinstance(value, StepSpec):
        return value
    if not isinstance(value, dict) or "step" not in value:
        raise problem_at(
            "step", f"expected a step such as {{step: gemm, kind: fprop, ...}}, got {value!r}"
        )
    primitive = step_name(value["step"], "step")
    signature = definition(primitive)
    if signature.of_passes:
        raise problem_at(
            "step",
            f"the passes write {primitive}; use 'pointwise:' with an expression",
            "step",
        )
    kind = value.get("kind")
    wrong = kind_problem(primitive, kind)
    if wrong:
        raise problem_at("step", wrong, "kind")
    slots = {key: text for key, text in value.items() if key not in ("step", "kind")}
    types = {each.name: each.type for each in signature.attributes_of(kind)}
    attributes = {key: slots.pop(key) for key in types if key in slots}
    known = (*signature.slots, *signature.results, *types)
    for key, text in slots.items():
        if key not in known:
            hint = did_you_mean(key, known)
            raise problem_at("step", f"{primitive} has no slot {key!r}{hint}", key)
        if not isinstance(text, str):
            raise problem_at("step", f"slot {key!r} names a tensor, got {text!r}", key)
    for slot in (*signature.required(kind), signature.results[0]):
        if slot not in slots:
            raise problem_at("step", f"{primitive} needs slot {slot!r}")
    for name, type_ in types.items():
        if name not in attributes:
            raise problem_at("step", f"{primitive} needs attribute {name!r} of type {type_.value}")
        value = attributes[name]
        if not isinstance(value, str) and not type_.holds(value):
            raise problem_at(
                "step",
                f"expected type {type_.value} or the name of one of the op's attributes for"
                f" {name!r} of {primitive}, got {value!r}",
                name,
            )
    return StepSpec(primitive, kind, tuple(slots.items()), tuple(attributes.items()))


StepField = Annotated[
    StepSpec,
    BeforeValidator(_step),
    WithJsonSchema(
        {
            "type": "object",
            "required": ["step"],
            "properties": {"step": {"enum": [kind.name for kind in SHIPPED if not kind.of_passes]}},
        }
    ),
]


def kind_problem(primitive: str, kind: object) -> str:
    """What is wrong with the kind of a step; empty where nothing is."""
    kinds = definition(primitive).kinds
    if kind is None and kinds:
        return f"{primitive} needs a kind: {' | '.join(kinds)}"
    if kind is not None and kind not in kinds:
        return f"{primitive} takes {' | '.join(kinds) or 'no kind'}, got {kind!r}"
    return ""


@dataclass(frozen=True, slots=True, config=STRICT)
class OpSpec:
    """A basic op.

    Attributes:
        dims: symbols of the shapes, each with the keyword it has in a constructor.
        attributes: scalars, symbols of the pointwise expression.
        inputs: in the order of the generated function; the first one fixes ``io``.
        outputs: what it returns, in this order.
        parameters: tensors that a module holds and trains.
        internal: tensors that one step leaves for another, such as the mean of a norm.
        forward: steps from inputs and parameters to outputs.
        backward: steps from ``d<output>`` to ``d<input>``; derived for a pointwise op.
        pointwise: one expression per output, instead of steps.
    """

    edition: Edition
    op: Name
    summary: Line
    dims: Mapping[Symbol, Name]
    inputs: Mapping[Name, TensorSpec]
    outputs: Mapping[Name, TensorSpec]
    parameters: Mapping[Name, TensorSpec] = field(default_factory=dict)
    attributes: Mapping[Name, AttributeSpec] = field(default_factory=dict)
    internal: Mapping[Name, TensorSpec] = field(default_factory=dict)
    forward: tuple[StepField, ...] = ()
    backward: tuple[StepField, ...] = ()
    pointwise: Mapping[Name, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.op

    @property
    def has_roles(self) -> bool:
        """Whether a recipe quantises something of it."""
        return any(tensor.role for tensor in self.tensors.values())

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """Every declared tensor by name."""
        return {**self.inputs, **self.parameters, **self.internal, **self.outputs}

    @property
    def counts(self) -> tuple[str, ...]:
        """Attributes that stand in its shapes: integers, fixed when a module is generated."""
        used = frozenset().union(*(each.shape.symbols() for each in self.tensors.values()))
        return tuple(
            name for name, spec in self.attributes.items() if spec.may_count and name in used
        )

    @property
    def any_shape(self) -> bool:
        """Whether its first input is all leading dimensions: elements, in whatever shape."""
        shape = next(iter(self.inputs.values())).shape
        return shape.leading is not None and not shape.dims

    @property
    def left_open(self) -> Mapping[str, TensorSpec]:
        """Outputs of which the op says nothing but that they have dimensions: chains say which."""
        operands = (*self.inputs.values(), *self.parameters.values())
        known = frozenset().union(*(each.shape.symbols() for each in operands))
        return {
            name: spec
            for name, spec in self.outputs.items()
            if not spec.shape.dims and spec.shape.leading not in {None, *known}
        }

    def shape_of(
        self, tensor: TensorSpec, dims: Mapping[str, Expr], read: Shape, said: Shape | None = None
    ) -> Shape:
        """The shape of a tensor of the op in a chain.

        Args:
            tensor: one of the op's.
            dims: what the names in the op's shapes stand for.
            read: of what it reads as its first input; an op on elements of any shape gives that.
            said: what the chain says of a result that the op leaves open.
        """
        if said and tensor in self.left_open.values():
            return said
        if self.any_shape and tensor.shape == next(iter(self.inputs.values())).shape:
            return read
        return tensor.shape.substitute(dims)


_BROADCAST = {Broadcast.ROW: Access.ROW, Broadcast.COLUMN: Access.COLUMN, None: Access.FULL}


def symbols_of(op: OpSpec, tensor: str) -> tuple[tuple[str, Access], ...]:
    """What an expression calls a tensor: its name, or the names of its halves."""
    spec = op.tensors[tensor]
    if spec.halves:
        return ((spec.halves[0], Access.FIRST_HALF), (spec.halves[1], Access.SECOND_HALF))
    return ((tensor, _BROADCAST[spec.broadcast]),)


def operand_symbols(op: OpSpec) -> tuple[str, ...]:
    """Every symbol an expression of the op may use for a tensor."""
    names = (*op.inputs, *op.parameters)
    return tuple(symbol for name in names for symbol, _ in symbols_of(op, name))
