"""The six kinds of spec, as frozen dataclasses.

Every field is what a person writes in YAML; nothing is derived here.  pydantic checks types and
closed sets from the annotations, ``load`` adds places to what it finds, and the JSON Schemas under
``specs/schema`` are printed from these classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from .dtypes import DType
from .names import MARK
from .predicate import Comparison, Predicate, SizeVariable, parse_predicate
from .primitives import MERGED, SIGNATURES, GemmKind, Primitive
from .shapes import Binary, Const, Expr, Shape, Sym, parse_expr
from .source import did_you_mean

_STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

_NAME = r"^[a-z][a-z0-9]*(_[a-z0-9]+)*$"
_CAPITAL = r"^[A-Z][A-Za-z0-9]*$"
_ARCH = r"^(cpu|sm_[0-9]+a?)$"
_GENCODE = r"^arch=compute_[0-9]+[af]?,code=sm_[0-9]+[af]?$"
_VERSION = r"^[0-9]{1,3}\.[0-9]{1,2}$"
PATTERNS = {
    _NAME: "a name in snake_case with single underscores",
    _CAPITAL: "a capital letter, then letters and digits",
    _ARCH: "cpu or sm_<number>, with an a behind it for its own instructions",
    _GENCODE: "what nvcc is told, such as arch=compute_90a,code=sm_90a",
    _VERSION: 'a version in quotes, such as "12.3"',
}
"""Every pattern, in words for error messages."""

Name = Annotated[str, StringConstraints(pattern=_NAME, max_length=40)]
"""snake_case without double underscores, which separate the parts of a cell's name."""

Symbol = Annotated[str, StringConstraints(pattern=_CAPITAL, max_length=8)]
"""A dimension: starts with a capital."""

ClassName = Annotated[str, StringConstraints(pattern=_CAPITAL, max_length=40)]
Edition = Literal[1]
Positive = Annotated[int, Field(ge=1, le=65536)]
Block = Annotated[int, Field(ge=1, le=4096)]
_FP32_MAX = 3.4028234663852886e38


def _error(kind: str, text: str, *path: str) -> PydanticCustomError:
    """A problem at a key below the value that is being read."""
    return PydanticCustomError(kind, "{text}", {"text": text, "path": path})


def _shape(value: object) -> object:
    if isinstance(value, Shape):
        return value
    if not isinstance(value, list) or not all(isinstance(item, str | int) for item in value):
        raise _error("shape", f"expected a list of dimensions such as [T, 2 * D], got {value!r}")
    if not value:
        raise _error("shape", "expected one dimension at least, such as [T...], got []")
    try:
        return Shape.parse(value)
    except ValueError as error:
        raise _error("shape", str(error)) from None


def _expr(value: object) -> object:
    if isinstance(value, Const | Sym | Binary):
        return value
    if not isinstance(value, str | int):
        raise _error("expression", f"expected a size such as 2 * F, got {value!r}")
    try:
        return parse_expr(value)
    except ValueError as error:
        raise _error("expression", str(error)) from None


def _predicate(value: object) -> object:
    if isinstance(value, Predicate):
        return value
    if not isinstance(value, dict):
        raise _error(
            "predicate", f"expected conditions such as {{groups: {{lt: 64}}}}, got {value!r}"
        )
    for variable, comparisons in value.items():
        _known("size", variable, SizeVariable, variable)
        if not isinstance(comparisons, dict) or not comparisons:
            raise _error(
                "predicate",
                f"expected comparisons such as {{lt: 64}}, got {comparisons!r}",
                variable,
            )
        for comparison, number in comparisons.items():
            _known("comparison", comparison, Comparison, variable, comparison)
            least = 1 if comparison == Comparison.MULTIPLE_OF.value else 0
            if type(number) is not int or number < least:
                raise _error(
                    "predicate",
                    f"expected an integer of at least {least}, got {number!r}",
                    variable,
                    comparison,
                )
    return parse_predicate(value)


def _known(what: str, word: object, choices: type[Enum], *path: str) -> None:
    known = [choice.value for choice in choices]
    if word not in known:
        raise _error("unknown", f"unknown {what} {word!r}{did_you_mean(str(word), known)}", *path)


def _text(text: str) -> str:
    """Text without control characters, line breaks, bidirectional marks and the like."""
    odd = next((c for c in text if not c.isprintable() or c == MARK), "")
    if odd:
        raise _error("text", f"expected one line of printable text, got character {odd!a}")
    return text


