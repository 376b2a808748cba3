"""Math: derive and print the expressions of pointwise steps."""

from __future__ import annotations

from dataclasses import replace

from ..ir.dtypes import DType
from ..ir.naming import gradient
from ..ir.plan import Access, AttributeRef, Pointwise, PointwiseOperand, Step
from ..ir.shapes import product
from ..math import Derivations, ExpressionError, Program, degrees, jumps, parse, to_cuda, to_torch
from ..spec.op import operand_symbols, symbols_of
from ..steps import is_derived, is_printed
from ..steps.sizes import with_flops
from .draft import Draft, Instance, NotPossible
from .padding import Padding


def derive_math(draft: Draft, derivations: Derivations) -> Draft:
    """Give every pointwise step its printed program, a backward step only the operands it reads.

    Raises:
        NotPossible: an op with several outputs or interleaved halves, a gradient that would be
            summed over rows, an expression without a derivative, one that comes out constant, or
            rows that groups do not divide.
    """
    instances = {instance.item: instance for instance in draft.instances}
    padding = Padding(draft)

    def attach(step: Step) -> Step:
        if not is_printed(step):
            padding.see(step)
            return step
        instance = instances[step.item]
        attached = _attach_backward if is_derived(step) else _attach_forward
        try:
            return padding.settle(*attached(draft, instance, step, derivations))
        except ExpressionError as error:
            raise NotPossible(f"op {instance.op.name!r}: the expression {error.message}") from None

    return replace(
        draft,
        forward=tuple(attach(step) for step in draft.forward),
        backward=tuple(attach(step) for step in draft.backward),
    )


def _expression(instance: Instance) -> tuple[str, str]:
    op = instance.op
    if len(op.pointwise) != 1:
        raise NotPossible(f"pointwise op {op.name!r} has {len(op.pointwise)} outputs, expected 1")
    for tensor, spec in op.tensors.items():
        if spec.interleave:
            raise NotPossible(
                f"op {op.name!r}: no kernel reads the interleaved halves of {tensor!r}"
            )
    return next(iter(op.pointwise.items()))


def _attach_forward(
    draft: Draft, instance: Instance, step: Step, derivations: Derivations
) -> tuple[Step, Program]:
    output, text = _expression(instance)
    expression = parse(text, operand_symbols(instance.op), dict.fromkeys(instance.op.attributes))
    program = derivations.forward(expression, output)
    result = PointwiseOperand(output, step.out, Access.FULL, draft.buffers[step.out].dtype)
    formula = (output, text)
    return _with_math(draft, instance, step, program, (result,), "forward", formula), program


def _attach_backward(
    draft: Draft, instance: Instance, step: Step, derivations: Derivations
) -> tuple[Step, Program]:
    op = instance.op
    output, text = _expression(instance)
    expression = parse(text, operand_symbols(op), dict.fromkeys(op.attributes))
    results = []
    for operand in step.outputs:
        buffer = draft.buffers[operand.buffer]
        for symbol, access in symbols_of(op, operand.slot[1:]):
            if access is Access.COLUMN:
                raise NotPossible(f"the gradient of {symbol!r} would be summed over rows")
            results.append(PointwiseOperand(symbol, buffer.name, access, buffer.dtype))
    wrt = tuple(result.symbol for result in results)
    program = derivations.backward(expression, wrt, gradient(output))
    named = tuple(replace(result, symbol=gradient(result.symbol)) for result in results)
    formula = (output, text)
    return _with_math(draft, instance, step, program, named, "backward", formula), program


def _with_math(
    draft: Draft,
    instance: Instance,
    step: Step,
    program: Program,
    results: tuple[PointwiseOperand, ...],
    direction: str,
    formula: tuple[str, str],
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
        raise NotPossible(
            f"op {op.name!r}: its {direction} reads no tensor of the module's own type"
        )
    output = draft.buffers[instance.tensors[next(iter(op.outputs))]]
    rows, columns = product(output.shape.flat[:-1]), output.shape.flat[-1]
    used = {operand.buffer for operand in operands}
    math = Pointwise(
        kernel=f"pointwise_{op.name}_{direction}",
        operands=tuple(operands),
        results=results,
        attributes=program.attributes,
        cuda=tuple(to_cuda(program)),
        torch=tuple(to_torch(program)),
        formula=f"{formula[0]} = {formula[1]}",
        rows=rows,
        columns=columns,
        cost=program.cost,
    )
    kept = tuple(operand for operand in step.inputs if operand.buffer in used)
    scalars = tuple((name, AttributeRef(instance.attributes[name])) for name in math.attributes)
    return with_flops(replace(step, inputs=kept, pointwise=math, attributes=scalars))
