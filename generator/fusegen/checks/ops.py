"""Ops: names, shapes and expressions fit together; programs read what is there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from ..ir.dtypes import INTEGERS, DType
from ..ir.naming import gradient
from ..ir.shapes import Const, Shape, Sym, mul
from ..ir.words import AttributeType, Broadcast
from ..math import ExpressionError, names_in, parse
from ..spec.diagnostics import Problem
from ..spec.load import Source
from ..spec.op import AttributeSpec, OpSpec, StepSpec, TensorSpec, operand_symbols
from ..steps import definition
from .common import (
    check_dimensions,
    check_drawn,
    check_input_types,
    check_optional_last,
    check_order,
    check_symbols,
    check_type,
    count_problem,
    fits,
    fixed_problem,
    range_problem,
    said_of_integer,
    unknown,
)
from .names import check_public_names, taken_by_function, takes_all_keywords
from .steps import check_step_tensors

_GIVEN = (DType.IO, DType.FLOAT32, DType.INT32, DType.INT64)
"""Types of what steps give an op as its output."""

_CHUNK_ALIGNMENT = 128
"""Rows: every kernel's tile begins at a multiple of them, whatever it is of."""


def check_op(op: OpSpec, source: Source) -> Iterator[Problem]:
    """Every problem of an op."""
    sections = {
        "inputs": op.inputs,
        "parameters": op.parameters,
        "internal": op.internal,
        "outputs": op.outputs,
    }
    if not op.inputs:
        yield source.problem("an op needs an input", "inputs")
    if not op.outputs:
        yield source.problem("an op needs an output", "outputs")
    for section, tensors in sections.items():
        for name, tensor in tensors.items():
            yield from _check_tensor(op, section, name, tensor, source)
    yield from _check_names({**sections, "attributes": op.attributes}, source)
    yield from _check_halves(op, source)
    yield from _check_attributes(op, source)
    for name, attribute in op.attributes.items():
        if not fits(attribute, attribute.default):
            yield source.problem(
                f"expected a default of type {attribute.type.value}, got"
                f" {attribute.default!r}{_number_hint(attribute.default)}",
                "attributes",
                name,
                "default",
            )
        else:
            yield from _check_range(name, attribute, source)
            reason = count_problem(op, name, attribute.default)
            if reason := reason or fixed_problem(op, name, attribute.default):
                yield source.problem(reason, "attributes", name, "default")
    yield from check_drawn(op.inputs, source)
    yield from check_order({n: (t, ("outputs", n)) for n, t in op.outputs.items()}, source)
    yield from _check_dims(op, source)
    if not op.inputs or not op.outputs:
        return
    yield from _check_types(op, source)
    if bool(op.pointwise) == bool(op.forward):
        got = "both" if op.forward else "none"
        yield source.problem(f"an op has either 'pointwise' or 'forward', got {got}", "op")
    elif op.pointwise:
        yield from _check_pointwise(op, source)
    else:
        yield from _check_programs(op, source)


