"""Cross checks of the specs against each other: every name means something, every rule is total."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from .load import Source, SpecSet
from .model.dtypes import DType
from .model.primitives import PRINTED, SIGNATURES, GemmKind
from .model.shapes import Const, Shape, mul, symbols
from .model.source import Problem, did_you_mean
from .model.specs import (
    AmaxSource,
    ArchSpec,
    AttributeSpec,
    AttributeType,
    Broadcast,
    ChainItem,
    FamilySpec,
    FusionPass,
    FusionSpec,
    KindSpec,
    ModuleSpec,
    OpSpec,
    PatternStep,
    RecipeSpec,
    SpecKind,
    StepSpec,
    TargetSpec,
    TensorSpec,
    kind_problem,
)
from .naming import gradient
from .passes.math import operand_symbols
from .pointwise import ExpressionError, is_reserved, names_in, parse

_QUANTIZED = (DType.E4M3, DType.E5M2, DType.E2M1)
_INTEGERS = (DType.INT64, DType.UINT8)
_PYTHON_TYPES: Mapping[AttributeType, type | tuple[type, ...]] = {
    AttributeType.FLOAT: (float, int),
    AttributeType.INT: int,
    AttributeType.BOOL: bool,
    AttributeType.STRING: str,
}


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
        yield from _check_fusion(fusion, specs, specs.source(SpecKind.FUSIONS, name), complete)
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
    sections = {
        "inputs": op.inputs,
        "parameters": op.parameters,
        "internal": op.internal,
        "outputs": op.outputs,
    }
    if not op.inputs:
        yield source.problem("an op needs an input", "inputs")
    if not op.outputs:
        yield source.problem("an op needs an output", "outputs")
    for section, tensors in sections.items():
        for name, tensor in tensors.items():
            yield from _check_tensor(op, section, name, tensor, source)
    yield from _check_names({**sections, "attributes": op.attributes}, source)
    for name, attribute in op.attributes.items():
        if not _fits(attribute, attribute.default):
            yield source.problem(
                f"expected a default of type {attribute.type.value}, got"
                f" {attribute.default!r}{_number_hint(attribute.default)}",
                "attributes",
                name,
                "default",
            )
    yield from _check_dims(op, source)
    if not op.inputs or not op.outputs:
        return
    if bool(op.pointwise) == bool(op.forward):
        got = "both" if op.forward else "none"
        yield source.problem(f"an op has either 'pointwise' or 'forward', got {got}", "op")
    elif op.pointwise:
        yield from _check_pointwise(op, source)
    else:
        yield from _check_programs(op, source)


def _fits(attribute: AttributeSpec, value: object) -> bool:
    """Whether a value is of an attribute's type; a YAML ``true`` is no number."""
    number = not isinstance(value, bool) or attribute.type is AttributeType.BOOL
    return number and isinstance(value, _PYTHON_TYPES[attribute.type])


