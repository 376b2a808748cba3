"""What activations read of a GEMM's result is saved as the recipe's copy of an input.

The forward is as without: activations read what the GEMM gives.  The backward, for their gradients
and for activations that it makes again, reads what the copy stands for.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.quantization import Role
from ..ir.step import Operand, Step
from ..steps import is_gemm
from ..steps.dequantize import DEQUANTIZE
from .draft import Draft, NotPossible
from .names import with_names


def cache_inputs(draft: Draft) -> Draft:
    """Let the backward read decoded copies; ``quantize`` makes them in the forward.

    Raises:
        NotPossible: no activation's gradient reads what a GEMM gives.
    """
    made = {name for step in draft.forward if is_gemm(step) for name in step.writes}
    made -= {*draft.outputs}  # the caller has them, so that saving them costs nothing
    read = {name for step in draft.backward if step.pointwise for name in step.reads}
    cached = [name for name in draft.buffers if name in made & read]
    if not cached:
        raise NotPossible("no activation's gradient reads what a GEMM gives")
    inputs = {name: replace(draft.buffers[name], role=Role.INPUT) for name in cached}
    values = {
        f"{name}_cached": replace(draft.buffers[name], name=f"{name}_cached") for name in cached
    }
    steps = list(draft.backward)
    for name in cached:
        first = next(i for i, each in enumerate(steps) if each.pointwise and name in each.reads)
        steps.insert(first, _decoded(name, steps[first].item))
    renamed = {name: f"{name}_cached" for name in cached}
    backward = (
        with_names(each, lambda name: renamed.get(name, name)) if each.pointwise else each
        for each in steps
    )
    return replace(draft.with_buffers({**inputs, **values}), backward=tuple(backward))


def _decoded(name: str, item: str) -> Step:
    return Step(
        DEQUANTIZE.name,
        None,
        item,
        inputs=(Operand("a", name),),
        outputs=(Operand("out", f"{name}_cached"),),
    )
