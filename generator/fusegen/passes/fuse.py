"""Pass 4, fuse: replace patterns of steps; joint patterns first, then forward, then backward.

A pattern is a few steps connected by variables.  It matches steps of a program in order, one per
pattern step, operand for operand, where each variable stands for one buffer throughout.  A buffer
that the pattern writes and the replacement does not must have no other reader.  A joint replacement
may rebuild a buffer of the forward in the backward: then liveness no longer saves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir.plan import AttributeValue, Operand, Pointwise, Step
from ..spec.fusion import FusionPass, FusionSpec, PatternStep
from ..spec.module import OptionName
from ..spec.recipe import RecipeSpec
from ..steps import definition
from .draft import Draft

Variables = Mapping[str, str]
Indices = tuple[int, ...]
Choices = Mapping[OptionName, str]
"""Options of a module and the choice of each."""


def fuse(
    draft: Draft,
    fusions: Mapping[str, FusionSpec],
    arch: str,
    recipe: RecipeSpec,
    choices: Choices,
) -> Draft:
    """Apply every fusion that arch, recipe and choices admit, wherever its pattern stands.

    Those with a merged step wait until kernels are chosen: see ``merge``.
    """
    for stage in FusionPass:
        for fusion in fusions.values():
            if fusion.pass_ is not stage or fusion.merges:
                continue
            if admits(fusion, arch, recipe, choices):
                draft = _apply_everywhere(draft, fusion)
    return draft


def admits(fusion: FusionSpec, arch: str, recipe: RecipeSpec, choices: Choices) -> bool:
    """Whether a fusion says that it applies there."""
    when = fusion.when
    return (
        (not when.archs or arch in when.archs)
        and (not when.recipes or recipe.name in when.recipes)
        and when.quantized in (None, bool(recipe.roles))
        and when.amax_pass in (None, recipe.amax_pass)
        and all(choices.get(option) == word for option, word in when.options.items())
    )


def _apply_everywhere(draft: Draft, fusion: FusionSpec) -> Draft:
    while True:
        rewritten = _apply_once(draft, fusion)
        if rewritten is None:
            return draft
        draft = rewritten


def _apply_once(draft: Draft, fusion: FusionSpec) -> Draft | None:
    """The draft with the first match rewritten, or None where nothing matches."""
    ops = {instance.item: instance.op.name for instance in draft.instances}
    match, rewrite = fusion.match, fusion.rewrite
    forward = _Candidates(draft.forward, match.forward, rewrite.forward, fusion.name, ops)
    backward = _Candidates(draft.backward, match.backward, rewrite.backward, fusion.name, ops)
    for variables, first in forward.matches({}):
        for bound, second in backward.matches(variables):
            if not _removable(draft, forward, backward, first, second, bound):
                continue
            steps = _in_order(forward.rewritten(first, bound))
            gradients = _in_order(backward.rewritten(second, bound))
            if steps is not None and gradients is not None:
                return replace(draft, forward=steps, backward=gradients)
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


@dataclass(frozen=True, slots=True)
class _Candidates:
    """One direction: a program, what to find in it, and what to put there.

    ``ops`` names the op of each item.
    """

    steps: Sequence[Step]
    pattern: Sequence[PatternStep]
    replacement: Sequence[PatternStep]
    rule: str
    ops: Mapping[str, str]

    def matches(
        self, variables: Variables, done: Indices = ()
    ) -> Iterator[tuple[Variables, Indices]]:
        """Every way to read the pattern in the program: the variables' buffers, the steps' indices.

        What the fusion made is no part of it, so that a pattern that occurs in its own replacement
        ends.
        """
        if len(done) == len(self.pattern):
            yield variables, done
            return
        for index in range(done[-1] + 1 if done else 0, len(self.steps)):
            bound = self._unify(self.steps[index], self.pattern[len(done)], variables)
            if bound is not None:
                yield from self.matches(bound, (*done, index))

    def _unify(self, step: Step, pattern: PatternStep, variables: Variables) -> Variables | None:
        if step.primitive != pattern.step or pattern.kind not in (None, step.kind):
            return None
        if step.rule == self.rule or pattern.op not in (None, self.ops[step.item]):
            return None
        reads = tuple(operand.buffer for operand in step.inputs)
        if len(reads) != len(pattern.in_) or len(step.writes) != len(pattern.out):
            return None
        bound = dict(variables)
        pairs = [*zip(pattern.in_, reads, strict=True), *zip(pattern.out, step.writes, strict=True)]
        if any(bound.setdefault(variable, buffer) != buffer for variable, buffer in pairs):
            return None
        return bound

    def gone(self, matched: Indices, variables: Variables) -> set[str]:
        """Buffers that the pattern writes and the replacement does not."""
        before = {name for index in matched for name in self.steps[index].writes}
        return before - self.written(variables)

    def written(self, variables: Variables) -> set[str]:
        """Buffers that the replacement writes."""
        return {variables[name] for step in self.replacement for name in step.out}

    def read_elsewhere(self, matched: Indices) -> set[str]:
        """Buffers that the other steps of the program read."""
        others = (step for index, step in enumerate(self.steps) if index not in matched)
        return {name for step in others for name in step.reads}

    def rewritten(self, matched: Indices, variables: Variables) -> tuple[Step, ...]:
        """The program with the matched steps replaced, at the place of the last of them."""
        if not matched:
            return tuple(self.steps)
        last = matched[-1]
        found = [self.steps[index] for index in matched]
        kept = [step for step, pattern in zip(found, self.pattern, strict=True) if not pattern.op]
        alike = {(step.primitive, step.kind): step for step in reversed(kept)}
        slots = {each.buffer: each.slot for step in found for each in (*step.outputs, *step.inputs)}
        new = [
            Step(
                primitive=step.step,
                kind=step.kind,
                item=alike.get((step.step, step.kind), found[-1]).item,
                inputs=_inputs(step, variables, slots),
                outputs=_operands(step, step.out, definition(step.step).results, variables, slots),
                pointwise=_expression(alike.get((step.step, step.kind))),
                attributes=_attributes(alike.get((step.step, step.kind))),
                rule=self.rule,
            )
            for step in self.replacement
        ]
        before = [step for i, step in enumerate(self.steps[:last]) if i not in matched]
        return (*before, *new, *self.steps[last + 1 :])


def _expression(step: Step | None) -> Pointwise | None:
    return step.pointwise if step else None


def _attributes(step: Step | None) -> tuple[tuple[str, AttributeValue], ...]:
    return step.attributes if step else ()


def _inputs(
    step: PatternStep, variables: Variables, slots: Mapping[str, str]
) -> tuple[Operand, ...]:
    named = tuple(Operand(slot, variables[name]) for slot, name in step.with_.items())
    order = definition(step.step).slots
    return _operands(step, step.in_, order, variables, slots) + named


def _operands(
    step: PatternStep,
    names: tuple[str, ...],
    order: tuple[str, ...],
    variables: Variables,
    slots: Mapping[str, str],
) -> tuple[Operand, ...]:
    """Buffers in the slots of the step, in order; a step of the passes keeps those they had."""
    buffers = [variables[name] for name in names]
    if definition(step.step).of_passes:
        return tuple(Operand(slots.get(buffer, buffer), buffer) for buffer in buffers)
    return tuple(Operand(slot, buffer) for slot, buffer in zip(order, buffers, strict=False))


def _removable(
    draft: Draft,
    forward: _Candidates,
    backward: _Candidates,
    first: Indices,
    second: Indices,
    variables: Variables,
) -> bool:
    """Whether no other step misses a buffer that disappears."""
    gone = forward.gone(first, variables)
    if gone & (forward.read_elsewhere(first) | {*draft.outputs}):
        return False
    gone = (gone - backward.written(variables)) | backward.gone(second, variables)
    gradients = {gradient for _, gradient in draft.gradients}
    return not gone & (backward.read_elsewhere(second) | gradients)