def _number_hint(value: object) -> str:
    """YAML reads ``1e-5`` as text, which nobody expects."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9.]+[eE][-+]?[0-9]+", value):
        return "; in YAML a number with an exponent has a point and a sign, such as 1.0e-5"
    return ""


def _check_names(sections: Mapping[str, Iterable[str]], source: Source) -> Iterator[Problem]:
    """Names become variables of Python and C++: each once, none a word of the languages."""
    seen: dict[str, str] = {}
    for section, names in sections.items():
        for name in names:
            if is_reserved(name):
                yield source.problem(f"{name!r} is a reserved word; choose another", section, name)
            if name in seen:
                yield source.problem(
                    f"{name!r} is also in {seen[name]}; choose another", section, name
                )
            seen[name] = section
    for name in seen:
        if gradient(name) in seen:
            yield source.problem(
                f"{gradient(name)!r} is the gradient of {name!r}; choose another",
                seen[gradient(name)],
                gradient(name),
            )


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
        yield source.problem("only a parameter has 'init'; remove it", section, name, "init")
    if tensor.optional and section != "parameters":
        yield source.problem("only a parameter may be optional", section, name, "optional")
    if tensor.dtype in _INTEGERS and tensor.differentiable:
        yield source.problem(
            f"{name!r} is of {tensor.dtype.value} and has no gradient; say differentiable: false",
            section,
            name,
        )
    if section == "parameters" and tensor.shape.leading:
        yield source.problem("a parameter has a fixed number of dimensions", section, name, "shape")
    for key in ("halves", "interleave", "broadcast"):
        if getattr(tensor, key) and (not op.pointwise or section not in ("inputs", "parameters")):
            yield source.problem(
                f"{key!r} belongs to an operand of a pointwise op", section, name, key
            )


def _check_dims(op: OpSpec, source: Source) -> Iterator[Problem]:
    used = frozenset().union(*(tensor.shape.symbols() for tensor in op.tensors.values()))
    for symbol in op.dims:
        if symbol not in used:
            yield source.problem(f"dimension {symbol!r} is in no shape; remove it", "dims", symbol)
    yield from _check_symbols(op.dims, source)


def _check_symbols(dims: Mapping[str, str], source: Source) -> Iterator[Problem]:
    words = list(dims.values())
    for symbol, word in dims.items():
        if words.count(word) > 1:
            yield source.problem(
                f"two dimensions have the keyword {word!r}; rename one", "dims", symbol
            )
        if symbol in ("I", "O"):
            yield source.problem(
                f"symbol {symbol!r} reads like a digit, and linters refuse it; use another letter",
                "dims",
                symbol,
            )


def _check_pointwise(op: OpSpec, source: Source) -> Iterator[Problem]:
    if op.backward:
        yield source.problem("the backward of a pointwise op is derived; remove it", "backward")
    for name in op.internal:
        yield source.problem("a pointwise op has no internal tensors; remove it", "internal", name)
    read: set[str] | None = set()
    for output, text in op.pointwise.items():
        yield from _unknown(source, "output", output, op.outputs, "pointwise", output)
        try:
            expression = parse(text, operand_symbols(op), dict.fromkeys(op.attributes))
        except ExpressionError as error:
            yield source.problem_within(error.message, error.column, "pointwise", output)
            read = None
        else:
            read = None if read is None else read | names_in(expression.tree)
    for output in op.outputs:
        if output not in op.pointwise:
            yield source.problem(f"output {output!r} has no expression", "pointwise")
    for section, tensors in (("inputs", op.inputs), ("parameters", op.parameters)):
        for name, tensor in tensors.items():
            yield from _check_operand(op, section, name, tensor, read, source)
    for name, attribute in op.attributes.items():
        numeric = attribute.type in (AttributeType.FLOAT, AttributeType.INT)
        if read and name in read and not numeric:
            yield source.problem(
                f"{name!r} is in the expression, so its type is float or int, not"
                f" {attribute.type.value}",
                "attributes",
                name,
                "type",
            )


def _check_operand(
    op: OpSpec, section: str, name: str, tensor: TensorSpec, read: set[str] | None, source: Source
) -> Iterator[Problem]:
    """An operand is indexed like the output, so its shape follows from the output's.

    Args:
        read: symbols that the expressions use; None where one could not be read.
    """
    if tensor.optional:
        yield source.problem(
            "an operand of an expression is always there", section, name, "optional"
        )
    if tensor.halves and tensor.broadcast:
        yield source.problem("an operand has 'halves' or 'broadcast', not both", section, name)
        return
    if tensor.interleave and not tensor.halves:
        yield source.problem("'interleave' needs 'halves'", section, name, "interleave")
    if read is not None and not read & {*(tensor.halves or (name,))}:
        yield source.problem(f"no expression uses {name!r}; remove it", section, name)
    output = next(iter(op.outputs.values()))
    if not output.shape.flat or not tensor.shape.symbols() <= {*op.dims}:
        return
    expected = _operand_shape(tensor, output.shape)
    if tensor.shape != expected:
        how = f" with broadcast: {tensor.broadcast.value}" if tensor.broadcast else ""
        how = " with halves" if tensor.halves else how
        yield source.problem(
            f"expected {expected} for an operand{how} of an output {output.shape}, got"
            f" {tensor.shape}",
            section,
            name,
            "shape",
        )


def _operand_shape(tensor: TensorSpec, output: Shape) -> Shape:
    """The shape an operand must have, from how it is indexed."""
    if tensor.broadcast is Broadcast.COLUMN:
        return Shape(None, output.flat[-1:])
    if not output.dims:
        return output
    *rows, columns = output.dims
    if tensor.broadcast is Broadcast.ROW:
        return Shape(output.leading, tuple(rows))
    if tensor.halves:
        return Shape(output.leading, (*rows, mul(Const(2), columns)))
    return output


def _check_programs(op: OpSpec, source: Source) -> Iterator[Problem]:
    defined = {*op.inputs, *op.parameters}
    yield from _check_steps(op, "forward", op.forward, defined, source)
    for output in op.outputs:
        if not any(_writes(step, output) for step in op.forward):
            yield source.problem(f"no forward step writes output {output!r}", "forward")
    defined |= {gradient(name) for name, spec in op.outputs.items() if spec.differentiable}
    yield from _check_steps(op, "backward", op.backward, defined, source)
    for name, spec in {**op.inputs, **op.parameters}.items():
        written = any(_writes(step, gradient(name)) for step in op.backward)
        if spec.differentiable and not written:
            yield source.problem(
                f"no backward step writes {gradient(name)!r}; say differentiable: false if {name!r}"
                " has no gradient",
                "backward",
            )


def _writes(step: StepSpec, name: str) -> bool:
    outputs = SIGNATURES[step.primitive].outputs
    return any(slot in outputs and tensor == name for slot, tensor in step.slots)


def _check_steps(
    op: OpSpec, section: str, steps: tuple[StepSpec, ...], defined: set[str], source: Source
) -> Iterator[Problem]:
    """Straight-line order: a step reads what is there and writes what is not."""
    gradients = {gradient(name) for name, spec in op.tensors.items() if spec.differentiable}
    known = {*op.tensors, *gradients}
    for index, step in enumerate(steps):
        signature = SIGNATURES[step.primitive]
        for slot, tensor in step.slots:
            path = (section, index, slot)
            if slot in signature.attributes:
                yield from _unknown(source, "attribute", tensor, op.attributes, *path)
            elif slot in signature.outputs:
                yield from _unknown(source, "tensor", tensor, known, *path)
                if tensor in defined:
                    yield source.problem(
                        f"{tensor!r} is already there; a tensor is written once", *path
                    )
                defined.add(tensor)
            elif tensor not in defined:
                if tensor in known:
                    yield source.problem(
                        f"{tensor!r} is read before it is written; move the step down", *path
                    )
                else:
                    yield from _unknown(source, "tensor", tensor, known, *path)


# Modules


def _check_module(
    module: ModuleSpec, specs: SpecSet, source: Source, complete: bool
) -> Iterator[Problem]:
    if bool(module.op) == bool(module.chain):
        got = "both" if module.op else "none"
        yield source.problem(f"a module has either 'op' or 'chain', got {got}", "module")
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
    if any(not op.inputs or not op.outputs for op in specs.ops.values()):
        return  # said about the op
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
            yield from _unknown(source, "op", item.op, specs.ops, "chain", index, "op")
            return
        op = specs.ops[item.op]
        yield from _check_item(module, item, op, available, source, index)
        for position, (name, spec) in enumerate(op.inputs.items()):
            tensor = item.with_.get(name, name if position else previous)
            yield from _check_reading(item, spec, tensor, available, source, index)
            if tensor in read and spec.differentiable:
                yield source.problem(
                    f"{tensor!r} is read by two ops, so its gradient would be a sum; split it with"
                    " make_extra_output",
                    "chain",
                    index,
                )
            if spec.differentiable:
                read.add(tensor)
        results = _results(item, op)
        for name, spec in zip(results, op.outputs.values(), strict=True):
            if name in available and not shared:
                yield source.problem(
                    f"{name!r} is already there; give the result another name with 'out'",
                    "chain",
                    index,
                )
            shape = spec.shape.substitute(item.dims).led_by(leading)
            available[name] = replace(spec, shape=shape)
        previous = results[0]


def _check_reading(
    item: ChainItem,
    spec: TensorSpec,
    tensor: str,
    available: Mapping[str, TensorSpec],
    source: Source,
    index: int,
) -> Iterator[Problem]:
    """The tensor an op reads has the shape and the type that the op's input has."""
    if tensor not in available:
        return
    got, expected = available[tensor], spec.shape.substitute(item.dims)
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