def _scalar(value: object) -> object:
    """What every language can print as a constant."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not isfinite(value):
        raise _error("scalar", f"expected a finite number, got {value}")
    return value


Line = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_text)]
"""What people read in comments, docstrings and tables: one line of printable text."""

Scalar = Annotated[float | int | bool | str, BeforeValidator(_scalar)]
"""The value of an attribute."""

ShapeField = Annotated[
    Shape,
    BeforeValidator(_shape),
    WithJsonSchema({"type": "array", "items": {"type": ["string", "integer"]}}),
]
ExprField = Annotated[Expr, BeforeValidator(_expr), WithJsonSchema({"type": ["string", "integer"]})]
PredicateField = Annotated[
    Predicate, BeforeValidator(_predicate), WithJsonSchema({"type": "object"})
]


class Role(str, Enum):
    """How a tensor enters a matrix product; recipes say one format per role."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


class Init(str, Enum):
    """How ``reset_parameters`` fills a parameter."""

    KAIMING_UNIFORM = "kaiming_uniform"
    ZEROS = "zeros"
    ONES = "ones"


class Broadcast(str, Enum):
    """Along what a pointwise operand repeats: one value per row, or one per column."""

    ROW = "row"
    COLUMN = "column"


@dataclass(frozen=True, slots=True, config=_STRICT)
class TensorSpec:
    """A tensor of an op.

    Attributes:
        shape: ``[T, 2 * D]``; ``T...`` stands for any number of leading dimensions.
        role: what a recipe quantises it as; None is never quantised.
        dtype: ``io`` is the module's own type.
        differentiable: whether a gradient can flow into it.
        optional: may be None at run time.
        init: for parameters.
        halves: names of the two halves of the last dimension in a pointwise expression.
        interleave: attribute that, when positive, interleaves the halves in blocks of that many.
        broadcast: repeats along rows or columns of a pointwise expression.
    """

    shape: ShapeField
    role: Role | None = None
    dtype: DType = DType.IO
    differentiable: bool = True
    optional: bool = False
    init: Init | None = None
    halves: tuple[Name, Name] | None = None
    interleave: Name | None = None
    broadcast: Broadcast | None = None


class AttributeType(str, Enum):
    """Types of scalar attributes."""

    FLOAT = "float"
    INT = "int"
    BOOL = "bool"
    STRING = "string"


@dataclass(frozen=True, slots=True, config=_STRICT)
class AttributeSpec:
    """A scalar of an op, a keyword of the generated function.

    Attributes:
        type: of the value.
        default: used where the caller says nothing.
        static: fixed when the module is generated instead of at run time.
    """

    type: AttributeType
    default: Scalar
    static: bool = False


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One step of an op's program, as written: primitive, kind and tensors by slot."""

    primitive: Primitive
    kind: str | None
    slots: tuple[tuple[str, str], ...]

    def get(self, slot: str) -> str | None:
        """The tensor in a slot, or None."""
        return dict(self.slots).get(slot)


def _step(value: object) -> object:
    if isinstance(value, StepSpec):
        return value
    if not isinstance(value, dict) or "step" not in value:
        raise _error(
            "step", f"expected a step such as {{step: gemm, kind: fprop, ...}}, got {value!r}"
        )
    _known("step", value["step"], Primitive, "step")
    primitive = Primitive(value["step"])
    signature = SIGNATURES[primitive]
    if signature.variadic:
        raise _error(
            "step",
            f"the passes write {primitive.value}; use 'pointwise:' with an expression",
            "step",
        )
    kind = value.get("kind")
    wrong = kind_problem(primitive, kind)
    if wrong:
        raise _error("step", wrong, "kind")
    slots = {key: text for key, text in value.items() if key not in ("step", "kind")}
    known = (*signature.inputs, *signature.optional_inputs, *signature.outputs)
    known += signature.attributes
    for key, text in slots.items():
        if key not in known:
            hint = did_you_mean(key, known)
            raise _error("step", f"{primitive.value} has no slot {key!r}{hint}", key)
        if not isinstance(text, str):
            raise _error("step", f"slot {key!r} names a tensor or an attribute, got {text!r}", key)
    for slot in (*signature.inputs, signature.outputs[0]):
        if slot not in slots:
            raise _error("step", f"{primitive.value} needs slot {slot!r}")
    return StepSpec(primitive, kind, tuple(slots.items()))


