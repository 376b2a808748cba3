"""A router's weight in fp32: GEMMs of 16 bits multiply its parts, and their products are added up.

The gradient of the weight is in fp32, too; that of x is a product with the weight rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..ir.buffers import Buffer
from ..ir.dtypes import DType
from ..ir.kernel import GemmKind
from ..ir.naming import gradient
from ..ir.shapes import Const, Shape, mul
from ..ir.step import LIKE, Operand, Step
from ..steps import is_gemm
from ..steps.fp32_weight import ADD_PRODUCTS, PARTS, SPLIT_WEIGHT
from ..steps.narrow import NARROW
from .draft import Draft


def widen_weights(draft: Draft) -> Draft:
    """Let parameters that have products in fp32 be in fp32, and their gradients."""
    parameters = {each.buffer for each in draft.parameters}
    wide = {
        step.input("b") or ""
        for step in draft.forward
        if is_gemm(step) and draft.buffers[step.out].dtype is DType.FLOAT32
    } & parameters
    widened = {
        name: replace(draft.buffers[name], dtype=DType.FLOAT32)
        for weight in wide
        for name in (weight, gradient(weight))
    }
    draft = draft.with_buffers(widened)
    made: dict[str, Buffer] = {}
    forward = tuple(e for step in draft.forward for e in _by_parts(draft, step, wide, made))
    backward = tuple(e for step in draft.backward for e in _of_rounded(draft, step, wide, made))
    return replace(draft.with_buffers(made), forward=forward, backward=backward)


def _by_parts(draft: Draft, step: Step, wide: set[str], made: dict[str, Buffer]) -> Iterator[Step]:
    """A GEMM of a weight as one of its parts, between the steps that split it and add up."""
    weight = step.input("b") if is_gemm(step) else None
    if weight not in wide:
        yield step
        return
    slots = {operand.slot: operand for operand in step.inputs}
    x, out = slots["a"].buffer, draft.buffers[step.out]
    rows, columns = draft.buffers[weight].shape.flat
    parts = Buffer(f"{weight}_parts", DType.IO, Shape(None, (mul(Const(PARTS), rows), columns)))
    shape = Shape(out.shape.leading, (*out.shape.dims[:-1], mul(Const(PARTS), rows)))
    products = Buffer(f"{out.name}_parts", DType.FLOAT32, shape)
    made |= {parts.name: parts, products.name: products}
    split = (Operand("a", weight), Operand(LIKE, x))
    yield Step(SPLIT_WEIGHT.name, None, step.item, split, (Operand("out", parts.name),))
    operands = (slots["a"], Operand("b", parts.name))
    yield replace(step, inputs=operands, outputs=(Operand("out", products.name),))
    added = (Operand("a", products.name), *([slots["add"]] if "add" in slots else []))
    yield Step(ADD_PRODUCTS.name, None, step.item, added, step.outputs)


def _of_rounded(
    draft: Draft, step: Step, wide: set[str], made: dict[str, Buffer]
) -> Iterator[Step]:
    """The gradient of x as a product with the weight rounded."""
    weight = step.input("b") if is_gemm(step) and step.kind == GemmKind.DGRAD.value else None
    if weight not in wide:
        yield step
        return
    rounded = replace(draft.buffers[weight], name=f"{weight}_rounded", dtype=DType.IO)
    made[rounded.name] = rounded
    yield Step(
        NARROW.name, None, step.item, (Operand("a", weight),), (Operand("out", rounded.name),)
    )
    inputs = (replace(o, buffer=rounded.name) if o.slot == "b" else o for o in step.inputs)
    yield replace(step, inputs=tuple(inputs))
