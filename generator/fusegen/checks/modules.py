"""Modules: an op, or a chain whose ops read what is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from keyword import iskeyword

from ..ir.dtypes import DType
from ..ir.naming import gradient
from ..ir.shapes import Expr, Shape, symbols
from ..ir.words import Broadcast
from ..options import OPTIONS
from ..spec.chains import outputs_of, prefix_of, reads_of, results_of, sizes_of
from ..spec.diagnostics import Problem
from ..spec.load import Source, SpecSet
from ..spec.module import ChainItem, ModuleSpec
from ..spec.offers import module_facts, recomputes
from ..spec.op import OpSpec, TensorSpec
from ..steps import definition
from ..steps.add import MOST_OPERANDS
from .common import (
    OWN_TYPE_FIRST,
    check_drawn,
    check_input_types,
    check_order,
    check_symbols,
    count_problem,
    fits,
    fixed_problem,
    range_problem,
    said_of_integer,
    unknown,
)
from .names import FILE_WORDS, check_public_names, taken_by_function, takes_all_keywords

Path = tuple[str | int, ...]
"""Keys that lead to a place of a spec."""


def check_module(
    module: ModuleSpec, specs: SpecSet, source: Source, complete: bool
) -> Iterator[Problem]:
    """Every problem of a module."""
    for key, word in (("module", module.module), ("class", module.class_)):
        if word in FILE_WORDS or iskeyword(word):
            yield source.problem(
                f"{word!r} is a word that generated files are written with; choose another", key
            )
    if bool(module.op) == bool(module.chain):
        got = "both" if module.op else "none"
        yield source.problem(f"a module has either 'op' or 'chain', got {got}", "module")
        return
    if complete:
        yield from _check_without(module, specs, source)
    if module.op:
        own = () if module.attributes else ("summary",)
        for key in (*own, "dims", "inputs", "outputs"):
            if getattr(module, key):
                yield source.problem(f"{key!r} comes from the op; remove it", key)
        if complete:
            yield from unknown(source, "op", module.op, specs.ops, "op")
            yield from _check_own_type(specs.ops.get(module.op), source)
            if module.op in specs.ops:
                yield from _check_values(module.attributes, specs.ops[module.op], source)
            for name in specs.ops[module.op].left_open if module.op in specs.ops else ():
                yield source.problem(
                    f"{module.op} leaves the shape of {name!r} open; make a chain of it, which says"
                    " the shape",
                    "op",
                )
        return
    for key in ("summary", "dims", "inputs"):
        if not getattr(module, key):
            yield source.problem(f"a chain needs {key!r}", "module")
    if module.attributes:
        yield source.problem("each op of a chain has its own 'attributes'", "attributes")
    yield from check_symbols(module.dims, source)
    yield from check_input_types(module.inputs, source)
    yield from check_drawn(module.inputs, source)
    for name, tensor in module.inputs.items():
        yield from said_of_integer(tensor, source, "inputs", name)
        for symbol in sorted(tensor.shape.symbols()):
            yield from unknown(source, "dimension", symbol, module.dims, "inputs", name, "shape")
    if complete:
        yield from _check_chain(module, specs, source)


def _check_own_type(op: OpSpec | None, source: Source) -> Iterator[Problem]:
    """A module of one op takes the op's inputs, of which the first tells what ``io`` is."""
    name, tensor = next(iter(op.inputs.items()), (None, None)) if op else (None, None)
    if op and tensor and tensor.dtype is not DType.IO:
        yield source.problem(
            f"{op.name} reads {tensor.dtype.value} {name!r} first, and {OWN_TYPE_FIRST}; make a"
            " chain of it, whose first input is of 16 bits",
            "op",
        )


