"""Aliases: what the tensors of a chain are called, where a result may be another tensor's name.

An expression that is one operand as it is computes nothing: its result is a further name of that
tensor, whose readers read the tensor itself, so that no step writes it and its gradient is the sum
of the readers' (``backward``).  A result that the module returns has memory of its own, because no
op of PyTorch may return an argument, or one tensor twice: it takes over the memory of the tensor
where that is neither, and is copied otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..math import Name, parse
from ..spec.chains import chain_of, outputs_of, prefix_of, reads_of, results_of
from ..spec.module import ModuleSpec
from ..spec.op import OpSpec, operand_symbols


def passed_on(op: OpSpec) -> dict[str, str]:
    """Outputs of an op that are one of its operands as it is -> that operand."""
    operands = {**op.inputs, **op.parameters}
    symbols, attributes = operand_symbols(op), dict.fromkeys(op.attributes)
    found = {}
    for output, text in op.pointwise.items():
        tree = parse(text, symbols, attributes).tree
        if not isinstance(tree, Name) or tree.name not in operands:
            continue
        operand, result = operands[tree.name], op.outputs[output]
        alike = ("shape", "dtype", "differentiable", "broadcast")
        if all(getattr(operand, each) == getattr(result, each) for each in alike):
            found[output] = tree.name
    return found


def tensors_of(module: ModuleSpec, ops: Mapping[str, OpSpec]) -> tuple[dict[str, str], ...]:
    """Of every op of a chain, its tensors -> the module's; without results that are aliases."""
    outputs = outputs_of(module, ops)
    inputs = module.inputs or ops[chain_of(module)[0].op].inputs
    previous = next(iter(inputs))
    aliased: dict[str, str] = {}
    renamed: dict[str, str] = {}
    written: set[str] = set()
    found: list[dict[str, str]] = []
    for index, item in enumerate(chain_of(module)):
        op, prefix = ops[item.op], prefix_of(item)
        reads = reads_of(item, op, previous, inputs)
        tensors = {name: aliased.get(t, t) for name, t in reads.items()}
        tensors |= {name: f"{prefix}{name}" for name in (*op.parameters, *op.internal)}
        results = results_of(module, index, op)
        previous = next(iter(results.values()))
        for output, operand in passed_on(op).items():
            result, tensor = results[output], tensors[operand]
            aliased[result] = tensor
            takes_over = tensor in written and tensor not in {*outputs, *renamed}
            if result in outputs and takes_over:
                renamed[tensor] = result
            if result not in outputs or takes_over:
                del results[output]
        written |= {*results.values()}
        found.append(tensors | results)
    return tuple({key: renamed.get(t, t) for key, t in each.items()} for each in found)
