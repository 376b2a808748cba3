"""Pointwise steps of references: functions printed from expressions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...ir.dtypes import DType
from ...ir.plan import ModulePlan
from ...ir.step import FIRSTS, HALVES, INTERLEAVE, Access, Pointwise, Step
from ...steps import is_derived
from ..python.words import scalar
from ..text.escape import docstring


@dataclass(frozen=True, slots=True)
class LoadText:
    """Assignment of a pointwise operand: ``gate, up = steps.halves(h)``."""

    target: str
    source: str


@dataclass(frozen=True, slots=True)
class PointwiseText:
    """A pointwise step of the reference as a function of its own.

    Attributes:
        name: of the function.
        formula: for its docstring.
        differentiated: whether it computes the formula's gradients.
        arguments: buffers and scalars read.
        loads: fp32 views of the operands.
        body: printed program.
        returns: source of the results, rounded to their buffers' types.
        annotation: of the return value.
    """

    name: str
    formula: str
    differentiated: bool
    arguments: tuple[str, ...]
    scalars: tuple[str, ...]
    loads: tuple[LoadText, ...]
    body: tuple[str, ...]
    returns: str
    annotation: str


def function_name(step: Step) -> str:
    """``_act_backward``: chain item and direction; without an item the direction alone."""
    assert step.pointwise is not None
    direction = step.pointwise.kernel.rpartition("_")[2]
    return f"_{step.item}_{direction}" if step.item else f"_math_{direction}"


def buffers(operands: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(operand.buffer for operand in operands))  # type: ignore[attr-defined]


def scalars_of(step: Step) -> list[str]:
    return [scalar(value) for _, value in step.attributes]


def pointwise_text(plan: ModulePlan, step: Step) -> PointwiseText:
    math = step.pointwise
    assert math is not None
    arguments = _argument_names(math)
    loads = []
    halves: dict[str, dict[bool, str]] = {}  # by whether it is the first
    for operand in math.operands:
        if operand.access in HALVES:
            first = operand.access in FIRSTS
            halves.setdefault(operand.buffer, {})[first] = operand.symbol
        elif operand.access is Access.ROW:
            loads.append(LoadText(operand.symbol, f"steps.per_row({arguments[operand.buffer]})"))
        else:
            loads.append(LoadText(operand.symbol, f"steps.wide({arguments[operand.buffer]})"))
    block = f", {INTERLEAVE}" if math.interleaved else ""
    for buffer, parts in halves.items():
        target = f"{parts.get(True, '_')}, {parts.get(False, '_')}"
        loads.insert(0, LoadText(target, f"steps.halves({arguments[buffer]}{block})"))
    own_type = next(o.buffer for o in math.operands if o.dtype is DType.IO)
    # Before a symbol takes the buffer's name.
    loads.insert(0, LoadText("io", f"{arguments[own_type]}.dtype"))
    results = _result_sources(math)
    return PointwiseText(
        name=function_name(step),
        formula=docstring(math.formula),
        differentiated=is_derived(step),
        arguments=tuple(arguments.values()),
        scalars=math.attributes,
        loads=tuple(loads),
        body=math.torch,
        returns=", ".join(results.values()),
        annotation="Tensor"
        if len(results) == 1
        else f"tuple[{', '.join(['Tensor'] * len(results))}]",
    )


def _argument_names(math: Pointwise) -> dict[str, str]:
    """What a function calls each buffer: another name where an op calls something else so."""
    others = {(each.symbol, each.buffer) for each in math.operands}
    scalars = {*math.attributes, *(each.symbol for each in math.results)}
    taken = {
        buffer: scalars | {symbol for symbol, other in others if other != buffer}
        for buffer in buffers(math.operands)
    }
    return {buffer: f"{buffer}_" if buffer in words else buffer for buffer, words in taken.items()}


def _result_sources(math: Pointwise) -> dict[str, str]:
    """Source per result buffer: rounded to its type, halves joined, rows summed."""
    sources: dict[str, str] = {}
    halves: dict[str, list[str]] = {}
    block = f", {INTERLEAVE}" if math.interleaved else ""
    for result in math.results:
        if result.access in HALVES:
            halves.setdefault(result.buffer, []).append(result.symbol)
            sources[result.buffer] = f"steps.join({', '.join(halves[result.buffer])}, io{block})"
        elif result.access is Access.ROW:
            sources[result.buffer] = f"steps.row_sum({result.symbol})"
        else:
            sources[result.buffer] = f"{result.symbol}.to(io)"
    return sources
