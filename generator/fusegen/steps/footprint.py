"""Bytes that a direction has at its worst moment, by what its ops hold, give and need inside.

A call of an op allocates all of its results, and one workspace, of which a part may lie in results
that no step has touched yet (``launch_memory.py`` prints that).  What it was given is there until
it returns.  Between two calls whatever no later one reads may go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    given = {argument.buffer for argument in plan.forward.arguments} | {*plan.outputs}
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
    calls = [
        Stretch(each.steps, frozenset(r.buffer for r in each.results))
        for each in direction.programs
    ]
    return peak(calls, frozenset(held(plan)), leaving, size)


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


def peak(
    calls: Sequence[Stretch], kept: frozenset[str], leaving: frozenset[str], size: Mapping[str, int]
) -> int:
    """Bytes at the worst moment of a direction, over all of its calls."""
    return max(peaks(calls, kept, leaving, size), default=0)


def peaks(
    calls: Sequence[Stretch], kept: frozenset[str], leaving: frozenset[str], size: Mapping[str, int]
) -> Iterator[int]:
    """Bytes at the worst moment of each call of a direction.

    That of a call follows from where it begins and ends, wherever else the direction is cut.

    Args:
        calls: of the direction.
        kept: what its caller gives and lets go of once no further call reads it.
        leaving: results of the direction.
        size: bytes of buffers.
    """
    there = set(kept)
    for index, call in enumerate(calls):
        yield sum(size[name] for name in there) + needed_inside(call, size)
        later = {name for each in calls[index + 1 :] for s in each.steps for name in s.reads}
        there = {name for name in there | call.results if name in later or name in leaving}


def needed_inside(call: Stretch, size: Mapping[str, int]) -> int:
    """Bytes that a call allocates at most: results and workspace."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, step in enumerate(call.steps):
        for name in (*step.reads, *step.writes):
            first.setdefault(name, index)
            last[name] = index
    made = {name for step in call.steps for name in step.writes if name not in step.mutates}
    change = [0] * (len(call.steps) + 1)
    for name in made:
        change[first[name]] += size[name]
        if name not in call.results:
            change[last[name] + 1] -= size[name]
    return max(accumulate(change))
