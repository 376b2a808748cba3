"""Sizes of a step: what the names of its kind's rule stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..ir.shapes import Const, Expr, Shape, ceildiv, equal, parse_expr, product, substitute
from ..ir.step import Step
from . import definition
from .definition import Rule, StepDef

Sizes = dict[str, tuple[Expr | str, ...]]
"""What each name of a rule stands for in a step: one size, or several leading ones."""


def bind(rule: str, shape: Shape, sizes: Sizes) -> bool:
    """Whether a shape is what a rule says; names that are new are bound to its sizes."""
    names, got = rule.split(), _sizes_of(shape)
    several = bool(names) and names[0].endswith("...")
    least = len(names)
    if len(got) < least or (len(got) > least and not several):
        return False
    if not several and shape.leading:
        return False
    own = len(got) - least + 1 if several else 1
    parts = [got[:own], *((size,) for size in got[own:])] if names else []
    known = dict(sizes)
    for name, part in zip(names, parts, strict=True):
        if _meant(name, known).setdefault(name, part) != part:
            return False
    sizes.update(known)
    return True


def _meant(name: str, sizes: Sizes) -> Sizes:
    """The sizes, with that of a name such as ``K/8`` where K is known."""
    whole, _, parts = name.partition("/")
    if parts and whole in sizes:
        (size,) = sizes[whole]
        assert not isinstance(size, str), name
        sizes[name] = (ceildiv(size, int(parts)),)
    return sizes


def name_of(rule: str, shape: Shape, axis: int) -> str:
    """The name of a rule that an axis of a shape is of; leading dimensions count as one axis."""
    names = rule.split()
    behind = len(shape.flat) - axis
    return names[max(len(names) - behind, 0)].removesuffix("...")


def spelled(name: str) -> str:
    """A name of a rule as shapes of specs have it: ``ceildiv(D, 8)`` for ``D/8``."""
    whole, _, parts = name.partition("/")
    return f"ceildiv({whole}, {parts})" if parts else name


def said(rule: str, sizes: Sizes) -> str:
    """A rule as ``[T, K]``, with what names stand for where they are bound."""
    words = (", ".join(map(str, sizes.get(name, (spelled(name),)))) for name in rule.split())
    return f"[{', '.join(words)}]"


def _sizes_of(shape: Shape) -> tuple[Expr | str, ...]:
    return (*((f"{shape.leading}...",) if shape.leading else ()), *shape.dims)


def bound(rule: Rule, shapes: Mapping[str, Shape]) -> Mapping[str, tuple[Expr, ...]]:
    """What the names of a rule stand for, given operands and results by slot.

    Args:
        rule: of a kind of step.
        shapes: by slot; leading dimensions count as one, and slots without a rule for nothing.

    Raises:
        ValueError: one has another shape.
    """
    sizes: Sizes = {}
    for slot, shape in shapes.items():
        if slot in rule and not bind(rule[slot], shape.fixed(), sizes):
            raise ValueError(f"{slot} is {shape}, expected [{rule[slot].replace(' ', ', ')}]")
    return {
        name.removesuffix("..."): tuple(size for size in found if not isinstance(size, str))
        for name, found in sizes.items()
    }


def unequal(
    kind: StepDef, sizes: Mapping[str, Expr], attributes: Mapping[str, Expr]
) -> Iterator[str]:
    """What is wrong with sizes that follow from others and from attributes, such as columns.

    Args:
        kind: of a step.
        sizes: those that its launch is given, by name.
        attributes: its integers, by name.
    """
    for name, formula in kind.equal.items():
        expected = substitute(parse_expr(formula), {**sizes, **attributes})
        if not equal(sizes[name], expected):
            yield f"expected {name} = {expected}, got {sizes[name]}"


def sizes_of(kind: StepDef, found: Mapping[str, tuple[Expr, ...]]) -> dict[str, Expr]:
    """Sizes by name, of what the names of a rule stand for."""
    return {name: product(found.get(symbol, ())) for name, symbol in kind.sizes.items()}


def with_sizes(step: Step, shapes: Mapping[str, Shape]) -> Step:
    """The step with the sizes that its launch is given, and its operations; others as they are.

    Args:
        step: of any kind.
        shapes: of its operands and results by slot, before any is quantised.

    Raises:
        ValueError: one has another shape than its kind says, or than attributes say.
    """
    kind = definition(step.primitive)
    if not kind.sizes:
        return step
    sizes = sizes_of(kind, bound(kind.shapes[step.kind], shapes))
    counts = {name: Const(n) for name, n in step.attributes if type(n) is int}
    for problem in unequal(kind, sizes, counts):
        raise ValueError(problem)
    return with_flops(replace(step, sizes=tuple(sizes.items())))


def with_flops(step: Step) -> Step:
    """The step with its floating-point operations; None where its kind counts none."""
    flops = definition(step.primitive).flops
    return replace(step, flops=flops(step) if flops else None)
