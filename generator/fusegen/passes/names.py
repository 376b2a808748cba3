"""Steps and programs with other buffers in the place of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir.program import Argument, Binding, Check, Program
from ..ir.step import Chunks, Copy, Operand, Pointwise, Result, Step

Final = Callable[[str], str]
"""The name that a buffer has then."""


def with_names(step: Step, final: Final) -> Step:
    """A step with the buffers that its own become."""

    def operands(given: tuple[Operand, ...]) -> tuple[Operand, ...]:
        return tuple(Operand(operand.slot, final(operand.buffer)) for operand in given)

    return replace(
        step,
        inputs=operands(step.inputs),
        outputs=operands(step.outputs),
        output_when=_results(step.output_when, final),
        pointwise=step.pointwise and _pointwise(step.pointwise, final),
        copies=tuple(_copy(each, final) for each in step.copies),
        mutates=tuple(map(final, step.mutates)),
        parts=tuple(with_names(part, final) for part in step.parts),
        chunks=step.chunks and _chunks(step.chunks, final),
    )


def program_with_names(program: Program, final: Final) -> Program:
    """A program with the buffers that its own become."""

    def binding(each: Binding) -> Binding:
        places = ((final(name), axis, by) for name, axis, by in each.candidates)
        return replace(each, candidates=tuple(places))

    def check(each: Check) -> Check:
        reference = each.reference and final(each.reference)
        return replace(each, tensor=final(each.tensor), reference=reference)

    def argument(each: Argument) -> Argument:
        return replace(each, buffer=final(each.buffer))

    return replace(
        program,
        arguments=tuple(map(argument, program.arguments)),
        results=_results(program.results, final),
        steps=tuple(with_names(step, final) for step in program.steps),
        bindings=tuple(map(binding, program.bindings)),
        checks=tuple(map(check, program.checks)),
    )


def _results(given: tuple[Result, ...], final: Final) -> tuple[Result, ...]:
    return tuple(replace(each, buffer=final(each.buffer)) for each in given)


def _pointwise(math: Pointwise, final: Final) -> Pointwise:
    return replace(
        math,
        operands=tuple(replace(each, buffer=final(each.buffer)) for each in math.operands),
        results=tuple(replace(each, buffer=final(each.buffer)) for each in math.results),
    )


def _copy(copy: Copy, final: Final) -> Copy:
    return replace(
        copy,
        original=final(copy.original),
        data=final(copy.data),
        scale=final(copy.scale),
        amax=copy.amax and final(copy.amax),
        groups=copy.groups and final(copy.groups),
    )


def _chunks(chunks: Chunks, final: Final) -> Chunks:
    return replace(
        chunks,
        memory=tuple((final(one), final(other)) for one, other in chunks.memory),
        adding=tuple(with_names(part, final) for part in chunks.adding),
    )
