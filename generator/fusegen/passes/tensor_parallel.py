"""What ranks exchange so that each may have a part of a module's weights.

One dimension of the module, or one for each chain of GEMMs, is split over the ranks, or the groups
of its rows are.  Outputs and gradients of which a rank then has a partial sum (``parts.py``) are
added up, each once, where they leave the ops.  A bias is part of each rank's sum, so each adds a
share of it.

Where tokens are split over ranks outside of the ops, inputs that ranks have in common are gathered
when they come in, and what is added up is scattered.  Where they are in slots for each rank, both
are exchanges of all with all: a slot has one rank's result.  Gradients that are exchanged come
before those that are not, so that these are computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..ir.naming import gradient
from ..ir.segments import Exchange
from ..ir.shapes import Expr, first_factor, symbols
from ..ir.step import Step
from ..options.tensor_parallel import Parallel, Split
from ..steps import definition, is_gemm
from ..steps.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    ALL_TO_ALL_NUMBERS,
    GATHER_NUMBERS,
    REDUCE_SCATTER,
    SHARE,
    CollectiveDef,
)
from .draft import Draft, NotPossible
from .parts import Parts, PartsOfFeatures, PartsOfGroups

_SUM = (("op", "sum"),)


def split_over_ranks(draft: Draft, said: Parallel) -> Draft:
    """The draft with what ranks exchange.

    Args:
        draft: before anything is quantised.
        said: what is split.

    Raises:
        NotPossible: a step needs what a rank does not have; the message names it.
    """
    dimensions = _dimensions(draft, said.split)
    kind = PartsOfGroups if said.split is Split.GROUPS else PartsOfFeatures
    parts = kind(draft, dimensions)
    for step in (*draft.forward, *draft.backward):
        parts.follow(step)
    exchanges = [Exchange(SHARE.name, name, True, parts.group) for name in parts.shared]
    if said.slots:
        exchanges += _entering(parts, ALL_TO_ALL, ALL_TO_ALL_NUMBERS)
        exchanges += _leaving(parts, ALL_TO_ALL)
    elif said.sequence:
        exchanges += _entering(parts, ALL_GATHER, GATHER_NUMBERS)
        exchanges += _leaving(parts, REDUCE_SCATTER)
    else:
        exchanges += _leaving(parts, None)
    leaving = {each.buffer for each in exchanges if not each.entering}
    return replace(
        draft,
        backward=_exchanged_first(draft, leaving),
        exchanges=tuple(exchanges),
        split=tuple(sorted(dimensions)),
    )


def _dimensions(draft: Draft, split: Split) -> frozenset[str]:
    """Names of the dimensions that ranks have parts of."""
    inputs = frozenset[str]().union(*(draft.buffers[n].shape.symbols() for n in draft.inputs))
    outputs = frozenset[str]().union(*(draft.buffers[n].shape.symbols() for n in draft.outputs))
    gemms = [step for step in draft.forward if is_gemm(step)]
    if split is Split.OUTPUTS:
        first = draft.buffers[draft.inputs[0]].shape.symbols()
        found = symbols(draft.buffers[draft.outputs[0]].shape.flat[-1]) - first
    elif split is Split.INPUTS:
        found = symbols(draft.buffers[draft.inputs[0]].shape.flat[-1]) - outputs
    elif split is Split.GROUPS:
        sizes = (draft.buffers[name].shape for gemm in gemms if (name := gemm.input("groups")))
        found = frozenset[str]().union(*(shape.symbols() for shape in sizes))
    else:
        read = (draft.buffers[gemm.input("a") or ""].shape.flat[-1] for gemm in gemms)
        found = frozenset[str]().union(*map(symbols, read)) - inputs - outputs
    if not found:
        raise NotPossible(f"no dimension of its {split.value} is one that ranks could split")
    return found


def _exchanged_first(draft: Draft, exchanged: set[str]) -> tuple[Step, ...]:
    """The backward, in which steps that lead to what is exchanged come first, from the last GEMM on
    that does: what stands before that needs no more memory where it stands.
    """
    leading = set[int]()
    wanted = {*exchanged}
    for place, step in reversed([*enumerate(draft.backward)]):
        if not wanted.isdisjoint(step.writes):
            leading.add(place)
            wanted |= {*step.reads}
    last = max((i for i in leading if is_gemm(draft.backward[i])), default=len(draft.backward))
    kept, rest = draft.backward[:last], [*enumerate(draft.backward)][last:]
    first = (step for place, step in rest if place in leading)
    return *kept, *first, *(step for place, step in rest if place not in leading)


def _entering(
    parts: Parts, of_rows: CollectiveDef, of_numbers: CollectiveDef
) -> Iterator[Exchange]:
    """What ranks have in common inside, and of tokens of their own outside.

    Args:
        parts: through all steps.
        of_rows: what gives a rank the rows of others.
        of_numbers: the same of numbers of what each rank has some of.

    Raises:
        NotPossible: rows of an input are not side by side any more once they are gathered.
    """
    draft = parts.draft
    counted, numbers = _counted(draft), dict(_numbers(parts))
    for name in draft.inputs:
        if name in counted:
            if parts.is_split(name):
                yield Exchange(REDUCE_SCATTER.name, name, True, parts.group)
            else:
                yield Exchange(ALL_REDUCE.name, name, True, parts.group, _SUM)
        elif parts.is_split(name):
            continue
        elif not _has_tokens(draft, name):
            raise NotPossible(f"{name!r} is not of tokens, which each rank has some of")
        elif name in numbers:
            (own,) = of_numbers.sizes
            sizes = ((own, numbers[name]),)
            yield Exchange(of_numbers.name, name, True, parts.group, sizes=sizes)
        else:
            yield Exchange(of_rows.name, name, True, parts.group)
    for name in draft.outputs:
        if name in parts.partial and gradient(name) in draft.incoming:
            yield Exchange(of_rows.name, gradient(name), True, parts.group)


def _numbers(parts: Parts) -> Iterator[tuple[str, Expr]]:
    """Inputs that have numbers of what ranks have some of each, with how many these are."""
    for step in parts.draft.forward:
        kind = definition(step.primitive)
        rule = kind.shapes.get(step.kind, {})
        for slot, size in kind.indices.items():
            for each in (*step.inputs, *step.outputs):
                numbered = rule.get(each.slot) == kind.sizes[size]
                if numbered and parts.is_split(each.buffer):
                    count = parts.draft.buffers[each.buffer].shape.flat[0]
                    yield step.input(slot) or "", count


def _counted(draft: Draft) -> frozenset[str]:
    """Inputs that have how often each number is among others."""
    return frozenset(
        step.input(slot) or ""
        for step in draft.forward
        for slot in definition(step.primitive).counted
    )


def _leaving(parts: Parts, of_rows: CollectiveDef | None) -> Iterator[Exchange]:
    """Outputs and gradients of which every rank has a partial sum.

    Args:
        parts: through all steps.
        of_rows: what gives ranks their own tokens of what has tokens; None where all have all.

    Raises:
        NotPossible: ranks would have to get their tokens of what each has all of.
    """
    draft = parts.draft
    lent = dict(draft.main_grads).values()
    gradients = {name: leaf for leaf, name in draft.gradients}
    for name in (*draft.outputs, *gradients):
        own = of_rows and _has_tokens(draft, name) and gradients.get(name, name) not in lent
        if name not in parts.partial:
            if own and not parts.is_split(name):
                raise NotPossible(f"every rank has all of {name!r}, not its own tokens of it")
        elif of_rows and own:
            yield Exchange(of_rows.name, name, False, parts.group)
        else:
            yield Exchange(ALL_REDUCE.name, name, False, parts.group, _SUM)


def token_symbols(draft: Draft) -> frozenset[str]:
    """Names of the dimension of tokens."""
    return symbols(first_factor(draft.buffers[draft.inputs[0]].shape.flat[0]))


def _has_tokens(draft: Draft, name: str) -> bool:
    flat = draft.buffers[name].shape.flat
    return bool(flat) and bool(symbols(flat[0]) & token_symbols(draft))
