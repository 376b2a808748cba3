"""A GEMM and the expressions of what it gives as one step of one kernel: its epilogue.

The tensor between two of them is then not read, and written only where something else reads it: the
GEMM's own result, if the fusion says so, as a second result of the merged step.  That keeps the
steps as its parts, as those of ``merge`` do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..ir.dtypes import DType
from ..ir.quantization import Orientation
from ..ir.shapes import total
from ..ir.step import HALVES, INTERLEAVE, Access, Operand, Result, Step
from ..spec.fusion import MERGES
from ..spec.recipe import RecipeSpec
from ..steps import quantizes, read_copies
from ..steps.copies import copy_slots
from ..steps.gemm_pointwise import AUX, MOST_SCALARS, OTHER
from .draft import NotPossible
from .kernels import kernel_set
from .rewrite import BACKWARD, FORWARD, Bound, Facts, Replacement, wanted_elsewhere

ONE_SCALE = ("tensor", "row")
"""Scalings whose scales no part of a row is enough for."""


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What a fusion makes of a GEMM and expressions.

    Attributes:
        rule: name of the fusion.
        has_aux: whether others may read the GEMM's own result.
    """

    rule: str
    has_aux: bool = False

    def why_not(self, bound: Bound, facts: Facts) -> str | None:
        """Why no kernel does the steps, or None."""
        if not facts.arch.has_kernels:
            return f"{facts.arch.name} has no kernels"
        step = self._step(bound)
        reason = _misfit(step) or _uncoded(step, facts.recipe)
        if reason is not None:
            return reason
        try:
            kernel_set(step, bound.draft.buffers, facts.arch, facts.recipe)
        except NotPossible as lack:
            return str(lack)
        return None

    def build(self, bound: Bound) -> Replacement:
        """One step for all, without its kernel."""
        step = self._step(bound)
        return Replacement(forward=(step,)) if bound.forward else Replacement(backward=(step,))

    def _step(self, bound: Bound) -> Step:
        """One step for all, which writes the GEMM's own result for those that want it."""
        program = FORWARD if bound.forward else BACKWARD
        steps = bound.parts(program)
        step, aux = _merged(self.rule, steps), steps[0].out
        when = wanted_elsewhere(bound, program, aux) if self.has_aux else None
        if when is None:
            return step
        asked = (Result(aux, when),) if when not in ((), step.when) else ()
        return replace(
            step,
            outputs=(*step.outputs, Operand(AUX, aux)),
            output_when=(*step.output_when, *asked),
        )


def _misfit(merged: Step) -> str | None:
    """Why a kernel cannot go on with the values of a result as it has them."""
    steps = merged.parts
    gemm, *expressions = (step for step in steps if not quantizes(step))
    if gemm.input("add_scales"):
        return f"{gemm.out} has a bias times scales of rows"
    if any(step.when != gemm.when for step in steps):
        return f"{gemm.out} is made under other flags than what is made of it"
    if sum(len(step.attributes) for step in expressions) > MOST_SCALARS:
        return f"the expressions read more than {MOST_SCALARS} scalars"
    if _reads_halves(expressions[0], gemm.out):
        return _ungated(expressions, gemm.out)
    if quantizes(steps[-1]):
        return f"what is quantised is no expression of halves of {gemm.out}"
    for before, step in pairwise(steps):
        if reason := _unlike(step, before.out):
            return reason
    others = [*_others(steps)]
    if len(others) > 1:
        return f"the expressions read more than one tensor besides {gemm.out}: {', '.join(others)}"
    if others and gemm.out in merged.writes:
        return f"{gemm.out} is read elsewhere, and the expressions read {others[0]} besides it"
    return None