def _number_hint(value: object) -> str:
    """YAML reads ``1e-5`` as text, which nobody expects."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9.]+[eE][-+]?[0-9]+", value):
        return "; in YAML a number with an exponent has a point and a sign, such as 1.0e-5"
    return ""


def _check_names(sections: Mapping[str, Iterable[str]], source: Source) -> Iterator[Problem]:
    """Names become variables of Python and C++: each once, none a word of the languages."""
    seen: dict[str, str] = {}
    for section, names in sections.items():
        for name in names:
            reason = taken_by_function(name)
            if reason:
                yield source.problem(f"{name!r} {reason}; choose another", section, name)
            if name in seen:
                yield source.problem(
                    f"{name!r} is also in {seen[name]}; choose another", section, name
                )
            seen[name] = section
    for name in seen:
        if gradient(name) in seen:
            yield source.problem(
                f"{gradient(name)!r} is the gradient of {name!r}; choose another",
                seen[gradient(name)],
                gradient(name),
            )


def _check_halves(op: OpSpec, source: Source) -> Iterator[Problem]:
    """Halves are symbols of an expression as tensors and attributes are."""
    seen = {*op.tensors, *op.attributes}
    seen |= {gradient(name) for name in seen}
    for section, tensors in (("inputs", op.inputs), ("parameters", op.parameters)):
        for name, tensor in tensors.items():
            for half in tensor.halves or ():
                if half in seen or gradient(half) in seen:
                    yield source.problem(
                        f"half {half!r} has the name of another symbol, or of its gradient;"
                        " choose another",
                        section,
                        name,
                        "halves",
                    )
                seen |= {half, gradient(half)}


def _check_attributes(op: OpSpec, source: Source) -> Iterator[Problem]:
    """What is an attribute of the class: parameters, scalars and keywords of sizes."""
    scalars: dict[str, tuple[str | int, ...]] = {n: ("attributes", n) for n in op.attributes}
    yield from check_public_names(op.dims, scalars, takes_all_keywords(op), source)
    for name in op.parameters:
        yield from check_public_names({}, {name: ("parameters", name)}, False, source)
        if name in op.dims.values():
            yield source.problem(
                f"{name!r} is also the keyword of a dimension; choose another", "parameters", name
            )


def _check_tensor(
    op: OpSpec, section: str, name: str, tensor: TensorSpec, source: Source
) -> Iterator[Problem]:
    if section != "outputs" or op.pointwise:
        yield from check_dimensions(tensor.shape, source, section, name, "shape")
    for symbol in sorted(tensor.shape.symbols() - {*op.counts}):
        if symbol in op.attributes:
            yield source.problem(
                f"{symbol!r} is no static attribute of type int, so no shape may hold it",
                section,
                name,
                "shape",
            )
        else:
            yield from unknown(source, "dimension", symbol, op.dims, section, name, "shape")
    if tensor.interleave:
        yield from unknown(
            source, "attribute", tensor.interleave, op.attributes, section, name, "interleave"
        )
    if tensor.init and section != "parameters":
        yield source.problem("only a parameter has 'init'; remove it", section, name, "init")
    for attribute in tensor.init_if:
        yield from _check_init_if(op, section, name, attribute, source)
    if tensor.drawn and section != "inputs":
        yield source.problem("only an input is drawn; remove it", section, name, "drawn")
    if tensor.optional:
        yield from _check_optional(op, section, name, tensor, source)
    yield from said_of_integer(tensor, source, section, name)
    if tensor.chunk is not None:
        yield from _check_chunk(section, name, tensor, source)
    if section == "parameters" and tensor.shape.leading:
        yield source.problem("a parameter has a fixed number of dimensions", section, name, "shape")
    for key in ("halves", "interleave", "broadcast"):
        if getattr(tensor, key) and (not op.pointwise or section not in ("inputs", "parameters")):
            yield source.problem(
                f"{key!r} belongs to an operand of a pointwise op", section, name, key
            )


def _check_optional(
    op: OpSpec, section: str, name: str, tensor: TensorSpec, source: Source
) -> Iterator[Problem]:
    """Parameters and inputs without a gradient may be left out, the inputs behind all others."""
    path = (section, name, "optional")
    if section not in ("inputs", "parameters"):
        yield source.problem("only a parameter or an input may be optional", *path)
        return
    if section == "inputs" and tensor.has_gradient:
        yield source.problem(
            f"an input with a gradient is always there; say differentiable: false of {name!r}",
            *path,
        )
    elif section == "inputs":
        yield from check_optional_last(op.inputs, name, source)
    for index, step in enumerate(op.forward):
        signature = definition(step.primitive)
        for slot, given in step.slots:
            if given == name and slot not in signature.optional:
                yield source.problem(
                    f"{step.primitive} needs slot {slot!r}, and {name!r} may be left out",
                    *("forward", index, slot),
                )


def _check_chunk(section: str, name: str, tensor: TensorSpec, source: Source) -> Iterator[Problem]:
    """Rows of a chunk start where kernels may read them: their tiles have 128 at most."""
    path = (section, name, "chunk")
    if section != "internal":
        yield source.problem(
            "only an internal tensor is there in chunks: callers have the others; remove it", *path
        )
    rows = tensor.shape.flat[0] if tensor.shape.flat else None
    if not isinstance(rows, Sym) or rows in tensor.shape.flat[1:]:
        yield source.problem(
            f"expected one dimension as the outermost, such as [T, N], got {tensor.shape}", *path
        )
    if not tensor.chunk or tensor.chunk % _CHUNK_ALIGNMENT or tensor.chunk < 0:
        yield source.problem(
            f"expected a multiple of {_CHUNK_ALIGNMENT} rows, got {tensor.chunk}", *path
        )


def _check_init_if(
    op: OpSpec, section: str, name: str, attribute: str, source: Source
) -> Iterator[Problem]:
    """Modules are made by what is known when they are generated."""
    path = (section, name, "init_if", attribute)
    yield from unknown(source, "attribute", attribute, op.attributes, *path)
    found = op.attributes.get(attribute)
    if found and not (found.static and found.type is AttributeType.BOOL):
        yield source.problem(f"{attribute!r} is no static attribute of type bool", *path)
    if section != "parameters":
        yield source.problem("only a parameter has 'init_if'; remove it", section, name, "init_if")


def _check_types(op: OpSpec, source: Source) -> Iterator[Problem]:
    """Types that references and kernels are printed for."""
    yield from check_input_types(op.inputs, source, any_first=bool(op.forward))
    own = (("parameters", op.parameters), ("internal", op.internal), ("outputs", op.outputs))
    for section, tensors in own:
        for name, tensor in tensors.items():
            reason = _own_type_reason(op, section, tensor)
            yield from check_type(section, name, tensor, reason, source)


def _own_type_reason(op: OpSpec, section: str, tensor: TensorSpec) -> str:
    """Why a tensor has the module's own type; empty where it may have another."""
    if section == "internal":
        return ""
    if section == "outputs" and op.forward:
        known = "outputs of steps are of the module's own type, or float32, int32 or int64"
        return "" if tensor.dtype in _GIVEN else known
    return f"{section} are of the module's own type"


