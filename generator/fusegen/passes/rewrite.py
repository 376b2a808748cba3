"""The one engine that puts steps in the place of others; fusions are its rules.

A rule has a pattern: a few steps, connected by variables, each of which stands for one buffer
throughout.  The pattern binds whole steps of a draft, operand for operand; what the rule builds of
them must read, write, change and copy all that they did, but for buffers that nobody else reads.
It writes them under the same flags, or under those that others have for one that the parts read.

Rules apply in order, each wherever its pattern stands, in the order of the steps.  A rule never
binds a step that it made, so that every firing leaves fewer steps for it, and it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from ..ir.buffers import Buffer
from ..ir.step import Operand, Rewriting, Step
from ..spec.arch import ArchSpec
from ..spec.fusion import FusionPass
from ..spec.recipe import RecipeSpec
from ..steps import commutes
from .draft import Draft
from .liveness import add_conditions, flags_of

Slot = str | int
"""A slot by its name, or by its position where the op names the slots of a step."""
ANY = "any"
"""In a pattern, whichever slot of a step."""

Variables = Mapping[str, str]
"""Variables of a pattern and the buffers that they stand for."""

FORWARD, BACKWARD = FusionPass.FORWARD.value, FusionPass.BACKWARD.value
_LATER = {FORWARD: (BACKWARD, "wgrad"), BACKWARD: ("wgrad",)}
"""Programs that may read what a program leaves."""


class Stage(Enum):
    """When a rule applies, by what its pattern is made of.

    OPS: steps of ops, before their operands are quantised: which copies there are, and what is
    saved for the backward, follows from what the rule leaves.  COPIES: steps that make quantised
    copies, once all kernels and flags are known: what the rule makes is a kernel of its own.
    """

    OPS = "ops"
    COPIES = "copies"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a guard may ask besides the steps: where the module is to run, and how."""

    arch: ArchSpec
    recipe: RecipeSpec
    choices: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Match:
    """One step of a pattern.

    Attributes:
        program: where it stands, ``forward`` or ``backward``.
        step, kind: what it does; a pattern without kind means every one.
        reads, writes: variables of its operands and results by slot.
        sole_reader: variables of results that nothing but steps of the pattern may read.
        op: the op that a pointwise step computes; empty for any.
        further: whether it may have operands and results besides those.
    """

    program: str
    step: str
    kind: str | None
    reads: Mapping[Slot, str]
    writes: Mapping[Slot, str]
    sole_reader: frozenset[str] = frozenset()
    op: str | None = None
    further: bool = False

    def __str__(self) -> str:
        words = [self.step, *([self.kind] if self.kind else [])]
        words += [f"of op {self.op!r}"] if self.op else []
        if not self.further:
            reads, writes = _count(self.reads, "operand"), _count(self.writes, "result")
            words.append(f"with {reads} and {writes}")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Bound:
    """A pattern that was found: its variables' buffers, and by program where its steps stand."""

    draft: Draft
    variables: Variables
    at: Mapping[str, tuple[int, ...]]

    @property
    def forward(self) -> tuple[Step, ...]:
        """The steps found in the forward."""
        return self.parts(FORWARD)

    @property
    def backward(self) -> tuple[Step, ...]:
        """The steps found in the backward."""
        return self.parts(BACKWARD)

    def parts(self, program: str) -> tuple[Step, ...]:
        """The steps found in a program."""
        steps = _steps(self.draft, program)
        return tuple(steps[index] for index in self.at.get(program, ()))

    @property
    def place(self) -> str:
        """How people see it."""
        shown = (f"{program}: {', '.join(map(_shown, self.parts(program)))}" for program in self.at)
        return "; ".join(shown)


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a rule puts in the place of the steps it bound, and the new buffers of that."""

    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    buffers: tuple[Buffer, ...] = ()

    def steps(self, program: str) -> tuple[Step, ...]:
        """The new steps of a program."""
        return self.forward if program == FORWARD else self.backward


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rule.

    Attributes:
        name: of the fusion.
        programs: whether it owns the forward, the backward or both.
        stage: when it applies.
        match: its pattern, steps of the forward first.
        guard: why it does not apply to what was found, or None.
        build: what stands there instead.
    """

    name: str
    programs: FusionPass
    stage: Stage
    match: tuple[Match, ...]
    guard: Callable[[Bound, Facts], str | None]
    build: Callable[[Bound], Replacement]


