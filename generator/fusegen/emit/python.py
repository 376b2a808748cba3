"""Contexts of the Python templates: a cell's module and its reference."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..model import dtypes
from ..model.dtypes import DType
from ..model.plan import (
    Access,
    Argument,
    Attribute,
    Binding,
    Buffer,
    Check,
    CheckKind,
    Copy,
    ModulePlan,
    Operand,
    Pointwise,
    Program,
    Result,
    StateFill,
    Step,
)
from ..model.primitives import Primitive
from ..model.shapes import Shape, Sym, parse_expr, product, substitute, symbols, to_code, to_python
from ..model.primitives import Primitive
from ..model.specs import AttributeType, Extent, Init, Orientation, Role
from ..naming import gradient, need

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
    """A scalar keyword of a signature."""

    name: str
    annotation: str
    default: str


@dataclass(frozen=True, slots=True)
class ResultText:
    """A result of an op.

    Attributes:
        name: of the buffer.
        annotation: ``Tensor`` or ``Tensor | None``.
        shape: tuple source for ``new_empty``.
        dtype: extra argument for ``new_empty``; empty for the module's own type.
        condition: Python source under which it is there; empty is always.
    """

    name: str
    annotation: str
    shape: str
    dtype: str
    condition: str


@dataclass(frozen=True, slots=True)
class ProgramText:
    """One direction, printed.

    Attributes:
        direction: ``forward`` or ``backward``.
        op: name of the op without its namespace.
        schema: of the op, cut into pieces that fit a line.
        arguments: tensors.
        flags: gradient flags.
        attributes: scalars.
        mutated: how many tensors, the last ones, are changed in place.
        results: tensors.
        returns: return annotation.
        first: the argument whose device and dtype results take.
        fake_dims: ``K = ...`` lines that the fake needs.
    """

    direction: str
    op: str
    schema: tuple[str, ...]
    arguments: tuple[TensorText, ...]
    flags: tuple[str, ...]
    attributes: tuple[AttributeText, ...]
    mutated: int
    results: tuple[ResultText, ...]
    returns: str
    first: str
    fake_dims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SavedText:
    """A tensor kept for the backward: name and source of what ``save_for_backward`` takes."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class ParameterText:
    """A parameter of the class.

    Attributes:
        path: in the state dict.
        holder: submodule it hangs on; empty for the module itself.
        name: within its holder.
        argument: of the function.
        shape: tuple source.
        optional: only with ``bias=True``.
        init: source of the in-place fill, without the tensor.
    """

    path: str
    holder: str
    name: str
    argument: str
    shape: str
    optional: bool
    init: str


@dataclass(frozen=True, slots=True)
class StateText:
    """A buffer of the class that an op changes in place.

    Attributes:
        path, holder, name: as of a parameter.
        argument: of the function.
        about: shape and type, for a docstring.
        shape: tuple source.
        dtype: attribute of torch.
        init: source of the in-place fill, without the tensor.
    """

    path: str
    holder: str
    name: str
    argument: str
    about: str
    shape: str
    dtype: str
    init: str


@dataclass(frozen=True, slots=True)
class KeywordText:
    """A size keyword of the constructor, and the dimension it gives."""

    name: str
    symbol: str


