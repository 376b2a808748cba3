"""What ranks have of each tensor, where dimensions or groups of rows are split over them.

Steps are followed, forwards and then backwards.  What has a dimension that is split is a part of
the whole.  Where features are split, what a GEMM or a sum leaves without them is a partial sum, as
is what steps that are linear make of such.  Where groups are split, rows are those of a rank's own
groups, though there is room for all; moved back to where tokens are, they are a partial sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from ..ir.segments import EXPERT_GROUP, TENSOR_GROUP, Group
from ..ir.shapes import symbols
from ..ir.step import Access, Operand, Step
from ..steps import definition, is_gemm, sums_rows
from ..steps.definition import Rule
from ..steps.sizes import name_of
from .draft import Draft, NotPossible


@dataclass(slots=True)
class Parts:
    """Steps that are followed.

    Attributes:
        draft: whose steps they are.
        dimensions: that are split.
        partial: what every rank has a partial sum of, in order.
        shared: parameters that every rank adds to a partial sum.
        group: the ranks.
    """

    group: ClassVar[Group]

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
        raise NotImplementedError

    def _reads_split(self, step: Step) -> bool:
        return any(self.is_split(name) for name in step.reads)

    def _follow_linear(self, step: Step, partial: list[Operand]) -> None:
        """A step that reads partial sums gives such."""
        linear = {*definition(step.primitive).linear}
        self._refuse_whole(step, linear)
        if any(each.slot not in linear for each in partial) or self._reads_split(step):
            raise self._needs(step, partial[0], "all of", "a partial sum of")
        self.partial |= dict.fromkeys(step.writes)

    def _refuse_whole(self, step: Step, slots: set[str]) -> None:
        """Operands in these slots are partial sums."""
        filled = (each for each in step.inputs if each.slot in slots)
        whole = next((each for each in filled if each.buffer not in self.partial), None)
        if whole:
            raise self._needs(step, whole, "a partial sum of", "all of")

    def _needs(self, step: Step, operand: Operand, needed: str, there: str) -> NotPossible:
        label = f"{step.primitive} {step.kind}" if step.kind else step.primitive
        return NotPossible(
            f"{step.item + ': ' if step.item else ''}{label} reads {needed} {operand.buffer!r}, of"
            f" which a rank has {there.removesuffix(' of')}"
        )


@dataclass(slots=True)
class PartsOfFeatures(Parts):
    """Where features are split."""

    group: ClassVar[Group] = TENSOR_GROUP

    def follow(self, step: Step) -> None:
        """As of `Parts`."""
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


@dataclass(slots=True)
class PartsOfGroups(Parts):
    """Where groups of rows are split.

    Attributes:
        rows: what has rows of a rank's own groups alone, or says where they are.
    """

    group: ClassVar[Group] = EXPERT_GROUP

    rows: set[str] = field(default_factory=set)

    def follow(self, step: Step) -> None:
        """As of `Parts`."""
        own = [each for each in step.inputs if each.buffer in self.rows]
        partial = [each for each in step.inputs if each.buffer in self.partial]
        if not (own or self._reads_split(step)):
            if partial:
                self._follow_linear(step, partial)
            return
        moved = definition(step.primitive).moves
        if moved and step.input(moved) in self.rows:
            self._refuse_whole(step, {*definition(step.primitive).linear} - {moved})
            self.partial |= dict.fromkeys(step.writes)
        elif partial:
            raise self._needs(step, partial[0], "all of", "a partial sum of")
        elif not self._keeps_rows(step):
            split = (each for each in step.inputs if self.is_split(each.buffer))
            raise self._needs(step, next(iter((*own, *split))), "all of", "those of its own groups")
        else:
            self.rows |= {name for name in step.writes if not self.is_split(name)}

    def _keeps_rows(self, step: Step) -> bool:
        """Whether a step gives rows, or sums over those of each group."""
        kind = definition(step.primitive)
        return kind.in_groups or not (is_gemm(step) or kind.adds_all_rows)
