"""Bytes that a direction has at its worst moment, by what its ops hold, give and need inside.

A call of an op allocates all of its results, and one workspace, of which a part may lie in results
that no step has touched yet (``launch_memory.py`` prints that).  What it was given is there until
it returns.  Between two calls whatever no later one reads may go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise

from ..ir.buffers import Buffer, size_in_bytes
from ..ir.dtypes import bits
from ..ir.plan import ModulePlan
from ..ir.shapes import (
    Const,
    Expr,
    Sym,
    evaluate,
    factors_of,
    product,
    split,
    substitute,
    symbols,
    to_markdown,
    without_factor,
)
from ..ir.step import Step


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes for what has to be decided before any are known.

    Attributes:
        rows: in all.
        groups: that these are in.
        features: length of a row.
        choices: rows of a token, where several are of one.
    """

    rows: int
    groups: int
    features: int
    choices: int


TYPICAL = (Layer(2**15, 2**3, 2**12, 2), Layer(2**15, 2**7, 2**11, 2**3))
"""Layers of a few large experts, where what is kept of tokens counts, and of many small ones, where
gradients of weights do."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that one call runs.

    Attributes:
        steps: in order.
        results: what the call allocates that is there after it.
    """

    steps: tuple[Step, ...]
    results: frozenset[str]


@dataclass(frozen=True, slots=True)
class Axes:
    """Which names of dimensions are what.

    Attributes:
        tokens: of the first input's rows.
        groups: numbers of groups.
        choices: how many rows each token has, where there are several.
    """

    tokens: frozenset[str]
    groups: frozenset[str]
    choices: frozenset[str]

    @classmethod
    def of(cls, buffers: Mapping[str, Buffer], steps: Iterable[Step], token_axis: Expr) -> Axes:
        """Of a module whose tokens are ``token_axis``."""
        sizes = {name for step in steps if (name := step.input("groups"))}
        groups = (buffers[name].shape.symbols() for name in sizes)
        dims = {dim for buffer in buffers.values() for dim in buffer.shape.flat}
        rows = (rest for dim in dims if (rest := without_factor(dim, token_axis)) is not None)
        choices = frozenset[str]().union(*map(symbols, rows))
        return cls(symbols(token_axis), frozenset[str]().union(*groups), choices)

    def length(self, name: str, layer: Layer) -> int:
        """Of a dimension in a layer."""
        if name in self.tokens:
            return layer.rows // layer.choices if self.choices else layer.rows
        if name in self.groups:
            return layer.groups
        return layer.choices if name in self.choices else layer.features


def typical(buffers: Mapping[str, Buffer], axes: Axes) -> Iterator[dict[str, int]]:
    """Sizes for every dimension of a module, of each layer that is typical."""
    named = sorted({name for buffer in buffers.values() for name in buffer.shape.symbols()})
    for layer in TYPICAL:
        yield {name: axes.length(name, layer) for name in named}


def bytes_of(buffers: Mapping[str, Buffer], lengths: Mapping[str, int]) -> dict[str, int]:
    """Bytes of every buffer whose dimensions are all known."""
    return {
        name: evaluate(size_in_bytes(buffer), lengths)
        for name, buffer in buffers.items()
        if symbols(size_in_bytes(buffer)) <= lengths.keys()
    }


def _axes(plan: ModulePlan) -> Axes:
    return Axes.of({b.name: b for b in plan.buffers}, plan.unmerged.steps, plan.token_axis)


def typical_sizes(plan: ModulePlan) -> Iterator[dict[str, int]]:
    """The same of a plan."""
    yield from typical({b.name: b for b in plan.buffers}, _axes(plan))


def held(plan: ModulePlan) -> tuple[str, ...]:
    """Buffers that a forward makes for its backward and that are there until it runs."""
    given = {argument.buffer for argument in plan.forward.arguments} | {*plan.results}
    given -= {*plan.input_copies}  # which a call makes of a tensor, too
    return tuple(each.buffer for each in plan.saved if each.buffer not in given)


def for_each_token(plan: ModulePlan, names: Iterable[str]) -> str:
    """Bytes of buffers for each token: a formula in the lengths of rows, and in rows of a token."""
    axes = _axes(plan)
    token = next(iter(sorted(axes.tokens)), "")
    one = {name: Const(1) for name in axes.choices}
    found: dict[str, Fraction] = {}
    for buffer in map(plan.buffer, names):
        slope, lengths = Fraction(max(bits(buffer.dtype), 8), 8), list[Expr]()
        for dim in buffer.shape.flat:
            if token in symbols(dim):
                way = split(substitute(dim, one), token)
                slope *= way.slope if way else 0
                lengths += [Sym(name) for name in sorted(axes.choices & symbols(dim))]
            else:
                lengths.append(dim)
        number, rest = factors_of(product(tuple(lengths)))
        name = to_markdown(product(rest))
        if token in buffer.shape.symbols():
            found[name] = found.get(name, Fraction(0)) + slope * number
    return " + ".join(_times(slope, name) for name, slope in found.items() if slope) or "0"