@dataclass(frozen=True, slots=True)
class CellContext:
    """Everything ``<cell>.py`` states.

    Attributes:
        inputs: what the module is called with.
        arguments: what the function is called with.
        states: tensors kept between calls.
        carried: arguments that the backward op changes; they are neither saved nor returned.
        differentiable: arguments that can have a gradient.
        take_output: ``y =`` or ``y, *_ =``, where the op also returns what it saves.
        op_arguments: what the forward op is called with.
        apply_arguments: what ``apply`` is called with: those, then what only the backward changes.
        parameters_of_apply: the parameters of ``forward`` for them.
        unpack_inputs: targets of ``setup_context``'s inputs; an underscore for what it does not read.
        saved_results: results of the forward op that are kept for the backward.
        saved: everything kept for the backward.
        saving_needs: flags that decide what is kept, with the argument's position.
        backward_rest: arguments of the backward op after the saved tensors.
        gradients: what backward returns, one per argument of ``forward``.
        no_gradients: what it returns where nothing flows back.
        call_arguments: how the module calls the function.
        representation: body of the f-string of ``extra_repr``, cut into pieces.
        trailing_rows: what becomes of rows past the last group.
        description: what ``describe()`` returns, line by line.
    """

    cell: str
    summary: str
    recipe: str
    arch: str
    status: str
    reason: str
    class_name: str
    function_name: str
    autograd_name: str
    inputs: tuple[TensorText, ...]
    arguments: tuple[TensorText, ...]
    attributes: tuple[AttributeText, ...]
    states: tuple[StateText, ...]
    carried: tuple[str, ...]
    parameters_of_apply: tuple[str, ...]
    differentiable: tuple[TensorText, ...]
    forward: ProgramText
    backward: ProgramText
    output: TensorText
    take_output: str
    op_arguments: tuple[str, ...]
    apply_arguments: tuple[str, ...]
    unpack_inputs: str
    saved_results: tuple[str, ...]
    saved: tuple[SavedText, ...]
    forward_flags: tuple[str, ...]
    saving_needs: tuple[tuple[str, int], ...]
    backward_rest: tuple[str, ...]
    gradients: tuple[str, ...]
    no_gradients: str
    parameters: tuple[ParameterText, ...]
    holders: tuple[str, ...]
    keywords: tuple[KeywordText, ...]
    call_arguments: tuple[str, ...]
    representation: tuple[str, ...]
    trailing_rows: str
    has_bias: bool
    uses_math: bool
    description: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepText:
    """A step of the reference.

    Attributes:
        comment: what it does, for people.
        condition: Python source under which it runs; empty is always.
        targets: names assigned.
        call: source of the value.
    """

    comment: str
    condition: str
    targets: tuple[str, ...]
    call: str


@dataclass(frozen=True, slots=True)
class LoadText:
    """Assignment of a pointwise operand: ``gate, up = steps.halves(h)``."""

    target: str
    source: str


@dataclass(frozen=True, slots=True)
class PointwiseText:
    """A pointwise step of the reference as a function of its own.

    Attributes:
        name: of the function.
        formula: for its docstring.
        differentiated: whether it computes the formula's gradients.
        arguments: buffers and scalars read.
        loads: fp32 views of the operands.
        body: printed program.
        returns: source of the results, rounded to their buffers' types.
        annotation: of the return value.
    """

    name: str
    formula: str
    differentiated: bool
    arguments: tuple[str, ...]
    scalars: tuple[str, ...]
    loads: tuple[LoadText, ...]
    body: tuple[str, ...]
    returns: str
    annotation: str


@dataclass(frozen=True, slots=True)
class CheckedProgram:
    """A direction of the reference with its argument checks.

    Attributes:
        text: signature.
        type_checks: calls that need no sizes.
        check_dims: sizes that the other checks compare with.
        size_checks: those calls.
        absent: results that stay None where no flag asks for them.
        dims: sizes that the steps need.
        steps: in order.
        returned: source of the return value.
        returns: its annotation.
    """

    text: ProgramText
    type_checks: tuple[str, ...]
    check_dims: tuple[str, ...]
    size_checks: tuple[str, ...]
    absent: tuple[str, ...]
    dims: tuple[str, ...]
    steps: tuple[StepText, ...]
    returned: str
    returns: str


@dataclass(frozen=True, slots=True)
class ReferenceContext:
    """Everything ``reference/<cell>.py`` states.

    Attributes:
        constants: how each role is quantised; empty where nothing is.
        exact: the forward without quantisation, where it differs.
    """

    cell: str
    summary: str
    recipe: str
    constants: tuple[str, ...]
    pointwise: tuple[PointwiseText, ...]
    exact: tuple[StepText, ...]
    uses_math: bool
    uses_torch: bool
    uses_steps: bool
    forward: CheckedProgram
    backward: CheckedProgram


def condition(when: tuple[str, ...]) -> str:
    """Python source of a condition over flags."""
    return " or ".join(when)


def _about(buffer: Buffer, plan: ModulePlan) -> str:
    kind = "bfloat16 or float16" if buffer.dtype is DType.IO else dtypes.info(buffer.dtype).torch
    words = f"{buffer.shape} {kind}"
    if buffer.name in plan.inputs and buffer.dtype is DType.INT64:
        words += ", rows per group on x's device; zeros allowed, the sum at most T"
    elif buffer.shape.leading and buffer.name == plan.inputs[0]:
        words += ", with any leading dimensions"
    elif buffer.name == plan.inputs[0] and "split_sizes" in plan.inputs:
        words += ", rows of one group adjacent"
    return words


