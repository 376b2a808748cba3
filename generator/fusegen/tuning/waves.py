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
    """The rule of estimates that fits samples of one kind; None where too few are of one group.

    Nor is there one where their sizes do not tell the three numbers apart.
    """
    from sympy.matrices.exceptions import (  # type: ignore[import-untyped]  # late: it is slow
        NonInvertibleMatrixError,
    )

    decided = [each for each in samples if WHEN.holds(each.case.sizes(each.kind))]
    points = [*dict.fromkeys(point for each in decided for point in each.times)]
    if len(points) < 2 or len(decided) <= len(WaveTime.__slots__):
        return None
    try:
        return RuleSpec(when=WHEN, least={point: _fitted(point, decided) for point in points})
    except NonInvertibleMatrixError:
        return None


def decides(rule: RuleSpec, sample: Sample) -> bool:
    """Whether the rule holds for a sample."""
    return rule.when.holds(sample.case.sizes(sample.kind))


def _fitted(point: str, samples: Sequence[Sample]) -> WaveTime:
    launch, wave, k = _least_squares([*_rows(point, samples)])
    return WaveTime(launch=round(launch), wave=round(wave), k=round(k))


def _rows(point: str, samples: Sequence[Sample]) -> Iterator[tuple[float, float, float]]:
    """Factors of the three numbers, over the time: the sum is to be 1."""
    work = parse_point(point).work
    for sample in samples:
        sizes, time = sample.case.sizes(sample.kind), sample.times[point] * _NANOSECONDS
        waves = work.waves(sizes)
        yield 1 / time, waves / time, waves * sizes[SizeVariable.K] / 1024 / time


def _least_squares(rows: Sequence[tuple[float, ...]]) -> list[float]:
    """Numbers, none negative, by which the factors of each row come nearest to 1 in sum."""
    from sympy import Matrix  # type: ignore[import-untyped]

    used = [*range(len(rows[0]))]
    while True:
        factors = Matrix([[row[index] for index in used] for row in rows])
        solved = (factors.T * factors).LUsolve(factors.T * Matrix([1] * len(rows)))
        found = dict(zip(used, map(float, solved), strict=True))
        if all(each >= 0 for each in found.values()):
            return [found.get(index, 0.0) for index in range(len(rows[0]))]
        used = [index for index in used if found[index] >= 0]