def rewrite(
    draft: Draft, rules: Sequence[Rewrite], stage: Stage, facts: Facts, fuel: int | None = None
) -> Draft:
    """Apply the rules of a stage; the draft records where each fired, and why not elsewhere.

    Args:
        draft: the module.
        rules: in order.
        stage: the others wait.
        facts: for their guards.
        fuel: fire no more than this often, what the draft records counted, to find the one
            rewrite that changes a result; None is no limit.
    """
    for rule in rules:
        if rule.stage is stage:
            draft = _everywhere(draft, rule, facts, fuel)
    return draft


def _everywhere(draft: Draft, rule: Rewrite, facts: Facts, fuel: int | None) -> Draft:
    """The draft with a rule applied wherever it can be, in the order of the steps."""
    while True:
        refused: dict[str, str] = {}
        for bound in _found(draft, rule.match, rule.name):
            spent = fuel is not None and fuel <= sum(not each.reason for each in draft.rewrites)
            result = "no fuel is left" if spent else _replaced(bound, rule, facts)
            if isinstance(result, Draft):
                draft = result
                break
            refused.setdefault(bound.place, result)
        else:
            break
    if not refused and not any(each.rule == rule.name for each in draft.rewrites):
        refused[""] = _unmatched(draft, rule)
    records = tuple(Rewriting(rule.name, place, reason) for place, reason in refused.items())
    return replace(draft, rewrites=(*draft.rewrites, *records))


def _replaced(bound: Bound, rule: Rewrite, facts: Facts) -> Draft | str:
    """The draft with one match replaced, or why it stays."""
    draft = bound.draft
    reason = rule.guard(bound, facts)
    if reason is not None:
        return reason
    built = rule.build(bound)
    reason = _read_elsewhere(bound, rule, built)
    if reason is not None:
        return reason
    _check_covers(bound, rule, built)
    programs: dict[str, tuple[Step, ...]] = {}
    for program in bound.at:
        placed = _placed(bound, program, built)
        if placed is None:
            return f"steps of the {program} would wait for each other"
        programs[program] = placed
    rewritten = replace(
        draft.with_buffers({buffer.name: buffer for buffer in built.buffers}),
        forward=programs.get(FORWARD, draft.forward),
        backward=programs.get(BACKWARD, draft.backward),
        rewrites=(*draft.rewrites, Rewriting(rule.name, bound.place)),
    )
    if rule.stage is Stage.OPS and rule.programs is FusionPass.BACKWARD:
        return _asked_more_often(draft, rewritten) or rewritten
    return rewritten


def _asked_more_often(before: Draft, after: Draft) -> str | None:
    """Which step that stays would run for gradients that did not ask for it, if any would.

    A replacement reads for all that it gives what one of its parts read.  A joint rule may choose
    to: it makes again what others read.
    """
    every = {*flags_of(before)}
    asked = {step.writes: {*step.when} or every for step in add_conditions(before).backward}
    for step in add_conditions(after).backward:
        more = ({*step.when} or every) - asked.get(step.writes, every)
        if more:
            return f"{_shown(step)} would run for {', '.join(sorted(more))}, too"
    return None


def _placed(bound: Bound, program: str, built: Replacement) -> tuple[Step, ...] | None:
    """A program with the new steps at the place of the last one found; None for a cycle."""
    steps, matched = _steps(bound.draft, program), bound.at[program]
    last = max(matched)
    passed = ((i, j) for i in matched for j in range(i, last) if j not in matched)
    if any(_conflict(steps[i], steps[j]) for i, j in passed):
        return None
    before = [step for i, step in enumerate(steps[:last]) if i not in matched]
    return in_order((*before, *built.steps(program), *steps[last + 1 :]))


# ---- what matches