def _check_range(name: str, attribute: AttributeSpec, source: Source) -> Iterator[Problem]:
    """Only numbers of a call have a range, or another value in evaluation."""
    said = {"range": attribute.range, "in_eval": attribute.in_eval}
    for key in (key for key, value in said.items() if value is not None):
        if attribute.static or attribute.type is not AttributeType.FLOAT:
            yield source.problem(
                f"{key!r} is of a float that is no static attribute; remove it",
                "attributes",
                name,
                key,
            )
            return
    for key, value in (("default", attribute.default), ("in_eval", attribute.in_eval)):
        reason = "" if value is None else range_problem(attribute, value)
        if reason:
            yield source.problem(reason, "attributes", name, key)


def _check_dims(op: OpSpec, source: Source) -> Iterator[Problem]:
    used = frozenset().union(*(tensor.shape.symbols() for tensor in op.tensors.values()))
    for symbol in op.dims:
        if symbol not in used:
            yield source.problem(f"dimension {symbol!r} is in no shape; remove it", "dims", symbol)
    yield from check_symbols(op.dims, source)


def _check_pointwise(op: OpSpec, source: Source) -> Iterator[Problem]:
    if op.backward:
        yield source.problem("the backward of a pointwise op is derived; remove it", "backward")
    for name in op.internal:
        yield source.problem("a pointwise op has no internal tensors; remove it", "internal", name)
    read: set[str] | None = set()
    for output, text in op.pointwise.items():
        yield from unknown(source, "output", output, op.outputs, "pointwise", output)
        try:
            expression = parse(text, operand_symbols(op), dict.fromkeys(op.attributes))
        except ExpressionError as error:
            yield source.problem_within(error.message, error.column, "pointwise", output)
            read = None
        else:
            read = None if read is None else read | names_in(expression.tree)
    for output in op.outputs:
        if output not in op.pointwise:
            yield source.problem(f"output {output!r} has no expression", "pointwise")
    for section, tensors in (("inputs", op.inputs), ("parameters", op.parameters)):
        for name, tensor in tensors.items():
            yield from _check_operand(op, section, name, tensor, read, source)
    interleaved = {tensor.interleave for tensor in op.tensors.values()}
    for name, attribute in op.attributes.items():
        if read is not None and name not in read | interleaved:
            yield source.problem(f"no expression reads {name!r}; remove it", "attributes", name)
        numeric = attribute.type in (AttributeType.FLOAT, AttributeType.INT)
        if read and name in read and not numeric:
            yield source.problem(
                f"{name!r} is in the expression, so its type is float or int, not"
                f" {attribute.type.value}",
                "attributes",
                name,
                "type",
            )