def _results(item: ChainItem, op: OpSpec) -> tuple[str, ...]:
    """What the chain calls the results of an op."""
    first, *others = op.outputs
    prefix = f"{item.as_}_" if item.as_ else ""
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
        yield from _unknown(source, "input", name, op.inputs, *path, "with", name)
        yield from _unknown(source, "tensor", tensor, available, *path, "with", name)
    for name in list(op.inputs)[1:]:
        if name not in item.with_ and name not in available:
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
    for name, value in item.attributes.items():
        yield from _unknown(source, "attribute", name, op.attributes, *path, "attributes", name)
        if name in op.attributes and not _fits(op.attributes[name], value):
            yield source.problem(
                f"expected {op.attributes[name].type.value}, got {value!r}",
                *path,
                "attributes",
                name,
            )


# Recipes, archs, fusions, targets


def _check_recipe(recipe: RecipeSpec, source: Source) -> Iterator[Problem]:
    for kind in GemmKind:
        if kind not in recipe.gemm:
            yield source.problem(f"the accumulation of {kind.value} is missing", "gemm")
    for role, spec in recipe.roles.items():
        path = ("roles", role.value)
        if spec.format not in _QUANTIZED:
            formats = ", ".join(dtype.value for dtype in _QUANTIZED)
            yield source.problem(
                f"expected a format among {formats}, got {spec.format.value}", *path, "format"
            )
        if (spec.scale.source is AmaxSource.HISTORY) != (spec.scale.history > 0):
            yield source.problem(
                "a scale from a history has 'history' above 0, another has none", *path, "scale"
            )


