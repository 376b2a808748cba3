"""GEMMs that gather: rows of tokens are read where these lie, and nobody writes their matrix.

A step that gathers rows is no part of one GEMM: in the backward two read what it gives, and sums of
its rows may, too.  Each GEMM whose architecture has kernels for that gathers by itself; the step
stays for what else reads its rows, under the flags of those.  No rule of the rewrite engine can say
so, which puts steps in the place of others that nobody else needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..ir.kernel_set import KernelSet
from ..ir.program import Program
from ..ir.step import Operand, Step
from ..spec.arch import ArchSpec
from ..spec.recipe import RecipeSpec
from ..steps.gathered_gemm import gathered
from ..steps.gemm import GROUPED_GEMM
from ..steps.gemm_pointwise import GROUPED_GEMM_POINTWISE
from ..steps.routing import GATHER_ROWS
from .draft import Draft, NotPossible
from .kernels import kernel_set

_GEMMS = (GROUPED_GEMM.name, GROUPED_GEMM_POINTWISE.name)


def gather_operands(
    draft: Draft, arch: ArchSpec, recipe: RecipeSpec
) -> tuple[Draft, tuple[KernelSet, ...]]:
    """The draft whose GEMMs gather rows where they can, and the kernels of these.

    Arguments, results and checks of the programs are those of the steps before.
    """
    sets: dict[str, KernelSet] = {}
    programs: list[Program] = []
    for program in draft.programs:
        for gather in program.steps:
            if gather.primitive != GATHER_ROWS.name:
                continue
            for gemm in (step for step in program.steps if _reads(step, gather.out)):
                rows = replace(draft.buffers[gather.out], name=f"{gather.out}_of_{gemm.out}")
                named = draft.with_buffers({rows.name: rows})
                try:
                    merged = gathered(*_apart(gather, gemm, rows.name))
                    chosen = kernel_set(merged, named.buffers, arch, recipe)
                except NotPossible:
                    continue
                draft, sets[chosen.name] = named, chosen
                merged = replace(merged, kernels=chosen.name, alignment=chosen.row_alignment)
                program = _with(program, gemm, merged)
            program = replace(program, steps=tuple(_left(program, gather)))
        programs.append(program)
    return draft.packed(programs), tuple(sets.values())


def _with(program: Program, step: Step, other: Step) -> Program:
    steps = (other if each is step else each for each in program.steps)
    return replace(program, steps=tuple(steps))


def _reads(step: Step, rows: str) -> bool:
    """Whether a step is a GEMM one of whose operands, in 16 bits, are these rows."""
    operands = [each.slot for each in step.inputs if each.buffer == rows]
    return step.primitive in _GEMMS and not step.copies and operands in (["a"], ["b"])


def _apart(gather: Step, gemm: Step, rows: str) -> tuple[Step, Step]:
    """A step that gathers for one GEMM alone, under its flags, and that GEMM."""

    def reading(step: Step) -> Step:
        return replace(
            step,
            inputs=tuple(
                replace(each, buffer=rows) if each.buffer == gather.out else each
                for each in step.inputs
            ),
            parts=tuple(map(reading, step.parts)),
        )

    own = replace(gather, outputs=(Operand("out", rows),), when=gemm.when, kernels=None)
    return own, reading(gemm)


def _left(program: Program, gather: Step) -> Iterator[Step]:
    """Steps of which the one that gathers runs only for those that still read its rows."""
    rows = gather.out
    asking = [each.asking(rows) for each in program.steps if rows in each.reads]
    asking += [each.when for each in program.results if each.buffer == rows]
    for step in program.steps:
        if step is not gather:
            yield step
        elif () in asking:
            yield step
        elif asking:
            flags = (flag for flag in program.flags if any(flag in when for when in asking))
            yield replace(step, when=tuple(flags))