def _check_without(module: ModuleSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    """What a module is not to have it would have, and is said once."""
    facts = module_facts(module, specs.ops)
    for index, name in enumerate(module.without):
        if name in module.without[:index]:
            yield source.problem(f"{name!r} is listed twice; remove one", "without", index)
        option = next(option for option in OPTIONS if option.name == name)
        reason = option.applies_to(facts)
        if reason:
            yield source.problem(
                f"{name!r} does not apply anyway: {reason}; remove it", "without", index
            )


def _check_chain(module: ModuleSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    if any(not op.inputs or not op.outputs for op in specs.ops.values()):
        return  # said about the op
    own = [item.as_ for item in module.chain]
    if len(own) == 1 or (all(own) and len({*own}) == len(own)):
        yield from _check_names(module, specs, source)
    prefixes: set[str | None] = set()
    available = dict(module.inputs)
    drawing: dict[str, str] = {}
    previous = next(iter(module.inputs), "")
    leading = module.inputs[previous].shape.leading if previous else None
    for index, item in enumerate(module.chain):
        shared = item.as_ in prefixes or (item.as_ is None and len(module.chain) > 1)
        if shared:
            yield source.problem("every op of a chain needs its own 'as'", "chain", index)
        prefixes.add(item.as_)
        if item.op not in specs.ops:
            yield from unknown(source, "op", item.op, specs.ops, "chain", index, "op")
            return
        op = specs.ops[item.op]
        yield from _check_item(
            module, item, op, available, _later(module, index, specs), source, index
        )
        reads = reads_of(item, op, previous, module.inputs)
        first = next(iter(reads.values()))
        known = available[first].shape if first in available else None
        sizes = sizes_of(item, op)
        for name, spec in op.inputs.items():
            if name not in reads:
                continue
            shape = op.shape_of(spec, sizes, known or spec.shape)
            yield from _check_reading(item, spec, shape, reads[name], available, source, index)
            other = drawing.setdefault(reads[name], item.as_ or item.op) if spec.drawn else ""
            if other not in ("", item.as_ or item.op):
                yield source.problem(
                    f"{item.as_!r} would draw as {other!r} does; map {name!r} in 'with' to another"
                    " input of the module",
                    "chain",
                    index,
                )
        yield from _check_shape(module, item, op, first, known, source, index)
        results = tuple(results_of(module, index, op).values())
        for name, spec in zip(results, op.outputs.values(), strict=True):
            if name in available and not shared:
                yield source.problem(
                    f"{name!r} is already there; give the result another name with 'out'",
                    "chain",
                    index,
                )
            shape = op.shape_of(spec, sizes, known or spec.shape, item.shape)
            available[name] = replace(spec, shape=shape.led_by(leading))
        previous = results[0]
    yield from _check_rows(module, specs, source)
    yield from _check_unread(module, specs, source)
    yield from _check_outputs(module, specs, source)
    yield from _check_readers(module, specs, source)


def _later(module: ModuleSpec, index: int, specs: SpecSet) -> dict[str, int]:
    """Results of the op at a place of the chain and of those behind it, and where each is given."""
    return {
        name: place
        for place, item in enumerate(module.chain)
        if place >= index and item.op in specs.ops
        for name in results_of(module, place, specs.ops[item.op]).values()
    }


def _check_rows(module: ModuleSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    """Rows past the groups belong to nobody: beside a grouped op none may add them to others.

    What sums over other rows than those in groups, such as tokens in front of the rows of experts,
    does not.
    """
    ops = [specs.ops[item.op] for item in module.chain]
    rows = [_rows(item, op) for item, op in zip(module.chain, ops, strict=True)]
    groups = {size: op.name for size, op in zip(rows, ops, strict=True) if _is_grouped(op)}
    for index, op in enumerate(ops):
        grouped = groups.get(rows[index])
        if grouped and _adds_all_rows(op):
            yield source.problem(
                f"{op.name} sums over all rows, also those past the groups of {grouped}; use a"
                " grouped op, or make it a module of its own",
                "chain",
                index,
            )


def _rows(item: ChainItem, op: OpSpec) -> Expr:
    """How many rows an op of a chain reads first, all leading dimensions as one."""
    return next(iter(op.inputs.values())).shape.substitute(sizes_of(item, op)).flat[0]


def _is_grouped(op: OpSpec) -> bool:
    return any(definition(step.primitive).in_groups for step in (*op.forward, *op.backward))


def _adds_all_rows(op: OpSpec) -> bool:
    """Whether a step of it does, or the gradient of an operand that all rows share."""
    steps = (*op.forward, *op.backward)
    operands = {**op.inputs, **op.parameters}.values()
    return any(definition(step.primitive).adds_all_rows for step in steps) or any(
        spec.broadcast is Broadcast.COLUMN and spec.has_gradient for spec in operands
    )


def _reads(module: ModuleSpec, specs: SpecSet) -> Iterator[tuple[int, str, TensorSpec]]:
    """Everything that ops read: the place in the chain, the tensor, and the input it is."""
    previous = next(iter(module.inputs), "")
    for index, item in enumerate(module.chain):
        op = specs.ops[item.op]
        for name, tensor in reads_of(item, op, previous, module.inputs).items():
            yield index, tensor, op.inputs[name]
        previous = next(iter(results_of(module, index, op).values()))


def _check_outputs(module: ModuleSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    """The module returns results of its ops, each once, and nothing is computed for nobody."""
    given = _later(module, 0, specs)
    for index, name in enumerate(module.outputs):
        if name in module.outputs[:index]:
            yield source.problem(f"{name!r} is listed twice; remove one", "outputs", index)
        elif name in module.inputs:
            yield source.problem(
                f"{name!r} is an input, which the caller has; outputs are results of ops",
                "outputs",
                index,
            )
        else:
            yield from unknown(source, "result", name, given, "outputs", index)
    specs_of = {
        name: op.outputs[result]
        for index, op in enumerate(specs.ops[item.op] for item in module.chain)
        for result, name in results_of(module, index, op).items()
    }
    named = [n for n in module.outputs if n in specs_of]
    places = {n: (specs_of[n], ("outputs", module.outputs.index(n))) for n in named}
    yield from check_order(places, source)
    used = {*outputs_of(module, specs.ops), *(name for _, name, _ in _reads(module, specs))}
    for name, place in given.items():
        if name not in used:
            yield source.problem(
                f"no op reads {name!r}, and it is no output; list it in 'outputs', or remove the op"
                " that gives it",
                "chain",
                place,
            )


def _check_readers(module: ModuleSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    """The gradient of a tensor is one sum, over its readers and the caller."""
    counts = Counter(outputs_of(module, specs.ops))
    for index, name, spec in _reads(module, specs):
        counts[name] += spec.has_gradient
        if counts[name] == MOST_OPERANDS + 1:
            yield source.problem(
                f"the gradient of {name!r} would be a sum of more than {MOST_OPERANDS}; let fewer"
                " ops read it",
                "chain",
                index,
            )


def _check_names(module: ModuleSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    """Every tensor and scalar of the chain has a name of its own, which Python can have."""
    named: list[tuple[str, Path]] = [(name, ("inputs", name)) for name in module.inputs]
    results: list[tuple[str, Path]] = []
    public: dict[str, Path] = {}
    ops = [specs.ops[item.op] for item in module.chain if item.op in specs.ops]
    for index, (item, op) in enumerate(zip(module.chain, ops, strict=False)):
        place: Path = ("chain", index)
        prefix = prefix_of(item)
        scalars = [f"{prefix}{name}" for name in op.attributes]
        own = [f"{prefix}{name}" for name in (*op.parameters, *op.internal)]
        named += [(name, place) for name in (*own, *scalars)]
        results += [(name, place) for name in results_of(module, index, op).values()]
        holders = [item.as_] if item.as_ and op.parameters else []
        public |= dict.fromkeys((*scalars, *holders), place)
    yield from check_public_names(module.dims, public, any(map(takes_all_keywords, ops)), source)
    seen: set[str] = set()
    own_names = {name for name, _ in named} - {*module.inputs}
    for name, place in (*named, *results):
        reason = taken_by_function(name)
        if name in seen and (name in own_names or (name, place) in named):
            reason = "is the name of something else"
        if reason:
            yield source.problem(f"{name!r} {reason}; choose another", *place)
        seen.add(name)
    for name, place in (*named, *results):
        origin = next((other for other in seen if gradient(other) == name), None)
        if origin:
            yield source.problem(f"{name!r} is the gradient of {origin!r}; choose another", *place)


def _check_unread(module: ModuleSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    """Inputs and dimensions that no op has: nobody would tell their gradients or sizes."""
    sizes = {symbol for tensor in module.inputs.values() for symbol in tensor.shape.symbols()}
    for item in module.chain:
        for symbol in specs.ops[item.op].dims:
            sizes |= symbols(item.dims[symbol]) if symbol in item.dims else {symbol}
        sizes |= item.shape.symbols() if item.shape else frozenset()
    for symbol in module.dims:
        if symbol not in sizes:
            yield source.problem(f"dimension {symbol!r} is in no shape; remove it", "dims", symbol)
    read = {next(iter(module.inputs), ""), *(name for _, name, _ in _reads(module, specs))}
    for name in module.inputs:
        if name not in read:
            yield source.problem(f"no op reads {name!r}; remove it", "inputs", name)


def _check_reading(
    item: ChainItem,
    spec: TensorSpec,
    expected: Shape,
    tensor: str,
    available: Mapping[str, TensorSpec],
    source: Source,
    index: int,
) -> Iterator[Problem]:
    """The tensor an op reads has the shape and the type that the op's input has."""
    if tensor not in available:
        return
    got = available[tensor]
    if expected.fixed() != got.shape.fixed():
        yield source.problem(
            f"{item.op} reads {expected}, but {tensor!r} is {got.shape}; map the dimensions with"
            " 'dims'",
            "chain",
            index,
        )
    elif got.shape.leading and not expected.leading:
        yield source.problem(
            f"{item.op} reads {expected}, but {tensor!r} is {got.shape}; give it a fixed number of"
            " dimensions",
            "chain",
            index,
        )
    if spec.dtype is not got.dtype:
        yield source.problem(
            f"{item.op} reads {spec.dtype.value}, but {tensor!r} is {got.dtype.value}",
            "chain",
            index,
        )
    if got.optional and not spec.optional:
        yield source.problem(
            f"{item.op} needs {tensor!r}, which may be left out; remove its 'optional'",
            "chain",
            index,
        )


def _check_shape(
    module: ModuleSpec,
    item: ChainItem,
    op: OpSpec,
    tensor: str,
    read: Shape | None,
    source: Source,
    index: int,
) -> Iterator[Problem]:
    """A shape that the op leaves to the chain is said, and has the elements of what is read.

    Args:
        tensor: what the op reads first.
        read: its shape; None where it is not there, which is said elsewhere.
    """
    path: Path = ("chain", index)
    if not op.left_open:
        if item.shape:
            yield source.problem(f"{item.op} says the shape itself; remove it", *path, "shape")
        return
    if item.shape is None:
        yield source.problem(
            f"{item.op} needs the shape of its result, such as shape: [T..., 8, 128]", *path
        )
        return
    unsaid = sorted(item.shape.symbols() - {*module.dims})
    for symbol in unsaid:
        yield from unknown(source, "dimension", symbol, module.dims, *path, "shape")
    if read is not None and not unsaid and not read.holds_as_many_as(item.shape):
        yield source.problem(
            f"nothing tells that {item.shape} has as many elements as {tensor!r}, which is {read};"
            " write both with the same factors, such as [T, 8 * D] and [T, 8, D]",
            *path,
            "shape",
        )


def _check_item(
    module: ModuleSpec,
    item: ChainItem,
    op: OpSpec,
    available: Mapping[str, TensorSpec],
    later: Mapping[str, int],
    source: Source,
    index: int,
) -> Iterator[Problem]:
    path = ("chain", index)
    for name, tensor in item.with_.items():
        yield from unknown(source, "input", name, op.inputs, *path, "with", name)
        if tensor in available or tensor not in later:
            yield from unknown(source, "tensor", tensor, available, *path, "with", name)
        elif later[tensor] == index:
            yield source.problem(
                f"{tensor!r} is what this op gives; no op reads its own result", *path, "with", name
            )
        else:
            yield source.problem(
                f"{tensor!r} is read before it is written, by op {later[tensor] + 1} of the chain;"
                " move that op up",
                *path,
                "with",
                name,
            )
    if isinstance(item.out, Mapping):
        for name in item.out:
            yield from unknown(source, "output", name, op.outputs, *path, "out", name)
    for name, spec in list(op.inputs.items())[1:]:
        if not spec.optional and name not in item.with_ and name not in available:
            yield source.problem(
                f"{item.op} needs {name!r}: name a module input so, or map it in 'with'", *path
            )
    for symbol, expr in item.dims.items():
        yield from unknown(source, "dimension", symbol, op.dims, *path, "dims", symbol)
        for used in sorted(symbols(expr)):
            yield from unknown(source, "dimension", used, module.dims, *path, "dims", symbol)
    first = next(iter(op.inputs.values())).shape
    if item.recompute and not recomputes(op):
        yield source.problem(
            f"no step of {item.op} may run again in the backward; remove it", *path, "recompute"
        )
    elements = {first.leading} if op.any_shape else set()
    elements |= {spec.shape.leading for spec in op.left_open.values()}
    for symbol in op.dims:
        if symbol not in item.dims and symbol not in module.dims and symbol not in elements:
            yield source.problem(f"{item.op} needs dimension {symbol!r} in 'dims'", *path)
    yield from _check_values(item.attributes, op, source, *path)


def _check_values(
    values: Mapping[str, object], op: OpSpec, source: Source, *path: str | int
) -> Iterator[Problem]:
    """Values that replace those of an op's attributes."""
    for name, value in values.items():
        yield from unknown(source, "attribute", name, op.attributes, *path, "attributes", name)
        if name not in op.attributes:
            continue
        reason = f"expected {op.attributes[name].type.value}, got {value!r}"
        if fits(op.attributes[name], value):
            reason = range_problem(op.attributes[name], value) or count_problem(op, name, value)
            reason = reason or fixed_problem(op, name, value)
        if reason:
            yield source.problem(reason, *path, "attributes", name)