def kind_problem(primitive: Primitive, kind: object) -> str:
    """What is wrong with the kind of a step; empty where nothing is."""
    kinds = SIGNATURES[primitive].kinds
    if kind is None and kinds:
        return f"{primitive.value} needs a kind: {' | '.join(kinds)}"
    if kind is not None and kind not in kinds:
        return f"{primitive.value} takes {' | '.join(kinds) or 'no kind'}, got {kind!r}"
    return ""


StepField = Annotated[
    StepSpec,
    BeforeValidator(_step),
    WithJsonSchema(
        {
            "type": "object",
            "required": ["step"],
            "properties": {"step": {"enum": [primitive.value for primitive in Primitive]}},
        }
    ),
]


@dataclass(frozen=True, slots=True, config=_STRICT)
class OpSpec:
    """A basic op.

    Attributes:
        dims: symbols of the shapes, each with the keyword it has in a constructor.
        attributes: scalars, symbols of the pointwise expression.
        inputs: in the order of the generated function; the first one fixes ``io``.
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
    def tensors(self) -> dict[str, TensorSpec]:
        """Every declared tensor by name."""
        return {**self.inputs, **self.parameters, **self.internal, **self.outputs}


class OptionName(str, Enum):
    """What a module may offer to be decided at generation time."""

    MAIN_GRAD = "main_grad"
    DELAY_WGRAD = "delay_wgrad"
    WEIGHT_CACHE = "weight_cache"
    SCALE_BIAS = "scale_bias"
    GLU_INTERLEAVE = "glu_interleave"
    SAVE = "save"
    BACKWARD_PRECISION = "backward_precision"
    QUANTIZED_INPUT = "quantized_input"
    QUANTIZED_OUTPUT = "quantized_output"
    OUTPUT_DTYPE = "output_dtype"
    PARAMETER_PER_GROUP = "parameter_per_group"
    TENSOR_PARALLEL = "tensor_parallel"
    SEQUENCE_PARALLEL = "sequence_parallel"
    AMAX_REDUCTION = "amax_reduction"
    DEBUG = "debug"
    RANGES = "ranges"


class MainGrad(str, Enum):
    """Where a product leaves the gradient of a weight: in fp32 where the type is not named."""

    RETURNED = "returned_grad"
    ADD = "add_to_main_grad"
    WRITE = "write_main_grad"
    ADD_16 = "add_to_16_bit_main_grad"
    WRITE_16 = "write_16_bit_main_grad"

    @property
    def adds(self) -> bool:
        """Whether to what is there."""
        return self in (MainGrad.ADD, MainGrad.ADD_16)

    @property
    def narrow(self) -> bool:
        """Whether in the type of the weight."""
        return self in (MainGrad.ADD_16, MainGrad.WRITE_16)


class BackwardPrecision(str, Enum):
    """What the products of a backward read."""

    QUANTIZED = "quantized_backward"
    HIGH = "high_precision_backward"
    DEQUANTIZED = "dequantized_backward"


@dataclass(frozen=True, slots=True, config=_STRICT)
class ChainItem:
    """One op of a module.

    Attributes:
        op: name of the op.
        as_: prefix of its parameters; needed where the chain has more than one op.
        with_: op input -> tensor of the module; the first input defaults to the result before it,
            the others to the module input of the same name.
        out: name of its result; the last item's results are the module's outputs.
        dims: op dimension -> expression in the module's dimensions; defaults to the same symbol.
        attributes: values that replace the op's defaults.
    """

    op: Name
    as_: Annotated[Name | None, Field(alias="as")] = None
    with_: Annotated[Mapping[Name, Name], Field(alias="with", default_factory=dict)] = field(
        default_factory=dict
    )
    out: Name | None = None
    dims: Mapping[Symbol, ExprField] = field(default_factory=dict)
    attributes: Mapping[Name, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, config=_STRICT)
class ModuleSpec:
    """What a user asks for by name: one op, or a chain of them.

    Attributes:
        class_: name of the generated ``nn.Module``.
        op: the one op; its summary, dims and inputs are the module's.
        chain: or several ops in a row; then summary, dims and inputs stand here.
        options: choices the module offers at generation time; the first is the default.
    """

    edition: Edition
    module: Name
    class_: Annotated[ClassName, Field(alias="class")]
    op: Name | None = None
    summary: Line | None = None
    dims: Mapping[Symbol, Name] = field(default_factory=dict)
    inputs: Mapping[Name, TensorSpec] = field(default_factory=dict)
    chain: tuple[ChainItem, ...] = ()
    options: Mapping[OptionName, tuple[Name, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.module


class ScaleRule(str, Enum):
    """How a scale follows from an amax."""

    MAX_OVER_AMAX = "max_over_amax"
    MX = "mx"
    NVFP4 = "nvfp4"


class ScaleRounding(str, Enum):
    """How a scale is rounded: not at all, to a power of two downwards or upwards."""

    NONE = "none"
    POW2_DOWN = "pow2_down"
    POW2_UP = "pow2_up"


class AmaxSource(str, Enum):
    """Which tensor's amax a scale follows: this one's, or the newest of a history."""

    CURRENT = "current"
    HISTORY = "history"


class Extent(str, Enum):
    """A block that spans a whole dimension of a tensor, or of a group of rows."""

    ALL = "all"


class Orientation(str, Enum):
    """Along which dimension the blocks of a quantised copy run."""

    ROWWISE = "rowwise"
    COLUMNWISE = "columnwise"


class Rounding(str, Enum):
    """How an element is rounded to its format."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