def _check_arch(arch: ArchSpec, source: Source) -> Iterator[Problem]:
    compiled = [arch.capability is not None, arch.gencode is not None, arch.toolkit is not None]
    if any(compiled) != all(compiled):
        yield source.problem(
            "'capability', 'gencode' and 'toolkit' go together; write all or none", "arch"
        )
    if arch.kernels and not arch.gencode:
        yield source.problem("kernels need 'capability', 'gencode' and 'toolkit'", "kernels")
    owners: dict[str, str] = {}
    for name, family in arch.kernels.items():
        for index, primitive in enumerate(family.implements):
            if primitive.value in owners:
                yield source.problem(
                    f"{primitive.value} is already implemented by {owners[primitive.value]!r};"
                    " remove one",
                    "kernels",
                    name,
                    "implements",
                    index,
                )
            owners[primitive.value] = name
        yield from _check_family(name, family, source)


def _check_family(name: str, family: FamilySpec, source: Source) -> Iterator[Problem]:
    for kind, spec in family.kinds.items():
        yield from _check_kind(spec, source, ("kernels", name, "kinds", kind.value))


def _check_kind(spec: KindSpec, source: Source, path: tuple[str, ...]) -> Iterator[Problem]:
    names = [point.name for point in spec.points]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield source.problem(
                f"point {name} is written twice; remove one", *path, "points", index
            )
    if not spec.select:
        yield source.problem("expected a rule; the last one has no condition", *path, "select")
    for index, rule in enumerate(spec.select):
        yield from _unknown(source, "point", rule.use, names, *path, "select", index, "use")
        last = index == len(spec.select) - 1
        if last and rule.when.conditions:
            yield source.problem(
                "the last rule must have no condition; remove 'when' or add a rule",
                *path,
                "select",
                index,
                "when",
            )
        if not last and not rule.when.conditions:
            yield source.problem(
                "rules after this one are never used; move it to the end or give it a condition",
                *path,
                "select",
                index,
            )
    unused = set(names) - {rule.use for rule in spec.select}
    for name in sorted(unused):
        yield source.problem(
            f"no rule uses point {name}; remove it or add a rule",
            *path,
            "points",
            names.index(name),
        )


def _check_fusion(
    fusion: FusionSpec, specs: SpecSet, source: Source, complete: bool
) -> Iterator[Problem]:
    match = (*fusion.match.forward, *fusion.match.backward)
    rewrite = (*fusion.rewrite.forward, *fusion.rewrite.backward)
    if not match or not rewrite:
        yield source.problem("a fusion needs steps in 'match' and in 'rewrite'", "fusion")
    if fusion.pass_ is FusionPass.FORWARD and (fusion.match.backward or fusion.rewrite.backward):
        yield source.problem("a forward fusion has no backward steps; say pass: joint", "pass")
    if fusion.pass_ is FusionPass.BACKWARD and (fusion.match.forward or fusion.rewrite.forward):
        yield source.problem("a backward fusion has no forward steps; say pass: joint", "pass")
    yield from _check_pattern(fusion, specs, source, complete)
    yield from _check_replacement(fusion, source)
    yield from _check_saving(fusion, source)
    if complete:
        for key, words, known in (
            ("archs", fusion.when.archs, specs.archs),
            ("recipes", fusion.when.recipes, specs.recipes),
        ):
            for index, word in enumerate(words):
                yield from _unknown(source, key[:-1], word, known, "when", key, index)


