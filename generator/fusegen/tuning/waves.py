"""Estimates of the time of a GEMM of one group, all of whose tiles are known when it is launched.

A launch takes as long as it has waves of tiles, the last of which may be nearly empty: one size of
tile is 10% faster than another at 4096 columns and 10% slower at 4224.  No threshold tells them
apart, but three numbers of each point do (`ir.kernel.WaveTime`), found by least squares of what the
estimate is wrong by, as a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..ir.kernel import WaveTime
from ..ir.predicate import Comparison, Condition, Predicate, SizeVariable
from ..math.squares import nonnegative
from ..spec.arch import RuleSpec
from ..spec.points import parse_point
from .cases import Sample

# With fewer, time goes into loading a weight, whatever the tile.
LEAST_TOKENS = 512
WHEN = Predicate(
    (
        Condition(SizeVariable.GROUPS, Comparison.EQ, 1),
        Condition(SizeVariable.TOKENS, Comparison.GE, LEAST_TOKENS),
    )
)
_NANOSECONDS = 10**6  # in a millisecond


def estimated(samples: Sequence[Sample]) -> RuleSpec | None:
    """The rule of estimates that fits samples of one kind.

    None where those of one group are too few to tell the three numbers apart.
    """
    decided = [each for each in samples if WHEN.holds(each.case.sizes(each.kind))]
    points = [*dict.fromkeys(point for each in decided for point in each.times)]
    least = {point: _fitted(point, decided) for point in points}
    fitted = {point: time for point, time in least.items() if time}
    return RuleSpec(when=WHEN, least=fitted) if len(fitted) == len(points) > 1 else None


def decides(rule: RuleSpec, sample: Sample) -> bool:
    """Whether the rule holds for a sample."""
    return rule.when.holds(sample.case.sizes(sample.kind))


def _fitted(point: str, samples: Sequence[Sample]) -> WaveTime | None:
    found = nonnegative([*_rows(point, samples)])
    return None if found is None else WaveTime(*map(round, found))


def _rows(point: str, samples: Sequence[Sample]) -> Iterator[tuple[float, float, float]]:
    """Factors of the three numbers, over the time: the sum is to be 1."""
    work = parse_point(point).work
    for sample in samples:
        sizes, time = sample.case.sizes(sample.kind), sample.times[point] * _NANOSECONDS
        waves = work.waves(sizes)
        yield 1 / time, waves / time, waves * sizes[SizeVariable.K] / 1024 / time
