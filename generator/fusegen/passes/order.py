"""The order of steps inside each op of a backward: the module's, or one with a lower peak.

Ops give the gradients of their inputs before those of their weights.  That is not always what takes
least memory: the gradient of tokens that rows were gathered from can take the place of the rows'
gradient at once, before rows are gathered again for the gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..ir.program import Program
from ..ir.step import Step
from ..steps import observes
from ..steps.footprint import Stretch, needed_inside, stretches

MOST_SETS = 4096
"""Sets of steps that are looked at, at most."""

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
    (whole,) = calls_of(backward, ())
    for steps in _lower(whole, sizes):
        yield replace(backward, steps=steps)


def order_inside(backward: Program, cuts: tuple[int, ...], sizes: Sequence[Sizes]) -> Program:
    """The backward with the steps of each op in the order that needs least, where that pays.

    Args:
        backward: all of it.
        cuts: positions of the steps that a further op begins with.
        sizes: bytes of buffers, in every layer that counts.
    """
    calls = calls_of(backward, cuts)
    steps = (step for call in calls for step in next(iter(_lower(call, sizes)), call.steps))
    return replace(backward, steps=tuple(steps))


def calls_of(backward: Program, cuts: Iterable[int]) -> tuple[Stretch, ...]:
    """The ops of a backward that is cut before the steps at these positions."""
    leaving = frozenset(result.buffer for result in backward.results)
    outside = frozenset(argument.buffer for argument in backward.arguments)
    return stretches(backward.steps, cuts, leaving, outside)


def _lower(call: Stretch, sizes: Sequence[Sizes]) -> list[Steps]:
    """Orders with the lowest peak at one of these sizes that pay at all of them, the best first."""
    now = [max(needed_inside(call, size), 1) for size in sizes]

    def share(steps: Steps) -> float:
        peaks = [needed_inside(replace(call, steps=steps), size) for size in sizes]
        return sum(peak / own for peak, own in zip(peaks, now, strict=True)) / len(sizes)

    runs = _runs(call.steps)
    places = dict.fromkeys(_Search.of(runs, call.results, size).order() for size in sizes)
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
    """Some steps in an order: the best of all orders of these.

    Attributes:
        peak: bytes at the worst moment.
        moved: pairs of steps that changed their order.
        there: bytes that are there at the end.
        order: positions of the steps.
    """

    peak: int
    moved: int
    there: int
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Search:
    """All orders of steps, or runs of such, that come after what they depend on.

    Sets of these are numbers, with a bit for each.

    Attributes:
        before: of each step, those that it runs after.
        made: bytes that each step allocates.
        lives: of each buffer that none but these read, its bytes, and the steps that touch it.
    """

    before: tuple[int, ...]
    made: tuple[int, ...]
    lives: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, runs: Sequence[Steps], results: AbstractSet[str], size: Sizes) -> _Search:
        new = [{n for step in run for n in step.writes if n not in step.mutates} for run in runs]
        inside = sorted({name for names in new for name in names} - results)
        touched = [{n for step in run for n in (*step.reads, *step.writes)} for run in runs]
        return cls(
            tuple(_bits(_depends(run, each) for each in runs[:i]) for i, run in enumerate(runs)),
            tuple(sum(size[name] for name in names) for names in new),
            tuple((size[name], _bits(name in names for names in touched)) for name in inside),
        )

    def order(self) -> tuple[int, ...]:
        """The one with the lowest peak, and of these the one that moves fewest past others; none
        where there are too many.
        """
        own = [[each for each in self.lives if each[1] >> i & 1] for i in range(len(self.before))]
        ways = {0: _Way(0, 0, 0, ())}
        looked_at = 0
        for _ in self.before:
            further: dict[int, _Way] = {}
            for done, way in ways.items():
                for step, before in enumerate(self.before):
                    if done >> step & 1 or before & ~done:
                        continue
                    after = done | 1 << step
                    there = way.there + self.made[step]
                    peak = max(way.peak, there)
                    moved = way.moved + ((1 << step) - 1 & ~done).bit_count()
                    known = further.get(after)
                    if known and (known.peak, known.moved) <= (peak, moved):
                        continue
                    gone = sum(size for size, touching in own[step] if not touching & ~after)
                    further[after] = _Way(peak, moved, there - gone, (*way.order, step))
            ways, looked_at = further, looked_at + len(further)
            if looked_at > MOST_SETS:
                return ()
        (best,) = ways.values()
        return best.order


def _depends(run: Steps, before: Steps) -> bool:
    """Whether steps have to run after some that stand before them."""
    changed = {name for step in run for name in (*step.writes, *step.mutates)}
    touched = changed | {name for step in run for name in step.reads}
    wrote = {name for step in before for name in (*step.writes, *step.mutates)}
    read = {name for step in before for name in step.reads}
    return not touched.isdisjoint(wrote) or not changed.isdisjoint(read)


def _bits(flags: Iterable[bool]) -> int:
    return sum(int(flag) << i for i, flag in enumerate(flags))
