"""Fusions: the pattern can occur, and the replacement reads and writes what it names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..load import Source, SpecSet
from ..model.primitives import PRINTED, SIGNATURES
from ..model.source import Problem
from ..model.specs import FusionPass, FusionSpec, PatternStep, kind_problem
from .common import unknown


def check_fusion(
    fusion: FusionSpec, specs: SpecSet, source: Source, complete: bool
) -> Iterator[Problem]:
    """Every problem of a fusion."""
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
                yield from unknown(source, key[:-1], word, known, "when", key, index)


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
                yield from unknown(source, "op", step.op, specs.ops, "match", section, index, "op")
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
                    yield from unknown(source, "variable", name, variables, *path)
            slots = SIGNATURES[step.step].optional_inputs
            for slot in step.with_:
                yield from unknown(
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
