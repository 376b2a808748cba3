"""What the printers of Python share: signatures, schemas, shapes and where sizes are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, count
from string import ascii_lowercase

from ...ir import dtypes
from ...ir.buffers import Attribute, Buffer
from ...ir.dtypes import DType
from ...ir.names import plain
from ...ir.naming import need
from ...ir.plan import ModulePlan
from ...ir.program import Argument, Binding, Program
from ...ir.shapes import Shape, symbols, to_code
from ...ir.step import AttributeRef, AttributeValue, Result, Step
from ...ir.words import AttributeType
from .conditions import Conditions, named_conditions

_SCHEMA_TYPE = {
    AttributeType.FLOAT: "float",
    AttributeType.INT: "SymInt",
    AttributeType.BOOL: "bool",
    AttributeType.STRING: "str",
}
_PYTHON_TYPE = {
    AttributeType.FLOAT: "float",
    AttributeType.INT: "int",
    AttributeType.BOOL: "bool",
    AttributeType.STRING: "str",
}


@dataclass(frozen=True, slots=True)
class TensorText:
    """A tensor of a signature.

    Attributes:
        name: argument name.
        annotation: ``Tensor`` or ``Tensor | None``.
        default: `` = None`` or nothing.
        about: shape, dtype and meaning, for a docstring.
        optional: may be None.
        flag: the flag that asks for its gradient; empty where it has none.
    """

    name: str
    annotation: str
    default: str
    about: str
    optional: bool
    flag: str


@dataclass(frozen=True, slots=True)
class AttributeText:
    """A scalar keyword of a signature.

    Attributes:
        name: of the keyword.
        annotation: its type.
        default: source of its default.
        least, largest: sources of what it is at least and at most; empty for any value.
    """

    name: str
    annotation: str
    default: str
    least: str = ""
    largest: str = ""


@dataclass(frozen=True, slots=True)
class WidenedText:
    """An input that a module takes in narrower types, too, and the type that its op has it in."""

    name: str
    dtype: str


@dataclass(frozen=True, slots=True)
class ResultText:
    """A result of an op.

    Attributes:
        name: of the buffer.
        annotation: ``Tensor`` or ``Tensor | None``.
        shape: tuple source for ``new_empty``.
        dtype: extra argument for ``new_empty``; empty for the module's own type.
        condition: Python source under which it is there; empty is always.
        absent: source of what stands in its place.
    """

    name: str
    annotation: str
    shape: str
    dtype: str
    condition: str
    absent: str


@dataclass(frozen=True, slots=True)
class FlopsText:
    """How many operations the matrix multiplications of an op take.

    PyTorch's counter counts no others, so a model reads the same with these ops as without.

    Attributes:
        parameters: those arguments of the op that the formula reads, with their types.
        lines: that read sizes and name conditions.
        terms: summands, one per GEMM.
    """

    parameters: tuple[str, ...]
    lines: tuple[str, ...]
    terms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProgramText:
    """One op, printed.

    Attributes:
        direction: ``forward``, ``backward``, ``refresh`` or ``wgrad``, with the number of the op
            where its direction has several.
        op: name of the op without its namespace.
        schema: of the op, cut into pieces that fit a line.
        arguments: tensors.
        unchanged: those of them that are not changed in place.
        flags: gradient flags.
        attributes: scalars.
        mutated: how many tensors, the last ones, are changed in place.
        results: tensors.
        returns: return annotation.
        first: the argument whose device and dtype results take, the first of the module's own type.
        fake_dims: ``K = ...`` lines that the fake needs.
        fake_conditions: ``keep_h = ...`` lines that it needs.
        flops: of its matrix multiplications, where its module tells PyTorch of them.
    """

    direction: str
    op: str
    schema: tuple[str, ...]
    arguments: tuple[TensorText, ...]
    unchanged: tuple[TensorText, ...]
    flags: tuple[str, ...]
    attributes: tuple[AttributeText, ...]
    mutated: int
    results: tuple[ResultText, ...]
    returns: str
    first: str
    fake_dims: tuple[str, ...]
    fake_conditions: tuple[str, ...]
    flops: FlopsText | None = None


def _about(buffer: Buffer, plan: ModulePlan) -> str:
    kind = "bfloat16 or float16" if buffer.dtype is DType.IO else dtypes.info(buffer.dtype).torch
    words, first = f"{buffer.shape} {kind}", plan.inputs[0]
    if buffer.name == plan.groups:
        words += f", rows per group on {first}'s device; zeros allowed,"
        words += f" the sum at most {plan.token_axis}"
    elif buffer.shape.leading and buffer.name == first:
        words += ", with any leading dimensions"
    elif buffer.name == first and plan.groups:
        words += ", rows of one group adjacent"
    return words


def tensor_text(plan: ModulePlan, argument: Argument) -> TensorText:
    """A tensor argument as a signature shows it."""
    buffer = plan.buffer(argument.buffer)
    return TensorText(
        name=buffer.name,
        annotation="Tensor | None" if argument.optional else "Tensor",
        default=" = None" if argument.optional else "",
        about=_about(buffer, plan),
        optional=argument.optional,
        flag=need(buffer.name) if buffer.name in plan.differentiated else "",
    )


def given_tensors(plan: ModulePlan, names: tuple[str, ...]) -> tuple[str, ...]:
    """Conditions that inputs are tensors, or left out where they may be."""
    optional = {*plan.optional_inputs}
    types = ((name, "Tensor | None" if name in optional else "Tensor") for name in names)
    return tuple(f"isinstance({name}, {allowed})" for name, allowed in types)


def given_inputs(plan: ModulePlan, names: tuple[str, ...]) -> tuple[str, ...]:
    """What is said of inputs that are no tensors, and which ones may be left out."""
    inputs = tuple(f'("{name}", {name})' for name in names)
    optional = "".join(f'"{name}", ' for name in plan.optional_inputs if name in names)
    return (*inputs, f"optional=({optional})") if optional else inputs


def attribute_text(attribute: Attribute) -> AttributeText:
    """A scalar keyword as a signature shows it."""
    within = (f"{end:g}" for end in attribute.range or ())
    return AttributeText(
        attribute.name, _PYTHON_TYPE[attribute.type], repr(attribute.default), *within
    )


def _source(tensor: str, axis: int | None, number: int) -> str:
    if axis is None:
        leading = f"{tensor}.shape[:-{number}]" if number else f"{tensor}.shape"
        return f"math.prod({leading})"
    size = f"{tensor}.shape[{axis}]"
    return f"{size} // {number}" if number > 1 else size


def bind_line(binding: Binding, optional: set[str]) -> str:
    """``K = x.shape[-1]``; tries the candidates in order where tensors may be absent."""
    text = "0"
    for tensor, axis, number in reversed(binding.candidates):
        source = _source(tensor, axis, number)
        text = f"{source} if {tensor} is not None else {text}" if tensor in optional else source
    return f"{binding.symbol} = {text}"


def bind_lines(program: Program, used: Iterable[str]) -> tuple[str, ...]:
    wanted = set(used)
    optional = {argument.buffer for argument in program.arguments if argument.optional}
    return tuple(
        bind_line(binding, optional) for binding in program.bindings if binding.symbol in wanted
    )


def shape_source(shape: Shape, first: Buffer) -> str:
    """Tuple source; leading dimensions are those of the program's first argument."""
    dims = [to_code(dim) for dim in shape.dims]
    if shape.leading:
        trailing = len(first.shape.dims)
        lead = f"*{first.name}.shape[:-{trailing}]" if trailing else f"*{first.name}.shape"
        dims.insert(0, lead)
    return f"({dims[0]},)" if len(dims) == 1 else f"({', '.join(dims)})"


