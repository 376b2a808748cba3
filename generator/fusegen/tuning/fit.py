"""Ordered threshold rules that lose the least time against the fastest point of every case.

Cases that models have count for more than the others (`cases.weighted`).

Before them may stand a rule of estimates (`waves.py`), which is fitted by itself.

A list of rules is built from its front: the first rule takes the cases beyond a threshold of one
size, the next ones what is left, the last one the rest. The best few beginnings are kept at each
length (a beam search), which finds the best list of one or two thresholds and a good longer one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import not_

from ..ir.predicate import Comparison, Condition, Predicate, SizeVariable
from ..spec.arch import RuleSpec
from ..spec.points import parse_point
from .cases import Case, Sample, Weights, weighted
from .waves import decides, estimated

# In the order in which one prefers to read them where several say the same.
VARIABLES = (
    SizeVariable.MEAN_GROUP_TOKENS,
    SizeVariable.K,
    SizeVariable.COLUMNS,
    SizeVariable.ROWS,
    SizeVariable.GROUPS,
    SizeVariable.TOKENS,
)

MOST_RULES = 5
# A rule must lower the mean regret by this: less is within the noise of one measurement.
PENALTY = 0.002
_BEAM = 48

Rules = tuple[RuleSpec, ...]


@dataclass(frozen=True)
class Observations:
    """Samples of one kind as the search reads them.

    Attributes:
        sizes: of every sample, by variable.
        regrets: of every sample, by point.
        weights: of every sample.
        anywhere: points that every GPU can launch, which the last rule may use; None for all.
    """

    sizes: tuple[Mapping[SizeVariable, int], ...]
    regrets: tuple[Mapping[str, float], ...]
    weights: Weights
    anywhere: Collection[str] | None = None

    @classmethod
    def of(
        cls,
        samples: Iterable[Sample],
        models: Sequence[Case] = (),
        anywhere: Collection[str] | None = None,
    ) -> Observations:
        """What the rules of these samples' kind may know, and what each point costs.

        Args:
            samples: of one kind.
            models: GEMMs whose cases count for more.
            anywhere: points that every GPU which runs their code can launch; None for all.
        """
        found = tuple(samples)
        return cls(
            tuple(sample.case.sizes(sample.kind) for sample in found),
            tuple(sample.regrets() for sample in found),
            weighted([sample.case for sample in found], models),
            anywhere,
        )

    @cached_property
    def costs(self) -> tuple[Mapping[str, float], ...]:
        """Regrets times weights."""
        return tuple(
            {point: weight * each for point, each in regrets.items()}
            for regrets, weight in zip(self.regrets, self.weights.each, strict=True)
        )

    @cached_property
    def points(self) -> tuple[str, ...]:
        """Points that every sample has."""
        return tuple(p for p in self.regrets[0] if all(p in each for each in self.regrets))

    @cached_property
    def defaults(self) -> tuple[str, ...]:
        """Those of them that the last rule may use."""
        return tuple(p for p in self.points if self.anywhere is None or p in self.anywhere)

    @cached_property
    def variables(self) -> tuple[SizeVariable, ...]:
        """Variables that tell samples apart, one of those that say the same."""
        found: dict[tuple[int, ...], SizeVariable] = {}
        for variable in VARIABLES:
            values = tuple(sizes[variable] for sizes in self.sizes)
            if len(set(values)) > 1:
                found.setdefault(values, variable)
        return tuple(found.values())

    def regret(self, rules: Sequence[RuleSpec]) -> float:
        """Weighted mean over the samples, as a fraction of the fastest point's time."""
        pairs = zip(self.costs, self.sizes, strict=True)
        return sum(costs[choose(rules, sizes)] for costs, sizes in pairs) / len(self.sizes)

    def loss(self, rules: Sequence[RuleSpec]) -> Loss:
        """What the rules lose on all samples, on those of models, and on the others."""
        each = [
            regrets[choose(rules, sizes)]
            for regrets, sizes in zip(self.regrets, self.sizes, strict=True)
        ]
        models = list(compress(each, self.weights.of_models))
        others = list(compress(each, map(not_, self.weights.of_models)))
        return Loss(self.regret(rules), _mean(models), _mean(others), max(each))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Loss:
    """What rules lose against the fastest point of every case, as fractions of its time.

    Attributes:
        weighted: mean of all samples, by their weights: what the fit makes small.
        models: plain mean of those near GEMMs of models; None without any.
        others: of the others; None without any.
        worst: of one sample.
    """

    weighted: float
    models: float | None
    others: float | None
    worst: float

    def __str__(self) -> str:
        parts = {"models": self.models, "others": self.others}
        words = [f"{name} {value:.2%}" for name, value in parts.items() if value is not None]
        return f"{self.weighted:.2%} ({', '.join(words)}, worst {self.worst:.1%})"


def choose(rules: Sequence[RuleSpec], sizes: Mapping[SizeVariable, int]) -> str:
    """The point of the first rule that holds."""
    rule = next(rule for rule in rules if rule.when.holds(sizes))
    if rule.use is not None:
        return rule.use
    return min(rule.least, key=lambda each: rule.least[each].of(parse_point(each).work, sizes))


@dataclass(frozen=True)
class _Beginning:
    """Rules so far, and what comes of them with the best point for all that they leave.

    Attributes:
        rules: none of them unconditional.
        before: samples, by index, that the rules before the last one leave.
        cost: regret of those the rules take, summed.
        default: point that is best for the rest.
        total: regret of all samples, with that point for the rest.
    """

    rules: Rules
    before: tuple[int, ...]
    cost: float
    default: str
    total: float

    def rest(self, observations: Observations) -> tuple[int, ...]:
        """Samples that the rules leave."""
        if not self.rules:
            return self.before
        holds = self.rules[-1].when.holds
        return tuple(i for i in self.before if not holds(observations.sizes[i]))


