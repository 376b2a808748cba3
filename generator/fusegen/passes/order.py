"""The order of steps inside each op of a backward: the module's, or one with a lower peak.

Ops give the gradients of their inputs before those of their weights.  That is not always what takes
least memory: the gradient of tokens that rows were gathered from can take the place of the rows'
gradient at once, before rows are gathered again for the gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache
from heapq import nsmallest
from operator import itemgetter
from typing import NamedTuple

from ..ir.program import Program
from ..ir.step import Step
from ..steps import observes
from ..steps.footprint import Stretch, needed_inside, stretches

MOST_SETS = 128
"""Sets of as many steps that are looked at, at most."""

WORTH = 1 / 64
"""The share of its peak that another order, or a further op, has to spare."""

Steps = tuple[Step, ...]
Sizes = Mapping[str, int]
"""Bytes of buffers."""


def orders(backward: Program, sizes: Sequence[Sizes]) -> Iterator[Program]:
    """A backward as it is, and in orders with a lower peak as one op.

    Args:
        backward: all of it.
        sizes: bytes of buffers, in every layer that counts.
    """
    yield backward
    (whole,) = _calls_of(backward, ())
    for steps in _lower(whole, sizes):
        yield replace(backward, steps=steps)


def order_inside(backward: Program, cuts: tuple[int, ...], sizes: Sequence[Sizes]) -> Program:
    """The backward with the steps of each op in the order that needs least, where that pays.

    Args:
        backward: all of it.
        cuts: positions of the steps that a further op begins with.
        sizes: bytes of buffers, in every layer that counts.
    """
    calls = _calls_of(backward, cuts)
    steps = (step for call in calls for step in next(iter(_lower(call, sizes)), call.steps))
    return replace(backward, steps=tuple(steps))


def _calls_of(backward: Program, cuts: Iterable[int]) -> tuple[Stretch, ...]:
    """The ops of a backward that is cut before the steps at these positions."""
    leaving = frozenset(result.buffer for result in backward.results)
    outside = frozenset(argument.buffer for argument in backward.arguments)
    return stretches(backward.steps, cuts, leaving, outside)


def _lower(call: Stretch, sizes: Sequence[Sizes]) -> list[Steps]:
    """Orders with the lowest peak at one of these sizes, where it pays there and over all of them,
    the best first.
    """
    now = [max(needed_inside(call, size), 1) for size in sizes]

    def share(steps: Steps) -> float:
        peaks = [needed_inside(replace(call, steps=steps), size) for size in sizes]
        return sum(peak / own for peak, own in zip(peaks, now, strict=True)) / len(sizes)

    runs = _runs(call.steps)
    limits = [int(peak * (1 - WORTH)) for peak in now]
    pairs = zip(sizes, limits, strict=True)
    places = dict.fromkeys(_order(_Search.of(runs, call.results, *each)) for each in pairs)
    found = [tuple(step for index in each for step in runs[index]) for each in places if each]
    shares = {steps: share(steps) for steps in found}
    return sorted((each for each in found if shares[each] <= 1 - WORTH), key=shares.__getitem__)


def _runs(steps: Steps) -> tuple[Steps, ...]:
    """Steps that stay side by side: one, and those behind it that leave numbers for people, so that
    the order is what it is without these.
    """
    found: list[Steps] = []
    for step in steps:
        if found and observes(step):
            found[-1] += (step,)
        else:
            found.append((step,))
    return tuple(found)


class _Way(NamedTuple):
    """Some steps in an order: the best that was found of these.

    Attributes:
        peak: bytes at the worst moment.
        there: bytes that are there at the end.
        moved: pairs of steps that changed their order.
        order: positions of the steps.
    """

    peak: int
    there: int
    moved: int
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Touched:
    """Buffers that steps touch.

    Attributes:
        made: what they allocate.
        changed: that, and what is there before.
        every: all of them.
    """

    made: frozenset[str]
    changed: frozenset[str]
    every: frozenset[str]

    @classmethod
    def of(cls, run: Steps) -> _Touched:
        made = frozenset(name for step in run for name in step.writes if name not in step.mutates)
        changed = frozenset(name for step in run for name in (*step.writes, *step.mutates))
        return cls(made, changed, changed.union(*(step.reads for step in run)))

    def waits_for(self, earlier: _Touched) -> bool:
        """Whether the steps have to run after some that stand before them."""
        return not (
            self.every.isdisjoint(earlier.changed) and self.changed.isdisjoint(earlier.every)
        )


@dataclass(frozen=True, slots=True)
class _Search:
    """All orders of steps, or runs of such, that come after what they depend on.

    Sets of these are numbers, with a bit for each.

    Attributes:
        before: of each step, those that it runs after.
        made: bytes that each step allocates.
        lives: of each step, the bytes of every buffer that it touches and none but these read,
            and the steps that touch it.
        most: bytes at the worst moment of an order that pays.
    """

    before: tuple[int, ...]
    made: tuple[int, ...]
    lives: tuple[tuple[tuple[int, int], ...], ...]
    most: int

    @classmethod
    def of(
        cls, runs: Sequence[Steps], results: AbstractSet[str], size: Sizes, most: int
    ) -> _Search:
        each = [_Touched.of(run) for run in runs]
        inside = {name for own in each for name in own.made} - results
        touching = {name: _bits(name in own.every for own in each) for name in sorted(inside)}
        return cls(
            tuple(
                _bits(own.waits_for(earlier) for earlier in each[:i]) for i, own in enumerate(each)
            ),
            tuple(sum(size[name] for name in own.made) for own in each),
            tuple(
                tuple((size[name], bits) for name, bits in touching.items() if name in own.every)
                for own in each
            ),
            most,
        )

    @property
    def least(self) -> int:
        """Bytes at the worst moment of any order: what one step touches is there while it runs."""
        return max((sum(size for size, _ in own) for own in self.lives), default=0)

    @property
    def behind(self) -> list[list[int]]:
        """Of each step, those that run after it."""
        places = range(len(self.before))
        return [[i for i in places if self.before[i] >> step & 1] for step in places]

    def extend(
        self, done: int, way: _Way, ready: Iterable[int], found: dict[int, _Way]
    ) -> dict[int, _Way]:
        """Sets of one step more, and the best ways there that may pay: with the first step alone
        that takes nothing, where there is one, since whatever others give can come after it.

        Args:
            done: a set of steps.
            way: an order of these.
            ready: steps that may run next, in their order.
            found: the best ways to such sets so far.
        """
        more: dict[int, _Way] = {}
        for step in ready:
            there = way.there + self.made[step]
            if there > self.most:
                continue
            after, peak = done | 1 << step, max(way.peak, there)
            known = found.get(after)
            left = known.there if known else there - self._gone(step, after)
            moved = way.moved + ((1 << step) - 1 & ~done).bit_count()
            better = known is None or (peak, moved) <= (known.peak, known.moved)
            if better:
                each = _Way(peak, left, moved, (*way.order, step))
                better = known is None or each < known
            if peak == way.peak and left <= way.there:
                return {after: each} if better else {}
            if better:
                more[after] = each
        return more

    def _gone(self, step: int, after: int) -> int:
        """Bytes that nothing reads any more once a step has run, the last of a set."""
        gone = 0
        for size, touching in self.lives[step]:
            if not touching & ~after:
                gone += size
        return gone


@cache
def _order(search: _Search) -> tuple[int, ...]:
    """One with a low peak, and near the one that steps are in; none where none pays.  It is as low
    as any where no more sets of as many steps have to be looked at than may be.
    """
    if search.least > search.most:
        return ()
    before, behind = search.before, search.behind

    def ready_after(done: int, last: int, ready: Iterable[int]) -> list[int]:
        more = [i for i in behind[last] if not before[i] & ~done]
        return sorted([*(i for i in ready if i != last), *more])

    ways = {0: _Way(0, 0, 0, ())}
    ready = {0: [i for i, steps in enumerate(before) if not steps]}
    for _ in before:
        found: dict[int, _Way] = {}
        for done, way in ways.items():
            found |= search.extend(done, way, ready[done], found)
        if len(found) > MOST_SETS:
            found = dict(nsmallest(MOST_SETS, found.items(), key=itemgetter(1)))
        parents = ((done, way.order[-1]) for done, way in found.items())
        ready = {done: ready_after(done, last, ready[done ^ 1 << last]) for done, last in parents}
        ways = found
    return next((best.order for best in ways.values()), ())


def _bits(flags: Iterable[bool]) -> int:
    return sum(int(flag) << i for i, flag in enumerate(flags))