def _result_text(
    plan: ModulePlan, program: Program, result: Result, first: Buffer, conditions: Conditions
) -> ResultText:
    buffer = plan.buffer(result.buffer)
    return ResultText(
        name=buffer.name,
        annotation="Tensor | None" if result.when and program.returns_none else "Tensor",
        shape=shape_source(buffer.shape, first),
        dtype=dtype_keyword(buffer),
        condition=conditions.text(result.when),
        absent=absent_source(plan, program, result),
    )


def dtype_keyword(buffer: Buffer) -> str:
    own = buffer.dtype is DType.IO
    return "" if own else f", dtype=torch.{dtypes.info(buffer.dtype).torch}"


def absent_source(plan: ModulePlan, program: Program, result: Result) -> str:
    """Source of a result that nobody asked for."""
    if program.returns_none:
        return "None"
    keyword = dtype_keyword(plan.buffer(result.buffer))
    return f"{plan.own_type_argument(program)}.new_empty(0{keyword})"


def schema(plan: ModulePlan, program: Program, groups: tuple[str, ...] = ()) -> str:
    """Schema of an op: tensors, then flags, then scalars, then names of process groups."""
    flags = tuple(f"bool {flag}" for flag in program.flags)
    optional = program.returns_none
    returns = [f"Tensor{'?' if result.when and optional else ''}" for result in program.results]
    return _schema(plan, program, flags, returns, groups)


