"""What ranks exchange so that each may have a part of a module's weights.

One dimension of the module, or one for each chain of GEMMs, is split over the ranks.  Steps are
followed forwards and then backwards: what has the dimension is split, too, and what a GEMM or a sum
leaves without it is a partial sum, as is what steps that are linear make of such.  Outputs and
gradients that are partial sums are added up, each once, where they leave the ops.  A bias is part
of each rank's sum, so each adds a share of it.

Where tokens are split over ranks outside of the ops, inputs that ranks have in common are gathered
when they come in, and what is added up is scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..ir.naming import gradient
from ..ir.segments import Exchange
from ..ir.shapes import first_factor, symbols
from ..ir.step import Access, Operand, Step
from ..options.tensor_parallel import Parallel, Split
from ..steps import definition, is_gemm, sums_rows
from ..steps.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SHARE
from ..steps.definition import Rule
from ..steps.sizes import name_of
from .draft import Draft, NotPossible

_SUM = (("op", "sum"),)


def split_over_ranks(draft: Draft, said: Parallel) -> Draft:
    """The draft with what ranks exchange.

    Args:
        draft: before anything is quantised.
        said: what is split.

    Raises:
        NotPossible: a step needs what a rank does not have; the message names it.
    """
    dimensions = _dimensions(draft, said.split)
    walk = _Walk(draft, dimensions)
    for step in (*draft.forward, *draft.backward):
        walk.follow(step)
    exchanges = [Exchange(SHARE.name, name, entering=True) for name in walk.shared]
    exchanges += _gathered(walk) if said.sequence else ()
    exchanges += _added_up(walk, scattered=said.sequence)
    return replace(draft, exchanges=tuple(exchanges), split=tuple(sorted(dimensions)))


def _dimensions(draft: Draft, split: Split) -> frozenset[str]:
    """Names of the dimensions that ranks have parts of."""
    inputs = frozenset[str]().union(*(draft.buffers[n].shape.symbols() for n in draft.inputs))
    outputs = frozenset[str]().union(*(draft.buffers[n].shape.symbols() for n in draft.outputs))
    if split is Split.OUTPUTS:
        first = draft.buffers[draft.inputs[0]].shape.symbols()
        found = symbols(draft.buffers[draft.outputs[0]].shape.flat[-1]) - first
    elif split is Split.INPUTS:
        found = symbols(draft.buffers[draft.inputs[0]].shape.flat[-1]) - outputs
    else:
        gemms = (step for step in draft.forward if is_gemm(step))
        read = (draft.buffers[gemm.input("a") or ""].shape.flat[-1] for gemm in gemms)
        found = frozenset[str]().union(*map(symbols, read)) - inputs - outputs
    if not found:
        raise NotPossible(f"no dimension of its {split.value} is one that ranks could split")
    return found


@dataclass(slots=True)
class _Walk:
    """Steps that are followed.

    Attributes:
        draft: whose steps they are.
        dimensions: that are split.
        partial: what every rank has a partial sum of, in order.
        shared: parameters that every rank adds to a partial sum.
    """

    draft: Draft
    dimensions: frozenset[str]
    partial: dict[str, None] = field(default_factory=dict)
    shared: dict[str, None] = field(default_factory=dict)

    def is_split(self, name: str) -> bool:
        """Whether a rank has a part of a buffer."""
        return bool(self.draft.buffers[name].shape.symbols() & self.dimensions)

    def follow(self, step: Step) -> None:
        """Find out what a step gives.

        Raises:
            NotPossible: it needs what the rank does not have.
        """
        adds = self._added(step)
        operands = [each for each in step.inputs if each is not adds]
        partial = [each for each in operands if each.buffer in self.partial]
        if partial:
            self._follow_linear(step, partial)
            return
        split = [each for each in operands if self.is_split(each.buffer)]
        whole = [name for name in step.writes if not self.is_split(name)]
        if not split:
            return
        if not self._may_be_split(step, whole):
            raise self._needs(step, split[0], "all of", "its part of")
        self.partial |= dict.fromkeys(whole)
        if adds and whole:
            self._share(step, adds)

    def _added(self, step: Step) -> Operand | None:
        """What a GEMM adds to its product."""
        return next((o for o in step.inputs if is_gemm(step) and o.slot == "add"), None)

    def _share(self, step: Step, adds: Operand) -> None:
        """What is added to a partial sum is one itself, or every rank's share of a parameter."""
        if adds.buffer in self.partial:
            return
        if adds.buffer not in {each.buffer for each in self.draft.parameters}:
            raise self._needs(step, adds, "a partial sum of", "all of")
        self.shared[adds.buffer] = None

    def _follow_linear(self, step: Step, partial: list[Operand]) -> None:
        linear = definition(step.primitive).linear
        filled = [each for each in step.inputs if each.slot in linear]
        whole = next((each for each in filled if each.buffer not in self.partial), None)
        if whole:
            raise self._needs(step, whole, "a partial sum of", "all of")
        if any(each.slot not in linear for each in partial) or self._reads_split(step):
            raise self._needs(step, partial[0], "all of", "a partial sum of")
        self.partial |= dict.fromkeys(step.writes)

    def _reads_split(self, step: Step) -> bool:
        return any(self.is_split(name) for name in step.reads)

    def _may_be_split(self, step: Step, whole: list[str]) -> bool:
        """Whether parts of operands give parts of results, and partial sums of others."""
        kind = definition(step.primitive)
        if is_gemm(step) or sums_rows(step):
            return True  # sums over rows of parts are parts of the sums
        if step.pointwise:
            sums = {r.buffer for r in step.pointwise.results if r.access is Access.ROW}
            return {*whole} <= sums
        rule = kind.shapes.get(step.kind, {})
        sums = {each.buffer for each in step.outputs if each.slot in kind.sums}
        names = {*self._names(step, rule)}
        return {*whole} <= sums and bool(rule) and names <= {*kind.independent}

    def _names(self, step: Step, rule: Rule) -> Iterator[str]:
        """What the rule of its kind calls the dimensions that are split."""
        for each in (*step.inputs, *step.outputs):
            shape = self.draft.buffers[each.buffer].shape
            for axis, dim in enumerate(shape.flat):
                if symbols(dim) & self.dimensions and each.slot in rule:
                    yield name_of(rule[each.slot], shape, axis)

    def _needs(self, step: Step, operand: Operand, needed: str, there: str) -> NotPossible:
        label = f"{step.primitive} {step.kind}" if step.kind else step.primitive
        return NotPossible(
            f"{step.item + ': ' if step.item else ''}{label} reads {needed} {operand.buffer!r}, of"
            f" which a rank has {there.removesuffix(' of')}"
        )


