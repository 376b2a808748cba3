"""Backward: the ops' backward rules in reverse order, over the gradients' buffers.

A tensor's gradient comes from each op that reads it, and from the caller if the module returns it.
Where that are several, each gives a partial one, and a step adds them up: the caller's first, then
those of the readers, the last reader first, which is the order in which they are there.  A reader
without a gradient adds nothing, and what no reader gives a gradient has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from ..ir.buffers import Buffer
from ..ir.naming import gradient, partial_gradient, terms_of, total_gradient
from ..ir.step import Access, Operand, Step
from ..math import names_in, parse
from ..spec.op import OpSpec, operand_symbols, symbols_of
from ..steps import definition
from ..steps.add import ADD, slots
from ..steps.pointwise import POINTWISE_GRAD
from ..steps.sums import COLUMN_SUM
from .draft import Draft, Instance, NotPossible
from .expand import bind


def write_backward(draft: Draft) -> Draft:
    """Add the backward program.

    Raises:
        NotPossible: an op's rule reads the gradient of a result that has none.
    """
    buffers: dict[str, Buffer] = {}
    steps: list[Step] = []
    there = {gradient(name) for name in draft.outputs}
    for instance in reversed(draft.instances):
        names = _names(instance)
        for tensor, name in names.items():
            if tensor not in instance.tensors and name not in draft.buffers:
                primal = draft.buffers[instance.tensors[tensor[1:]]]
                buffers[name] = replace(primal, name=name, role=None, optional=False)
        given = tuple(name for name in instance.results if names.get(gradient(name)) in there)
        if not given:
            continue
        if instance.op.pointwise:
            own, terms = _pointwise_steps(draft, instance, names, given)
            buffers |= terms
        else:
            own = _ruled_steps(instance, names, given)
        steps += own
        there |= {name for step in own for name in step.writes}
    draft, summed = _with_sums(draft.with_buffers(buffers), steps)
    written = {name for step in summed for name in step.writes}
    gradients = tuple(
        (leaf, gradient(leaf))
        for leaf in draft.arguments
        if gradient(leaf) in written and leaf not in draft.constants
    )
    return replace(draft, backward=tuple(summed), gradients=gradients)


def _names(instance: Instance) -> dict[str, str]:
    """Names a backward rule may use: the op's tensors and ``d<tensor>``."""
    names = dict(instance.tensors)
    for tensor, spec in instance.op.tensors.items():
        if spec.has_gradient and tensor in instance.tensors:
            names[gradient(tensor)] = gradient(instance.tensors[tensor])
    return names


def _ruled_steps(instance: Instance, names: dict[str, str], given: tuple[str, ...]) -> list[Step]:
    """The rule of an op; what a step may do without it does without where nothing gives it."""
    absent = {gradient(name): name for name in instance.results if name not in given}
    for step in instance.op.backward:
        for slot, tensor in step.slots:
            if tensor in absent and slot not in definition(step.primitive).optional:
                raise NotPossible(
                    f"op {instance.label!r}: its backward reads the gradient of {absent[tensor]!r},"
                    " which nothing gives"
                )
    known = {tensor: name for tensor, name in names.items() if tensor not in absent}
    return [bind(step, instance, known) for step in instance.op.backward]


def _pointwise_steps(
    draft: Draft, instance: Instance, names: dict[str, str], given: tuple[str, ...]
) -> tuple[list[Step], dict[str, Buffer]]:
    """One step for all gradients; what all rows share gets a term per element, and their sum.

    Which operands the step reads is settled when its math is derived.

    Returns:
        the steps, and the buffers of terms.
    """
    op = instance.op
    operands = (*op.inputs, *op.parameters)
    inputs = [Operand(gradient(name), names[gradient(name)]) for name in given]
    inputs += [Operand(name, names[name]) for name in operands]
    shape = draft.buffers[instance.tensors[given[0]]]
    outputs: list[Operand] = []
    sums: list[Step] = []
    terms: dict[str, Buffer] = {}
    for name in _reached(op, given):
        slot, total = gradient(name), names[gradient(name)]
        if symbols_of(op, name) != ((name, Access.COLUMN),):
            outputs.append(Operand(slot, total))
            continue
        each = replace(shape, name=terms_of(total), role=None)
        terms[each.name] = each
        outputs.append(Operand(slot, each.name))
        sums.append(
            Step(
                COLUMN_SUM.name,
                None,
                instance.item,
                (Operand("a", each.name),),
                (Operand("out", total),),
            )
        )
    step = Step(POINTWISE_GRAD.name, None, instance.item, tuple(inputs), tuple(outputs))
    return [step, *sums] if outputs else [], terms


def _reached(op: OpSpec, given: tuple[str, ...]) -> Iterator[str]:
    """Operands with a gradient, of those that the given outputs depend on."""
    symbols, attributes = operand_symbols(op), dict.fromkeys(op.attributes)
    trees = (parse(op.pointwise[name], symbols, attributes).tree for name in given)
    read = frozenset().union(*map(names_in, trees))
    for name in (*op.inputs, *op.parameters):
        own = {symbol for symbol, _ in symbols_of(op, name)}
        if op.tensors[name].has_gradient and own & read:
            yield name


def _with_sums(draft: Draft, steps: list[Step]) -> tuple[Draft, list[Step]]:
    """Partial gradients and the steps that add them, each behind the last one that it reads."""
    incoming = {gradient(name) for name in draft.outputs}
    counts = Counter(name for step in steps for name in step.writes)
    several = {name for name, count in counts.items() if count + (name in incoming) > 1}
    buffers: dict[str, Buffer] = {}
    parts: dict[str, list[str]] = {name: [name] * (name in incoming) for name in several}
    totals = {name: total_gradient(name) for name in several & incoming}
    found: list[Step] = []

    def named(operand: Operand) -> Operand:
        name = operand.buffer
        if name not in several:
            return operand
        part = partial_gradient(name, len(parts[name]) + (name not in incoming))
        buffers[part] = replace(draft.buffers[name], name=part)
        parts[name].append(part)
        return replace(operand, buffer=part)

    for step in steps:
        inputs = (replace(o, buffer=totals.get(o.buffer, o.buffer)) for o in step.inputs)
        found.append(replace(step, inputs=tuple(inputs), outputs=tuple(map(named, step.outputs))))
        for name in dict.fromkeys(step.writes):
            if name in several and len(parts[name]) == counts[name] + (name in incoming):
                total = totals.get(name, name)
                buffers[total] = replace(draft.buffers[name], name=total)
                found.append(_sum(parts[name], total, step.item))
    return draft.with_buffers(buffers), found


def _sum(parts: list[str], total: str, item: str) -> Step:
    named = zip(slots(len(parts)), parts, strict=True)
    inputs = tuple(Operand(slot, name) for slot, name in named)
    return Step(ADD.name, None, item, inputs, (Operand("out", total),))
