"""Modules: an op, or a chain whose ops read what is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from keyword import iskeyword

from ..ir.naming import gradient
from ..ir.shapes import Shape, symbols
from ..options import OPTIONS
from ..spec.diagnostics import Problem
from ..spec.load import Source, SpecSet
from ..spec.module import ChainItem, ModuleSpec
from ..spec.offers import module_facts
from ..spec.op import OpSpec, TensorSpec
from ..steps import definition
from ..steps.definition import StepDef
from .common import check_input_types, check_symbols, fits, unknown
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
        for key in ("summary", "dims", "inputs"):
            if getattr(module, key):
                yield source.problem(f"{key!r} comes from the op; remove it", key)
        if complete:
            yield from unknown(source, "op", module.op, specs.ops, "op")
        return
    for key in ("summary", "dims", "inputs"):
        if not getattr(module, key):
            yield source.problem(f"a chain needs {key!r}", "module")
    yield from check_symbols(module.dims, source)
    yield from check_input_types(module.inputs, source)
    for name, tensor in module.inputs.items():
        for symbol in sorted(tensor.shape.symbols()):
            yield from unknown(source, "dimension", symbol, module.dims, "inputs", name, "shape")
    if complete:
        yield from _check_chain(module, specs, source)


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
    read: set[str] = set()
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
        yield from _check_item(module, item, op, available, source, index)
        first = item.with_.get(next(iter(op.inputs)), previous)
        known = available[first].shape if first in available else None
        for position, (name, spec) in enumerate(op.inputs.items()):
            tensor = item.with_.get(name, name if position else previous)
            shape = op.shape_of(spec, item.dims, known or spec.shape)
            yield from _check_reading(item, spec, shape, tensor, available, source, index)
            if tensor in read and spec.differentiable:
                yield source.problem(
                    f"{tensor!r} is read by two ops, so its gradient would be a sum; split it with"
                    " make_extra_output",
                    "chain",
                    index,
                )
            if spec.differentiable:
                read.add(tensor)
        results = _results(module, index, op)
        for name, spec in zip(results, op.outputs.values(), strict=True):
            if name in available and not shared:
                yield source.problem(
                    f"{name!r} is already there; give the result another name with 'out'",
                    "chain",
                    index,
                )
            shape = op.shape_of(spec, item.dims, known or spec.shape)
            available[name] = replace(spec, shape=shape.led_by(leading))
        previous = results[0]
    yield from _check_rows(module, specs, source)
    yield from _check_unread(module, specs, source)


def _check_rows(module: ModuleSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    """Rows past the groups belong to nobody: beside a grouped op none may add them to others."""
    ops = [specs.ops[item.op] for item in module.chain]
    grouped = next((op.name for op in ops if any(s.in_groups for s in _steps(op))), None)
    for index, op in enumerate(ops):
        if grouped and any(step.adds_all_rows for step in _steps(op)):
            yield source.problem(
                f"{op.name} sums over all rows, also those past the groups of {grouped}; use a"
                " grouped op, or make it a module of its own",
                "chain",
                index,
            )


def _steps(op: OpSpec) -> list[StepDef]:
    return [definition(step.primitive) for step in (*op.forward, *op.backward)]


def _check_names(module: ModuleSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    """Every tensor and scalar of the chain has a name of its own, which Python can have."""
    named: list[tuple[str, Path]] = [(name, ("inputs", name)) for name in module.inputs]
    results: list[tuple[str, Path]] = []
    public: dict[str, Path] = {}
    ops = [specs.ops[item.op] for item in module.chain if item.op in specs.ops]
    for index, (item, op) in enumerate(zip(module.chain, ops, strict=False)):
        place: Path = ("chain", index)
        prefix = f"{item.as_}_" if item.as_ else ""
        scalars = [f"{prefix}{name}" for name in op.attributes]
        own = [f"{prefix}{name}" for name in (*op.parameters, *op.internal)]
        named += [(name, place) for name in (*own, *scalars)]
        results += [(name, place) for name in _results(module, index, op)]
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
    for symbol in module.dims:
        if symbol not in sizes:
            yield source.problem(f"dimension {symbol!r} is in no shape; remove it", "dims", symbol)
    read = {next(iter(module.inputs), "")}
    for item in module.chain:
        read |= {item.with_.get(name, name) for name in specs.ops[item.op].inputs}
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


def _results(module: ModuleSpec, index: int, op: OpSpec) -> tuple[str, ...]:
    """What the chain calls the results of an op; those of the last one are the module's."""
    item, (first, *others) = module.chain[index], op.outputs
    prefix = f"{item.as_}_" if item.as_ and index < len(module.chain) - 1 else ""
    return (item.out or f"{prefix}{first}", *(f"{prefix}{name}" for name in others))


def _check_item(
    module: ModuleSpec,
    item: ChainItem,
    op: OpSpec,
    available: Mapping[str, TensorSpec],
    source: Source,
    index: int,
) -> Iterator[Problem]:
    path = ("chain", index)
    for name, tensor in item.with_.items():
        yield from unknown(source, "input", name, op.inputs, *path, "with", name)
        yield from unknown(source, "tensor", tensor, available, *path, "with", name)
    for name in list(op.inputs)[1:]:
        if name not in item.with_ and name not in available:
            yield source.problem(
                f"{item.op} needs {name!r}: name a module input so, or map it in 'with'", *path
            )
    for symbol, expr in item.dims.items():
        yield from unknown(source, "dimension", symbol, op.dims, *path, "dims", symbol)
        for used in sorted(symbols(expr)):
            yield from unknown(source, "dimension", used, module.dims, *path, "dims", symbol)
    first = next(iter(op.inputs.values())).shape
    elements = {first.leading} if op.any_shape else set()
    for symbol in op.dims:
        if symbol not in item.dims and symbol not in module.dims and symbol not in elements:
            yield source.problem(f"{item.op} needs dimension {symbol!r} in 'dims'", *path)
    for name, value in item.attributes.items():
        yield from unknown(source, "attribute", name, op.attributes, *path, "attributes", name)
        if name in op.attributes and not fits(op.attributes[name], value):
            yield source.problem(
                f"expected {op.attributes[name].type.value}, got {value!r}",
                *path,
                "attributes",
                name,
            )
