"""Liveness: when each step runs, and exactly what the forward leaves for the backward."""

from __future__ import annotations

from dataclasses import replace

from ..ir.naming import need
from ..ir.step import LIKE, Result, Step
from ..steps import observes
from .draft import Draft


def flags_of(draft: Draft) -> tuple[str, ...]:
    """One flag per gradient that can be asked for, in argument order."""
    return tuple(need(leaf) for leaf, _ in draft.gradients)


def add_conditions(draft: Draft) -> Draft:
    """Let each backward step run only if a gradient that was asked for depends on it.

    A step that no gradient depends on is dropped.  One that moves on a state which a later step
    reads, such as random numbers, runs and gives all that it gives whenever that one does: what is
    drawn for a gradient is the same, whichever others are asked for.
    """
    flags = flags_of(draft)
    wanted = {name: {*when} for name, when in draft.computed.items()}
    steps: list[Step] = []
    for step in reversed(draft.backward):
        asked = set().union(*(wanted.get(name, set()) for name in step.writes))
        moved = set().union(*(wanted.get(name, set()) for name in step.mutates))
        if asked and not moved <= asked:
            asked |= moved
            wanted |= {n: {*asked} for n in step.writes if n not in draft.computed}
        for name in step.reads:
            wanted.setdefault(name, set()).update(asked)
        if asked:
            conditions = tuple(
                Result(name, ordered(wanted.get(name, set()), flags))
                for name in step.writes
                if wanted.get(name, set()) != asked
            )
            steps.append(replace(step, when=ordered(asked, flags), output_when=conditions))
    return replace(draft, backward=tuple(reversed(steps)))


def ordered(asked: set[str], flags: tuple[str, ...]) -> tuple[str, ...]:
    """Flags in schema order; none where every flag asks, since a backward runs for one at least."""
    if asked == set(flags):
        return ()
    return tuple(flag for flag in flags if flag in asked)


def saved(draft: Draft) -> tuple[Result, ...]:
    """Buffers of the forward that the backward reads, each once, with the flags that ask for it.

    What only binds a length is a weight, which costs nothing to keep, and there under every flag:
    what a module keeps is an argument of every backward, and its sizes are checked by those.
    """
    flags = flags_of(draft)
    produced = {name for step in draft.backward for name in step.writes}
    incoming = {*draft.incoming} | {each.buffer for each in draft.states}
    incoming |= {name for each in draft.collectives for name in each.results}
    weights = {parameter.buffer for parameter in draft.parameters}
    asked: dict[str, set[str]] = {}
    for step in draft.backward:
        like = {step.input(LIKE)} & weights
        for name in step.reads:
            if name not in produced | incoming:
                when = flags if name in like else step.when or flags
                asked.setdefault(name, set()).update(when)
    position = {name: index for index, name in enumerate(draft.buffers)}
    return tuple(
        Result(name, ordered(asked[name], flags))
        for name in sorted(asked, key=position.__getitem__)
    )


def joined_results(draft: Draft, results: tuple[Result, ...]) -> tuple[Result, ...]:
    """Results as ops give them: several that lie in one tensor are this, if any is asked for."""
    flags = flags_of(draft)
    asked: dict[str, set[str]] = {}
    for result in results:
        asked.setdefault(draft.tensor_with(result.buffer), set()).update(result.when or flags)
    return tuple(Result(name, ordered(when, flags)) for name, when in asked.items())


def forward_conditions(
    steps: tuple[Step, ...], kept: tuple[Result, ...], sent: frozenset[str]
) -> tuple[Step, ...]:
    """Forward steps whose results for the backward are written only under their flags.

    A step whose results have the same flags runs for these alone; nothing is written for the sake
    of statistics.

    Args:
        steps: of the forward.
        kept: results for the backward.
        sent: what collectives of the forward read, under whatever flags its step writes it.
    """
    read = sent | {n for step in steps if not observes(step) for n in step.reads}
    asked = {result.buffer: result.when for result in kept if result.buffer not in read}

    def conditioned(step: Step) -> Step:
        if observes(step):
            return replace(step, when=asked.get(step.copies[0].data, ()))
        own = tuple(r for r in kept if r.buffer in step.writes and r.buffer not in read)
        if len({result.when for result in own}) == 1 and len(own) == len(step.writes):
            return replace(step, when=own[0].when)
        if len(step.writes) > 1:
            return replace(step, output_when=(*step.output_when, *own))
        return step

    return tuple(conditioned(step) for step in steps)
