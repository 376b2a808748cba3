"""Math: derive and print the expressions of pointwise steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.naming import gradient
from ..ir.shapes import Expr, product
from ..ir.step import Access, Operand, Pointwise, PointwiseOperand, Step
from ..math import (
    Derivations,
    Expression,
    ExpressionError,
    Name,
    Program,
    degrees,
    jumps,
    parse,
    to_cuda,
    to_torch,
)
from ..spec.op import OpSpec, operand_symbols, symbols_of
from ..steps import definition, is_derived, is_printed
from ..steps.sizes import with_flops
from .draft import Draft, Instance, NotPossible
from .names import with_names
from .padding import Padding

MayBe = Callable[[str, str], bool]
"""Whether a buffer may be another one."""


def derive_math(draft: Draft, derivations: Derivations) -> Draft:
    """Give every pointwise step its printed program, a backward step only the operands it reads.

    Raises:
        NotPossible: an op with interleaved halves, an expression without a derivative, one that
            comes out constant, or rows that groups do not divide.
    """
    instances = {instance.item: instance for instance in draft.instances}
    padding = Padding(draft)
    leaving = {name for _, name in draft.gradients}
    copied: dict[str, str] = {}

    def may_be(result: str, given: str) -> bool:
        """Whether a gradient may be another one: a leaf's is zero in rows past the groups."""
        return result not in leaving or padding.ends_in_zeros(given)

    def attach(step: Step) -> Step:
        step = with_names(step, lambda name: copied.get(name, name))
        if definition(step.primitive).formula:
            return padding.settle(*attach_formula(draft.buffers, step))
        if not is_printed(step):
            padding.see(step)
            return step
        instance = instances[step.item]
        try:
            if not is_derived(step):
                return padding.settle(*_attach_forward(draft, instance, step, derivations))
            step, program, copies = _attach_backward(draft, instance, step, derivations, may_be)
        except ExpressionError as error:
            raise NotPossible(f"op {instance.op.name!r}: the expression {error.message}") from None
        copied.update(copies)
        return padding.settle(step, program)

    forward = tuple(attach(step) for step in draft.forward)
    backward = tuple(step for step in map(attach, draft.backward) if step.outputs)
    return _passed_on(replace(draft, forward=forward, backward=backward), copied)


def _passed_on(draft: Draft, copied: Mapping[str, str]) -> Draft:
    """The draft where leaves have the gradients that were to be copied for them.

    One that steps make is called after the first of its leaves.

    Args:
        copied: gradients that no step writes any more, and what each of them is.
    """
    leaving = {name for _, name in draft.gradients}
    given = {*draft.incoming, *leaving}
    names: dict[str, str] = {}
    for _, name in draft.gradients:
        if copied.get(name, name) not in given:
            names.setdefault(copied[name], name)

    def final(name: str) -> str:
        name = copied.get(name, name)
        return names.get(name, name)

    gone = {*copied, *names} - {*names.values()}
    return replace(
        draft,
        buffers={name: buffer for name, buffer in draft.buffers.items() if name not in gone},
        backward=tuple(with_names(step, final) for step in draft.backward),
        gradients=tuple((leaf, final(name)) for leaf, name in draft.gradients),
    )


def attach_formula(buffers: Mapping[str, Buffer], step: Step) -> tuple[Step, Program]:
    """A step whose kind has an expression of its own, over elements of whatever shape."""
    formula = definition(step.primitive).formula
    assert formula is not None
    slots = tuple(operand.slot for operand in step.inputs)
    (result,) = step.outputs
    written = parse(formula(step), slots)
    program = Program(slots, (), (), ((result.slot, written.tree),))
    whole = buffers[result.buffer].shape.flat
    operands = tuple(_part(buffers, operand, whole) for operand in step.inputs)
    out = _element(buffers, result)
    types = [each.dtype for each in (*operands, out)]
    wide = [] if {*types} == {DType.IO} else [dtype.value for dtype in types]
    rows, *columns = whole
    math = Pointwise(
        kernel="_".join(("pointwise", step.primitive, str(len(slots)), *wide)),
        operands=operands,
        results=(out,),
        attributes=(),
        cuda=tuple(to_cuda(program)),
        torch=tuple(to_torch(program)),
        formula=f"{result.slot} = {written.text}",
        rows=rows,
        columns=product(tuple(columns)),
        cost=program.cost,
    )
    return with_flops(replace(step, pointwise=math)), program


