"""Pass 9, merge: an expression and the quantisation of what it gives become one step of one kernel.

The tensor between the two is then neither written nor read.  Fusions whose replacement is a merged
step say where; an architecture without kernels for it leaves the two as they are, and the merged
step keeps them as its parts, which is what plain PyTorch runs everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..ir.dtypes import DType
from ..ir.plan import Access, Buffer, KernelSet, Operand, Pointwise, Program, Result, Step
from ..ir.shapes import Shape, ceildiv
from ..spec.arch import ArchSpec
from ..spec.fusion import FusionPass, FusionSpec
from ..spec.recipe import RecipeSpec
from ..steps import quantizes
from ..steps.pointwise_quantize import ROW_PARTIALS
from .draft import NotPossible
from .fuse import Choices, admits
from .kernels import kernel_set

_TILE = 128  # columns that a kernel leaves one partial sum of
_RESULTS = ({Access.FULL}, {Access.FIRST_HALF, Access.SECOND_HALF})


@dataclass(frozen=True, slots=True)
class Merged:
    """Programs after the pass, with what their merged steps need besides."""

    forward: Program
    backward: Program
    buffers: tuple[Buffer, ...]
    kernel_sets: tuple[KernelSet, ...]


def merge(
    forward: Program,
    backward: Program,
    buffers: Mapping[str, Buffer],
    fusions: Mapping[str, FusionSpec],
    arch: ArchSpec,
    recipe: RecipeSpec,
    choices: Choices,
) -> Merged:
    """Apply every fusion with a merged step that arch, recipe and choices admit."""
    found: dict[str, Buffer] = {}
    sets: dict[str, KernelSet] = {}

    def merged(program: Program, patterns: Iterable[_Pattern]) -> Program:
        for pattern in patterns if arch.has_kernels else ():
            for first, second in _pairs(program, pattern):
                try:
                    step, scratch = _merged(first, second, pattern)
                    chosen = kernel_set(step, buffers, arch, recipe)
                except NotPossible:  # the arch has no such kernel
                    continue
                step = replace(step, kernels=chosen.name, alignment=chosen.row_alignment)
                kept = tuple(step if each is second else each for each in program.steps)
                program = replace(program, steps=tuple(each for each in kept if each is not first))
                sets[chosen.name] = chosen
                found.update({buffer.name: buffer for buffer in scratch})
        return program

    admitted = [f for f in fusions.values() if f.merges and admits(f, arch.name, recipe, choices)]
    first = merged(forward, _patterns(admitted, FusionPass.FORWARD))
    second = merged(backward, _patterns(admitted, FusionPass.BACKWARD))
    return Merged(first, second, tuple(found.values()), tuple(sets.values()))


@dataclass(frozen=True, slots=True)
class _Pattern:
    rule: str
    first: str
    merged: str


def _patterns(fusions: Iterable[FusionSpec], direction: FusionPass) -> list[_Pattern]:
    """Fusions of a direction: an expression and the quantisation of its result, as one step."""
    patterns = []
    for fusion in fusions:
        if fusion.pass_ is direction:
            programs = (fusion.match, fusion.rewrite)
            (first, _), (merged,) = (getattr(each, direction.value) for each in programs)
            patterns.append(_Pattern(fusion.name, first.step, merged.step))
    return patterns


def _pairs(program: Program, pattern: _Pattern) -> Iterator[tuple[Step, Step]]:
    """Steps that can be one: nothing else reads the tensor, or waits for the sum beside it."""
    results = {result.buffer for result in program.results}
    for at, second in enumerate(program.steps):
        if not quantizes(second):
            continue
        tensor = second.input("a")
        for i, first in enumerate(program.steps[:at]):
            if first.primitive != pattern.first or tensor not in first.writes:
                continue
            between = {name for step in program.steps[i:at] for name in step.reads}
            others = (step for step in program.steps if step is not second)
            read = {name for step in others for name in step.reads} | results
            if tensor not in read and not between & {*first.writes} and _fits(first, tensor):
                yield first, second


def _fits(step: Step, tensor: str) -> bool:
    """Whether a kernel can give the tensor tile by tile, and a sum over its rows at most."""
    math = step.pointwise
    assert math is not None
    rows = [result for result in math.results if result.access is Access.ROW]
    own = {result.access for result in math.results if result.buffer == tensor}
    fits = own in _RESULTS and len(rows) <= 1 and len(step.writes) == 1 + len(rows)
    return fits and not math.grouped


def _merged(first: Step, second: Step, pattern: _Pattern) -> tuple[Step, tuple[Buffer, ...]]:
    """One step for two, and its scratch."""
    math = first.pointwise
    assert math is not None
    tensor = second.input("a")
    scratch = tuple(_row_partials(math))
    outputs = [*second.outputs, *(each for each in first.outputs if each.buffer != tensor)]
    parts = (first, second)
    asked = {name: part.wanted(name) or part.when for part in parts for name in part.writes}
    for buffer in scratch:
        outputs.append(Operand(ROW_PARTIALS, buffer.name))
        asked[buffer.name] = asked[buffer.name.removesuffix(f"_{ROW_PARTIALS}")]
    step = replace(
        second,
        primitive=pattern.merged,
        item=first.item,
        inputs=(*first.inputs, *(each for each in second.inputs if each.buffer != tensor)),
        outputs=tuple(outputs),
        when=first.when,
        output_when=tuple(
            Result(each.buffer, asked[each.buffer])
            for each in outputs
            if asked[each.buffer] not in ((), first.when)
        ),
        pointwise=math,
        rule=pattern.rule,
        flops=first.flops,
        parts=parts,
        attributes=first.attributes,
    )
    return step, scratch


def _row_partials(math: Pointwise) -> Iterator[Buffer]:
    """What tiles of columns leave of a sum over a row."""
    tiles = ceildiv(math.columns, _TILE)
    for result in math.results:
        if result.access is Access.ROW:
            shape = Shape(None, (tiles, math.rows))
            yield Buffer(f"{result.buffer}_{ROW_PARTIALS}", DType.FLOAT32, shape)