def _check_operand(
    op: OpSpec, section: str, name: str, tensor: TensorSpec, read: set[str] | None, source: Source
) -> Iterator[Problem]:
    """An operand is indexed like the output, so its shape follows from the output's.

    Args:
        read: symbols that the expressions use; None where one could not be read.
    """
    if tensor.optional:
        yield source.problem(
            "an operand of an expression is always there", section, name, "optional"
        )
    if tensor.halves and tensor.broadcast:
        yield source.problem("an operand has 'halves' or 'broadcast', not both", section, name)
        return
    if tensor.interleave and not tensor.halves:
        yield source.problem("'interleave' needs 'halves'", section, name, "interleave")
    if read is not None and not read & {*(tensor.halves or (name,))}:
        yield source.problem(f"no expression uses {name!r}; remove it", section, name)
    yield from _check_operand_type(section, name, tensor, source)
    output = next(iter(op.outputs.values()))
    if not output.shape.flat or not tensor.shape.symbols() <= {*op.dims}:
        return
    expected = _operand_shape(tensor, output.shape)
    if tensor.shape != expected:
        how = f" with broadcast: {tensor.broadcast.value}" if tensor.broadcast else ""
        how = " with halves" if tensor.halves else how
        yield source.problem(
            f"expected {expected} for an operand{how} of an output {output.shape}, got"
            f" {tensor.shape}",
            section,
            name,
            "shape",
        )


def _check_operand_type(
    section: str, name: str, tensor: TensorSpec, source: Source
) -> Iterator[Problem]:
    """The gradient of an operand per row is a sum in fp32, that of any other is rounded."""
    if tensor.dtype in INTEGERS:
        yield source.problem(
            f"an expression reads io or float32, got {tensor.dtype.value}", section, name, "dtype"
        )
    elif tensor.has_gradient:
        expected = DType.FLOAT32 if tensor.broadcast is Broadcast.ROW else DType.IO
        if tensor.dtype is not expected:
            yield source.problem(
                f"expected dtype {expected.value} for {name!r}, as its gradient has, got"
                f" {tensor.dtype.value}; or say differentiable: false",
                section,
                name,
                "dtype",
            )


def _operand_shape(tensor: TensorSpec, output: Shape) -> Shape:
    """The shape an operand must have, from how it is indexed."""
    if tensor.broadcast is Broadcast.COLUMN:
        return Shape(None, output.flat[-1:])
    if not output.dims:
        return output
    *rows, columns = output.dims
    if tensor.broadcast is Broadcast.ROW:
        return Shape(output.leading, tuple(rows))
    if tensor.halves:
        return Shape(output.leading, (*rows, mul(Const(2), columns)))
    return output