def _uncoded(merged: Step, recipe: RecipeSpec) -> str | None:
    """Why a kernel cannot go on to codes of what the last expression gives."""
    quantized = merged.parts[-1]
    if not quantizes(quantized):
        return None
    tensor, operand = quantized.input("a"), read_copies(merged)
    copy, *others = quantized.copies
    if copy.orientation is not Orientation.ROWWISE:
        return f"{tensor} is quantised along its columns alone"
    if any(each.untransposed for each in others):
        return f"the columnwise copy of {tensor} lies as the rowwise one does"
    if quantized.input("scale") is None:
        whole = f"scales of {tensor} follow from {tensor}, which is whole at the end alone"
        blocks = f"scales of blocks of {tensor} take an epilogue as long to find as it spares"
        return whole if recipe.roles[copy.role].scaling in ONE_SCALE else blocks
    if not operand or recipe.roles[copy.role] != recipe.roles[operand[0].role]:
        return f"{tensor} is quantised otherwise than what the GEMM reads"
    left = {slot for each in quantized.copies for slot in copy_slots(each.orientation.value, each)}
    if {*quantized.outputs} != left:
        return f"more is left of {tensor} than copies"
    if quantized.input("amax_history") is None:
        return f"scales of {tensor} are given, and have no history"
    return None


def _reads_halves(step: Step, tensor: str) -> bool:
    """Whether an expression is of the halves of a tensor's rows."""
    math = step.pointwise
    assert math is not None, step
    return any(each.buffer == tensor and each.access in HALVES for each in math.operands)


def _ungated(expressions: Sequence[Step], tensor: str) -> str | None:
    """Why expressions are not one of both halves of a tensor's rows and a value of each row."""
    math = expressions[0].pointwise
    assert math is not None, expressions
    if len(expressions) > 1:
        return f"another expression follows the one of halves of {tensor}"
    if math.interleaved:
        return f"halves of {tensor} alternate in blocks of {INTERLEAVE} columns"
    of = [each.access for each in math.operands if each.buffer == tensor]
    if sorted(of) != [Access.FIRST_HALF, Access.SECOND_HALF]:
        return f"the expression reads {tensor} otherwise than as two halves"
    others = [each for each in math.operands if each.buffer != tensor]
    for each in others:
        if (each.access, each.dtype) != (Access.ROW, DType.FLOAT32):
            return f"{each.buffer} is not one fp32 value of each row"
    if len(others) > 1:
        return f"the expression reads more than one tensor besides {tensor}"
    if [(each.access, each.dtype) for each in math.results] != [(Access.FULL, DType.IO)]:
        return f"the expression of halves of {tensor} gives more than one tensor of its columns"
    return None


def _unlike(step: Step, tensor: str) -> str | None:
    """Why an expression is not one of a tensor and others of its shape, element by element."""
    math = step.pointwise
    assert math is not None, step
    if len(math.results) != 1:
        return f"an expression of {tensor} gives more than one tensor"
    for each in (*math.operands, *math.results):
        if each.access is not Access.FULL:
            return f"{each.buffer} is not read or written element by element"
        if each.dtype is not DType.IO:
            return f"{each.buffer} is {each.dtype.value}"
    if sum(each.buffer == tensor for each in math.operands) != 1:
        return f"an expression has {tensor} as several operands"
    return None


def _others(steps: Sequence[Step]) -> Iterator[str]:
    """What expressions read besides what comes before them."""
    for before, step in pairwise(steps):
        if step.pointwise is None:
            continue  # it quantises what the last one gives
        yield from (o.buffer for o in step.pointwise.operands if o.buffer != before.out)


def _merged(rule: str, steps: Sequence[Step]) -> Step:
    gemm, last = steps[0], steps[-1]
    given = {name for step in steps for name in step.writes}
    others = tuple(Operand(OTHER, name) for name in _others(steps))
    if quantizes(last):
        read = {*gemm.reads, *given}
        others += tuple(each for each in last.inputs if each.buffer not in read)
    return replace(
        gemm,
        primitive=MERGES[tuple(step.primitive for step in steps)],
        inputs=(*gemm.inputs, *others),
        outputs=last.outputs if quantizes(last) else (Operand("out", last.out),),
        output_when=last.output_when if quantizes(last) else (),
        copies=(*gemm.copies, *last.copies),
        mutates=last.mutates,
        kernels=None,
        alignment=1,
        rule=rule,
        flops=total(tuple(step.flops for step in steps if step.flops is not None)),
        parts=tuple(steps),
    )
