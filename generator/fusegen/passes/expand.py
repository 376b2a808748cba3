"""Expand: the chain of a module becomes forward steps over named buffers."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.buffers import Attribute, Buffer, Parameter
from ..ir.naming import parameter_argument
from ..ir.shapes import Shape, Sym
from ..ir.step import AttributeRef, Operand, Step
from ..ir.words import Init
from ..spec.chains import chain_of, outputs_of, prefix_of, sizes_of
from ..spec.module import ChainItem, ModuleSpec
from ..spec.op import OpSpec, StepSpec, TensorSpec
from ..steps import definition
from ..steps.pointwise import POINTWISE
from .aliases import tensors_of
from .draft import Draft, Instance


def expand(module: ModuleSpec, ops: Mapping[str, OpSpec]) -> Draft:
    """Name every tensor of every op in the module's terms and string the forward steps together."""
    chain = chain_of(module)
    first = ops[chain[0].op]
    module_inputs = module.inputs or first.inputs
    sizes = {} if module.inputs else sizes_of(chain[0], first)
    leading = next(iter(module_inputs.values())).shape.leading
    buffers = {
        name: _buffer(name, spec, spec.shape.substitute(sizes), leading)
        for name, spec in module_inputs.items()
    }
    instances: list[Instance] = []
    parameters: list[Parameter] = []
    attributes: list[Attribute] = []
    for item, tensors in zip(chain, tensors_of(module, ops), strict=True):
        op = ops[item.op]
        instance = _instance(item, op, tensors)
        read = buffers[instance.tensors[next(iter(op.inputs))]].shape
        for name, tensor in tensors.items():
            spec = op.tensors[name]
            shape = op.shape_of(spec, instance.dims, read, item.shape)
            buffer = _buffer(tensor, spec, shape, leading)
            buffers.setdefault(buffer.name, buffer)
        parameters += _parameters(instance)
        attributes += [
            Attribute(
                f"{prefix_of(item)}{name}",
                spec.type,
                item.attributes.get(name, spec.default),
                spec.range,
                spec.in_eval,
            )
            for name, spec in op.attributes.items()
            if not spec.static
        ]
        instances.append(instance)
    return Draft(
        instances=tuple(instances),
        buffers=buffers,
        inputs=tuple(module_inputs),
        constants=frozenset(n for n, spec in module_inputs.items() if not spec.has_gradient),
        outputs=outputs_of(module, ops),
        parameters=tuple(parameters),
        attributes=tuple(attributes),
        forward=tuple(step for instance in instances for step in _forward(instance)),
    )


def _instance(item: ChainItem, op: OpSpec, tensors: Mapping[str, str]) -> Instance:
    prefix = prefix_of(item)
    return Instance(
        item=item.as_ or "",
        op=op,
        tensors=tensors,
        dims={**{symbol: Sym(symbol) for symbol in op.dims}, **sizes_of(item, op)},
        attributes={
            name: item.attributes.get(name, spec.default)
            if spec.static
            else AttributeRef(f"{prefix}{name}")
            for name, spec in op.attributes.items()
        },
        recompute=item.recompute,
    )


def _buffer(name: str, spec: TensorSpec, shape: Shape, leading: str | None) -> Buffer:
    """A tensor has several leading dimensions only where the module's first input has them."""
    shape = shape.led_by(leading)
    return Buffer(name, spec.dtype, shape, spec.role, spec.optional, spec.drawn, spec.chunk)


def _parameters(instance: Instance) -> list[Parameter]:
    """Parameters of an op; the inputs per output of its first one bound every uniform fill."""
    result = []
    for name, spec in instance.op.parameters.items():
        path = f"{instance.item}.{name}" if instance.item else name
        fan_in = spec.shape.substitute(instance.dims).dims[-1]
        result.append(Parameter(parameter_argument(path), path, _init(spec, instance), fan_in))
    return result


def _init(spec: TensorSpec, instance: Instance) -> Init:
    chosen = (init for name, init in spec.init_if.items() if instance.attributes[name] is True)
    return next(chosen, spec.init or Init.ZEROS)


def _forward(instance: Instance) -> list[Step]:
    if instance.op.pointwise and not instance.results:
        return []
    if instance.op.pointwise:
        inputs = tuple(Operand(name, instance.tensors[name]) for name in instance.op.inputs)
        inputs += tuple(Operand(name, instance.tensors[name]) for name in instance.op.parameters)
        outputs = tuple(Operand(name, instance.tensors[name]) for name in instance.results)
        return [Step(POINTWISE.name, None, instance.item, inputs, outputs)]
    return [bind(step, instance, instance.tensors) for step in instance.op.forward]


def bind(step: StepSpec, instance: Instance, names: Mapping[str, str]) -> Step:
    """A step of an op with the module's buffers in its slots."""
    kind = definition(step.primitive)
    slots = {slot: names[tensor] for slot, tensor in step.slots if tensor in names}
    return Step(
        primitive=step.primitive,
        kind=step.kind,
        item=instance.item,
        inputs=tuple(Operand(slot, slots[slot]) for slot in kind.slots if slot in slots),
        outputs=tuple(Operand(slot, slots[slot]) for slot in kind.results if slot in slots),
        attributes=tuple(
            (name, instance.attributes[value] if isinstance(value, str) else value)
            for name, value in step.attributes
        ),
    )
