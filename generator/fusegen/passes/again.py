"""An activation that the backward makes again, and its gradient, in one step.

Both read what was activated, and most of what one computes the other does, too.  Where nothing is
quantised a kernel of both reads it once, and no later step needs it.  A recipe that quantises has
kernels that make each of them and quantise it, which reads less still.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.step import Step
from ..math import Derivations
from ..steps import is_derived, is_printed
from .draft import Draft
from .math import attach_again


def join_recomputed(draft: Draft, derivations: Derivations) -> Draft:
    """Put one step in the place of an expression that is made again and its gradient."""
    steps = draft.backward
    for repeated in steps:
        found = _gradient_of(repeated, steps)
        if found:
            steps = _joined(draft, steps, found, repeated, derivations)
    return replace(draft, backward=steps)


def _gradient_of(repeated: Step, steps: tuple[Step, ...]) -> Step | None:
    """The gradient of an expression that is made again, if one kernel can do both.

    Where halves of rows alternate, to find them takes registers that the longest expressions lack.
    """
    for step in steps:
        if not is_derived(step) or step.item != repeated.item:
            continue
        maths = (step.pointwise, repeated.pointwise)
        alike = is_printed(repeated) and not is_derived(repeated)
        alike = alike and {*repeated.reads} <= {*step.reads}
        if alike and all(math and not (math.grouped or math.interleaved) for math in maths):
            return None if step in _behind(repeated, steps) else step
    return None


def _behind(first: Step, steps: tuple[Step, ...]) -> list[Step]:
    """Steps that read what a step gives, or what one of them does."""
    known = {*first.writes}
    found = []
    for step in steps[steps.index(first) + 1 :]:
        if known.intersection(step.reads):
            known.update(step.writes)
            found.append(step)
    return found


def _joined(
    draft: Draft,
    steps: tuple[Step, ...],
    gradient: Step,
    repeated: Step,
    derivations: Derivations,
) -> tuple[Step, ...]:
    """The steps with one for both where the later of them stood, and behind it who waits for it."""
    both = attach_again(draft, gradient, repeated, derivations)
    place = steps.index(gradient)
    waiting = [step for step in _behind(repeated, steps) if steps.index(step) < place]
    before = (s for s in steps[:place] if s is not repeated and s not in waiting)
    after = (s for s in steps[place + 1 :] if s is not repeated)
    return (*before, both, *waiting, *after)
