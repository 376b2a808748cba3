"""A module's first input comes quantised: what quantises it moves into a program of its own.

The forward takes the copies as arguments.  It keeps the tensor as one, too: this tells sizes and
type, and has the gradient, but nobody reads an element of it, so that a tensor without memory may
stand in its place.
"""

from __future__ import annotations

from dataclasses import replace

from ..steps import quantizes
from .draft import Draft, NotPossible


def take_quantized(draft: Draft) -> Draft:
    """Move the step that quantises the first input into ``quantize_input``.

    Raises:
        NotPossible: no step quantises the first input, or something else reads it.
    """
    first = draft.inputs[0]
    readers = [step for step in (*draft.forward, *draft.backward) if first in step.reads]
    moved = [step for step in draft.forward if quantizes(step) and first in step.reads]
    if len(moved) != 1 or len(readers) != 1 or first in draft.outputs:
        raise NotPossible(f"{first!r} is not read by one step alone, which quantises it")
    (step,) = moved
    return replace(
        draft,
        forward=tuple(each for each in draft.forward if each is not step),
        quantize_input=(step,),
        input_copies=tuple(name for copy in step.copies for name in copy.buffers),
    )