def fit(observations: Observations, *, most_rules: int = MOST_RULES) -> Rules:
    """The rules with the least weighted mean regret plus `PENALTY` for every rule.

    Args:
        observations: of one kind.
        most_rules: the unconditional one included.
    """
    best = _nothing(observations)
    beam = {best.before: best}
    for _ in range(most_rules - 1):
        longer = [new for rest, old in beam.items() for new in _extended(old, rest, observations)]
        beam = {}
        for new in sorted(longer, key=lambda each: each.total):
            beam.setdefault(new.rest(observations), new)
            if len(beam) == _BEAM:
                break
        best = min([best, *beam.values()], key=lambda each: _objective(each, observations))
    return tidy((*best.rules, RuleSpec(best.default)))


def _objective(beginning: _Beginning, observations: Observations) -> float:
    return beginning.total / len(observations.sizes) + PENALTY * len(beginning.rules)


def _nothing(observations: Observations) -> _Beginning:
    sums = {p: sum(each[p] for each in observations.costs) for p in observations.defaults}
    default = min(sums, key=lambda point: sums[point])
    everything = tuple(range(len(observations.sizes)))
    return _Beginning((), everything, 0.0, default, sums[default])


def _extended(
    old: _Beginning, rest: tuple[int, ...], observations: Observations
) -> Iterator[_Beginning]:
    """Beginnings with one rule more: samples beyond each threshold, with the best point for them.

    Every rule takes some of the rest and leaves some.
    """
    for variable in observations.variables:
        ordered = sorted(rest, key=lambda i: observations.sizes[i][variable])
        values = [observations.sizes[i][variable] for i in ordered]
        below = _running(ordered, observations)
        for cut in range(1, len(ordered)):
            if values[cut - 1] == values[cut]:
                continue
            threshold = between(values[cut - 1], values[cut])
            low = {point: sums[cut] for point, sums in below.items()}
            high = {point: sums[-1] - sums[cut] for point, sums in below.items()}
            for comparison, taken, left in (
                (Comparison.GE, high, low),
                (Comparison.LT, low, high),
            ):
                use = min(taken, key=lambda point: taken[point])
                default = min(observations.defaults, key=lambda point: left[point])
                when = Predicate((Condition(variable, comparison, threshold),))
                cost = old.cost + taken[use]
                rules = (*old.rules, RuleSpec(use, when))
                yield _Beginning(rules, rest, cost, default, cost + left[default])


def _running(ordered: Sequence[int], observations: Observations) -> dict[str, list[float]]:
    """Weighted regret of the first so many of the samples, by point."""
    sums: dict[str, list[float]] = {}
    for point in observations.points:
        total = [0.0]
        for index in ordered:
            total.append(total[-1] + observations.costs[index][point])
        sums[point] = total
    return sums


def between(low: int, high: int) -> int:
    """A round number near the middle of two by their logarithms; `high` where none is between.

    As few binary digits as there can be: between 256 and 512 it is 384.
    """
    middle = math.sqrt(max(low, 1) * high)
    exponent = math.floor(math.log2(middle))
    for digits in range(1, exponent + 1):
        step = 1 << (exponent - digits)
        near = [n * step for n in (math.floor(middle / step), math.ceil(middle / step))]
        inside = [number for number in near if low < number < high]
        if inside:
            return min(inside, key=lambda number: abs(math.log(number / middle)))
    return high


def tidy(rules: Rules) -> Rules:
    """Without rules just before the last that choose what it chooses."""
    last = rules[-1]
    while len(rules) > 1 and rules[-2].use == last.use:
        rules = (*rules[:-2], last)
    return rules


@dataclass(frozen=True, slots=True)
class Choice:
    """Rules before and after a sweep, with what each loses.

    Attributes:
        samples: how many they are judged by.
        before, after: the rules; equal where new ones would not be worth a change.
        loss_before, loss_after: over the samples.
    """

    samples: int
    before: Rules
    after: Rules
    loss_before: Loss
    loss_after: Loss


def chosen(
    samples: Iterable[Sample],
    before: Rules,
    models: Sequence[Case] = (),
    *,
    anywhere: Collection[str] | None = None,
    most_rules: int = MOST_RULES,
) -> Choice:
    """Fit rules, and keep the old ones unless the new ones lose less, each rule counted.

    Nor may what models gain cost the others more than a rule is worth.  Estimates, which decide few
    cases, are judged by those alone.
    """
    found = tuple(samples)
    observed = Observations.of(found, models, anywhere)
    plain = _better(observed, tuple(rule for rule in before if not rule.least), most_rules)
    estimates = _better_estimates(found, tuple(rule for rule in before if rule.least), plain)
    after = (*estimates, *plain)
    old, new = observed.loss(before), observed.loss(after)
    return Choice(len(observed.sizes), before, after, old, new)


def _better(observed: Observations, before: Rules, most_rules: int) -> Rules:
    after = fit(observed, most_rules=most_rules)
    old, new = observed.loss(before), observed.loss(after)
    gained = old.weighted + PENALTY * len(before) > new.weighted + PENALTY * (len(after) + 1)
    return after if gained and (new.others or 0.0) <= (old.others or 0.0) + PENALTY else before


def _better_estimates(samples: Sequence[Sample], before: Rules, plain: Rules) -> Rules:
    """Estimates in front of other rules: new ones, those that there were, or none."""
    new = estimated(samples)
    if new is None:
        return before
    decided = Observations.of(each for each in samples if decides(new, each))
    losses = [decided.loss((*front, *plain)).weighted for front in (before, (new,), ())]
    old, gained, none = losses
    if gained + PENALTY > min(old, none):
        return before if old <= none else ()
    return (new,)
