"""Where a backward is cut so that memory goes while it runs.

What a backward was given is there until it returns: what the forward saved, beside all results and
the workspace.  As several ops it has at its worst moment what one of them was given, gives and
needs inside, together with what later ones wait for.  Each further op takes the host about 5 us,
and has to earn that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, pairwise, takewhile
from operator import itemgetter

from ..ir.dtypes import DType
from ..ir.program import Program
from ..ir.shapes import first_factor
from ..steps import decodes
from ..steps.footprint import Axes, bytes_of, peaks, stretches, typical
from .draft import Draft

MOST_CUTS = 3
WORTH = 1 / 64
"""The share of the peak that a further op has to spare."""


def where_memory_goes(draft: Draft, backward: Program) -> Iterator[tuple[int, ...]]:
    """Ways to cut a backward that pay, the best one first.

    Each is the positions of the steps that a further op begins with.  Other programs are not cut.
    Neither is a backward whose gradients of weights are delayed: what those read stays until they
    are computed.
    """
    if backward.name != "backward" or draft.program("wgrad"):
        return
    judges = [_Judge.of(draft, backward, lengths) for lengths in _typical(draft)]

    def cost(cuts: tuple[int, ...]) -> float:
        return sum(each.share(cuts) for each in judges) / len(judges) + len(cuts) * WORTH

    places = [
        place
        for place in range(1, len(backward.steps))
        if any(each.lets_go(place) for each in judges) and _may_be_cut(draft, backward, place)
    ]
    ways = (cuts for count in range(MOST_CUTS + 1) for cuts in combinations(places, count))
    ranked = sorted(((cost(cuts), cuts) for cuts in ways), key=itemgetter(0))  # fewest ops first
    yield from (cuts for _, cuts in takewhile(itemgetter(1), ranked))


@dataclass(frozen=True, slots=True)
class _Judge:
    """A backward at sizes.

    Attributes:
        backward: all of it.
        saved: what the forward made for it.
        size: bytes of buffers.
        whole: its peak as one op.
        calls: peaks of ops that were asked for, by the steps that they begin and end with.
    """

    backward: Program
    saved: frozenset[str]
    size: Mapping[str, int]
    whole: int
    calls: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, draft: Draft, backward: Program, lengths: Mapping[str, int]) -> _Judge:
        saved = frozenset(result.buffer for result in draft.saved) - {*draft.arguments}
        own = cls(backward, saved, bytes_of(draft.buffers, lengths), 0)
        return replace(own, whole=max(own._peak(()), 1))

    def _peak(self, cuts: tuple[int, ...]) -> int:
        return max(self._call(*ends) for ends in pairwise((0, *cuts, len(self.backward.steps))))

    def _call(self, begin: int, end: int) -> int:
        """The peak of an op of the steps from one to before another."""
        if (begin, end) not in self.calls:
            steps = self.backward.steps
            leaving = frozenset(result.buffer for result in self.backward.results)
            outside = frozenset(argument.buffer for argument in self.backward.arguments)
            cuts = {begin, end} - {0, len(steps)}
            calls = stretches(steps, cuts, leaving, outside)
            found = peaks(calls, self.saved, leaving, self.size)
            self.calls[begin, end] = next(islice(found, int(begin > 0), None))
        return self.calls[begin, end]

    def share(self, cuts: tuple[int, ...]) -> float:
        """The peak of several ops over that of one."""
        return self._peak(cuts) / self.whole

    def lets_go(self, place: int) -> bool:
        """Whether what is read for the last time just before a step is worth an op."""
        *_, last = self.backward.steps[:place]
        later = {name for step in self.backward.steps[place:] for name in step.reads}
        results = {result.buffer for result in self.backward.results}
        made = {name for step in self.backward.steps for name in step.writes}
        gone = {*last.reads} & (self.saved | made) - later - results
        return sum(self.size[name] for name in gone) >= WORTH * self.whole


def _may_be_cut(draft: Draft, backward: Program, place: int) -> bool:
    """Whether what crosses from op to op may.

    A GEMM reads what a step decodes for it, as part of one thing.  Compilers refuse E8M0 where an
    op changes something (``as_bytes.py``).
    """
    steps = backward.steps
    read = {name for step in steps[place:] for name in step.reads}
    if any(decodes(step) and not read.isdisjoint(step.writes) for step in steps[:place]):
        return False
    if not any(step.mutates for step in steps):
        return True
    written = {name for step in steps[:place] for name in step.writes}
    return all(draft.buffers[name].dtype is not DType.E8M0 for name in written & read)


def _typical(draft: Draft) -> Iterator[Mapping[str, int]]:
    """Sizes of a module's dimensions in typical layers."""
    steps = (step for program in draft.programs for step in program.steps)
    rows = first_factor(draft.buffers[draft.inputs[0]].shape.flat[0])
    return typical(draft.buffers, Axes.of(draft.buffers, steps, rows))
