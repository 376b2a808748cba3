"""Steps of an op: each reads and writes shapes and types that its primitive has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..ir.naming import gradient
from ..ir.shapes import Const, Expr, Sym
from ..spec.diagnostics import Problem
from ..spec.load import Source
from ..spec.op import OpSpec, StepSpec, TensorSpec
from ..steps import definition
from ..steps.definition import StepDef
from ..steps.sizes import Sizes, bind, sizes_of, spelled, unequal


def check_step_tensors(
    op: OpSpec, step: StepSpec, source: Source, path: tuple[str | int, ...]
) -> Iterator[Problem]:
    """Problems of one step whose tensors are all declared."""
    signature = definition(step.primitive)
    rules = signature.shapes[step.kind]
    words = f"{step.primitive} {step.kind}" if step.kind else step.primitive
    tensors = _tensors(op)
    slots = {slot: tensors[name] for slot, name in step.slots if name in tensors}
    sizes: Sizes = {}
    fitting = True
    for slot in (*signature.slots, *signature.results):
        if slot not in slots:
            continue
        spec = slots[slot]
        if slot not in rules:
            yield source.problem(f"{words} takes {', '.join(rules)}, not {slot!r}", *path, slot)
            continue
        if not bind(rules[slot], spec.shape, sizes):
            fitting = False
            yield source.problem(
                f"expected {_expected(rules[slot], sizes)} for {slot!r}, got {spec.shape}: {words}"
                f" has {_rule_text(rules)}",
                *path,
                slot,
            )
        expected = signature.types(slot)
        if spec.dtype not in expected:
            named = " or ".join(dtype.value for dtype in expected)
            yield source.problem(
                f"expected {named} for {slot!r} of {words}, got {spec.dtype.value}",
                *path,
                slot,
            )
    if fitting and {*rules} <= {*slots}:
        for problem in _unequal(signature, step, sizes):
            yield source.problem(f"{words}: {problem}", *path)


def _unequal(signature: StepDef, step: StepSpec, sizes: Sizes) -> Iterator[str]:
    """What is wrong with sizes that follow from others and from integers of the op."""
    found = {
        name.removesuffix("..."): tuple(size for size in given if not isinstance(size, str))
        for name, given in sizes.items()
    }
    named = {name: _count(value) for name, value in step.attributes}
    counts = {name: value for name, value in named.items() if value is not None}
    yield from unequal(signature, sizes_of(signature, found), counts)


def _count(value: float | int | bool | str) -> Expr | None:
    """An attribute as shapes have it: the op's by its name; None of what is no integer."""
    if isinstance(value, str):
        return Sym(value)
    return Const(value) if type(value) is int else None


def _tensors(op: OpSpec) -> Mapping[str, TensorSpec]:
    """Every tensor that a step may name; a gradient is like what it is the gradient of."""
    gradients = {gradient(name): spec for name, spec in op.tensors.items() if spec.has_gradient}
    return {**op.tensors, **gradients}


def _expected(rule: str, sizes: Sizes) -> str:
    """The rule with the sizes that other operands have fixed."""
    words = [str(size) for name in rule.split() for size in sizes.get(name, (spelled(name),))]
    return f"[{', '.join(words)}]"


def _rule_text(rules: Mapping[str, str]) -> str:
    return ", ".join(f"{slot} {_expected(rule, {})}" for slot, rule in rules.items())
