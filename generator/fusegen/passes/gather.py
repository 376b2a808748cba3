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
from ..steps.gathered_gemm import gathered, is_gather, may_gather
from .draft import Draft, NotPossible
from .kernels import kernel_set


def gather_operands(
    draft: Draft, arch: ArchSpec, recipe: RecipeSpec
) -> tuple[Draft, tuple[KernelSet, ...]]:
    """The draft whose GEMMs gather rows where they can, and the kernels of these.

    Arguments, results and checks of the programs are those of the steps before.
    """
    sets: dict[str, KernelSet] = {}
    buffers = dict(draft.buffers)

    def merged(gather: Step, gemm: Step) -> Step:
        """One step for both; the GEMM as it is where no kernel does that."""
        rows = replace(buffers[gather.out], name=f"{gather.out}_of_{gemm.out}")
        both = gathered(*_apart(gather, gemm, rows.name))
        try:
            chosen = kernel_set(both, {**buffers, rows.name: rows}, arch, recipe)
        except NotPossible:
            return gemm
        sets[chosen.name], buffers[rows.name] = chosen, rows
        return replace(both, kernels=chosen.name, alignment=chosen.row_alignment)

    def gathering(program: Program) -> Program:
        for gather in filter(is_gather, program.steps):
            steps = tuple(
                merged(gather, each) if may_gather(each, gather.out) else each
                for each in program.steps
            )
            program = replace(program, steps=steps)
            program = replace(program, steps=tuple(_left(program, gather)))
        return program

    programs = [gathering(program) for program in draft.programs]
    return draft.with_buffers(buffers).packed(programs), tuple(sets.values())


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
    """Steps of which the one that gathers runs only for those that still read its rows, and before
    the first of them: tokens may arrive until then.
    """
    rows = gather.out
    asking = [each.asking(rows) for each in program.steps if rows in each.reads]
    asking += [each.when for each in program.results if each.buffer == rows]
    flags = (flag for flag in program.flags if any(flag in when for when in asking))
    kept = [gather if () in asking else replace(gather, when=tuple(flags))] if asking else []
    for step in program.steps:
        if step is gather:
            continue
        if rows in step.reads and kept:
            yield kept.pop()
        yield step
    yield from kept
