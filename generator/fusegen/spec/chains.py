"""What the tensors of a chain are called: which ones an op reads, what its results are named."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..ir.shapes import Const, Expr
from .module import ChainItem, ModuleSpec
from .op import OpSpec


def chain_of(module: ModuleSpec) -> tuple[ChainItem, ...]:
    """The module's ops; one op stands for a chain of one."""
    return module.chain or (ChainItem(op=module.op or "", attributes=module.attributes),)


def prefix_of(item: ChainItem) -> str:
    """What the names of an op's own tensors and scalars begin with."""
    return f"{item.as_}_" if item.as_ else ""


def sizes_of(item: ChainItem, op: OpSpec) -> dict[str, Expr]:
    """What names in the shapes of an op stand for in a chain; others stand for themselves.

    Dimensions are those that the chain says, counts are numbers.
    """
    counts = {name: item.attributes.get(name, op.attributes[name].default) for name in op.counts}
    numbers = {name: Const(n) for name, n in counts.items() if type(n) is int and n > 0}
    return {**item.dims, **numbers}


def reads_of(item: ChainItem, op: OpSpec, previous: str, inputs: Collection[str]) -> dict[str, str]:
    """The tensor of the module behind each input of an op; an optional one may have none.

    Args:
        item: the op's place in the chain.
        op: its spec.
        previous: first result of the op before it, or the module's first input.
        inputs: of the module.
    """
    first = next(iter(op.inputs), "")
    given = {*item.with_, *inputs}
    read = (name for name, spec in op.inputs.items() if not spec.optional or name in given)
    return {name: item.with_.get(name, previous if name == first else name) for name in read}


def results_of(module: ModuleSpec, index: int, op: OpSpec) -> dict[str, str]:
    """What the module calls the results of the op at a place of its chain.

    A name of the item's own counts; otherwise it is the op's, behind the op's prefix but for the
    last op, whose results nobody in the chain can mistake for others.
    """
    item = chain_of(module)[index]
    last = index == len(chain_of(module)) - 1
    prefix = "" if last else prefix_of(item)
    given = item.out if isinstance(item.out, Mapping) else {}
    if isinstance(item.out, str):
        given = {next(iter(op.outputs), ""): item.out}
    return {name: given.get(name, f"{prefix}{name}") for name in op.outputs}


def outputs_of(module: ModuleSpec, ops: Mapping[str, OpSpec]) -> tuple[str, ...]:
    """What the module returns: what it names, or the results of its last op."""
    index = len(chain_of(module)) - 1
    op = ops[chain_of(module)[index].op]
    return module.outputs or tuple(results_of(module, index, op).values())