@dataclass(slots=True)
class _Search:
    """A pattern being looked for; its steps may stand in any order in a program."""

    draft: Draft
    pattern: Sequence[Match]
    rule: str
    ops: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.ops = {instance.item: instance.op.name for instance in self.draft.instances}

    def matches(self, variables: Variables, at: Mapping[str, tuple[int, ...]]) -> Iterator[Bound]:
        done = sum(map(len, at.values()))
        if done == len(self.pattern):
            yield Bound(self.draft, variables, at)
            return
        match = self.pattern[done]
        before = at.get(match.program, ())
        steps = _steps(self.draft, match.program)
        for index, step in enumerate(steps):
            if index in before:
                continue
            for bound in self.unified(step, match, variables):
                yield from self.matches(bound, {**at, match.program: (*before, index)})

    def unified(self, step: Step, match: Match, variables: Variables) -> Iterator[Variables]:
        """The ways to read a step as one of the pattern."""
        if step.primitive != match.step or match.kind not in (None, step.kind):
            return
        if step.rule == self.rule or match.op not in (None, self.ops.get(step.item)):
            return
        for inputs in _orders(step):
            for bound in _assigned(inputs, match.reads, match.further, variables):
                yield from _assigned(step.outputs, match.writes, match.further, bound)


def _found(draft: Draft, pattern: Sequence[Match], rule: str) -> Iterator[Bound]:
    return _Search(draft, pattern, rule).matches({}, {})


def _orders(step: Step) -> Iterator[tuple[Operand, ...]]:
    """Operands of a step, in every order in which it gives the same bits."""
    yield step.inputs
    if commutes(step):
        first, second, *others = step.inputs
        changed = (replace(first, buffer=second.buffer), replace(second, buffer=first.buffer))
        yield (*changed, *others)


def _assigned(
    operands: Sequence[Operand], named: Mapping[Slot, str], further: bool, variables: Variables
) -> Iterator[Variables]:
    """Every way to give named slots their buffers, where a variable keeps the buffer it has."""
    if len(operands) != len(named) and not further:
        return
    ways: list[dict[str, str]] = [dict(variables)]
    for slot, variable in named.items():
        buffers = [o.buffer for i, o in enumerate(operands) if slot in (o.slot, i, ANY)]
        ways = [
            {**way, variable: buffer}
            for way in ways
            for buffer in buffers
            if way.get(variable, buffer) == buffer
        ]
    yield from ways


def _unmatched(draft: Draft, rule: Rewrite) -> str:
    """What of a pattern is not there: its first step that none goes on with."""
    count = next(
        n
        for n in range(1, len(rule.match) + 1)
        if next(_found(draft, rule.match[:n], rule.name), None) is None
    )
    match = rule.match[count - 1]
    if match.step not in {step.primitive for step in _steps(draft, match.program)}:
        return f"the {match.program} has no {match.step}"
    beside = ", connected as in the pattern" if count > 1 else ""
    return f"no step of the {match.program} is {match}{beside}"


# ---- what must hold of a replacement


def _read_elsewhere(bound: Bound, rule: Rewrite, built: Replacement) -> str | None:
    """Who else reads a buffer that disappears, if anybody does."""
    draft = bound.draft
    leaving = {*draft.results, *(name for _, name in draft.gradients)}
    leaving |= {name for each in draft.collectives for name in each.operands}
    for match in rule.match:
        made = {name for step in built.steps(match.program) for name in step.writes}
        for name in (bound.variables[variable] for variable in sorted(match.sole_reader)):
            if name in made:
                continue
            if name in leaving:
                return f"{name} is a result of the {match.program}"
            for program in (match.program, *_LATER[match.program]):
                new = {written for step in built.steps(program) for written in step.writes}
                others = _others(bound, program)
                if program != match.program and (name in new or _writes(others, name)):
                    break  # made again there: that is what later ones read, too
                if any(name in step.reads for step in built.steps(program)):
                    return f"{name} is read in the place of another operand, too"
                reader = next((step for step in others if name in step.reads), None)
                if reader is not None:
                    return f"{name} is read by {_shown(reader)} of the {program}, too"
    return None


def wanted_elsewhere(bound: Bound, program: str, name: str) -> tuple[str, ...] | None:
    """Flags under which anything but the bound steps wants what one of them gives.

    Args:
        bound: steps of programs, whose results are settled.
        program: that they are of.
        name: the buffer.

    Returns:
        None where nothing wants it; empty where it is wanted in every call.
    """
    draft = bound.draft
    made = draft.program(program)
    assert made is not None, program
    when = [each.when for each in made.results if each.buffer == draft.tensor_with(name)]
    when += [step.asking(name) for step in _others(bound, program) if name in step.reads]
    when += [() for each in draft.collectives if name in each.operands]
    if not when or () in when:
        return () if when else None
    return tuple(flag for flag in made.flags if any(flag in flags for flags in when))