def _check_pattern(
    fusion: FusionSpec, specs: SpecSet, source: Source, complete: bool
) -> Iterator[Problem]:
    """Steps that can occur, and at most one expression per direction, which the rewrite keeps."""
    for section, steps in (("forward", fusion.match.forward), ("backward", fusion.match.backward)):
        for index, step in enumerate(steps):
            if step.kind is not None:
                yield from _check_step_kind(step, source, "match", section, index)
            yield from _check_arity(step, source, "match", section, index)
            if step.op and complete:
                yield from _unknown(source, "op", step.op, specs.ops, "match", section, index, "op")
            if step.with_:
                yield source.problem(
                    "a pattern names all operands in 'in'", "match", section, index, "with"
                )
        pointwise = [i for i, s in enumerate(steps) if s.step in PRINTED and not s.op]
        for index in pointwise[1:]:
            yield source.problem(
                f"a second {steps[index].step.value} step without 'op'; a fusion keeps the"
                " expression of one",
                "match",
                section,
                index,
            )


def _check_replacement(fusion: FusionSpec, source: Source) -> Iterator[Problem]:
    """Replacing steps read and write what the pattern of their direction or the forward names."""
    variables = _variables(fusion.match.forward)
    for section, pattern, steps in (
        ("forward", fusion.match.forward, fusion.rewrite.forward),
        ("backward", fusion.match.backward, fusion.rewrite.backward),
    ):
        variables |= _variables(pattern)
        for index, step in enumerate(steps):
            yield from _check_step_kind(step, source, "rewrite", section, index)
            yield from _check_arity(step, source, "rewrite", section, index)
            for key, names in (("in", step.in_), ("with", step.with_.values()), ("out", step.out)):
                for name in names:
                    path = ("rewrite", section, index, key)
                    yield from _unknown(source, "variable", name, variables, *path)
            slots = SIGNATURES[step.step].optional_inputs
            for slot in step.with_:
                yield from _unknown(
                    source, "slot", slot, slots, "rewrite", section, index, "with", slot
                )
            if step.op:
                yield source.problem(
                    "a replacement names no op; remove it", "rewrite", section, index, "op"
                )


def _variables(steps: Iterable[PatternStep]) -> set[str]:
    return {name for step in steps for name in (*step.in_, *step.out)}


def _check_step_kind(step: PatternStep, source: Source, *path: str | int) -> Iterator[Problem]:
    wrong = kind_problem(step.step, step.kind)
    if wrong:
        yield source.problem(wrong, *path, *(("kind",) if step.kind else ()))


def _check_arity(step: PatternStep, source: Source, *path: str | int) -> Iterator[Problem]:
    signature = SIGNATURES[step.step]
    if signature.variadic:
        return
    least = len(signature.inputs)
    for key, got, low, high in (
        ("in", len(step.in_), least, least + len(signature.optional_inputs)),
        ("out", len(step.out), 1, len(signature.outputs)),
    ):
        if not low <= got <= high:
            span = str(low) if low == high else f"{low} to {high}"
            yield source.problem(
                f"{step.step.value} has {span} names in {key!r}, got {got}", *path, key
            )


def _check_saving(fusion: FusionSpec, source: Source) -> Iterator[Problem]:
    """What a joint fusion says of its saved tensors follows from its steps, and is checked."""
    read = {name for step in fusion.rewrite.backward for name in (*step.in_, *step.with_.values())}
    written = {name for step in fusion.rewrite.backward for name in step.out}
    for key, names, found, verb in (
        ("keep", fusion.keep, read, "reads"),
        ("drop", fusion.drop, written, "writes"),
    ):
        if names and fusion.pass_ is not FusionPass.JOINT:
            yield source.problem(f"only a joint fusion has {key!r}; remove it", key)
            continue
        for index, name in enumerate(names):
            if name not in found:
                yield source.problem(f"no backward step of 'rewrite' {verb} {name!r}", key, index)


def _check_target(target: TargetSpec, specs: SpecSet, source: Source) -> Iterator[Problem]:
    named: Mapping[str, tuple[tuple[str, ...], Mapping[str, object]]] = {
        "archs": (target.archs, specs.archs),
        "modules": (target.modules, specs.modules),
        "recipes": (target.recipes, specs.recipes),
    }
    for key, (words, known) in named.items():
        if not words:
            yield source.problem(f"a target needs {key}; name at least one", key)
        for index, word in enumerate(words):
            yield from _unknown(source, key[:-1], word, known, key, index)
            if word in words[:index]:
                yield source.problem(f"{word!r} is listed twice; remove one", key, index)
