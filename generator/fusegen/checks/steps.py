"""Steps of an op: each reads and writes shapes and types that its primitive has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..ir.dtypes import DType
from ..ir.naming import gradient
from ..ir.primitives import DTYPES, SHAPES, SIGNATURES
from ..ir.shapes import Expr, Shape
from ..spec.diagnostics import Problem
from ..spec.load import Source
from ..spec.op import OpSpec, StepSpec, TensorSpec

Sizes = dict[str, tuple[Expr | str, ...]]
"""What each name of a rule stands for in a step: one size, or several leading ones."""


def check_step_tensors(
    op: OpSpec, step: StepSpec, source: Source, path: tuple[str | int, ...]
) -> Iterator[Problem]:
    """Problems of one step whose tensors are all declared."""
    rules = SHAPES.get((step.primitive, step.kind))
    if rules is None:
        return
    words = f"{step.primitive.value} {step.kind}" if step.kind else step.primitive.value
    tensors = _tensors(op)
    slots = {slot: tensors[name] for slot, name in step.slots if name in tensors}
    signature = SIGNATURES[step.primitive]
    sizes: Sizes = {}
    for slot in (*signature.inputs, *signature.optional_inputs, *signature.outputs):
        if slot not in slots:
            continue
        spec = slots[slot]
        if slot not in rules:
            yield source.problem(f"{words} takes {', '.join(rules)}, not {slot!r}", *path, slot)
            continue
        if not _matches(rules[slot], spec.shape, sizes):
            yield source.problem(
                f"expected {_expected(rules[slot], sizes)} for {slot!r}, got {spec.shape}: {words}"
                f" has {_rule_text(rules)}",
                *path,
                slot,
            )
        dtype = DTYPES.get(step.primitive, {}).get(slot, DType.IO)
        if spec.dtype is not dtype:
            yield source.problem(
                f"expected {dtype.value} for {slot!r} of {words}, got {spec.dtype.value}",
                *path,
                slot,
            )


def _tensors(op: OpSpec) -> Mapping[str, TensorSpec]:
    """Every tensor that a step may name; a gradient is like what it is the gradient of."""
    gradients = {gradient(name): spec for name, spec in op.tensors.items() if spec.differentiable}
    return {**op.tensors, **gradients}


def _sizes_of(shape: Shape) -> tuple[Expr | str, ...]:
    return (*((f"{shape.leading}...",) if shape.leading else ()), *shape.dims)


def _matches(rule: str, shape: Shape, sizes: Sizes) -> bool:
    """Whether a shape is what a rule says; names that are new are bound to its sizes."""
    names, got = rule.split(), _sizes_of(shape)
    several = names[0].endswith("...")
    least = len(names)
    if len(got) < least or (len(got) > least and not several):
        return False
    if not several and shape.leading:
        return False
    own = len(got) - least + 1 if several else 1
    parts = [got[:own], *((size,) for size in got[own:])]
    bound = {name: part for name, part in zip(names, parts, strict=True) if name not in sizes}
    fits = all({**bound, **sizes}[name] == part for name, part in zip(names, parts, strict=True))
    if fits:
        sizes.update(bound)
    return fits


def _expected(rule: str, sizes: Sizes) -> str:
    """The rule with the sizes that other operands have fixed."""
    words = [str(size) for name in rule.split() for size in sizes.get(name, (name,))]
    return f"[{', '.join(words)}]"


def _rule_text(rules: Mapping[str, str]) -> str:
    return ", ".join(f"{slot} [{rule.replace(' ', ', ')}]" for slot, rule in rules.items())