def _gathered(walk: _Walk) -> Iterator[Exchange]:
    """What ranks have in common inside, and of tokens of their own outside.

    Raises:
        NotPossible: rows of an input are not side by side any more once they are gathered.
    """
    draft = walk.draft
    counted = _counted(draft)
    for name in draft.inputs:
        if walk.is_split(name):
            continue
        if _has_tokens(draft, name):
            yield Exchange(ALL_GATHER.name, name, entering=True)
        elif name in counted:
            yield Exchange(ALL_REDUCE.name, name, entering=True, attributes=_SUM)
        else:
            raise NotPossible(f"{name!r} is not of tokens, which each rank has some of")
    for name in draft.outputs:
        if name in walk.partial and gradient(name) in draft.incoming:
            yield Exchange(ALL_GATHER.name, gradient(name), entering=True)


def _counted(draft: Draft) -> frozenset[str]:
    """Inputs that have how often each number is among others."""
    return frozenset(
        step.input(slot) or ""
        for step in draft.forward
        for slot in definition(step.primitive).counted
    )


def _added_up(walk: _Walk, *, scattered: bool) -> Iterator[Exchange]:
    """Outputs and gradients of which every rank has a partial sum.

    Args:
        walk: through all steps.
        scattered: whether ranks get their own tokens of what has tokens.

    Raises:
        NotPossible: ranks would have to get their tokens of what each has all of.
    """
    draft = walk.draft
    lent = dict(draft.main_grads).values()
    gradients = {name: leaf for leaf, name in draft.gradients}
    for name in (*draft.outputs, *gradients):
        own = scattered and _has_tokens(draft, name) and gradients.get(name, name) not in lent
        if name not in walk.partial:
            if own and not walk.is_split(name):
                raise NotPossible(f"every rank has all of {name!r}, not its own tokens of it")
        elif own:
            yield Exchange(REDUCE_SCATTER.name, name, entering=False)
        else:
            yield Exchange(ALL_REDUCE.name, name, entering=False, attributes=_SUM)


def token_symbols(draft: Draft) -> frozenset[str]:
    """Names of the dimension of tokens."""
    return symbols(first_factor(draft.buffers[draft.inputs[0]].shape.flat[0]))


def _has_tokens(draft: Draft, name: str) -> bool:
    flat = draft.buffers[name].shape.flat
    return bool(flat) and bool(symbols(flat[0]) & token_symbols(draft))