def _element(buffers: Mapping[str, Buffer], operand: Operand) -> PointwiseOperand:
    buffer = buffers[operand.buffer]
    return PointwiseOperand(operand.slot, buffer.name, Access.FULL, buffer.dtype)


def _part(
    buffers: Mapping[str, Buffer], operand: Operand, whole: tuple[Expr, ...]
) -> PointwiseOperand:
    """What a formula reads of an operand: its own element, or that of the row or the column."""
    parts = {whole[:-1]: Access.ROW, whole[-1:]: Access.COLUMN, whole: Access.FULL}
    access = parts.get(buffers[operand.buffer].shape.flat, Access.FULL)
    return replace(_element(buffers, operand), access=access)


def _expressions(op: OpSpec) -> dict[str, Expression]:
    """The expression of each output."""
    for tensor, spec in op.tensors.items():
        if spec.interleave:
            raise NotPossible(
                f"op {op.name!r}: no kernel reads the interleaved halves of {tensor!r}"
            )
    attributes = dict.fromkeys(op.attributes)
    symbols = operand_symbols(op)
    return {name: parse(text, symbols, attributes) for name, text in op.pointwise.items()}


def _attach_forward(
    draft: Draft, instance: Instance, step: Step, derivations: Derivations
) -> tuple[Step, Program]:
    written = {operand.slot for operand in step.outputs}
    named = tuple((n, e) for n, e in _expressions(instance.op).items() if n in written)
    program = derivations.forward(named)
    results = tuple(_element(draft.buffers, operand) for operand in step.outputs)
    absent = (f"without_{name}" for name in instance.op.outputs if name not in written)
    direction = "_".join((*absent, "forward"))
    return _with_math(draft, instance, step, program, results, direction, named), program


def _attach_backward(
    draft: Draft,
    instance: Instance,
    step: Step,
    derivations: Derivations,
    may_be: MayBe,
) -> tuple[Step, Program, dict[str, str]]:
    """A derived step with its math.

    Args:
        may_be: whether a gradient may be one that comes in.

    Returns:
        the step, what it computes, and the buffers of gradients that are nothing but one that comes
        in: the step leaves them out, so that their readers read what came in.
    """
    op = instance.op
    given = {operand.slot: operand.buffer for operand in step.inputs}
    named = tuple((n, e) for n, e in _expressions(op).items() if gradient(n) in given)
    incoming = {gradient(name): given[gradient(name)] for name, _ in named}
    results = tuple(_gradients(draft, op, step))
    wrt = tuple(result.symbol[1:] for result in results)
    program = derivations.backward(tuple((gradient(n), e) for n, e in named), wrt)
    copies = _copies(results, program, incoming, may_be)
    outputs = tuple(operand for operand in step.outputs if operand.buffer not in copies)
    step = replace(step, outputs=outputs)
    if not outputs:
        return step, program, copies
    kept = tuple(result for result in results if result.buffer not in copies)
    dropped = [result.symbol for result in results if result.buffer in copies]
    program = program.without(dropped) if dropped else program
    absent = [name for name in op.outputs if gradient(name) not in given] + dropped
    direction = "_".join((*(f"without_{name}" for name in absent), "backward"))
    return _with_math(draft, instance, step, program, kept, direction, named), program, copies


