"""The bias of the last grouped GEMM is multiplied by a scale of each token.

A token's experts are weighted by the router's probabilities.  Where the activation before the
GEMM applies them, ``y = probs * (act(h) @ weight.T + bias)`` holds only if the bias is weighted,
too.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.naming import gradient, total_gradient
from ..ir.shapes import Shape
from ..ir.step import Operand, Step
from ..ir.words import Broadcast
from ..steps import is_gemm, sums_rows
from ..steps.group_row_dot import GROUP_ROW_DOT
from .draft import Draft
from .rewrite import in_order

_SCALES = "scales"
"""Input of a module whose activation has none."""


def scale_bias(draft: Draft) -> Draft:
    """Scale the bias of the last grouped GEMM by rows, in both directions.

    The scales are those that a pointwise op multiplies its rows by, or one more input ``scales``.
    Their gradient is the pointwise op's plus the dot product of a row of dy with its group's bias.
    """
    grouped = (step for step in draft.forward if is_gemm(step) and step.input("groups"))
    scaled = [step for step in grouped if step.input("add")][-1]
    draft, scales = _with_scales(draft, scaled)
    forward = tuple(
        replace(step, inputs=(*step.inputs, Operand("add_scales", scales)))
        if step is scaled
        else step
        for step in draft.forward
    )
    incoming = _incoming(draft, scaled)
    backward = tuple(
        replace(step, inputs=(*step.inputs, Operand("scales", scales)))
        if sums_rows(step) and step.input("a") == incoming
        else step
        for step in draft.backward
    )
    draft = replace(draft, forward=forward, backward=backward)
    return _with_gradient(draft, scaled, scales)


def _incoming(draft: Draft, scaled: Step) -> str:
    """The gradient of a GEMM's result, with what its readers add where it is an output, too."""
    total = total_gradient(gradient(scaled.out))
    return total if total in draft.buffers else gradient(scaled.out)


def _with_scales(draft: Draft, scaled: Step) -> tuple[Draft, str]:
    """The module's scales of rows; a new input where it has none."""
    for instance in draft.instances:
        for name, spec in instance.op.inputs.items():
            if spec.broadcast is Broadcast.ROW:
                return draft, instance.tensors[name]
    rows = draft.buffers[scaled.input("a") or ""].shape.flat[0]
    buffer = Buffer(_SCALES, DType.FLOAT32, Shape(None, (rows,)))
    given = replace(buffer, name=gradient(_SCALES))
    draft = draft.with_buffers({_SCALES: buffer, given.name: given})
    return replace(draft, inputs=(*draft.inputs, _SCALES)), _SCALES


def _with_gradient(draft: Draft, scaled: Step, scales: str) -> Draft:
    """The gradient of the scales, from one step or two."""
    out = gradient(scales)
    steps = list(draft.backward)
    writer = next((step for step in steps if out in step.writes), None)
    partial: tuple[Operand, ...] = ()
    place = len(steps)
    if writer is not None:
        # Right behind it: where the scales are a step's result, its backward reads the gradient.
        place = steps.index(writer) + 1
        own = Buffer(f"{writer.item}_{out}", draft.buffers[out].dtype, draft.buffers[out].shape)
        draft = draft.with_buffers({own.name: own})
        renamed = (replace(o, buffer=own.name) if o.buffer == out else o for o in writer.outputs)
        steps[place - 1] = replace(writer, outputs=tuple(renamed))
        partial = (Operand("add", own.name),)
    named = {operand.slot: operand for operand in scaled.inputs}
    inputs = (
        Operand("a", _incoming(draft, scaled)),
        Operand("b", named["add"].buffer),
        named["groups"],
        *partial,
    )
    outputs = (Operand("out", out),)
    steps.insert(place, Step(GROUP_ROW_DOT.name, None, scaled.item, inputs, outputs))
    ordered = in_order(steps)  # what comes in may be a sum that others add to behind it
    assert ordered is not None, "a gradient of scales waits for no reader of it"
    found = dict(draft.gradients) | {scales: out}
    gradients = tuple((leaf, found[leaf]) for leaf in draft.arguments if leaf in found)
    return replace(draft, backward=ordered, gradients=gradients)