def twin_schema(plan: ModulePlan, program: Program) -> str:
    """Schema of the op's twin for DTensors: integers instead of flags, and no optional result."""
    return _schema(plan, program, ("int flags", "int ways"), ["Tensor"] * len(program.results))


def _schema(
    plan: ModulePlan,
    program: Program,
    flags: tuple[str, ...],
    returns: list[str],
    groups: tuple[str, ...] = (),
) -> str:
    letters = chain(ascii_lowercase, (f"a{number}" for number in count(1)))
    tensors = [
        f"Tensor{f'({next(letters)}!)' if a.mutated else ''}{'?' if a.optional else ''} {a.buffer}"
        for a in program.arguments
    ]
    scalars = [f"{_SCHEMA_TYPE[a.type]} {a.name}" for a in plan.attributes_of(program)]
    scalars += [f"int {name}" for name in program.arrival]
    scalars += [f"str {name}" for name in groups]
    end = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    return f"({', '.join((*tensors, *flags, *scalars))}) -> {end}"


def return_annotation(types: Iterable[str]) -> str:
    """Of a function that returns tensors of these types, perhaps none at all."""
    found = tuple(types)
    if len(found) == 1:
        return found[0]
    return f"tuple[{', '.join(found)}]" if found else "None"


def pieces(text: str, separator: str = ", ", width: int = 84) -> tuple[str, ...]:
    """A long text cut after separators, to be printed as adjacent string literals."""
    pieces = [""]
    for part in text.split(separator):
        if pieces[-1] and len(plain(pieces[-1] + part)) > width:
            pieces.append("")
        pieces[-1] += part + separator
    return (*pieces[:-1], pieces[-1].removesuffix(separator))


def op_name(plan: ModulePlan, program: Program) -> str:
    """Name of an op without its namespace."""
    return f"{plan.cell}_{program.function}"


def program_text(plan: ModulePlan, program: Program) -> ProgramText:
    """One op, printed."""
    first = plan.buffer(program.arguments[0].buffer)
    conditions = named_conditions(
        program, lambda names: (names.text(result.when) for result in program.results)
    )
    results = tuple(
        _result_text(plan, program, result, first, conditions) for result in program.results
    )
    shapes = [plan.buffer(result.buffer).shape for result in program.results]
    used = {name for shape in shapes for dim in shape.dims for name in symbols(dim)}
    return ProgramText(
        direction=program.function,
        op=op_name(plan, program),
        schema=pieces(schema(plan, program)),
        arguments=tuple(tensor_text(plan, a) for a in program.arguments),
        unchanged=tuple(tensor_text(plan, a) for a in program.arguments if not a.mutated),
        flags=program.flags,
        attributes=(
            *(attribute_text(a) for a in plan.attributes_of(program)),
            *(AttributeText(name, "int", "0") for name in program.arrival),
        ),
        mutated=len(program.mutated),
        results=results,
        returns=return_annotation(result.annotation for result in results),
        first=plan.own_type_argument(program),
        fake_dims=bind_lines(program, used),
        fake_conditions=conditions.lines,
    )


def scalar(value: AttributeValue) -> str:
    """The source of a scalar of a step: a name of the module's, or a number, the same in C++."""
    return value.name if isinstance(value, AttributeRef) else repr(value)


def uses_math(lines: Iterable[str]) -> bool:
    return any("math." in line for line in lines)


def step_name(step: Step, index: int) -> str:
    """``1. grouped_gemm fprop``, unique in its program."""
    kind = f" {step.kind}" if step.kind else ""
    return f"{index}. {step.primitive}{kind}"


def scope_name(plan: ModulePlan, program: Program, step: Step, index: int) -> str:
    """``grouped_linear__bf16__nvtx_ranges forward 1. grouped_gemm fprop``: what scopes are told."""
    return f"{plan.cell} {program.function} {step_name(step, index)}"


def step_comment(step: Step, index: int) -> str:
    """``1. grouped_gemm fprop: x, weight -> y``, the same in every emission."""
    maths = [step.pointwise] if step.pointwise else [part.pointwise for part in step.parts]
    formulas = "; ".join(math.formula for math in maths if math)
    formula = f"  ({formulas})" if formulas else ""
    reads, writes = ", ".join(step.reads), ", ".join(step.writes or step.mutates)
    return f"{step_name(step, index)}: {reads} -> {writes}{formula}"
