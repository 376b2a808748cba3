"""Rows past the groups that nobody reads are not written.

Results of a module with groups are zero there (``padding.py``).  Where ranks have some of the
groups each, most rows may be of no group of a rank's, and writing those of all tensors between its
ops would cost as much as that of others.  GEMMs leave them as they are where every reader keeps to
rows that groups have, or that a map names; so do expressions, which are given the group sizes for
that.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ..ir.kernel_set import KernelSet
from ..ir.program import Program
from ..ir.step import LIKE, Step
from ..spec.arch import ArchSpec
from ..spec.recipe import RecipeSpec
from ..steps import definition, gives_rows_of_groups, is_gemm, is_printed, made_copies
from ..steps.gemm import OPERANDS
from ..steps.pointwise import in_groups
from .draft import Draft
from .kernels import kernel_set


def leave_rows(
    draft: Draft, arch: ArchSpec, recipe: RecipeSpec
) -> tuple[Draft, tuple[KernelSet, ...]]:
    """The draft whose steps leave rows alone where they may, and kernels of expressions in groups.

    Arguments, results and checks of the programs are those of the steps before.
    """
    if not arch.has_kernels:
        return draft, ()
    sets: dict[str, KernelSet] = {}
    readers: dict[str, list[Step]] = defaultdict(list)
    outside = {*draft.results, *draft.computed}

    def is_left(name: str) -> bool:
        """Whether nobody reads rows of a buffer past the groups."""
        return name not in outside and not any(_reads_past(each, name) for each in readers[name])

    def settled(step: Step, program: Program) -> Step:
        if made_copies(step) or not all(map(is_left, step.writes)):
            return step
        if gives_rows_of_groups(step):
            return replace(step, leaves=True)
        groups = _groups_of(step, program, draft)
        if not groups:
            return step
        grouped = in_groups(step, groups)
        chosen = kernel_set(grouped, draft.buffers, arch, recipe)
        sets[chosen.name] = chosen
        return replace(grouped, leaves=True, kernels=chosen.name, alignment=chosen.row_alignment)

    programs = []
    for program in reversed(draft.programs):  # what reads a buffer comes before what writes it
        steps = []
        for step in reversed(program.steps):
            steps.append(settled(step, program))
            for name in steps[-1].reads:
                readers[name].append(steps[-1])
        programs.append(replace(program, steps=tuple(reversed(steps))))
    return draft.packed(reversed(programs)), tuple(sets.values())


def _groups_of(step: Step, program: Program, draft: Draft) -> str:
    """Group sizes of an expression's rows: those of its program's GEMMs whose operands have as many
    rows.  Empty where there are none, or several, or it is no expression without groups.
    """
    math = step.pointwise
    if math is None or math.grouped or not is_printed(step):
        return ""
    gemms = [each for each in filter(is_gemm, program.steps) if each.input("groups")]
    found = {
        each.input("groups") or ""
        for each in gemms
        if draft.buffers[each.input("a") or ""].shape.flat[0] == math.rows
    }
    return found.pop() if len(found) == 1 else ""


def _reads_past(step: Step, name: str) -> bool:
    """Whether a step reads rows of a buffer that no group has, and no map names."""
    return any(
        operand.buffer == name and not _keeps_within(part, operand.slot)
        for part in step.parts or (step,)
        for operand in part.inputs
    )


def _keeps_within(step: Step, slot: str) -> bool:
    """Whether a step reads no other rows of an operand than groups have, or maps name."""
    kind = definition(step.primitive)
    grouped = bool(step.pointwise and step.pointwise.grouped)
    return slot in (LIKE, kind.moves) or grouped or (kind.in_groups and slot in OPERANDS)
