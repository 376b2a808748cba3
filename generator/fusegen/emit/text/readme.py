"""How the modules of a bundle are called, for its README: signatures, shapes, code that runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...ir import dtypes
from ...ir.buffers import Buffer
from ...ir.dtypes import DType
from ...ir.plan import ModulePlan
from ...ir.shapes import evaluate

_EXAMPLE_SIZE = 128
"""Of every dimension in the example but tokens, which are more, and groups, which are few."""

_EXAMPLE_TOKENS = 256
_EXAMPLE_GROUPS = 4


@dataclass(frozen=True, slots=True)
class SignatureText:
    """How a module is made and called, whatever the recipe.

    Attributes:
        constructor: its call with names of sizes and defaults.
        inputs: what it is called with, each with its shape and type.
        outputs: what it gives.
    """

    constructor: str
    inputs: str
    outputs: str


@dataclass(frozen=True, slots=True)
class ExampleText:
    """Lines of Python that make a module, call it and, where a caller need lend nothing, train it.

    Attributes:
        cell: that is imported from.
        class_name: what is imported.
        lines: what follows.
    """

    cell: str
    class_name: str
    lines: tuple[str, ...]


def signature_texts(plans: Iterable[ModulePlan]) -> tuple[SignatureText, ...]:
    """Of every module of a bundle, once."""
    return tuple(dict.fromkeys(map(_signature, plans)))


def _signature(plan: ModulePlan) -> SignatureText:
    keywords = [dim.keyword for dim in plan.dims if dim.constructor]
    if any(plan.buffer(parameter.buffer).optional for parameter in plan.parameters):
        keywords.append("bias=False")
    if plan.parameters:
        keywords += ["device=None", "dtype=torch.bfloat16"]
    keywords += [f"{each.name}={each.default!r}" for each in plan.attributes]
    return SignatureText(
        constructor=f"{plan.class_name}({', '.join(keywords)})",
        inputs=_shapes(plan, (name for name in plan.inputs if name not in plan.drawn)),
        outputs=_shapes(plan, plan.outputs),
    )


def _shapes(plan: ModulePlan, names: Iterable[str]) -> str:
    """``x [T, H], split_sizes [E] int64``; the module's own type goes without saying."""
    return ", ".join(
        f"{buffer.name} {buffer.shape}{_type(buffer)}" for buffer in map(plan.buffer, names)
    )


def _type(buffer: Buffer) -> str:
    return "" if buffer.dtype is DType.IO else f" {dtypes.info(buffer.dtype).torch}"


def example_text(plans: tuple[ModulePlan, ...]) -> ExampleText:
    """A call of the module that takes the most tensors, without options if it is there so."""
    plan = max(plans, key=lambda each: (not each.options, len(each.inputs) + len(each.parameters)))
    return ExampleText(plan.cell, plan.class_name, tuple(_lines(plan)))


def _lines(plan: ModulePlan) -> Iterator[str]:
    sizes = {dim.symbol: _EXAMPLE_SIZE for dim in plan.dims}
    sizes |= {str(plan.token_axis): _EXAMPLE_TOKENS, str(plan.group_axis): _EXAMPLE_GROUPS}
    words = [f"{dim.keyword}={sizes[dim.symbol]}" for dim in plan.dims if dim.constructor]
    words += ["device=device"] if plan.parameters else []
    trains = not (plan.main_grads or plan.wgrad or plan.process_groups)
    given = [name for name in plan.inputs if name not in plan.drawn]
    yield 'device = "cuda" if torch.cuda.is_available() else "cpu"'
    yield f"layer = {plan.class_name}({', '.join(words)})"
    for name in given:
        yield f"{name} = {_values(plan, plan.buffer(name), sizes)}"
    call = f"layer({', '.join(given)})"
    outputs = ", ".join(plan.outputs)
    if trains:
        yield f"{given[0]}.requires_grad_()"
        yield f"{outputs} = {call}"
        yield f"{plan.outputs[0]}.sum().backward()"
    else:
        yield "with torch.no_grad():"
        yield f"    {outputs} = {call}"


def _values(plan: ModulePlan, buffer: Buffer, sizes: dict[str, int]) -> str:
    shape = tuple(evaluate(dim, sizes) for dim in buffer.shape.dims)
    if buffer.shape.leading:
        shape = (_EXAMPLE_TOKENS, *shape)
    text = ", ".join(map(str, shape))
    if buffer.name == plan.groups:
        each = _EXAMPLE_TOKENS // _EXAMPLE_GROUPS
        return f"torch.full(({text},), {each}, device=device)"
    if buffer.dtype is DType.IO:
        return f"torch.randn({text}, device=device, dtype=torch.bfloat16)"
    if buffer.dtype is DType.FLOAT32:
        return f"torch.rand({text}, device=device)"
    kind = dtypes.info(buffer.dtype).torch
    return f"torch.zeros({text}, device=device, dtype=torch.{kind})"
