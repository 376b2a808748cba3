"""In which order contenders take turns, and what the ratios of their times say.

Whoever ran before leaves its heat, its clocks and its cache lines behind. So every round has
another order, in which, over a whole cycle, everybody follows everybody else equally often
(E. J. Williams, "Experimental designs balanced for the estimation of residual effects of
treatments", 1949). Ratios are taken within rounds, where both times are of one state of the card.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

T = TypeVar("T")
COVERAGE = 0.95


def orders(items: Sequence[T], rounds: int, seed: int = 1) -> Iterator[list[T]]:
    """Every round's order of the items.

    A cycle has as many rounds as there are items, twice as many where their number is odd; cycles
    follow each other, each with its rounds shuffled.
    """
    cycle = _cycle(len(items))
    draw = random.Random(seed)
    found: list[list[int]] = []
    while len(found) < rounds:
        found += draw.sample(cycle, len(cycle))
    return ([items[index] for index in order] for order in found[:rounds])


def _cycle(count: int) -> list[list[int]]:
    """Rows in which each ordered pair of neighbours is there once, of odd counts twice."""
    first = list(chain.from_iterable(zip(range(count), range(count - 1, -1, -1), strict=True)))
    first = first[:count]
    rows = [[(each + shift) % count for each in first] for shift in range(count)]
    return rows if count % 2 == 0 else rows + [row[::-1] for row in rows]


@dataclass(frozen=True)
class Ratio:
    """Of two contenders' times, round by round.

    Attributes:
        median: over the rounds.
        low, high: order statistics that hold the median of all rounds there could be with a
            probability of at least `COVERAGE`, whatever their distribution; None where there are
            too few rounds (less than six).
    """

    median: float
    low: float | None
    high: float | None


def ratio(times: Sequence[float], over: Sequence[float]) -> Ratio:
    """How many times as long one takes as another.

    Raises:
        ValueError: they have not the same number of rounds.
    """
    ratios = sorted(own / other for own, other in zip(times, over, strict=True))
    rank = _rank(len(ratios))
    bounds = (None, None) if rank is None else (ratios[rank], ratios[-1 - rank])
    return Ratio(statistics.median(ratios), *bounds)


def between(times: Sequence[float], over: Sequence[float]) -> Ratio:
    """The same, and where the number of rounds differs the ratio of the medians."""
    if len(times) == len(over):
        return ratio(times, over)
    return Ratio(statistics.median(times) / statistics.median(over), None, None)


def _rank(count: int) -> int | None:
    """How many of sorted values to leave out at either end."""
    outside, found = 0.0, None
    for rank in range((count + 1) // 2):
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - COVERAGE:
            break
        found = rank
    return found