def attach_again(
    draft: Draft, gradient_step: Step, repeated: Step, derivations: Derivations
) -> Step:
    """One step for gradients and for what the forward gave, of the same op, with its math.

    Args:
        draft: that both are of.
        gradient_step: a derived one.
        repeated: the forward's, which reads nothing else.
    """
    instance = next(each for each in draft.instances if each.item == gradient_step.item)
    own, other = gradient_step.pointwise, repeated.pointwise
    assert own and other, (gradient_step, repeated)
    expressions = _expressions(instance.op)
    given = {operand.symbol for operand in own.operands}
    named = tuple((gradient(n), e) for n, e in expressions.items() if gradient(n) in given)
    written = tuple(result.symbol for result in other.results)
    wrt = tuple(result.symbol[1:] for result in own.results)
    again = tuple((name, expressions[name]) for name in written)
    program = derivations.backward(named, wrt, again)
    powers, jumping = degrees(program), jumps(program)
    operands = {each.symbol: each for each in (*own.operands, *other.operands)}
    stem, prefix = own.kernel, f"pointwise_{instance.op.name}_"
    math = replace(
        own,
        kernel="_".join((f"{prefix}with", *written, stem.removeprefix(prefix))),
        operands=tuple(
            replace(operands[symbol], degree=powers[symbol], jumps=symbol in jumping)
            for symbol in program.operands
        ),
        results=(*own.results, *other.results),
        attributes=program.attributes,
        cuda=tuple(to_cuda(program)),
        torch=tuple(to_torch(program)),
        cost=program.cost,
    )
    further = (each for each in repeated.inputs if each.buffer not in gradient_step.reads)
    return with_flops(
        replace(
            gradient_step,
            inputs=(*gradient_step.inputs, *further),
            outputs=(*gradient_step.outputs, *repeated.outputs),
            pointwise=math,
            attributes=tuple((name, instance.attributes[name]) for name in math.attributes),
        )
    )


def _gradients(draft: Draft, op: OpSpec, step: Step) -> Iterator[PointwiseOperand]:
    """Results of a derived step; what all rows share gets a term per element, to be added up."""
    for operand in step.outputs:
        buffer = draft.buffers[operand.buffer]
        for symbol, access in symbols_of(op, operand.slot[1:]):
            place = Access.FULL if access is Access.COLUMN else access
            yield PointwiseOperand(gradient(symbol), buffer.name, place, buffer.dtype)


def _copies(
    results: tuple[PointwiseOperand, ...],
    program: Program,
    incoming: Mapping[str, str],
    may_be: MayBe,
) -> dict[str, str]:
    """Buffers of gradients that are nothing but one that comes in, and the buffer of that."""
    values = dict(program.results)
    copies = {}
    for result in results:
        value = values[result.symbol]
        given = incoming.get(value.name) if isinstance(value, Name) else None
        if given and result.access is Access.FULL and may_be(result.buffer, given):
            copies[result.buffer] = given
    return copies


def _with_math(
    draft: Draft,
    instance: Instance,
    step: Step,
    program: Program,
    results: tuple[PointwiseOperand, ...],
    direction: str,
    named: tuple[tuple[str, Expression], ...],
) -> Step:
    op = instance.op
    operands = []
    powers, jumping = degrees(program), jumps(program)
    for operand in step.inputs:
        buffer = draft.buffers[operand.buffer]
        symbols = (
            symbols_of(op, operand.slot)
            if operand.slot in op.tensors
            else ((operand.slot, Access.FULL),)
        )
        operands += [
            PointwiseOperand(
                symbol, buffer.name, access, buffer.dtype, powers[symbol], symbol in jumping
            )
            for symbol, access in symbols
            if symbol in program.operands
        ]
    if all(operand.dtype is not DType.IO for operand in operands):
        word = direction.rpartition("_")[2]
        raise NotPossible(f"op {op.name!r}: its {word} reads no tensor of the module's own type")
    output = draft.buffers[instance.tensors[instance.results[0]]]
    rows, columns = product(output.shape.flat[:-1]), output.shape.flat[-1]
    used = {operand.buffer for operand in operands}
    math = Pointwise(
        kernel=f"pointwise_{op.name}_{direction}",
        operands=tuple(operands),
        results=results,
        attributes=program.attributes,
        cuda=tuple(to_cuda(program)),
        torch=tuple(to_torch(program)),
        formula=", ".join(f"{name} = {op.pointwise[name]}" for name, _ in named),
        rows=rows,
        columns=columns,
        cost=program.cost,
    )
    kept = tuple(operand for operand in step.inputs if operand.buffer in used)
    scalars = tuple((name, instance.attributes[name]) for name in math.attributes)
    return with_flops(replace(step, inputs=kept, pointwise=math, attributes=scalars))
