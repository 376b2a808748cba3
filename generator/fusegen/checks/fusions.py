"""Fusions: the pattern can occur, and a pass can put the replacement in its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from ..options import OPTIONS
from ..spec.diagnostics import Problem
from ..spec.fusion import MERGES, FusionPass, FusionSpec, PatternStep
from ..spec.load import Source, SpecSet
from ..spec.op import kind_problem
from ..steps import STEPS, definition
from ..steps.definition import Trait
from .common import unknown

_REWRITABLE = sorted(
    each.name for each in STEPS if not each.of_passes and Trait.QUANTIZES not in each.traits
)

_QUANTIZING = [kind for kind in MERGES.values() if Trait.GEMM not in definition(kind).traits]
"""Merged steps of which one part quantises."""


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
    if match and rewrite and not fusion.merges:
        yield from _check_nothing_lost(match, rewrite, source)
    yield from _check_saving(fusion, source)
    yield from _check_merge(fusion, source) if fusion.merges else _check_fuse(fusion, source)
    if complete:
        for option, word in fusion.when.options.items():
            words = next(each.words for each in OPTIONS if each.name == option)
            yield from unknown(
                source, f"choice of {option}", word, words, "when", "options", option
            )
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
        pointwise = [i for i, s in enumerate(steps) if _is_printed(s) and not s.op]
        for index in pointwise[1:]:
            yield source.problem(
                f"a second {steps[index].step} step without 'op'; a fusion keeps the"
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
        if steps and not pattern:
            yield source.problem(
                f"no step of 'match' is in the {section}, so that these have no place there",
                "rewrite",
                section,
            )
        for index, step in enumerate(steps):
            yield from _check_step_kind(step, source, "rewrite", section, index)
            yield from _check_arity(step, source, "rewrite", section, index)
            for key, names in (("in", step.in_), ("with", step.with_.values()), ("out", step.out)):
                for name in names:
                    path = ("rewrite", section, index, key)
                    yield from unknown(source, "variable", name, variables, *path)
            slots = definition(step.step).optional
            for slot in step.with_:
                yield from unknown(
                    source, "slot", slot, slots, "rewrite", section, index, "with", slot
                )
            if step.op:
                yield source.problem(
                    "a replacement names no op; remove it", "rewrite", section, index, "op"
                )


def _check_nothing_lost(
    match: tuple[PatternStep, ...], rewrite: tuple[PatternStep, ...], source: Source
) -> Iterator[Problem]:
    """The replacement reads what the pattern reads from outside, and gives what that gives."""
    written = {name for step in match for name in step.out}
    read = {name for step in match for name in step.in_}
    still_read = {name for step in rewrite for name in (*step.in_, *step.with_.values())}
    given = {name for step in rewrite for name in step.out}
    for name in sorted(read - written - still_read):
        yield source.problem(
            f"the pattern reads {name!r}, so a step of the replacement must: add it to 'in' or"
            " 'with'",
            "rewrite",
        )
    for name in sorted(written - read - given):
        yield source.problem(
            f"the pattern gives {name!r} to others, so a step of the replacement must: add it to"
            " 'out'",
            "rewrite",
        )


def _check_fuse(fusion: FusionSpec, source: Source) -> Iterator[Problem]:
    """What is over steps of ops, before their operands are quantised."""
    for section, pattern, steps in (
        ("forward", fusion.match.forward, fusion.rewrite.forward),
        ("backward", fusion.match.backward, fusion.rewrite.backward),
    ):
        for index, step in enumerate(pattern):
            if step.step not in _REWRITABLE and not _is_printed(step):
                yield source.problem(
                    f"no {step.step} is there yet when this fusion applies; what quantises"
                    f" takes part in {', '.join(_QUANTIZING)} alone",
                    "match",
                    section,
                    index,
                    "step",
                )
        kept = [step for step in pattern if _is_printed(step) and not step.op]
        before = fusion.match.forward if section == "backward" else ()
        again = [step for step in before if _is_printed(step) and not step.op]
        yield from _check_expressions(section, kept, again, steps, source)
        for index, step in enumerate(steps):
            if not _is_printed(step):
                yield from _check_replacing_step(step, source, "rewrite", section, index)


def _check_expressions(
    section: str,
    kept: list[PatternStep],
    again: list[PatternStep],
    steps: tuple[PatternStep, ...],
    source: Source,
) -> Iterator[Problem]:
    """An expression has a step of its own before and after; the backward may make one again."""
    for index, step in enumerate(steps):
        if _is_printed(step) and not any(_same(step, each) for each in (*kept, *again)):
            yield source.problem(
                f"no {step.step} step of 'match' without 'op' has these names, so that this"
                " one has no expression",
                "rewrite",
                section,
                index,
            )
    for each in kept:
        found = sum(_same(step, each) for step in steps)
        if found != 1:
            yield source.problem(
                f"expected one step that computes {', '.join(each.out)}, got {found}: repeat"
                f" {{step: {each.step}, in: [{', '.join(each.in_)}], out:"
                f" [{', '.join(each.out)}]}}, since no other step has an expression",
                "rewrite",
                *((section,) if steps else ()),
            )


def _same(step: PatternStep, other: PatternStep) -> bool:
    return (step.step, {*step.in_}, {*step.out}) == (other.step, {*other.in_}, {*other.out})


def _check_replacing_step(step: PatternStep, source: Source, *path: str | int) -> Iterator[Problem]:
    """A step by itself is one that the reference has, with operands that it has there."""
    signature = definition(step.step)
    rules = signature.shapes.get(step.kind)
    if step.step not in _REWRITABLE:
        yield source.problem(
            f"no pass puts {step.step} in the place of other steps; known:"
            f" {', '.join(_REWRITABLE)}",
            *path,
            "step",
        )
    elif rules is not None:
        named = [(slot, "in") for slot in signature.slots_of(step.kind)[: len(step.in_)]]
        named += [(slot, "with") for slot in step.with_ if slot in signature.slots]
        for slot, key in named:
            if slot not in rules:
                words = f"{step.step} {step.kind}" if step.kind else step.step
                yield source.problem(f"{words} takes {', '.join(rules)}, not {slot!r}", *path, key)


def _check_merge(fusion: FusionSpec, source: Source) -> Iterator[Problem]:
    """One step of one kernel for several, each of what the one before it gives."""
    section = fusion.pass_.value
    if fusion.pass_ is FusionPass.JOINT:
        yield source.problem("a merged step has one direction; say forward or backward", "pass")
        return
    match: tuple[PatternStep, ...] = getattr(fusion.match, section)
    rewrite: tuple[PatternStep, ...] = getattr(fusion.rewrite, section)
    made = next(step.step for step in rewrite if step.step in MERGES.values())
    merged_kind = MERGES.get(tuple(step.step for step in match))
    if merged_kind is None:
        rows = " or ".join(_row(row) for row, kind in MERGES.items() if kind == made)
        got = _row(step.step for step in match)
        yield source.problem(f"{made} replaces {rows}, got {got}", "match", section)
        return
    if [step.step for step in rewrite] != [merged_kind]:
        yield source.problem(
            f"expected {merged_kind} alone in the place of {_row(step.step for step in match)}",
            "rewrite",
            section,
        )
        return
    given = [match[-1].out]
    if Trait.GEMM in definition(merged_kind).traits:
        given.append((*match[-1].out, *match[0].out))
        yield from _check_epilogue(match[0], rewrite[0], source, section)
    else:
        yield from _check_quantization(fusion, match[0], source, section)
    yield from _check_names(match, rewrite[0], given, source, section)


def _check_epilogue(
    gemm: PatternStep, merged: PatternStep, source: Source, section: str
) -> Iterator[Problem]:
    """What is over a GEMM and expressions of its result."""
    if merged.kind != gemm.kind:
        yield source.problem(
            f"expected kind {gemm.kind}, that of the GEMM", "rewrite", section, 0, "kind"
        )


def _check_quantization(
    fusion: FusionSpec, first: PatternStep, source: Source, section: str
) -> Iterator[Problem]:
    """What is over an expression and the quantisation of its result."""
    if fusion.when.quantized is False:
        yield source.problem("a merged step quantises; remove it", "when", "quantized")
    if first.op:
        yield source.problem("every expression is merged; remove 'op'", "match", section, 0, "op")


def _check_names(
    match: tuple[PatternStep, ...],
    merged: PatternStep,
    given: list[tuple[str, ...]],
    source: Source,
    section: str,
) -> Iterator[Problem]:
    """Each step reads what the one before it gives, and the merged one what is read besides.

    Args:
        match: the pattern.
        merged: the step in its place.
        given: what that may give.
        source: of the fusion.
        section: its direction.
    """
    between = set[str]()
    for index, (first, second) in enumerate(pairwise(match)):
        between.update(first.out)
        if len(first.out) != 1:
            path = ("match", section, index, "out")
            yield source.problem(f"expected one name, got [{', '.join(first.out)}]", *path)
        elif first.out[0] not in second.in_:
            got = ", ".join(second.in_)
            path = ("match", section, index + 1, "in")
            yield source.problem(f"expected {first.out[0]} among [{got}]", *path)
    read = dict.fromkeys(name for step in match for name in step.in_ if name not in between)
    for got_, expected, key in ((merged.in_, [(*read,)], "in"), (merged.out, given, "out")):
        if got_ not in expected:
            words = " or ".join(f"[{', '.join(names)}]" for names in expected)
            yield source.problem(
                f"expected {words}, got [{', '.join(got_)}]", *("rewrite", section, 0, key)
            )


def _is_printed(step: PatternStep) -> bool:
    return Trait.PRINTED in definition(step.step).traits


def _row(kinds: Iterable[str]) -> str:
    return " and ".join(kinds)


def _variables(steps: Iterable[PatternStep]) -> set[str]:
    return {name for step in steps for name in (*step.in_, *step.out)}


def _check_step_kind(step: PatternStep, source: Source, *path: str | int) -> Iterator[Problem]:
    wrong = kind_problem(step.step, step.kind)
    if wrong:
        yield source.problem(wrong, *path, *(("kind",) if step.kind else ()))


def _check_arity(step: PatternStep, source: Source, *path: str | int) -> Iterator[Problem]:
    signature = definition(step.step)
    if signature.of_passes:
        return
    least = len(signature.operands)
    for key, got, low, high in (
        ("in", len(step.in_), least, len(signature.slots)),
        ("out", len(step.out), 1, len(signature.results)),
    ):
        if not low <= got <= high:
            span = str(low) if low == high else f"{low} to {high}"
            yield source.problem(f"{step.step} has {span} names in {key!r}, got {got}", *path, key)


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
