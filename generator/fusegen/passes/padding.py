"""Rows past the groups: every result of a module with groups is zero there, whatever they hold.

Grouped GEMMs write zeros there and read nothing.  A pointwise step reads every row, so that NaN
of the caller's would reach a result, and so would the value of its expression at 0.  Where neither
can be, as in an expert MLP, nothing need be done; elsewhere the step is given the group sizes.
A kind of step that computes each row by itself, such as a norm, knows no groups: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.shapes import Expr, is_multiple
from ..ir.step import Step
from ..math import Program, zero_results
from ..steps import copies_memory, definition, gives_rows_of_groups, is_gemm
from ..steps.pointwise import in_groups
from .draft import Draft, NotPossible


class Padding:
    """Follows the steps of a draft in their order.

    Args:
        draft: before its pointwise steps have their math.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._results = {*draft.outputs, *(name for _, name in draft.gradients)}
        self._results |= {*_passed_on(draft.backward, self._results)}
        self._zero: set[str] = set()  # buffers that are known to be zero there
        self._last: Step | None = None
        self._grouped = [
            step for step in (*draft.forward, *draft.backward) if gives_rows_of_groups(step)
        ]

    def ends_in_zeros(self, name: str) -> bool:
        """Whether a buffer's rows past the groups are known to be zero, or there are no groups."""
        return not self._grouped or name in self._zero

    def see(self, step: Step) -> None:
        """A step without an expression.

        Raises:
            NotPossible: it copies to a result what may not be zero, or computes rows past the
                groups from whatever they hold.
        """
        if gives_rows_of_groups(step):
            self._last = step
            self._zero.add(step.out)
        elif copies_memory(step):
            self._see_copy(step)
        elif self._grouped and definition(step.primitive).independent:
            groups, tokens = self._groups()
            rows, *_ = self._draft.buffers[step.out].shape.flat
            if not is_multiple(rows, tokens):  # tokens, of which experts have several rows each
                return
            raise NotPossible(
                f"op {step.item!r}: rows past {groups} are to be zero in {step.out}, and"
                f" {step.primitive} reads all rows; put it into a module of its own"
            )

    def _see_copy(self, step: Step) -> None:
        """Its result is zero where its tensor is."""
        if self._zero.issuperset(step.reads):
            self._zero.add(step.out)
        elif self._grouped and step.out in self._results:
            raise NotPossible(
                f"op {step.item!r}: rows past the groups are to be zero in {step.out!r}, and it"
                f" copies those of {step.reads[0]!r} as they are"
            )

    def settle(self, step: Step, program: Program) -> Step:
        """A pointwise step with its math, given the groups where a result needs them.

        Raises:
            NotPossible: its rows are not those of the groups.
        """
        math = step.pointwise
        if not self._grouped or math is None:
            return step
        zeros = [o.symbol for o in math.operands if o.buffer in self._zero]
        known = zero_results(program, zeros)
        others = {r.buffer for r in math.results if r.symbol not in known}
        self._zero.update({*step.writes} - others)
        if not others & self._results:
            return step
        groups, tokens = self._groups()
        if not is_multiple(math.rows, tokens):  # tokens, of which experts have several rows each
            return step
        self._zero.update(step.writes)
        if math.rows != tokens:
            raise NotPossible(
                f"op {step.item!r}: rows past {groups} are to be zero in"
                f" {', '.join(sorted(others & self._results))}, whose rows are {math.rows},"
                f" not {tokens}"
            )
        return in_groups(step, groups)

    def _groups(self) -> tuple[str, Expr]:
        """Group sizes of the GEMM before it, or after it where there is none, and its tokens."""
        gemm = self._last or self._grouped[0]
        groups, rows = gemm.input("groups"), gemm.input("a")
        assert groups is not None and rows is not None
        return groups, self._draft.buffers[rows].shape.flat[0]


def _passed_on(steps: tuple[Step, ...], results: set[str]) -> Iterator[str]:
    """What a step in groups that gives a result adds to: rows past the groups keep that."""
    for step in steps:
        added = step.input("add")
        if added and step.input("groups") and not is_gemm(step) and {*step.writes} & results:
            yield added