def _times(number: Fraction, name: str) -> str:
    """``5 F``, ``H``, ``F / 32``, ``4``."""
    if name == "1":
        return str(number)
    top = name if number.numerator == 1 else f"{number.numerator} {name}"
    return top if number.denominator == 1 else f"{top} / {number.denominator}"


def for_each_parameter(plan: ModulePlan) -> float:
    """Bytes of copies of weights that are held, for each element of those, in large layers."""
    names = {*held(plan)}
    weights = {parameter.buffer for parameter in plan.parameters}
    copies = [c for step in plan.steps for c in step.copies if c.original in weights]
    size = bytes_of({b.name: b for b in plan.buffers}, next(typical_sizes(plan)))
    own = {name for copy in copies for name in copy.buffers} & names
    elements = sum(
        size[name] // (bits(plan.buffer(name).dtype) // 8 or 1)
        for name in {copy.original for copy in copies}
    )
    return sum(size[name] for name in own) / elements if own else 0.0


def backward_peak(plan: ModulePlan, lengths: Mapping[str, int]) -> int:
    """Bytes at the worst moment of a backward: what was held, all gradients, and workspaces."""
    size = bytes_of({b.name: b for b in plan.buffers}, lengths)
    direction = plan.direction("backward")
    assert direction is not None, "a plan has a backward"
    leaving = frozenset(r.buffer for r in plan.backward.results)
    steps = [step for program in direction.programs for step in program.steps]
    cuts = accumulate(len(program.steps) for program in direction.programs[:-1])
    return Peaks.of(steps, frozenset(held(plan)), leaving, size).of_calls(tuple(cuts))


def stretches(
    steps: Sequence[Step], cuts: Iterable[int], leaving: frozenset[str], outside: frozenset[str]
) -> tuple[Stretch, ...]:
    """The steps of a direction in calls.

    Args:
        steps: of the direction.
        cuts: positions of the first step of each further call.
        leaving: results of the direction.
        outside: what its caller gives.
    """
    places = [0, *sorted(cuts), len(steps)]
    found = []
    for begin, end in pairwise(places):
        own = tuple(steps[begin:end])
        later = {name for step in steps[end:] for name in step.reads} | leaving
        written = {n for s in own for n in s.writes if n not in s.mutates}
        found.append(Stretch(own, frozenset(written & later - outside)))
    return tuple(found)


def needed_inside(call: Stretch, size: Mapping[str, int]) -> int:
    """Bytes that a call allocates at most: results and workspace."""
    return Peaks.of(call.steps, frozenset(), call.results, size).of_calls(())


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes at the worst moments of calls, wherever a direction is cut into these.

    Attributes:
        entering: bytes that are there before a call that begins with each step.
        allocated: bytes that each step is the first to touch.
        freed: of each step, the buffers that it is the last to touch, but for results of the
            direction: which step was the first to, and bytes.
        running: of steps that calls began with, the most bytes that these have allocated, by steps.
    """

    entering: tuple[int, ...]
    allocated: tuple[int, ...]
    freed: tuple[tuple[tuple[int, int], ...], ...]
    running: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        steps: Sequence[Step],
        kept: frozenset[str],
        leaving: frozenset[str],
        size: Mapping[str, int],
    ) -> Peaks:
        """Of the steps of a direction, in their order.

        Args:
            steps: of all calls.
            kept: what the caller gives and lets go of once no further call reads it.
            leaving: results of the direction.
            size: bytes of buffers.
        """
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for index, step in enumerate(steps):
            for name in (*step.reads, *step.writes):
                first.setdefault(name, index)
                last[name] = index
        made = {name for step in steps for name in step.writes if name not in step.mutates}
        allocated, change = [0] * len(steps), [0] * (len(steps) + 1)
        freed: list[list[tuple[int, int]]] = [[] for _ in steps]
        for name in made | kept:
            since, until = first.get(name, 0), last.get(name, 0)
            if name in made:
                allocated[since] += size[name]
            if name in leaving:
                until = len(steps) - 1
            elif name in made:
                freed[until].append((since, size[name]))
            since = 0 if name in kept else since
            change[since] += size[name]
            change[until] -= size[name]
        there = (0, *accumulate(change))
        entering = (sum(size[name] for name in kept), *there[1 : len(steps)])
        return cls(entering, tuple(allocated), tuple(map(tuple, freed)))

    def of_calls(self, cuts: Sequence[int]) -> int:
        """Of all, where a further call begins with each of these steps."""
        ends = (0, *cuts, len(self.allocated))
        return max(self._of_call(*each) for each in pairwise(ends))

    def _of_call(self, begin: int, end: int) -> int:
        if begin not in self.running:
            self.running[begin] = tuple(accumulate(self._inside(begin), max))
        return self.entering[begin] + self.running[begin][end - begin - 1] if end > begin else 0

    def _inside(self, begin: int) -> Iterator[int]:
        """What a call has allocated while each of its steps runs."""
        there = 0
        for allocated, freed in zip(self.allocated[begin:], self.freed[begin:], strict=True):
            there += allocated
            yield there
            there -= sum(size for since, size in freed if since >= begin)