class Accumulation(str, Enum):
    """Where partial sums of a product are kept."""

    FP32 = "fp32"
    FAST = "fast"
    SPLIT_128 = "split_128"


@dataclass(frozen=True, slots=True, config=_STRICT)
class ScaleSpec:
    """Scale factors of a quantised tensor.

    Attributes:
        dtype: of the stored inverse scale.
        rule: formula from amax (numerics documentation).
        round: of the scale.
        source: current tensor or history.
        epsilon: an amax below it is raised to it.
        margin: the scale is divided by 2^margin.
        history: number of amaxes kept, where source is history.
    """

    dtype: DType
    rule: ScaleRule
    round: ScaleRounding = ScaleRounding.NONE
    source: AmaxSource = AmaxSource.CURRENT
    epsilon: Annotated[float, Field(ge=0, le=_FP32_MAX)] = 0.0
    margin: Annotated[int, Field(ge=0, le=100)] = 0
    history: Annotated[int, Field(ge=0, le=65536)] = 0


@dataclass(frozen=True, slots=True, config=_STRICT)
class HadamardSpec:
    """A random Hadamard transform before quantisation, along the blocks of one orientation."""

    size: Annotated[int, Field(ge=2, le=256)]
    orientation: Orientation


@dataclass(frozen=True, slots=True, config=_STRICT)
class QuantizationSpec:
    """How one role is quantised.

    Attributes:
        format: of the elements.
        block: rows and columns that share a scale, for rowwise copies; columnwise copies swap them.
        scale: scale factors per block.
        tensor_scale: a second scale over the whole tensor or group (NVFP4).
        rounding: of elements.
        hadamard: transform before quantisation.
    """

    format: DType
    block: tuple[Block | Extent, Block | Extent]
    scale: ScaleSpec
    tensor_scale: ScaleSpec | None = None
    rounding: Rounding = Rounding.NEAREST
    hadamard: HadamardSpec | None = None

    @property
    def scaling(self) -> str:
        """How elements share a scale: ``tensor``, ``row``, ``block_1x128``, ``mx_1x32`` ..."""
        words = {(Extent.ALL, Extent.ALL): "tensor", (1, Extent.ALL): "row"}
        if self.scale.rule is ScaleRule.MAX_OVER_AMAX and self.block in words:
            return words[self.block]
        kind = {ScaleRule.MX: "mx", ScaleRule.NVFP4: "nv"}.get(self.scale.rule, "block")
        rows, columns = (e.value if isinstance(e, Extent) else e for e in self.block)
        return f"{kind}_{rows}x{columns}"

    @property
    def amax_pass(self) -> bool:
        """Whether a tensor is read for its amaxes before it can be quantised.

        It is where a scale of this very tensor spans more than a kernel has at hand: all of a row,
        a column or a group.
        """
        spans = self.block[1] is Extent.ALL and self.scale.source is AmaxSource.CURRENT
        return spans or self.tensor_scale is not None

    def along_tokens(self, role: Role, orientation: Orientation) -> bool:
        """Whether a copy has several fp32 scales per token, in blocks of its row."""
        rows, columns = self.block
        fp32 = self.scale.dtype is DType.FLOAT32
        blocks = fp32 and rows == 1 and columns is not Extent.ALL
        return role is not Role.WEIGHT and orientation is Orientation.ROWWISE and blocks


