"""Cross checks of the specs against each other: every name means something, every rule is total."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .load import Source, SpecSet
from .model.primitives import SIGNATURES
from .model.shapes import Shape, symbols
from .model.source import Problem, did_you_mean
from .model.specs import (
    ArchSpec,
    ChainItem,
    FamilySpec,
    FusionSpec,
    KindSpec,
    ModuleSpec,
    OpSpec,
    RecipeSpec,
    SpecKind,
    StepSpec,
    TargetSpec,
    TensorSpec,
)
from .passes.math import operand_symbols
from .pointwise import ExpressionError, parse


def check(specs: SpecSet, *, complete: bool) -> Iterator[Problem]:
    """Every problem between specs.

    Args:
        specs: what was read.
        complete: whether every file could be read; if not, a missing name proves nothing.
    """
    for name, op in specs.ops.items():
        yield from _check_op(op, specs.source(SpecKind.OPS, name))
    for name, module in specs.modules.items():
        yield from _check_module(module, specs, specs.source(SpecKind.MODULES, name), complete)
    for name, recipe in specs.recipes.items():
        yield from _check_recipe(recipe, specs.source(SpecKind.RECIPES, name))
    for name, arch in specs.archs.items():
        yield from _check_arch(arch, specs.source(SpecKind.ARCHS, name))
    for name, fusion in specs.fusions.items():
        yield from _check_fusion(fusion, specs.source(SpecKind.FUSIONS, name))
    if complete:
        for name, target in specs.targets.items():
            yield from _check_target(target, specs, specs.source(SpecKind.TARGETS, name))


def _unknown(
    source: Source, what: str, word: str, known: Iterable[str], *path: str | int
) -> Iterator[Problem]:
    """A problem where a word is not among the known ones."""
    choices = list(known)
    if word not in choices:
        yield source.problem(f"unknown {what} {word!r}{did_you_mean(word, choices)}", *path)


# Ops


def _check_op(op: OpSpec, source: Source) -> Iterator[Problem]:
    sections = {"inputs": op.inputs, "parameters": op.parameters, "outputs": op.outputs}
    if not op.inputs:
        yield source.problem("an op needs an input", "inputs")
    if not op.outputs:
        yield source.problem("an op needs an output", "outputs")
    seen: dict[str, str] = {}
    for section, tensors in sections.items():
        for name, tensor in tensors.items():
            yield from _check_tensor(op, section, name, tensor, source)
            if name in seen:
                yield source.problem(f"{name!r} is also in {seen[name]}", section, name)
            seen[name] = section
    yield from _check_dims(op, source)
    if bool(op.pointwise) == bool(op.forward):
        yield source.problem("an op has either 'pointwise' or 'forward'", "op")
    elif op.pointwise:
        yield from _check_pointwise(op, source)
    else:
        yield from _check_programs(op, source)


def _check_tensor(
    op: OpSpec, section: str, name: str, tensor: TensorSpec, source: Source
) -> Iterator[Problem]:
    for symbol in sorted(tensor.shape.symbols()):
        yield from _unknown(source, "dimension", symbol, op.dims, section, name, "shape")
    if tensor.interleave:
        yield from _unknown(
            source, "attribute", tensor.interleave, op.attributes, section, name, "interleave"
        )
    if tensor.init and section != "parameters":
        yield source.problem("only a parameter has 'init'", section, name, "init")
    if tensor.optional and section != "parameters":
        yield source.problem("only a parameter may be optional", section, name, "optional")
    if section == "parameters" and tensor.shape.leading:
        yield source.problem("a parameter has a fixed number of dimensions", section, name, "shape")
    if tensor.halves and not op.pointwise:
        yield source.problem("'halves' belongs to a pointwise op", section, name, "halves")


def _check_dims(op: OpSpec, source: Source) -> Iterator[Problem]:
    used = frozenset().union(*(tensor.shape.symbols() for tensor in op.tensors.values()))
    for symbol in op.dims:
        if symbol not in used:
            yield source.problem(f"dimension {symbol!r} is in no shape", "dims", symbol)
    yield from _check_symbols(op.dims, source)


def _check_symbols(dims: Mapping[str, str], source: Source) -> Iterator[Problem]:
    words = list(dims.values())
    for symbol, word in dims.items():
        if words.count(word) > 1:
            yield source.problem(f"two dimensions have the keyword {word!r}", "dims", symbol)
        if symbol in ("I", "O"):
            yield source.problem(
                f"symbol {symbol!r} reads like a digit, and linters refuse it; use another letter",
                "dims", symbol,
            )


def _check_pointwise(op: OpSpec, source: Source) -> Iterator[Problem]:
    if op.backward:
        yield source.problem("the backward of a pointwise op is derived; remove it", "backward")
    for output, text in op.pointwise.items():
        yield from _unknown(source, "output", output, op.outputs, "pointwise", output)
        try:
            parse(text, operand_symbols(op), {name: None for name in op.attributes})
        except ExpressionError as error:
            yield source.problem(str(error), "pointwise", output)
    for output in op.outputs:
        if output not in op.pointwise:
            yield source.problem(f"output {output!r} has no expression", "pointwise")


def _check_programs(op: OpSpec, source: Source) -> Iterator[Problem]:
    defined = {*op.inputs, *op.parameters}
    yield from _check_steps(op, "forward", op.forward, defined, source)
    for output in op.outputs:
        if not any(_writes(step, output) for step in op.forward):
            yield source.problem(f"no forward step writes output {output!r}", "forward")
    defined |= {f"d{name}" for name, spec in op.outputs.items() if spec.differentiable}
    yield from _check_steps(op, "backward", op.backward, defined, source)
    for name, spec in {**op.inputs, **op.parameters}.items():
        if spec.differentiable and not any(_writes(step, f"d{name}") for step in op.backward):
            yield source.problem(
                f"no backward step writes 'd{name}'; say differentiable: false if {name!r} has no"
                " gradient",
                "backward",
            )


def _writes(step: StepSpec, name: str) -> bool:
    outputs = SIGNATURES[step.primitive].outputs
    return any(slot in outputs and tensor == name for slot, tensor in step.slots)


def _check_steps(
    op: OpSpec, section: str, steps: tuple[StepSpec, ...], defined: set[str], source: Source
) -> Iterator[Problem]:
    """Straight-line order: a step reads what is there and writes what is not."""
    known = {*op.tensors, *(f"d{name}" for name in op.tensors)}
    for index, step in enumerate(steps):
        signature = SIGNATURES[step.primitive]
        for slot, tensor in step.slots:
            path = (section, index, slot)
            if slot in signature.attributes:
                yield from _unknown(source, "attribute", tensor, op.attributes, *path)
            elif slot in signature.outputs:
                yield from _unknown(source, "tensor", tensor, known, *path)
                if tensor in defined:
                    yield source.problem(f"{tensor!r} is already there", *path)
                defined.add(tensor)
            elif tensor not in defined:
                if tensor in known:
                    yield source.problem(f"{tensor!r} is read before it is written", *path)
                else:
                    yield from _unknown(source, "tensor", tensor, known, *path)


# Modules


def _check_module(
    module: ModuleSpec, specs: SpecSet, source: Source, complete: bool
) -> Iterator[Problem]:
    if bool(module.op) == bool(module.chain):
        yield source.problem("a module has either 'op' or 'chain'", "module")
        return
    if module.op:
        for key in ("summary", "dims", "inputs"):
            if getattr(module, key):
                yield source.problem(f"{key!r} comes from the op; remove it", key)
        if complete:
            yield from _unknown(source, "op", module.op, specs.ops, "op")
        return
    for key in ("summary", "dims", "inputs"):
        if not getattr(module, key):
            yield source.problem(f"a chain needs {key!r}", "module")
    yield from _check_symbols(module.dims, source)
    for name, tensor in module.inputs.items():
        for symbol in sorted(tensor.shape.symbols()):
            yield from _unknown(source, "dimension", symbol, module.dims, "inputs", name, "shape")
    if complete:
        yield from _check_chain(module, specs, source)


def _check_chain(module: ModuleSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    prefixes: set[str | None] = set()
    available = set(module.inputs)
    read: dict[str, int] = {}
    result: Shape | None = next((t.shape for t in module.inputs.values()), None)
    previous = next(iter(module.inputs), "")
    for index, item in enumerate(module.chain):
        if item.as_ in prefixes or (item.as_ is None and len(module.chain) > 1):
            yield source.problem("every op of a chain needs its own 'as'", "chain", index)
        prefixes.add(item.as_)
        if item.op not in specs.ops:
            yield from _unknown(source, "op", item.op, specs.ops, "chain", index, "op")
            return
        op = specs.ops[item.op]
        yield from _check_item(module, item, op, available, source, index)
        first = next(iter(op.inputs))
        expected = op.inputs[first].shape.substitute(item.dims).fixed()
        if first not in item.with_ and result and expected != result.fixed():
            yield source.problem(
                f"{item.op} reads {expected}, but {previous!r} is {result}; map the dimensions with"
                " 'dims'",
                "chain", index,
            )
        for name in op.inputs:
            tensor = item.with_.get(name, previous if name == first else name)
            if tensor in read and op.inputs[name].differentiable:
                yield source.problem(
                    f"{tensor!r} is read by two ops, so its gradient would be a sum; split it with"
                    " make_extra_output",
                    "chain", index,
                )
            if op.inputs[name].differentiable:
                read[tensor] = index
        output, spec = next(iter(op.outputs.items()))
        result = spec.shape.substitute(item.dims)
        previous = item.out or f"{item.as_}_{output}"
        available.add(previous)


def _check_item(
    module: ModuleSpec,
    item: ChainItem,
    op: OpSpec,
    available: set[str],
    source: Source,
    index: int,
) -> Iterator[Problem]:
    path = ("chain", index)
    for name, tensor in item.with_.items():
        yield from _unknown(source, "input", name, op.inputs, *path, "with", name)
        yield from _unknown(source, "tensor", tensor, available, *path, "with", name)
    for name in list(op.inputs)[1:]:
        if name not in item.with_:
            if name not in available:
                yield source.problem(
                    f"{item.op} needs {name!r}: name a module input so, or map it in 'with'", *path
                )
    for symbol, expr in item.dims.items():
        yield from _unknown(source, "dimension", symbol, op.dims, *path, "dims", symbol)
        for used in sorted(symbols(expr)):
            yield from _unknown(source, "dimension", used, module.dims, *path, "dims", symbol)
    for symbol in op.dims:
        if symbol not in item.dims and symbol not in module.dims:
            yield source.problem(f"{item.op} needs dimension {symbol!r} in 'dims'", *path)
    for name in item.attributes:
        yield from _unknown(source, "attribute", name, op.attributes, *path, "attributes", name)


# Recipes, archs, fusions, targets


def _check_recipe(recipe: RecipeSpec, source: Source) -> Iterator[Problem]:
    from .model.primitives import GemmKind

    for kind in GemmKind:
        if kind not in recipe.gemm:
            yield source.problem(f"the accumulation of {kind.value} is missing", "gemm")
    for role, spec in recipe.roles.items():
        if (spec.scale.source.value == "history") != (spec.scale.history > 0):
            yield source.problem(
                "a scale from a history has 'history' above 0, another has none",
                "roles", role.value, "scale",
            )


def _check_arch(arch: ArchSpec, source: Source) -> Iterator[Problem]:
    compiled = [arch.capability is not None, arch.gencode is not None, arch.toolkit is not None]
    if any(compiled) != all(compiled):
        yield source.problem("'capability', 'gencode' and 'toolkit' go together", "arch")
    if arch.kernels and not arch.gencode:
        yield source.problem("kernels need 'gencode'", "kernels")
    owners: dict[str, str] = {}
    for name, family in arch.kernels.items():
        for index, primitive in enumerate(family.implements):
            if primitive.value in owners:
                yield source.problem(
                    f"{primitive.value} is already implemented by {owners[primitive.value]!r}",
                    "kernels", name, "implements", index,
                )
            owners[primitive.value] = name
        yield from _check_family(name, family, source)


def _check_family(name: str, family: FamilySpec, source: Source) -> Iterator[Problem]:
    for kind, spec in family.kinds.items():
        yield from _check_kind(spec, source, ("kernels", name, "kinds", kind.value))


def _check_kind(
    spec: KindSpec, source: Source, path: tuple[str, ...]
) -> Iterator[Problem]:
    names = [point.name for point in spec.points]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield source.problem(f"point {name} is written twice", *path, "points", index)
    if not spec.select:
        yield source.problem("the last rule must have no condition", *path, "select")
    for index, rule in enumerate(spec.select):
        yield from _unknown(source, "point", rule.use, names, *path, "select", index, "use")
        last = index == len(spec.select) - 1
        if last and rule.when.conditions:
            yield source.problem(
                "the last rule must have no condition", *path, "select", index, "when"
            )
        if not last and not rule.when.conditions:
            yield source.problem("rules after this one are never used", *path, "select", index)
    unused = set(names) - {rule.use for rule in spec.select}
    for name in sorted(unused):
        yield source.problem(
            f"no rule uses point {name}", *path, "points", names.index(name)
        )


def _check_fusion(fusion: FusionSpec, source: Source) -> Iterator[Problem]:
    match = (*fusion.match.forward, *fusion.match.backward)
    rewrite = (*fusion.rewrite.forward, *fusion.rewrite.backward)
    if not match or not rewrite:
        yield source.problem("a fusion needs steps in 'match' and in 'rewrite'", "fusion")
    if fusion.pass_.value == "forward" and (fusion.match.backward or fusion.rewrite.backward):
        yield source.problem("a forward fusion has no backward steps", "match")
    if fusion.pass_.value == "backward" and (fusion.match.forward or fusion.rewrite.forward):
        yield source.problem("a backward fusion has no forward steps", "match")
    variables = {name for step in match for name in (*step.in_, *step.out)}
    for section, steps in (("forward", fusion.rewrite.forward), ("backward", fusion.rewrite.backward)):
        for index, step in enumerate(steps):
            for name in (*step.in_, *step.out):
                yield from _unknown(source, "variable", name, variables, "rewrite", section, index)
    for key, names in (("keep", fusion.keep), ("drop", fusion.drop)):
        for index, name in enumerate(names):
            yield from _unknown(source, "variable", name, variables, key, index)


def _check_target(target: TargetSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    named: Mapping[str, tuple[tuple[str, ...], Mapping[str, object]]] = {
        "archs": (target.archs, specs.archs),
        "modules": (target.modules, specs.modules),
        "recipes": (target.recipes, specs.recipes),
    }
    for key, (words, known) in named.items():
        if not words:
            yield source.problem(f"a target needs {key}", key)
        for index, word in enumerate(words):
            yield from _unknown(source, key[:-1], word, known, key, index)
            if word in words[:index]:
                yield source.problem(f"{word!r} is listed twice", key, index)