def tensor_text(plan: ModulePlan, argument: Argument, gradients: set[str]) -> TensorText:
    """A tensor argument as a signature shows it."""
    buffer = plan.buffer(argument.buffer)
    return TensorText(
        name=buffer.name,
        annotation="Tensor | None" if argument.optional else "Tensor",
        default=" = None" if argument.optional else "",
        about=_about(buffer, plan),
        optional=argument.optional,
        flag=need(buffer.name) if gradient(buffer.name) in gradients else "",
    )


def attribute_text(attribute: Attribute) -> AttributeText:
    """A scalar keyword as a signature shows it."""
    return AttributeText(
        attribute.name, _PYTHON_TYPE[attribute.type], repr(attribute.default)
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
    for tensor, axis, number in reversed(binding.sources):
        source = _source(tensor, axis, number)
        text = f"{source} if {tensor} is not None else {text}" if tensor in optional else source
    return f"{binding.symbol} = {text}"


def _bind_lines(program: Program, used: Iterable[str]) -> tuple[str, ...]:
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


def _result_text(plan: ModulePlan, result: Result, first: Buffer) -> ResultText:
    buffer = plan.buffer(result.buffer)
    own = buffer.dtype is DType.IO
    return ResultText(
        name=buffer.name,
        annotation="Tensor | None" if result.when else "Tensor",
        shape=shape_source(buffer.shape, first),
        dtype="" if own else f", dtype=torch.{dtypes.info(buffer.dtype).torch}",
        condition=condition(result.when),
    )


def schema(plan: ModulePlan, program: Program) -> str:
    """Schema of an op: tensors, then flags, then scalars."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    parts = [
        f"Tensor{'?' if a.optional else ''}{f'({next(letters)}!)' if a.mutated else ''} {a.buffer}"
        for a in program.arguments
    ]
    parts += [f"bool {flag}" for flag in program.flags]
    parts += [f"{_SCHEMA_TYPE[a.type]} {a.name}" for a in plan.attributes]
    returns = [f"Tensor{'?' if result.when else ''}" for result in program.results]
    end = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    return f"({', '.join(parts)}) -> {end}"


def _pieces(text: str, separator: str = ", ", width: int = 84) -> tuple[str, ...]:
    """A long text cut after separators, to be printed as adjacent string literals."""
    pieces = [""]
    for part in text.split(separator):
        if pieces[-1] and len(pieces[-1]) + len(part) > width:
            pieces.append("")
        pieces[-1] += part + separator
    return (*pieces[:-1], pieces[-1].removesuffix(separator))


def op_name(plan: ModulePlan, program: Program) -> str:
    """Name of an op without its namespace."""
    return f"{plan.cell}_{program.name}"


def program_text(plan: ModulePlan, program: Program) -> ProgramText:
    """One direction, printed."""
    gradients = {result.buffer for result in plan.backward.results}
    first = plan.buffer(program.arguments[0].buffer)
    results = tuple(_result_text(plan, result, first) for result in program.results)
    shapes = [plan.buffer(result.buffer).shape for result in program.results]
    used = {name for shape in shapes for dim in shape.dims for name in symbols(dim)}
    annotations = [result.annotation for result in results]
    return ProgramText(
        direction=program.name,
        op=op_name(plan, program),
        schema=_pieces(schema(plan, program)),
        arguments=tuple(tensor_text(plan, a, gradients) for a in program.arguments),
        flags=program.flags,
        attributes=tuple(attribute_text(a) for a in plan.attributes),
        mutated=len(program.mutated),
        results=results,
        returns=annotations[0] if len(results) == 1 else f"tuple[{', '.join(annotations)}]",
        first=first.name,
        fake_dims=_bind_lines(program, used),
    )


def _saved_text(plan: ModulePlan, result: Result) -> SavedText:
    given = {argument.buffer for argument in plan.forward.arguments}
    test = condition(result.when)
    source = result.buffer
    if test and result.buffer in given:
        source = f"{result.buffer} if {test} else None"
    return SavedText(result.buffer, source)


def _parameter_texts(plan: ModulePlan) -> tuple[ParameterText, ...]:
    words = {dim.symbol: Sym(dim.keyword) for dim in plan.dims}
    texts = []
    for parameter in plan.parameters:
        buffer = plan.buffer(parameter.buffer)
        holder, _, name = parameter.path.rpartition(".")
        dims = [to_python(dim) for dim in buffer.shape.substitute(words).dims]
        fan_in = to_python(Shape(None, (parameter.fan_in,)).substitute(words).dims[0])
        fill = {
            Init.ZEROS: "zero_()",
            Init.ONES: "fill_(1.0)",
            Init.KAIMING_UNIFORM: f"uniform_(-1 / math.sqrt({_on_self(plan, fan_in)}),"
            f" 1 / math.sqrt({_on_self(plan, fan_in)}))",
        }[parameter.init]
        texts.append(
            ParameterText(
                path=parameter.path,
                holder=holder,
                name=name,
                argument=parameter.buffer,
                shape=", ".join(dims),
                optional=buffer.optional,
                init=fill,
            )
        )
    return tuple(texts)


def _on_self(plan: ModulePlan, source: str) -> str:
    """A size in terms of the module's attributes."""
    words = {dim.keyword: Sym(f"self.{dim.keyword}") for dim in plan.dims}
    return to_python(substitute(parse_expr(source), words))


def cell_context(plan: ModulePlan, description: tuple[str, ...]) -> CellContext:
    """What ``<cell>.py`` states.

    Args:
        plan: of the cell.
        description: what ``describe()`` returns, line by line.
    """
    gradients = {result.buffer for result in plan.backward.results}
    arguments = tuple(tensor_text(plan, a, gradients) for a in plan.forward.arguments)
    by_name = {argument.name: argument for argument in arguments}
    given = tuple(by_name[name] for name in plan.arguments)
    scalars = tuple(attribute.name for attribute in plan.attributes)
    carried = tuple(n for n in plan.backward.mutated if n not in by_name)
    op_arguments = (*by_name, *plan.forward.flags, *scalars)
    apply_arguments = (*op_arguments, *carried)
    needs = tuple((a.flag, index) for index, a in enumerate(arguments) if a.flag)
    conditional = {f for r in plan.saved if r.buffer in by_name for f in r.when}
    programs = program_text(plan, plan.forward), program_text(plan, plan.backward)
    parameters = _parameter_texts(plan)
    states = _state_texts(plan)
    saved_results = tuple(r.buffer for r in plan.forward.results[len(plan.outputs) :])
    keywords = tuple(KeywordText(d.keyword, d.symbol) for d in plan.dims if d.constructor)
    has_bias = any(argument.optional for argument in arguments)
    carried_over = {*(result.buffer for result in plan.saved), *scalars, *plan.backward.mutated}
    return CellContext(
        cell=plan.cell,
        summary=plan.summary,
        recipe=plan.recipe,
        arch=plan.arch,
        status=plan.status.value,
        reason=plan.reason,
        class_name=plan.class_name,
        function_name=plan.module,
        autograd_name=f"_{plan.class_name}",
        inputs=tuple(by_name[name] for name in plan.inputs),
        arguments=given,
        attributes=tuple(attribute_text(a) for a in plan.attributes),
        states=states,
        carried=plan.backward.mutated,
        parameters_of_apply=(
            *(f"{a.name}: {a.annotation}" for a in arguments),
            *(f"{flag}: bool" for flag in plan.forward.flags),
            *(f"{a.name}: {attribute_text(a).annotation}" for a in plan.attributes),
            *(f"{name}: Tensor" for name in carried),
        ),
        differentiable=tuple(a for a in arguments if a.flag),
        forward=programs[0],
        backward=programs[1],
        output=tensor_text(plan, Argument(plan.outputs[0], False), gradients),
        take_output="y, *_ =" if saved_results else "y =",
        op_arguments=op_arguments,
        apply_arguments=apply_arguments,
        unpack_inputs=", ".join(name if name in carried_over else "_" for name in apply_arguments)
        + ("," if len(apply_arguments) == 1 else ""),
        saved_results=saved_results,
        saved=tuple(_saved_text(plan, result) for result in plan.saved),
        forward_flags=plan.forward.flags,
        saving_needs=tuple(pair for pair in needs if pair[0] in conditional),
        backward_rest=(
            *(f"ctx.{name}" for name in plan.backward.mutated),
            *(f"needs[{dict(needs)[flag]}]" for flag in plan.backward.flags),
            *(f"ctx.{name}" for name in scalars),
        ),
        gradients=(
            *(gradient(a.name) if a.flag else "None" for a in arguments),
            *("None" for _ in apply_arguments[len(arguments) :]),
        ),
        no_gradients=", ".join(["None"] * len(apply_arguments)),
        parameters=parameters,
        holders=tuple(dict.fromkeys(p.holder for p in (*parameters, *states) if p.holder)),
        keywords=keywords,
        call_arguments=_call_arguments(plan),
        representation=_representation(plan, keywords, has_bias),
        trailing_rows=(
            "  Rows past sum(split_sizes) are zero." if "split_sizes" in plan.inputs else ""
        ),
        has_bias=has_bias,
        uses_math=_uses_math((*(line for p in programs for line in p.fake_dims),
                              *(p.init for p in parameters))),
        description=description,
    )


def _state_texts(plan: ModulePlan) -> tuple[StateText, ...]:
    fills = {
        StateFill.ZEROS: "zero_()",
        StateFill.ONES: "fill_(1.0)",
        StateFill.SEED: "copy_(torch.stack((torch.randint(2**62, ()), torch.tensor(0))))",
    }
    words = {dim.symbol: Sym(dim.keyword) for dim in plan.dims}
    texts = []
    for state in plan.states:
        buffer = plan.buffer(state.buffer)
        holder, _, name = state.path.rpartition(".")
        dtype = dtypes.info(buffer.dtype).torch
        texts.append(
            StateText(
                path=state.path,
                holder=holder,
                name=name,
                argument=state.buffer,
                about=f"{buffer.shape} {dtype}, changed in place",
                shape=", ".join(to_python(dim) for dim in buffer.shape.substitute(words).dims),
                dtype=dtype,
                init=fills[state.fill],
            )
        )
    return tuple(texts)


def _uses_math(lines: Iterable[str]) -> bool:
    return any("math." in line for line in lines)


def _call_arguments(plan: ModulePlan) -> tuple[str, ...]:
    paths = {parameter.buffer: f"self.{parameter.path}" for parameter in plan.parameters}
    states = (f"{state.buffer}=self.{state.path}" for state in plan.states)
    scalars = (f"{attribute.name}=self.{attribute.name}" for attribute in plan.attributes)
    return (*(paths.get(name, name) for name in plan.arguments), *states, *scalars)


def _representation(
    plan: ModulePlan, keywords: tuple[KeywordText, ...], has_bias: bool
) -> tuple[str, ...]:
    parts = [f"{k.name}={{self.{k.name}}}" for k in keywords]
    parts += [f"{attribute.name}={{self.{attribute.name}}}" for attribute in plan.attributes]
    if has_bias:
        path = next(p.path for p in plan.parameters if plan.buffer(p.buffer).optional)
        parts.append(f"bias={{self.{path} is not None}}")
    return _pieces(", ".join(parts)) if parts else ()


# The reference


def reference_context(plan: ModulePlan) -> ReferenceContext:
    """What ``reference/<cell>.py`` states."""
    steps = (*plan.forward.steps, *plan.backward.steps)
    pointwise = tuple(_pointwise_text(plan, step) for step in steps if step.pointwise)
    programs = _checked(plan, plan.forward), _checked(plan, plan.backward)
    lines = [line for text in pointwise for line in text.body]
    lines += [line for program in programs for line in program.type_checks]
    exact = tuple(
        _step_text(plan, plan.forward, step, index)
        for index, step in enumerate(plan.exact if plan.quantizations else (), 1)
    )
    calls = [step.call for program in programs for step in program.steps]
    calls += [step.call for step in exact]
    calls += [load.source for text in pointwise for load in text.loads]
    dims = [line for program in programs for line in (*program.check_dims, *program.dims)]
    return ReferenceContext(
        cell=plan.cell,
        summary=plan.summary,
        recipe=plan.recipe,
        constants=tuple(_constants(plan)),
        pointwise=pointwise,
        exact=exact,
        uses_math=_uses_math(dims),
        uses_torch=any("torch." in line for line in lines),
        uses_steps=any("steps." in call for call in calls),
        forward=programs[0],
        backward=programs[1],
    )


def _constants(plan: ModulePlan) -> Iterator[str]:
    """``INPUT = quantized.Quantization(...)`` for every role, and the layout of the copies."""
    for role, spec in plan.quantizations:
        fields: dict[str, object] = {
            "format": spec.format.value,
            "block": tuple(None if extent is Extent.ALL else extent for extent in spec.block),
            "scale_dtype": spec.scale.dtype.value,
            "rule": spec.scale.rule.value,
            "round": spec.scale.round.value,
            "source": spec.scale.source.value,
            "epsilon": spec.scale.epsilon,
            "margin": spec.scale.margin,
            "history": spec.scale.history,
            "tensor_scale": spec.tensor_scale is not None,
            "rounding": spec.rounding.value,
            "hadamard": spec.hadamard.orientation.value if spec.hadamard else None,
        }
        values = ", ".join(f"{name}={_literal(value)}" for name, value in fields.items())
        yield f"{role.value.upper()} = quantized.Quantization({values})"
    if plan.quantizations:
        layout = plan.layout
        yield (
            f"LAYOUT = quantized.Layout(transposed={layout.transposed},"
            f" align={layout.token_alignment}, pitch={layout.pitch})"
        )


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _checked(plan: ModulePlan, program: Program) -> CheckedProgram:
    sized = [check for check in program.checks if check.expr is not None]
    used = {name for check in sized if check.expr for name in symbols(check.expr)}
    backward = program.name == "backward"
    steps = tuple(
        text
        for i, step in enumerate(program.steps, 1)
        for text in (_step_text(plan, program, step, i), _update_text(plan, program, step, i))
        if text
    )
    words = {word for step in steps for word in re.findall(r"\w+", step.call)}
    return CheckedProgram(
        text=program_text(plan, program),
        type_checks=tuple(_check_line(plan, c) for c in program.checks if c.expr is None),
        check_dims=_bind_lines(program, used),
        size_checks=tuple(_check_line(plan, check) for check in sized),
        absent=tuple(r.buffer for r in program.results if r.when) if backward else (),
        dims=_bind_lines(program, words),
        steps=steps,
        returned=", ".join(
            (*(_returned(program, result) for result in program.results), *program.mutated)
        ),
        returns=_reference_returns(program),
    )


def _reference_returns(program: Program) -> str:
    """A reference is functional: what an op changes in place, its reference returns."""
    types = ["Tensor | None" if result.when else "Tensor" for result in program.results]
    types += ["Tensor" for _ in program.mutated]
    return types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"


def _returned(program: Program, result: Result) -> str:
    """A result, or None where its step ran for the sake of others; part of a copy by its field."""
    writer = next((step for step in program.steps if result.buffer in step.writes), None)
    source = result.buffer
    for copy in writer.copies if writer and writer.primitive is Primitive.QUANTIZE else ():
        for name, part in zip(copy.buffers, ("data", "scale", "amax"), strict=False):
            source = f"{_copy_name(copy)}.{part}" if name == result.buffer else source
    if not result.when or (writer and writer.when == result.when):
        return source
    return f"{source} if {condition(result.when)} else None"


def _check_line(plan: ModulePlan, check: Check) -> str:
    """One call into ``reference/_checks.py``."""
    name = f'"{check.tensor}", {check.tensor}'
    match check.kind:
        case CheckKind.IO_DTYPE:
            return f"checks.io_dtype(CELL, {name})"
        case CheckKind.SAME_DTYPE:
            return f'checks.same_dtype(CELL, {name}, "{check.reference}", {check.reference})'
        case CheckKind.DTYPE:
            return f"checks.dtype(CELL, {name}, torch.{dtypes.info(check.dtype).torch})"
        case CheckKind.DEVICE:
            return f'checks.device(CELL, {name}, "{check.reference}", {check.reference})'
        case CheckKind.RANK:
            exact = "" if check.exact else ", exact=False"
            return f'checks.rank(CELL, {name}, {check.number}, "{check.label}"{exact})'
        case CheckKind.SIZE:
            assert check.expr is not None
            size = to_code(check.expr)
            if check.axis == 0:
                return f'checks.leading(CELL, {name}, {check.number}, {size}, "{check.label}")'
            return f'checks.size(CELL, {name}, {check.axis}, {size}, "{check.label}")'
        case CheckKind.MULTIPLE:
            assert check.expr is not None
            size = to_code(check.expr)
            return f'checks.multiple(CELL, "{check.label}", {size}, {check.number}, "{plan.arch}")'


def step_comment(step: Step, index: int) -> str:
    """``1. grouped_gemm fprop: x, weight -> y``, the same in every emission."""
    kind = f" {step.kind}" if step.kind else ""
    formula = f"  ({step.pointwise.formula})" if step.pointwise else ""
    reads, writes = ", ".join(step.reads), ", ".join(step.writes)
    return f"{index}. {step.primitive.value}{kind}: {reads} -> {writes}{formula}"


def _step_text(plan: ModulePlan, program: Program, step: Step, index: int) -> StepText:
    comment, when = step_comment(step, index), condition(step.when)
    if step.primitive is Primitive.QUANTIZE:
        return StepText(comment, when, *_quantize_call(plan, step))
    if step.copies:
        return StepText(comment, when, step.writes, _product_of_copies(plan, program, step))
    if step.pointwise:
        values = [*_buffers(step.pointwise.operands), *_scalars(step)]
        call = f"{_function_name(step)}({', '.join(values)})"
    else:
        kind = f"_{step.kind}" if step.kind else ""
        call = f"steps.{step.primitive.value}{kind}({', '.join(_slots(step.inputs))})"
    return StepText(comment, when, step.writes, call)


def _copy_name(copy: Copy) -> str:
    return f"{copy.data}_copy"


def _quantize_call(plan: ModulePlan, step: Step) -> tuple[tuple[str, ...], str]:
    """Targets, one per orientation, and the call that makes the copies."""
    made = {copy.orientation: copy for copy in step.copies}
    targets, wanted = [], []
    for orientation in Orientation:
        copy = made.get(orientation)
        targets.append(_copy_name(copy) if copy else "_")
        asked = condition(step.wanted(copy.data)) or "True" if copy else "False"
        wanted.append(f"{orientation.value}={asked}")
    source = step.reads[0]
    rows = f"steps.rows({source})" if plan.buffer(source).shape.leading else source
    groups = step.input("groups")
    words = [rows, step.copies[0].role.value.upper(), *wanted]
    words += [f"split_sizes={groups}"] if groups else []
    words += [f"{o.slot}={o.buffer}" for o in step.inputs if o.slot in ("scale", "rng_state")]
    return tuple(targets), f"quantized.quantize({', '.join(words)}, layout=LAYOUT)"


def _update_text(plan: ModulePlan, program: Program, step: Step, index: int) -> StepText | None:
    """What follows a step that keeps state: the state after it.  A forward without grad keeps it."""
    if not step.mutates:
        return None
    flags = program.flags if program.name == "forward" else step.when
    comment = f"{index}. state after it: {', '.join(step.mutates)}"
    rng = step.input("rng_state")
    if rng:
        return StepText(comment, condition(flags), (rng,), f"quantized.advance({rng})")
    source, role = step.reads[0], step.copies[0].role
    rows = f"steps.rows({source})" if plan.buffer(source).shape.leading else source
    groups = step.input("groups")
    split = f", split_sizes={groups}" if groups else ""
    amax = f"quantized.group_amax({rows}, {role.value.upper()}{split})"
    grouped = f", grouped={groups is not None}"
    words = f"{', '.join(step.mutates)}, {amax}, {role.value.upper()}{grouped}"
    return StepText(comment, condition(flags), step.mutates, f"quantized.delayed_update({words})")


def _product_of_copies(plan: ModulePlan, program: Program, step: Step) -> str:
    """A product of two copies: made in this program, or put together from what was saved."""
    first = plan.buffer(program.arguments[0].buffer)
    made = {c for s in program.steps if s.primitive is Primitive.QUANTIZE for c in s.copies}
    words = [_copy_name(c) if c in made else _saved_copy(plan, c) for c in step.copies]
    words += [o.buffer for o in step.inputs if o.slot == "groups"]
    words.append(f"dtype={first.name}.dtype")
    words += [f"add={o.buffer}" for o in step.inputs if o.slot == "add"]
    call = f"quantized.{step.primitive.value}_{step.kind}({', '.join(words)})"
    leading = plan.buffer(step.out).shape.leading
    return f"steps.with_leading({call}, {first.name})" if leading else call


def _saved_copy(plan: ModulePlan, copy: Copy) -> str:
    flat = plan.buffer(copy.source).shape.fixed()
    if copy.role is not Role.WEIGHT:
        flat = Shape(None, (product(flat.dims[:-1]), flat.dims[-1]))
    shape = ", ".join(to_code(dim) for dim in flat.dims)
    columnwise = copy.orientation is Orientation.COLUMNWISE
    words = [copy.data, copy.scale, copy.role.value.upper(), f"({shape})"]
    words += [f"amax={copy.amax}"] if copy.amax else []
    return f"quantized.Operand({', '.join(words)}, columnwise={columnwise}, layout=LAYOUT)"


def _slots(operands: tuple[Operand, ...]) -> list[str]:
    """Positional operands; the optional ones by keyword, so that a reader sees what they are."""
    return [
        operand.buffer if operand.slot in ("a", "b", "groups") else f"{operand.slot}={operand.buffer}"
        for operand in operands
    ]


def _function_name(step: Step) -> str:
    """``_act_backward``: chain item and direction; without an item the direction alone."""
    assert step.pointwise is not None
    direction = step.pointwise.kernel.rpartition("_")[2]
    return f"_{step.item}_{direction}" if step.item else f"_math_{direction}"


def _buffers(operands: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(operand.buffer for operand in operands))  # type: ignore[attr-defined]


def _scalars(step: Step) -> list[str]:
    assert step.pointwise is not None
    prefix = f"{step.item}_" if step.item else ""
    return [f"{prefix}{name}" for name in step.pointwise.attributes]


def _pointwise_text(plan: ModulePlan, step: Step) -> PointwiseText:
    math = step.pointwise
    assert math is not None
    loads = []
    halves: dict[str, dict[Access, str]] = {}
    for operand in math.operands:
        if operand.access in (Access.FIRST_HALF, Access.SECOND_HALF):
            halves.setdefault(operand.buffer, {})[operand.access] = operand.symbol
        elif operand.access is Access.ROW:
            loads.append(LoadText(operand.symbol, f"steps.per_row({operand.buffer})"))
        else:
            loads.append(LoadText(operand.symbol, f"steps.wide({operand.buffer})"))
    for buffer, parts in halves.items():
        first = parts.get(Access.FIRST_HALF, "_")
        second = parts.get(Access.SECOND_HALF, "_")
        loads.insert(0, LoadText(f"{first}, {second}", f"steps.halves({buffer})"))
    own_type = next(o.buffer for o in math.operands if o.dtype is DType.IO)
    loads.insert(0, LoadText("io", f"{own_type}.dtype"))  # before a symbol takes the buffer's name
    results = _result_sources(math)
    return PointwiseText(
        name=_function_name(step),
        formula=math.formula,
        differentiated=step.primitive is Primitive.POINTWISE_GRAD,
        arguments=tuple(_buffers(math.operands)),
        scalars=math.attributes,
        loads=tuple(loads),
        body=math.torch,
        returns=", ".join(results.values()),
        annotation="Tensor" if len(results) == 1 else f"tuple[{', '.join(['Tensor'] * len(results))}]",
    )


def _result_sources(math: Pointwise) -> dict[str, str]:
    """Source per result buffer: rounded to its type, halves joined, rows summed."""
    sources: dict[str, str] = {}
    halves: dict[str, list[str]] = {}
    for result in math.results:
        if result.access in (Access.FIRST_HALF, Access.SECOND_HALF):
            halves.setdefault(result.buffer, []).append(result.symbol)
            sources[result.buffer] = f"steps.join({', '.join(halves[result.buffer])}, io)"
        elif result.access is Access.ROW:
            sources[result.buffer] = f"steps.row_sum({result.symbol})"
        else:
            sources[result.buffer] = f"{result.symbol}.to(io)"
    return sources