@dataclass(frozen=True, slots=True, config=_STRICT)
class ToleranceSpec:
    """Largest relative Frobenius errors a generated test accepts.

    Attributes:
        gemm: a product with an ``io`` result against float64 of the operands it read.
        end_to_end: a module as deep as an expert MLP against float64 of its unquantised inputs;
            deeper ones are given more, as errors add up in squares.
        float32: sums kept in fp32 against float64.
    """

    gemm: Annotated[float, Field(gt=0, lt=1)]
    end_to_end: Annotated[float, Field(gt=0, lt=1)]
    float32: Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, slots=True, config=_STRICT)
class RecipeSpec:
    """Numerics of the matrix products.

    Attributes:
        source: where the recipe was published.
        roles: how each role is quantised; a role that is not named stays in ``io``.
        gemm: accumulation of each product.
        tolerance: what tests accept.
    """

    edition: Edition
    recipe: Name
    summary: Line
    source: Line
    gemm: Mapping[GemmKind, Accumulation]
    tolerance: ToleranceSpec
    roles: Mapping[Role, QuantizationSpec] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.recipe

    @property
    def amax_pass(self) -> bool:
        """Whether a role of it is read for amaxes before it can be quantised."""
        return any(role.amax_pass for role in self.roles.values())


class Store(str, Enum):
    """What becomes of a product: written in the module's own type or in fp32, or added in one.

    SCALED_BIAS is the module's own type after a bias times a scale of each row was added.
    """

    IO = "io"
    SCALED_BIAS = "scaled_bias"
    FP32 = "fp32"
    ADD = "add"
    ADD_IO = "add_io"


class Schedule(str, Enum):
    """How the math warpgroups of a kernel share the work."""

    COOPERATIVE = "cooperative"
    PINGPONG = "pingpong"


_POINT = re.compile(r"([a-z]+)_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)")


@dataclass(frozen=True, slots=True, config=_STRICT)
class PointSpec:
    """One configuration of a kernel.

    Attributes:
        tile: rows, columns and depth of the result tile a step computes.
        cluster: thread blocks along rows and columns that share loads.
        schedule: of the math warpgroups.
    """

    tile: tuple[Positive, Positive, Positive]
    cluster: tuple[Positive, Positive]
    schedule: Schedule

    @property
    def name(self) -> str:
        """``cooperative_128x256x64_2x1``: everything the point says."""
        tile = "x".join(str(extent) for extent in self.tile)
        cluster = "x".join(str(extent) for extent in self.cluster)
        return f"{self.schedule.value}_{tile}_{cluster}"

    @classmethod
    def parse(cls, name: str) -> PointSpec:
        """The point of a name.

        Raises:
            ValueError: it is not a point's name.
        """
        match = _POINT.fullmatch(name)
        if match is None:
            raise ValueError(f"point {name!r}: expected one like cooperative_128x256x64_2x1")
        m, n, k, rows, columns = map(int, match.groups()[1:])
        return cls((m, n, k), (rows, columns), Schedule(match[1]))


@dataclass(frozen=True, slots=True, config=_STRICT)
class RuleSpec:
    """Use a point where the conditions hold; the last rule of a list has none."""

    use: Name
    when: PredicateField = Predicate(())


@dataclass(frozen=True, slots=True, config=_STRICT)
class KindSpec:
    """Configurations of one kind of product and the ordered rules that choose among them."""

    points: tuple[PointSpec, ...]
    select: tuple[RuleSpec, ...]


@dataclass(frozen=True, slots=True, config=_STRICT)
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

    implements: tuple[Primitive, ...]
    formats: tuple[DType, ...] = (DType.IO,)
    scalings: tuple[Name, ...] = ()
    accumulations: tuple[Accumulation, ...] = ()
    stores: tuple[Store, ...] = (Store.IO,)
    template: Name | None = None
    row_alignment: Positive = 1
    kinds: Mapping[GemmKind, KindSpec] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, config=_STRICT)
class LayoutSpec:
    """How an architecture's kernels store quantised copies.

    Attributes:
        transposed: columnwise data is ``[K, rows]``, because the MMA reads one major only.
        token_alignment: elements that a group's transposed data starts at a multiple of.
        pitch: bytes that rows of data are padded to a multiple of.
        token_major: fp32 scales of blocks along a row are stored ``[blocks, tokens]``, groups where
            transposed data has them, because the MMA's scales are loaded for many tokens at once.
    """

    transposed: bool = True
    token_alignment: Positive = 32
    pitch: Positive = 16
    token_major: bool = False