def _check_programs(op: OpSpec, source: Source) -> Iterator[Problem]:
    defined = {*op.inputs, *op.parameters}
    yield from _check_steps(op, "forward", op.forward, defined, source)
    for output in op.outputs:
        if not any(_writes(step, output) for step in op.forward):
            yield source.problem(f"no forward step writes output {output!r}", "forward")
    defined |= {gradient(name) for name, spec in op.outputs.items() if spec.has_gradient}
    defined -= {name for name, spec in op.internal.items() if spec.chunk}  # made again
    yield from _check_steps(op, "backward", op.backward, defined, source)
    yield from _check_unread(op, source)
    for name, spec in {**op.inputs, **op.parameters}.items():
        written = any(_writes(step, gradient(name)) for step in op.backward)
        if spec.has_gradient and not written:
            yield source.problem(
                f"no backward step writes {gradient(name)!r}; say differentiable: false if {name!r}"
                " has no gradient",
                "backward",
            )


def _writes(step: StepSpec, name: str) -> bool:
    outputs = definition(step.primitive).results
    return any(slot in outputs and tensor == name for slot, tensor in step.slots)


def _check_steps(
    op: OpSpec, section: str, steps: tuple[StepSpec, ...], defined: set[str], source: Source
) -> Iterator[Problem]:
    """Straight-line order: a step reads what is there and writes what is not."""
    gradients = {gradient(name) for name, spec in op.tensors.items() if spec.has_gradient}
    known = {*op.tensors, *gradients}
    for index, step in enumerate(steps):
        signature = definition(step.primitive)
        for slot, tensor in step.slots:
            path = (section, index, slot)
            if slot in signature.results:
                yield from unknown(source, "tensor", tensor, known, *path)
                if tensor in defined:
                    yield source.problem(
                        f"{tensor!r} is already there; a tensor is written once", *path
                    )
                defined.add(tensor)
            elif tensor not in defined:
                if tensor in op.internal and op.internal[tensor].chunk and section == "backward":
                    yield source.problem(
                        f"{tensor!r} is not kept for the backward, as a chunk of it is there at a"
                        " time; repeat the step that writes it",
                        *path,
                    )
                elif tensor in known:
                    yield source.problem(
                        f"{tensor!r} is read before it is written; move the step down", *path
                    )
                else:
                    yield from unknown(source, "tensor", tensor, known, *path)
        yield from _check_step_attributes(op, step, source, (section, index))
        yield from check_step_tensors(op, step, source, (section, index))


def _check_step_attributes(
    op: OpSpec, step: StepSpec, source: Source, path: tuple[str | int, ...]
) -> Iterator[Problem]:
    """Attributes of the op that a step names are there, and of the type that its kind has."""
    attributes = definition(step.primitive).attributes_of(step.kind)
    types = {each.name: each.type for each in attributes}
    for name, value in step.attributes:
        if not isinstance(value, str):
            continue
        yield from unknown(source, "attribute", value, op.attributes, *path, name)
        got = op.attributes[value].type if value in op.attributes else types[name]
        if got is not types[name]:
            yield source.problem(
                f"expected type {types[name].value} for {name!r} of {step.primitive}, got {value!r}"
                f" of type {got.value}",
                *path,
                name,
            )
        elif value in op.attributes:
            yield from _check_fixed(step, name, value, op.attributes[value], source)


def _check_fixed(
    step: StepSpec, name: str, value: str, attribute: AttributeSpec, source: Source
) -> Iterator[Problem]:
    """What launches are printed with is known when a module is generated, and is one of few."""
    kind = next(each for each in definition(step.primitive).attributes if each.name == name)
    if kind.fixed and not attribute.static:
        yield source.problem(
            f"{name!r} of {step.primitive} is fixed when a module is generated; say static: true",
            "attributes",
            value,
        )


def _check_unread(op: OpSpec, source: Source) -> Iterator[Problem]:
    """Attributes of an op without an expression that no step names."""
    steps = (*op.forward, *op.backward)
    read = {value for step in steps for _, value in step.attributes}
    for name in op.attributes:
        if name not in read:
            yield source.problem(f"no step reads {name!r}; remove it", "attributes", name)
