"""Activations that the backward makes again instead of the forward saving them.

What an expression, a norm or a gather gives follows, bit for bit, from what it read.  Where the
backward has that anyway, because it is an argument or saved for another step, the result itself
need not be saved.  Chains say it of some of their ops, an option of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..ir.step import Step
from ..steps import is_recomputed
from .draft import Draft, NotPossible


def recompute_activations(draft: Draft, *, every: bool) -> Draft:
    """Repeat such steps of the forward in the backward, each before its first reader there.

    Liveness then saves what they read in place of what they give, and quantisation makes copies
    of a tensor in the program that makes the tensor.

    Args:
        draft: the module.
        every: whether of all ops, and not only of those of which the chain says so.

    Raises:
        NotPossible: every one is asked for, and the backward reads nothing that could be made
            again.
    """
    chosen = {each.item for each in draft.instances if every or each.recompute}
    steps = list(draft.backward)
    for step in _again(draft, chosen):
        first = next(i for i, reader in enumerate(steps) if set(step.writes) & set(reader.reads))
        steps.insert(first, step)
    if every and len(steps) == len(draft.backward):
        raise NotPossible(
            "neither expression nor norm gives an activation that is saved for the backward"
        )
    return replace(draft, backward=tuple(steps))


def _again(draft: Draft, chosen: set[str]) -> Iterator[Step]:
    """Steps of the chosen items whose results the backward can have without saving them, last one
    first.
    """
    made = {name for step in draft.backward for name in step.writes}
    wanted = {name for step in draft.backward for name in step.reads} - made
    known = {*draft.arguments, *wanted}
    repeatable = []
    for step in draft.forward:
        if step.item in chosen and is_recomputed(step) and known.issuperset(step.reads):
            known.update(step.writes)
            repeatable.append(step)
    wanted -= {*draft.outputs}  # the caller has them, so that saving them costs nothing
    for step in reversed(repeatable):
        if wanted.intersection(step.writes):
            wanted.update(step.reads)
            yield step
