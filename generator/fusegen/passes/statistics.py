"""Statistics of quantised copies: what each lost of the tensor that it was made from.

A step after the one that quantises looks at the tensor and at one copy, and leaves a few numbers in
a buffer of the module.  Nothing reads them but people, so no other step waits for one, or runs
because of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..ir.buffers import Buffer, State, StateFill
from ..ir.step import Copy, Operand, Step
from ..spec.arch import ArchSpec
from ..spec.recipe import RecipeSpec
from ..steps import quantizes
from ..steps.copies import copy_slots
from ..steps.statistics import PARTIALS, RESULTS, STATISTICS
from .draft import Draft, NotPossible


def take_statistics(draft: Draft, recipe: RecipeSpec, arch: ArchSpec) -> Draft:
    """Put one step per copy behind the first step that makes it.

    A backward makes copies of weights again, of the same bits.

    Raises:
        NotPossible: the recipe quantises no tensor of the module.
    """
    steps = (*draft.quantize_input, *draft.forward, *draft.backward, *draft.refresh)
    first = {copy.data: step for step in reversed(steps) for copy in _made_by(step)}

    def observed_of(step: Step) -> tuple[Copy, ...]:
        return tuple(copy for copy in _made_by(step) if first[copy.data] is step)

    copies = [copy for step in steps for copy in observed_of(step)]
    if not copies:
        raise NotPossible(f"recipe {recipe.name!r} quantises no tensor of the module")
    numbers, partials = RESULTS["out"], RESULTS[PARTIALS]
    buffers = [Buffer(_numbers(copy), numbers.typed, numbers.shape) for copy in copies]
    states = tuple(State(each.name, each.name, StateFill.RECORD) for each in buffers)
    if arch.has_kernels:
        buffers += [Buffer(_partials(copy), partials.typed, partials.shape) for copy in copies]

    def observed(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(
            each for step in steps for each in (step, *_observers(step, observed_of(step), arch))
        )

    return replace(
        draft.with_buffers({buffer.name: buffer for buffer in buffers}),
        forward=observed(draft.forward),
        backward=observed(draft.backward),
        quantize_input=observed(draft.quantize_input),
        refresh=observed(draft.refresh),
        states=(*draft.states, *states),
    )


def _made_by(step: Step) -> tuple[Copy, ...]:
    return step.copies if quantizes(step) else ()


def _observers(step: Step, copies: tuple[Copy, ...], arch: ArchSpec) -> Iterator[Step]:
    """One step for each of these copies of a step, under the flags that ask for the copy."""
    for copy in copies:
        inputs = (o for o in step.inputs if o.slot in ("a", "groups"))
        out = _numbers(copy)
        partials = (Operand(PARTIALS, _partials(copy)),) if arch.has_kernels else ()
        yield Step(
            primitive=STATISTICS.name,
            kind=None,
            item=step.item,
            inputs=(*inputs, *copy_slots("copy", copy)),
            outputs=(Operand("out", out), *partials),
            when=step.wanted(copy.data) or step.when,
            sizes=step.sizes,
            copies=(copy,),
            mutates=(out,),
        )


def _numbers(copy: Copy) -> str:
    return f"{copy.data}_statistics"


def _partials(copy: Copy) -> str:
    return f"{copy.data}_{PARTIALS}"
