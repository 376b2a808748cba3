"""Backward: the ops' backward rules in reverse order, over the gradients' buffers."""

from __future__ import annotations

from dataclasses import replace

from ..ir.naming import gradient
from ..ir.plan import Buffer, Operand, Step
from ..steps.pointwise import POINTWISE_GRAD
from .draft import Draft, Instance, NotPossible
from .expand import bind


def write_backward(draft: Draft) -> Draft:
    """Add the backward program.

    Raises:
        NotPossible: a tensor's gradient would come from two steps; the grammar has no implicit sum.
    """
    buffers: dict[str, Buffer] = {}
    steps: list[Step] = []
    for instance in reversed(draft.instances):
        names = _names(instance)
        for tensor, name in names.items():
            if tensor not in instance.tensors and name not in draft.buffers:
                source = draft.buffers[instance.tensors[tensor[1:]]]
                buffers[name] = replace(source, name=name, role=None, optional=False)
        if instance.op.pointwise:
            steps.append(_pointwise_grad(instance, names))
        else:
            steps += [bind(step, instance, names) for step in instance.op.backward]
    _refuse_sums(steps)
    written = {name for step in steps for name in step.writes}
    gradients = tuple(
        (leaf, gradient(leaf))
        for leaf in draft.arguments
        if gradient(leaf) in written and leaf not in draft.constants
    )
    return replace(draft.with_buffers(buffers), backward=tuple(steps), gradients=gradients)


def _names(instance: Instance) -> dict[str, str]:
    """Names a backward rule may use: the op's tensors and ``d<tensor>``."""
    names = dict(instance.tensors)
    for tensor, spec in instance.op.tensors.items():
        if spec.differentiable:
            names[gradient(tensor)] = gradient(instance.tensors[tensor])
    return names


def _pointwise_grad(instance: Instance, names: dict[str, str]) -> Step:
    """One step for all gradients; which operands it reads is settled when its math is derived."""
    op = instance.op
    operands = (*op.inputs, *op.parameters)
    inputs = [Operand(gradient(name), names[gradient(name)]) for name in op.outputs]
    inputs += [Operand(name, names[name]) for name in operands]
    outputs = [
        Operand(gradient(name), names[gradient(name)])
        for name in operands
        if op.tensors[name].differentiable
    ]
    return Step(POINTWISE_GRAD.name, None, instance.item, tuple(inputs), tuple(outputs))


def _refuse_sums(steps: list[Step]) -> None:
    writers: dict[str, str] = {}
    for step in steps:
        for name in step.writes:
            if name in writers:
                raise NotPossible(
                    f"{name} would be the sum of gradients from {writers[name]!r} and"
                    f" {step.item!r}; split the tensor with make_extra_output"
                )
            writers[name] = step.item
