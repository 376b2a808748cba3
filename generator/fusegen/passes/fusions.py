"""Fusions of ``specs/fusions`` as rules of the rewrite engine: patterns, conditions, replacements.

An expression of the pattern keeps a step of its own in the replacement; that of the forward may
stand in the backward, too, where a joint fusion makes its result again.  What merges an expression
with the quantisation of its result is built by ``merge``, what merges a GEMM with expressions of
its result by ``epilogue``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..ir.step import AttributeValue, Operand, Step
from ..options import OPTIONS
from ..spec.fusion import FusionPass, FusionSpec, PatternStep
from ..steps import definition, is_printed
from ..steps.definition import Trait
from .epilogue import Epilogue
from .merge import merged, why_not_merged
from .rewrite import (
    ANY,
    BACKWARD,
    FORWARD,
    Bound,
    Facts,
    Match,
    Replacement,
    Rewrite,
    Slot,
    Stage,
)

_ORDER = tuple(FusionPass)


def rules_of(fusions: Mapping[str, FusionSpec]) -> tuple[Rewrite, ...]:
    """The rules of fusions in the order in which they apply.

    Joint ones come first, then forward, then backward ones; of those, the largest patterns, which
    a smaller one would break up.  Epilogues come after what quantises, which leaves out a tensor
    that an epilogue would write.  Then it is the order of the fusions.
    """
    return tuple(map(rule_of, sorted(fusions.values(), key=_precedence)))


def _precedence(fusion: FusionSpec) -> tuple[int, int, bool]:
    steps = len(fusion.match.forward) + len(fusion.match.backward)
    return _ORDER.index(fusion.pass_), -steps, _is_epilogue(fusion)


def _is_epilogue(fusion: FusionSpec) -> bool:
    """Whether it puts one kernel in the place of a GEMM and expressions of its result."""
    if not fusion.merges:
        return False
    first, *_ = (*fusion.match.forward, *fusion.match.backward)
    return Trait.GEMM in definition(first.step).traits


def rule_of(fusion: FusionSpec) -> Rewrite:
    """A fusion as a rule."""
    guard = partial(_why_not, fusion)
    if fusion.merges:
        why_not, build = _merger(fusion)
        return Rewrite(
            name=fusion.name,
            programs=fusion.pass_,
            stage=Stage.COPIES,
            match=(*_merging(fusion, FORWARD), *_merging(fusion, BACKWARD)),
            guard=lambda bound, facts: guard(bound, facts) or why_not(bound, facts),
            build=build,
        )
    return Rewrite(
        name=fusion.name,
        programs=fusion.pass_,
        stage=Stage.OPS,
        match=(*_matches(fusion, FORWARD), *_matches(fusion, BACKWARD)),
        guard=guard,
        build=partial(_replacement, fusion),
    )


def _merger(
    fusion: FusionSpec,
) -> tuple[Callable[[Bound, Facts], str | None], Callable[[Bound], Replacement]]:
    """Why no kernel does what a fusion merges, and what it makes of that."""
    if not _is_epilogue(fusion):
        return why_not_merged, partial(merged, fusion.name)
    (made,) = (*fusion.rewrite.forward, *fusion.rewrite.backward)
    epilogue = Epilogue(fusion.name, has_aux=len(made.out) > 1)
    return epilogue.why_not, epilogue.build


def _of(fusion: FusionSpec, program: str) -> tuple[Sequence[PatternStep], Sequence[PatternStep]]:
    """Pattern and replacement of a program."""
    if program == FORWARD:
        return fusion.match.forward, fusion.rewrite.forward
    return fusion.match.backward, fusion.rewrite.backward


# ---- patterns


def _matches(fusion: FusionSpec, program: str) -> Iterator[Match]:
    """Steps of ops: all their operands have names, and what the replacement lacks goes away."""
    pattern, replacement = _of(fusion, program)
    written = {name for step in replacement for name in step.out}
    for step in pattern:
        kind = definition(step.step)
        positions = tuple(range(max(len(step.in_), len(step.out))))
        reads: tuple[Slot, ...] = kind.slots_of(step.kind)
        writes: tuple[Slot, ...] = kind.results_of(step.kind)
        if kind.of_passes:
            reads = writes = positions
        yield Match(
            program,
            step.step,
            step.kind,
            reads=dict(zip(reads, step.in_, strict=False)),
            writes=dict(zip(writes, step.out, strict=False)),
            sole_reader=frozenset(step.out) - written,
            op=step.op,
        )


def _merging(fusion: FusionSpec, program: str) -> Iterator[Match]:
    """Steps, each of what the one before it gives: that is all that names say of most of them.

    An expression of a GEMM's result alone is of nothing else.
    """
    pattern, replacement = _of(fusion, program)
    written = {name for step in replacement for name in step.out}
    for index, step in enumerate(pattern):
        unary = index > 0 and len(step.in_) == 1 and _is_epilogue(fusion)
        given = unary or step is not pattern[-1]
        reads: dict[Slot, str] = {ANY: pattern[index - 1].out[0]} if index else {}
        writes: dict[Slot, str] = {ANY: step.out[0]} if given else {}
        alone = frozenset(writes.values()) - written
        yield Match(program, step.step, step.kind, reads, writes, alone, step.op, not unary)


# ---- conditions


def _why_not(fusion: FusionSpec, bound: Bound, facts: Facts) -> str | None:
    """Which condition of a fusion rules it out, or what it is declined for, whatever its pattern
    found.
    """
    del bound
    when, recipe = fusion.when, facts.recipe
    quantizes, amax_pass = bool(recipe.roles), recipe.amax_pass
    if when.archs and facts.arch.name not in when.archs:
        return f"it is for {', '.join(when.archs)}"
    if when.recipes and recipe.name not in when.recipes:
        return f"it is for {', '.join(when.recipes)}"
    if when.quantized not in (None, quantizes):
        return f"recipe {recipe.name!r} quantises {'operands' if quantizes else 'nothing'}"
    if when.amax_pass not in (None, amax_pass):
        return f"recipe {recipe.name!r} needs {'an' if amax_pass else 'no'} amax first"
    for option, word in when.options.items():
        default = next(each.default for each in OPTIONS if each.name == option)
        if facts.choices.get(option, default) != word:
            return f"the choice of {option} is not {word}"
    return fusion.declined


# ---- replacements


def _replacement(fusion: FusionSpec, bound: Bound) -> Replacement:
    """The steps of a fusion over the buffers that its pattern found."""
    return Replacement(
        forward=tuple(_built(fusion, FORWARD, bound)),
        backward=tuple(_built(fusion, BACKWARD, bound)),
    )


def _built(fusion: FusionSpec, program: str, bound: Bound) -> Iterator[Step]:
    pattern, replacement = _of(fusion, program)
    parts = bound.parts(program)
    if not parts:
        return
    kept = _kept(pattern, parts)
    again = _kept(fusion.match.forward, bound.forward) if program == BACKWARD else []
    slots = {each.buffer: each.slot for part in parts for each in (*part.outputs, *part.inputs)}
    for step in replacement:
        reads = [bound.variables[name] for name in step.in_]
        writes = [bound.variables[name] for name in step.out]
        same = next((part for part in (*kept, *again) if _is(part, step, reads, writes)), None)
        if same is not None and is_printed(same):
            yield replace(same, rule=fusion.name)
            continue
        found = (*kept, *again)
        alike = next((p for p in found if (p.primitive, p.kind) == (step.step, step.kind)), None)
        kind = definition(step.step)
        ins = zip(kind.slots_of(step.kind), reads, strict=False)
        outs = zip(kind.results_of(step.kind), writes, strict=False)
        if kind.of_passes:
            ins, outs = (
                zip([slots.get(name, name) for name in names], names, strict=True)
                for names in (reads, writes)
            )
        named = [Operand(slot, bound.variables[name]) for slot, name in step.with_.items()]
        yield Step(
            primitive=step.step,
            kind=step.kind,
            item=(alike or parts[-1]).item,
            inputs=(*(Operand(*each) for each in ins), *named),
            outputs=tuple(Operand(*each) for each in outs),
            pointwise=alike.pointwise if alike else None,
            rule=fusion.name,
            attributes=alike.attributes if alike else _attributes(step, found),
        )


def _attributes(step: PatternStep, parts: Sequence[Step]) -> tuple[tuple[str, AttributeValue], ...]:
    """Scalars of a step of another kind: those of the parts, by their names."""
    told = {name: value for part in parts for name, value in part.attributes}
    own = definition(step.step).attributes_of(step.kind)
    return tuple((each.name, told[each.name]) for each in own if each.name in told)


def _kept(pattern: Sequence[PatternStep], parts: Sequence[Step]) -> list[Step]:
    """Steps whose expression goes along to the replacement: it does that of a named op itself."""
    return [part for part, step in zip(parts, pattern, strict=True) if not step.op]


def _is(part: Step, step: PatternStep, reads: list[str], writes: list[str]) -> bool:
    """Whether a step of the replacement is this one of the pattern."""
    touched = ({*part.reads}, {*part.writes})
    return part.primitive == step.step and touched == ({*reads}, {*writes})
