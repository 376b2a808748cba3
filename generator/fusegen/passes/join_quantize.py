"""One launch for several tensors that the same kernel quantises.

An expert MLP quantises its input and its weights, none of which waits for another, each by a launch
of its own.  They become one step, in the place of the first of them.  What is quantised so early
takes memory until a later GEMM has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..families.registry import known_family
from ..ir.kernel_set import KernelSet
from ..ir.program import Program
from ..ir.step import Step
from ..spec.arch import ArchSpec
from ..spec.recipe import RecipeSpec
from ..steps import quantizes
from ..steps.quantize import needs_amaxes
from ..steps.quantize_several import several
from .draft import Draft, NotPossible
from .kernels import kernel_set


def join_quantize(
    draft: Draft, arch: ArchSpec, recipe: RecipeSpec
) -> tuple[tuple[Program, ...], tuple[KernelSet, ...]]:
    """The programs of a draft with such steps joined, and the kernels that run those.

    Where amaxes come first a tensor is read twice, from its end the second time, which the L2 cache
    still holds: other tensors between the two reads would cost more than a launch.
    """
    sets: dict[str, KernelSet] = {}

    def kernels_of(parts: Sequence[Step]) -> KernelSet | None:
        try:
            return kernel_set(several(parts), draft.buffers, arch, recipe)
        except NotPossible:
            return None

    def joined(parts: Sequence[Step]) -> Step:
        chosen = kernels_of(parts)
        assert chosen is not None, parts
        sets[chosen.name] = chosen
        return replace(several(parts), kernels=chosen.name, alignment=chosen.row_alignment)

    def most(step: Step) -> int:
        chosen = kernels_of((step,)) if _quantizes_at_once(step) else None
        family = known_family(chosen.template) if chosen else None
        return family.most_parts if family else 0

    programs = []
    for program in draft.programs:
        steps = dict(enumerate(program.steps))
        for group in _groups(program.steps, most):
            steps[group[0]] = joined([steps.pop(index) for index in group])
        programs.append(replace(program, steps=tuple(step for _, step in sorted(steps.items()))))
    return tuple(programs), tuple(sets.values())


def _quantizes_at_once(step: Step) -> bool:
    """Whether one kernel does all of it, and something runs it."""
    return quantizes(step) and step.kernels is not None and not needs_amaxes(step)


def _groups(steps: Sequence[Step], most: Callable[[Step], int]) -> list[list[int]]:
    """Positions of steps that become one where the first of them stands.

    Args:
        steps: of a program.
        most: parts that a launch of a step's kernels may have; 0 where it joins with no other.
    """
    groups: list[list[int]] = []
    for index, step in enumerate(steps):
        limit = most(step)
        if not limit:
            continue
        alike = (each for each in groups if len(each) < limit and _alike(steps[each[0]], step))
        group = next((each for each in alike if _may_move(steps, index, each[0])), None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    return [group for group in groups if len(group) > 1]


def _alike(step: Step, other: Step) -> bool:
    return (step.kernels, step.when) == (other.kernels, other.when)


def _may_move(steps: Sequence[Step], index: int, to: int) -> bool:
    """Whether a step touches nothing that one before it writes or changes, back to a place."""
    step = steps[index]
    own, changed = {*step.reads, *step.writes, *step.mutates}, {*step.writes, *step.mutates}
    return all(
        own.isdisjoint((*other.writes, *other.mutates)) and changed.isdisjoint(other.reads)
        for other in steps[to:index]
    )
