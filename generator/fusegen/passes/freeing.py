"""In what order a backward runs, and where it is cut so that memory goes while it does.

What a backward was given is there until it returns: what the forward saved, beside all results and
the workspace.  As several ops it has at its worst moment what one of them was given, gives and
needs inside, together with what later ones wait for.  Each further op takes the host about 5 us,
and has to earn that; an order that is not the module's has to earn as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, islice
from operator import attrgetter

from ..ir.dtypes import DType
from ..ir.naming import need
from ..ir.program import Program
from ..ir.shapes import first_factor
from ..steps import decodes, is_recomputed
from ..steps.footprint import Axes, Peaks, bytes_of, typical
from .draft import Draft
from .order import WORTH, order_inside, orders

MOST_CUTS, MOST_PLACES = 3, 8
"""Of a backward, and from how many places they are chosen: those where most goes."""
LOOKED_AT = 4
"""Ways that are looked at with the steps of each op in the best order."""
RARITY = 16
"""What is made for few layers counts for this part of its bytes."""
PULLED = 32
"""Ways that are looked at with what they make again before the cuts."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to run a backward.

    Attributes:
        cost: its peak over that of the module's order as one op, and what its ops have to spare.
        backward: in an order of its steps.
        cuts: positions of the steps that a further op begins with.
        possible: whether the backward can be cut so.
    """

    cost: float
    backward: Program
    cuts: tuple[int, ...]
    possible: Callable[[tuple[int, ...]], bool]


def best_way(
    draft: Draft,
    backward: Program,
    possible_cuts: Callable[[Program], Callable[[tuple[int, ...]], bool]],
    *,
    freeing: bool,
    ordering: bool,
) -> tuple[Program, tuple[int, ...]]:
    """The way to run a backward that takes least memory: in which order, and where it is cut.

    A backward whose gradients of weights are delayed is never cut: what those read stays until they
    are computed.

    Args:
        draft: with programs.
        backward: one of them.
        possible_cuts: of an order of its steps, whether it can be cut at positions.
        freeing: whether it may be.
        ordering: whether its steps may run in another order.
    """
    rarely = _rarely_made(draft, backward)
    sizes = [
        {name: size // RARITY if name in rarely else size for name, size in found.items()}
        for found in (bytes_of(draft.buffers, lengths) for lengths in _typical(draft))
    ]
    now = [max(_peaks(draft, backward, size).of_calls(()), 1) for size in sizes]

    def ways(order: Program, every: Iterable[tuple[int, ...]] | None = None) -> Iterator[_Way]:
        pairs = zip(sizes, now, strict=True)
        judges = [_Judge.of(draft, order, whole, size) for size, whole in pairs]
        possible = possible_cuts(order)
        for cuts in _cuts(draft, order, judges) if every is None else every:
            share = sum(each.share(cuts) for each in judges) / len(judges)
            yield _Way(share + len(cuts) * WORTH, order, cuts, possible)

    every = orders(backward, sizes) if ordering else [backward]
    whole = None if freeing and not draft.program("wgrad") else [()]
    found = sorted(  # of equal ones the first: the module's order, the fewest ops
        (way for order in every for way in ways(order, whole)),
        key=attrgetter("cost"),
    )
    few = [*islice((way for way in found if way.possible(way.cuts)), LOOKED_AT)]
    if ordering:
        pulled = (_pulled(way, _saved(draft)) for way in islice(found, PULLED))
        again = (way for each in pulled if each for way in ways(each[0], [each[1]]))
        few += [replace(w, cost=w.cost + WORTH) for w in again if w.possible(w.cuts)]
        few = [next(ways(order_inside(w.backward, w.cuts, sizes), [w.cuts])) for w in few]
    best = min(few, key=attrgetter("cost"))
    return best.backward, best.cuts


def _pulled(way: _Way, saved: frozenset[str]) -> tuple[Program, tuple[int, ...]] | None:
    """A way whose ops make again, before a cut, what alone would keep something saved beyond it.

    Orders are looked for without cuts, where what is made early is only longer there.

    Returns:
        None where that is how it is.
    """
    steps, cuts = [*way.backward.steps], [*way.cuts]
    for number in range(len(cuts)):
        behind = steps[cuts[number] :]
        made = {name for step in behind for name in step.writes}
        read = Counter(name for step in behind for name in step.reads)
        for step in behind:
            kept = any(name in saved and read[name] == 1 for name in step.reads)
            if kept and is_recomputed(step) and made.isdisjoint(step.reads):
                place = steps.index(step)
                steps.insert(cuts[number], steps.pop(place))
                cuts = [at + (number <= n and at <= place) for n, at in enumerate(cuts)]
    if steps == [*way.backward.steps]:
        return None
    return replace(way.backward, steps=tuple(steps)), tuple(cuts)


def _rarely_made(draft: Draft, backward: Program) -> frozenset[str]:
    """What lies between steps for gradients of optional parameters alone: most layers lack them."""
    optional = {need(leaf) for leaf, _ in draft.gradients if draft.buffers[leaf].optional}
    steps = (step for step in backward.steps if step.when and optional.issuperset(step.when))
    written = frozenset(name for step in steps for name in step.writes)
    return written - {result.buffer for result in backward.results}


def _cuts(draft: Draft, backward: Program, judges: list[_Judge]) -> Iterator[tuple[int, ...]]:
    """Where further ops may begin, the fewest first."""
    freed = {
        place: max(each.lets_go(place) for each in judges)
        for place in range(1, len(backward.steps))
        if _may_be_cut(draft, backward, place)
    }
    worth = [place for place, share in freed.items() if share >= WORTH]
    most = sorted(worth, key=freed.__getitem__, reverse=True)[:MOST_PLACES]
    for count in range(MOST_CUTS + 1):
        yield from combinations(sorted(most), count)


@dataclass(frozen=True, slots=True)
class _Judge:
    """A backward at sizes.

    Attributes:
        whole: the peak that its own is compared with.
        peaks: of ops that it may be cut into.
        freed: bytes that are read for the last time by each step.
    """

    whole: int
    peaks: Peaks
    freed: tuple[int, ...]

    @classmethod
    def of(cls, draft: Draft, backward: Program, whole: int, size: Mapping[str, int]) -> _Judge:
        results = {result.buffer for result in backward.results}
        made = {name for step in backward.steps for name in step.writes}
        last = {name: i for i, step in enumerate(backward.steps) for name in step.reads}
        freed = [0] * len(backward.steps)
        for name in ((_saved(draft) | made) - results) & last.keys():
            freed[last[name]] += size[name]
        return cls(whole, _peaks(draft, backward, size), tuple(freed))

    def share(self, cuts: tuple[int, ...]) -> float:
        """The peak of several ops over what it is compared with."""
        return self.peaks.of_calls(cuts) / self.whole

    def lets_go(self, place: int) -> float:
        """The share of what is read for the last time just before a step."""
        return self.freed[place - 1] / self.whole


def _saved(draft: Draft) -> frozenset[str]:
    """What the forward made for the backward."""
    return frozenset(result.buffer for result in draft.saved) - {*draft.called_with}


def _peaks(draft: Draft, backward: Program, size: Mapping[str, int]) -> Peaks:
    leaving = frozenset(result.buffer for result in backward.results)
    return Peaks.of(backward.steps, _saved(draft), leaving, size)


def _may_be_cut(draft: Draft, backward: Program, place: int) -> bool:
    """Whether what crosses from op to op may.

    A GEMM reads what a step decodes for it, as part of one thing.  Compilers refuse E8M0 where an
    op changes something (``as_bytes.py``).
    """
    steps = backward.steps
    decoding = [step for step in steps[:place] if decodes(step)]
    changing = any(step.mutates for step in steps)
    if not (decoding or changing):
        return True
    read = {name for step in steps[place:] for name in step.reads}
    if not all(read.isdisjoint(step.writes) for step in decoding):
        return False
    if not changing:
        return True
    written = {name for step in steps[:place] for name in step.writes}
    return all(draft.buffers[name].dtype is not DType.E8M0 for name in written & read)


def _typical(draft: Draft) -> Iterator[Mapping[str, int]]:
    """Sizes of a module's dimensions in typical layers."""
    steps = (step for program in draft.programs for step in program.steps)
    rows = first_factor(draft.buffers[draft.inputs[0]].shape.flat[0])
    return typical(draft.buffers, Axes.of(draft.buffers, steps, rows))
