"""Sizes of grouped GEMMs to measure, and the times of every point on them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from ..ir.kernel import GemmKind
from ..ir.predicate import SizeVariable

T = TypeVar("T")

GROUPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MEANS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
QUICK_GROUPS = (1, 8, 64, 512)
QUICK_MEANS = (16, 256, 2048, 16384)

# Besides those of models: smaller and squarer ones, so that N and K vary by themselves.
WIDTHS = ((1024, 1024), (2048, 7168), (4096, 512))

MOST_BYTES = 24 * 2**30
MOST_FLOPS = 10**13  # 13 ms of an H200; one GEMM of a step

ELEMENT = 2  # bytes of bfloat16
SMS = 132  # of an H200, on which points are timed

# Of the weight of all cases; the others are a guard against rules that fit models alone.
OF_MODELS = 2 / 3
# Ranks share experts, and batches differ: a model's GEMM is also run on as few as a quarter of
# its groups, and on half to twice as many tokens a group.
FEWER_GROUPS = 4
OTHER_MEAN = 2


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of one grouped linear.

    Attributes:
        groups: E.
        tokens: T, of all groups.
        n: out_features.
        k: in_features.
    """

    groups: int
    tokens: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Of one GEMM."""
        return 2 * self.tokens * self.n * self.k

    @property
    def bytes(self) -> int:
        """What a step may hold: every operand, its gradient, and quantised copies of both."""
        return 3 * ELEMENT * (self.tokens * (self.n + self.k) + self.groups * self.n * self.k)

    def sizes(self, kind: GemmKind) -> dict[SizeVariable, int]:
        """What rules ask about, as gemm.h computes it."""
        mean = self.tokens // self.groups
        rows, columns, k = {
            GemmKind.FPROP: (self.tokens, self.n, self.k),
            GemmKind.DGRAD: (self.tokens, self.k, self.n),
            GemmKind.WGRAD: (self.n, self.k, mean),
        }[kind]
        return {
            SizeVariable.TOKENS: self.tokens,
            SizeVariable.GROUPS: self.groups,
            SizeVariable.MEAN_GROUP_TOKENS: mean,
            SizeVariable.ROWS: rows,
            SizeVariable.COLUMNS: columns,
            SizeVariable.K: k,
            SizeVariable.SMS: SMS,
        }

    def is_near(self, model: Case) -> bool:
        """Whether a model's GEMM may have these sizes, on some of its ranks or batches."""
        mean, wanted = self.tokens * model.groups, model.tokens * self.groups
        return (
            (self.n, self.k) == (model.n, model.k)
            and model.groups <= FEWER_GROUPS * self.groups <= FEWER_GROUPS * model.groups
            and wanted <= OTHER_MEAN * mean
            and mean <= OTHER_MEAN * wanted
        )

    def __str__(self) -> str:
        return f"{self.groups} x {self.tokens // self.groups} tokens, {self.k} -> {self.n}"


@dataclass(frozen=True, slots=True)
class Weights:
    """How much cases count in a fit.

    Attributes:
        each: one per case, 1 on average.
        of_models: whether each is near a model's GEMM.
    """

    each: tuple[float, ...]
    of_models: tuple[bool, ...]


def weighted(cases: Sequence[Case], models: Sequence[Case]) -> Weights:
    """Cases near GEMMs of models share `OF_MODELS` of the weight, each GEMM alike.

    Where there are none of one sort, all of them count alike.
    """
    nearest = [next((m for m in models if case.is_near(m)), None) for case in cases]
    counts = Counter(nearest)
    gemms = len(counts) - (None in counts)
    if not gemms or None not in counts:
        return Weights((1.0,) * len(cases), tuple(each is not None for each in nearest))
    shares = {
        each: (1 - OF_MODELS if each is None else OF_MODELS / gemms) / count
        for each, count in counts.items()
    }
    return Weights(
        tuple(len(cases) * shares[each] for each in nearest),
        tuple(each is not None for each in nearest),
    )


def grid(
    widths: Sequence[tuple[int, int]], *, quick: bool = False, most_bytes: int = MOST_BYTES
) -> tuple[Case, ...]:
    """All combinations of group counts, mean group sizes and (n, k) that fit and end soon.

    Args:
        widths: (n, k) of linears.
        quick: a part of the counts and sizes; their ends are the same.
        most_bytes: of what a case may hold.
    """
    counts, means = (QUICK_GROUPS, QUICK_MEANS) if quick else (GROUPS, MEANS)
    cases = (
        Case(groups, groups * mean, n, k)
        for groups, mean, (n, k) in product(counts, means, dict.fromkeys(widths))
    )
    return tuple(c for c in cases if c.bytes <= most_bytes and c.flops <= MOST_FLOPS)


def spread(items: Sequence[T]) -> Iterator[T]:
    """The items in an order of which every beginning is spread over all of them."""
    bits = max(len(items) - 1, 0).bit_length()
    for index in range(2**bits):
        place = int(f"{index:0{bits}b}"[::-1], 2) if bits else 0
        if place < len(items):
            yield items[place]


@dataclass(frozen=True, slots=True)
class Sample:
    """One GEMM under every point.

    Attributes:
        kind: of the GEMM.
        recipe: whose operands it had.
        case: its sizes.
        times: milliseconds by point.
    """

    kind: GemmKind
    recipe: str
    case: Case
    times: Mapping[str, float]

    def to_json(self) -> dict[str, object]:
        """Kind, recipe, sizes and times in one object."""
        sizes = {name: getattr(self.case, name) for name in ("groups", "tokens", "n", "k")}
        return {"kind": self.kind.value, "recipe": self.recipe, **sizes, "ms": dict(self.times)}

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Sample:
        """Inverse of `to_json`."""
        case = Case(data["groups"], data["tokens"], data["n"], data["k"])
        return cls(GemmKind(data["kind"]), data["recipe"], case, data["ms"])

    def regrets(self) -> dict[str, float]:
        """By point: how much longer it takes than the fastest, as a fraction of that."""
        best = min(self.times.values())
        return {point: each / best - 1 for point, each in self.times.items()}


Timer = Callable[[str, Case], Mapping[GemmKind, Mapping[str, float]]]
"""Milliseconds by kind and point, of a recipe on a case."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Samples, and how many cases the time was too short for."""

    samples: tuple[Sample, ...]
    left_out: int


def measure(
    todo: Sequence[tuple[str, Case]],
    timer: Timer,
    *,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    done: Callable[[int], None] = lambda count: None,
) -> Measured:
    """Time cases, spread evenly over all of them if there is no time for every one.

    Args:
        todo: recipes and cases.
        timer: what times one.
        seconds: no case begins that would, at the mean so far, end after as many.
        done: hears how many cases are done.
    """
    samples: list[Sample] = []
    start, count = clock(), 0
    for recipe, case in spread(todo):
        if seconds is not None and (clock() - start) * (count + 1) > seconds * max(count, 1):
            break
        for kind, times in timer(recipe, case).items():
            samples.append(Sample(kind, recipe, case, times))
        count += 1
        done(count)
    return Measured(tuple(samples), len(todo) - count)
