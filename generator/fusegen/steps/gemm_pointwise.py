"""A GEMM and the expressions that its result goes through, in one kernel: its epilogue.

The result is rounded before each expression, as it would be on its way through memory.  It may be
a result of the step, too, where something else reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ..ir.kernel import GemmKind
from ..ir.kernel_set import EpilogueMath
from ..ir.step import FIRSTS, Step
from . import gemm
from .add import ADD
from .definition import StepDef
from .gemm import GEMM, GROUPED_GEMM
from .launch import Field, Launch, Origin
from .pointwise import POINTWISE, POINTWISE_GRAD
from .quantize import QUANTIZE

OTHER = "other"
"""Slot of the one tensor that expressions read besides the result: of its shape or, where they are
of halves of its rows, with a value of each row.  No operand of a GEMM is called so."""

AUX = "aux"
"""Slot of the GEMM's own result, before its expressions."""

MOST_SCALARS = 8  # `kMostScalars` of gemm/gemm.h: of all expressions

_KINDS = (GemmKind.FPROP.value, GemmKind.DGRAD.value)  # gradients of weights are summed further
_EPILOGUES = ((POINTWISE,), (POINTWISE_GRAD,), (ADD,), (POINTWISE, POINTWISE))


def epilogue(step: Step) -> tuple[EpilogueMath, ...]:
    """The expressions of a GEMM, each with its operands that are what comes before it."""
    return tuple(_epilogue(step))


def _epilogue(step: Step) -> Iterator[EpilogueMath]:
    for before, part in pairwise(step.parts):
        if part.pointwise is None:
            continue  # behind what it gathers, or what quantises the last of them
        operands = part.pointwise.operands
        of = [i for i, each in enumerate(operands) if each.buffer in before.writes]
        of.sort(key=lambda i: operands[i].access not in FIRSTS)
        yield EpilogueMath(part.pointwise, tuple(of))


def launch(step: Step) -> Launch:
    """That of the GEMM alone, and what its expressions read."""
    alone = gemm.launch(step)
    return alone if step.leaves else gemm.extended(alone, gemm.EPILOGUE)


def _with_epilogue(kind: StepDef) -> StepDef:
    return StepDef(
        f"{kind.name}_pointwise",
        results=(*kind.results, AUX),
        kinds=_KINDS,
        parts=tuple((kind.name, *(each.name for each in row)) for row in _EPILOGUES),
        traits=kind.traits,
        launch=launch,
    )


GEMM_POINTWISE = _with_epilogue(GEMM)
GROUPED_GEMM_POINTWISE = _with_epilogue(GROUPED_GEMM)

OF_CODES = Launch(
    "GatedCodesArguments",
    "gemm/gated_codes.h",
    (Field("product", Origin.PRODUCT),),
    assigned=True,
)


def _quantized(kind: StepDef) -> StepDef:
    """What an expression of a result gives is quantised, in the same kernel."""
    return StepDef(
        f"{kind.name}_pointwise_quantize",
        kinds=_KINDS,
        parts=tuple((kind.name, each.name, QUANTIZE.name) for each in (POINTWISE, POINTWISE_GRAD)),
        traits=kind.traits,
        launch=lambda _: OF_CODES,
    )


GEMM_POINTWISE_QUANTIZE = _quantized(GEMM)
GROUPED_GEMM_POINTWISE_QUANTIZE = _quantized(GROUPED_GEMM)

GEMMS = tuple(each.name for each in (GEMM, GROUPED_GEMM, GEMM_POINTWISE, GROUPED_GEMM_POINTWISE))
"""Kinds that families of GEMMs implement."""
