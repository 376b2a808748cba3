"""Views: what the forward has in other dimensions, the backward has of the same tensor.

Dimensions cost nothing, memory does: where the backward reads what a step of the forward gives in
other dimensions, it makes that again, so that one tensor is saved, under whatever name others read.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.step import Step
from ..steps import copies_memory
from .draft import Draft


def view_again(draft: Draft) -> Draft:
    """Repeat such steps before their first reader in the backward; those without a reader go."""
    made = {step.out: step for step in draft.forward if copies_memory(step)}
    kept = {state.buffer for state in draft.states}
    made = {name: step for name, step in made.items() if kept.isdisjoint(step.reads)}
    backward: list[Step] = []
    there = {*draft.outputs}
    for step in draft.backward:
        for name in step.reads:
            backward += _chain(name, made, there)
        backward.append(step)
    read = {name for step in draft.forward for name in step.reads} | {*draft.outputs}
    forward = tuple(s for s in draft.forward if s.out not in made or s.out in read)
    return replace(draft, forward=forward, backward=tuple(backward))


def _chain(name: str, made: dict[str, Step], there: set[str]) -> list[Step]:
    """The steps that give a tensor in its dimensions, of the first one that they are all of."""
    if name not in made or name in there:
        return []
    there.add(name)
    return [*_chain(made[name].reads[0], made, there), made[name]]