@dataclass(frozen=True, slots=True, config=_STRICT)
class ArchSpec:
    """A GPU architecture, or ``cpu``: the reference alone.

    Attributes:
        capability: compute capability, None for cpu.
        gencode: what nvcc is told.
        toolkit: oldest CUDA toolkit that knows the architecture.
        limits: hardware limits by name, for people and tests.
        layout: of quantised copies.
        kernels: families by name.
    """

    edition: Edition
    arch: Annotated[str, StringConstraints(pattern=_ARCH)]
    summary: Line
    capability: tuple[int, int] | None = None
    gencode: Annotated[str, StringConstraints(pattern=_GENCODE)] | None = None
    toolkit: Annotated[str, StringConstraints(pattern=_VERSION)] | None = None
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


@dataclass(frozen=True, slots=True, config=_STRICT)
class TargetSpec:
    """A named selection: every listed module with every listed recipe on every listed arch.

    Attributes:
        options: choices that every module is generated with.
    """

    edition: Edition
    target: Name
    summary: Line
    archs: tuple[Name, ...]
    modules: tuple[Name, ...]
    recipes: tuple[Name, ...]
    options: tuple[Name, ...] = ()

    @property
    def name(self) -> str:
        return self.target


class FusionPass(str, Enum):
    """When a fusion applies; a joint one owns both directions."""

    JOINT = "joint"
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, config=_STRICT)
class PatternStep:
    """A step of a pattern, or the step that replaces it; names are pattern variables.

    Attributes:
        in_: operands in the order of the step's slots.
        out: results in that order.
        kind: variant of the primitive; a pattern that says none matches every one.
        op: in a pattern, the op that a pointwise step computes.  The replacement does it by itself,
            whereas the expression of a step without ``op`` goes along to the replacement.
        with_: in a replacement, further operands by slot.
    """

    step: Primitive
    in_: Annotated[tuple[Name, ...], Field(alias="in")]
    out: tuple[Name, ...]
    kind: str | None = None
    op: Name | None = None
    with_: Annotated[Mapping[Name, Name], Field(alias="with", default_factory=dict)] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True, config=_STRICT)
class FusionPrograms:
    """Steps per direction."""

    forward: tuple[PatternStep, ...] = ()
    backward: tuple[PatternStep, ...] = ()


@dataclass(frozen=True, slots=True, config=_STRICT)
class FusionConditions:
    """Where a fusion applies; what is left out is no condition.

    Attributes:
        archs: on these.
        recipes: with these.
        quantized: with recipes that quantise a role, or with those that quantise none.
        amax_pass: with recipes some role of which needs one, or with those where none does.
        options: of modules.
    """

    archs: tuple[Name, ...] = ()
    recipes: tuple[Name, ...] = ()
    quantized: bool | None = None
    amax_pass: bool | None = None
    options: Mapping[OptionName, Name] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, config=_STRICT)
class FusionSpec:
    """A pattern of steps and what replaces it.

    Attributes:
        pass_: joint, forward or backward.
        match: steps to find, connected by the pattern's variables.
        rewrite: steps to put in their place.
        keep: variables that a joint fusion saves for its backward.
        drop: variables that it no longer saves because its backward rebuilds them.
        when: where it applies.
    """

    edition: Edition
    fusion: Name
    pass_: Annotated[FusionPass, Field(alias="pass")]
    summary: Line
    match: FusionPrograms
    rewrite: FusionPrograms
    keep: tuple[Name, ...] = ()
    drop: tuple[Name, ...] = ()
    when: FusionConditions = FusionConditions()

    @property
    def name(self) -> str:
        return self.fusion

    @property
    def merges(self) -> bool:
        """Whether it puts one kernel in the place of several steps, which the plan still names.

        Its names say how the two steps hang together: an expression with further operands matches.
        """
        rewrite = (*self.rewrite.forward, *self.rewrite.backward)
        return any(step.step in MERGED for step in rewrite)


AnySpec = OpSpec | ModuleSpec | RecipeSpec | ArchSpec | TargetSpec | FusionSpec


class SpecKind(Enum):
    """The six kinds: folder under ``specs/`` (also the plural people use), key field, class."""

    OPS = ("ops", "op", OpSpec)
    FUSIONS = ("fusions", "fusion", FusionSpec)
    MODULES = ("modules", "module", ModuleSpec)
    RECIPES = ("recipes", "recipe", RecipeSpec)
    ARCHS = ("archs", "arch", ArchSpec)
    TARGETS = ("targets", "target", TargetSpec)

    def __init__(self, folder: str, key: str, spec: type[Any]) -> None:
        self.folder = folder
        self.key = key
        self.spec = spec
