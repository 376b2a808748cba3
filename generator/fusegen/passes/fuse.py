"""Pass 4, fuse: replace patterns of steps; joint patterns first, then forward, then backward.

A pattern is a few steps connected by variables.  It matches steps of a program in order, one per
pattern step, operand for operand, where each variable stands for one buffer throughout.  A buffer
that the pattern writes and the replacement does not must have no other reader.  A joint replacement
may rebuild a buffer of the forward in the backward: then liveness no longer saves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..model.plan import Operand, Step
from ..model.specs import FusionPass, FusionSpec, PatternStep, RecipeSpec
from .draft import Draft

Variables = Mapping[str, str]


def fuse(draft: Draft, fusions: Mapping[str, FusionSpec], arch: str, recipe: RecipeSpec) -> Draft:
    """Apply every fusion that the arch and recipe admit, wherever its pattern stands."""
    for stage in FusionPass:
        for fusion in fusions.values():
            if fusion.pass_ is stage and _admits(fusion, arch, recipe):
                draft = _apply_everywhere(draft, fusion)
    return draft


def _admits(fusion: FusionSpec, arch: str, recipe: RecipeSpec) -> bool:
    when = fusion.when
    return (
        (not when.archs or arch in when.archs)
        and (not when.recipes or recipe.name in when.recipes)
        and (when.quantized is None or when.quantized == bool(recipe.roles))
        and not when.options
    )


def _apply_everywhere(draft: Draft, fusion: FusionSpec) -> Draft:
    while True:
        rewritten = _apply_once(draft, fusion)
        if rewritten is None:
            return draft
        draft = rewritten


def _apply_once(draft: Draft, fusion: FusionSpec) -> Draft | None:
    """The draft with the first match rewritten, or None where nothing matches."""
    for variables, forward in _matches(
        draft.forward, fusion.match.forward, {}, fusion.name
    ):
        for bound, backward in _matches(
            draft.backward, fusion.match.backward, variables, fusion.name
        ):
            if not _removable(draft, fusion, bound, forward, backward):
                continue
            first = _in_order(
                _rewrite(draft.forward, forward, fusion, fusion.rewrite.forward, bound)
            )
            second = _in_order(
                _rewrite(draft.backward, backward, fusion, fusion.rewrite.backward, bound)
            )
            if first is not None and second is not None:
                return replace(draft, forward=first, backward=second)
    return None


def _in_order(steps: Sequence[Step]) -> tuple[Step, ...] | None:
    """The steps with every writer before its readers, otherwise as they stand; None for a cycle."""
    waiting, ordered = list(steps), list[Step]()
    while waiting:
        pending = {name for step in waiting for name in step.writes}
        ready = next((step for step in waiting if not pending & {*step.reads}), None)
        if ready is None:
            return None
        waiting.remove(ready)
        ordered.append(ready)
    return tuple(ordered)


def _matches(
    steps: Sequence[Step],
    pattern: Sequence[PatternStep],
    variables: Variables,
    fusion: str,
    start: int = 0,
) -> list[tuple[Variables, tuple[int, ...]]]:
    """Every way to read the pattern in the program: the variables' buffers and the steps' indices.

    What the fusion made is no part of it, so that a pattern that occurs in its own replacement ends.
    """
    if not pattern:
        return [(variables, ())]
    found = []
    for index in range(start, len(steps)):
        bound = _unify(steps[index], pattern[0], variables)
        if bound is not None and steps[index].rule != fusion:
            for rest, indices in _matches(steps, pattern[1:], bound, fusion, index + 1):
                found.append((rest, (index, *indices)))
    return found


def _unify(step: Step, pattern: PatternStep, variables: Variables) -> Variables | None:
    if step.primitive is not pattern.step or (pattern.kind and pattern.kind != step.kind):
        return None
    reads = tuple(operand.buffer for operand in step.inputs)
    if len(reads) != len(pattern.in_) or len(step.writes) != len(pattern.out):
        return None
    bound = dict(variables)
    pairs = [*zip(pattern.in_, reads, strict=True), *zip(pattern.out, step.writes, strict=True)]
    for variable, buffer in pairs:
        if bound.setdefault(variable, buffer) != buffer:
            return None
    return bound


def _removable(
    draft: Draft,
    fusion: FusionSpec,
    variables: Variables,
    forward: tuple[int, ...],
    backward: tuple[int, ...],
) -> bool:
    """Whether every buffer that disappears is read by the replaced steps alone."""
    rewrites = (*fusion.rewrite.forward, *fusion.rewrite.backward)
    remaining = {variables.get(name, name) for step in rewrites for name in step.out}
    inside = {("f", index) for index in forward} | {("b", index) for index in backward}
    gone = {
        name
        for index in forward
        for name in draft.forward[index].writes
        if name not in remaining
    } | {
        name
        for index in backward
        for name in draft.backward[index].writes
        if name not in remaining
    }
    programs = [("f", i, s) for i, s in enumerate(draft.forward)]
    programs += [("b", i, s) for i, s in enumerate(draft.backward)]
    outside = {name for tag, i, step in programs if (tag, i) not in inside for name in step.reads}
    ends = {*draft.outputs, *(gradient for _, gradient in draft.gradients)}
    return not gone & (outside | ends)


def _rewrite(
    steps: Sequence[Step],
    matched: tuple[int, ...],
    fusion: FusionSpec,
    replacement: Sequence[PatternStep],
    variables: Variables,
) -> tuple[Step, ...]:
    """The program with the matched steps replaced, at the place of the last of them."""
    if not matched:
        return tuple(steps)
    read = {operand.buffer: operand.slot for i in matched for operand in steps[i].inputs}
    written = {operand.buffer: operand.slot for i in matched for operand in steps[i].outputs}

    def operands(names: tuple[str, ...], slots: Mapping[str, str]) -> tuple[Operand, ...]:
        buffers = [variables[name] for name in names]
        return tuple(Operand(slots.get(buffer, buffer), buffer) for buffer in buffers)

    last = steps[matched[-1]]
    math = next((steps[i].pointwise for i in matched if steps[i].pointwise), None)
    new = tuple(
        Step(
            primitive=step.step,
            kind=step.kind,
            item=last.item,
            inputs=operands(step.in_, {**written, **read}),
            outputs=operands(step.out, {**read, **written}),
            pointwise=math,
            rule=fusion.name,
        )
        for step in replacement
    )
    before = [step for i, step in enumerate(steps[: matched[-1]]) if i not in matched]
    return (*before, *new, *steps[matched[-1] + 1 :])