def _others(bound: Bound, program: str) -> tuple[Step, ...]:
    matched = bound.at.get(program, ())
    steps = _steps(bound.draft, program)
    return tuple(step for index, step in enumerate(steps) if index not in matched)


def _writes(steps: Sequence[Step], name: str) -> bool:
    return any(name in step.writes for step in steps)


def _check_covers(bound: Bound, rule: Rewrite, built: Replacement) -> None:
    """Nothing that the parts read, write, change or copy is lost, nor under which flags.

    Raises:
        AssertionError: the rule is wrong; what is said to be unread may disappear.
    """
    gone = {bound.variables[name] for match in rule.match for name in match.sole_reader}
    parts = (*bound.forward, *bound.backward)
    wanted = _wanted(bound) if rule.stage is Stage.COPIES else {}
    gone |= {name for name, when in wanted.items() if when is None}
    new = (*built.forward, *built.backward)
    within = {name for step in parts for name in step.writes}
    for what, had, has in (
        ("reads", _all(parts, "reads") - within, _all(new, "reads")),
        ("writes", _all(parts, "writes") - gone, _all(new, "writes")),
        ("mutates", _all(parts, "mutates"), _all(new, "mutates")),
        ("copies", _all(parts, "copies"), _all(new, "copies")),
    ):
        assert had <= has, f"rule {rule.name!r} loses what it {what}: {had - has}"
    for program in bound.at:
        old, made = bound.parts(program), built.steps(program)
        for name in _all(old, "writes") & _all(made, "writes"):
            allowed = (_flags(old, name), wanted.get(str(name)))
            assert _flags(made, name) in allowed, f"{rule.name!r} changes when {name} is written"


def _wanted(bound: Bound) -> dict[str, tuple[str, ...] | None]:
    """Flags of others for what one bound step gives another, as ``wanted_elsewhere`` has them."""
    read = {name for step in (*bound.forward, *bound.backward) for name in step.reads}
    return {
        name: wanted_elsewhere(bound, program, name)
        for program in bound.at
        for step in bound.parts(program)
        for name in step.writes
        if name in read
    }


def _all(steps: Sequence[Step], what: str) -> set[object]:
    return {each for step in steps for each in getattr(step, what)}


def _flags(steps: Sequence[Step], name: object) -> tuple[str, ...]:
    """Under which flags a buffer is written."""
    step = next(step for step in steps if name in step.writes)
    return step.wanted(str(name)) or step.when


def in_order(steps: Sequence[Step]) -> tuple[Step, ...] | None:
    """The steps with every writer before its readers, otherwise as they stand; None for a cycle.

    What changes in place stays on its side of what reads it.
    """
    waiting, ordered = list(steps), list[Step]()
    while waiting:
        pending = {name for step in waiting for name in {*step.writes} - {*step.mutates}}
        ready = next((i for i, step in enumerate(waiting) if not pending & {*step.reads}), None)
        if ready is None or any(_conflict(waiting[ready], step) for step in waiting[:ready]):
            return None
        ordered.append(waiting.pop(ready))
    return tuple(ordered)


def _conflict(step: Step, other: Step) -> bool:
    """Whether two steps may not change places, because one changes what the other touches."""
    return any(
        {*one.mutates} & {*two.reads, *two.mutates} for one, two in ((step, other), (other, step))
    )


def _steps(draft: Draft, program: str) -> tuple[Step, ...]:
    if program == FORWARD:
        return draft.forward
    return draft.backward if program == BACKWARD else draft.wgrad


def _shown(step: Step) -> str:
    """A step as people find it in a plan: its item, what it does, what it gives."""
    kind = [step.kind] if step.kind else []
    item = [f"{step.item}:"] if step.item else []
    return " ".join((*item, step.primitive, *kind, "->", step.out))


def _count(named: Mapping[Slot, str], word: str) -> str:
    return f"{len(named)} {word}{'' if len(named) == 1 else 's'}"
