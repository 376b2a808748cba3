"""A GEMM that reads the rows of one operand where the tokens lie, in one kernel.

The matrix of those rows is then neither written nor read.  What goes on with the result is part of
the step as it is of one whose operands are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..ir.kernel import GemmKind
from ..ir.step import Operand, Step
from . import gemm, gemm_pointwise
from .definition import StepDef
from .gemm import GROUPED_GEMM, KINDS
from .gemm_pointwise import GROUPED_GEMM_POINTWISE
from .launch import Field, Launch, Origin, sizes
from .routing import GATHER_ROWS

_TRAIT = "gathered_"
_MAPS = ("row_slot", "slot_row")


def gathered_slot(traits: Iterable[str]) -> str:
    """The operand that a variant gathers, ``a`` or ``b``; empty where it gathers none."""
    return next((each.removeprefix(_TRAIT) for each in traits if each.startswith(_TRAIT)), "")


def gathers(step: Step) -> tuple[str, ...]:
    """The trait of the kernels of a step: which operand they gather; nothing of other steps."""
    first, *others = step.parts or (step,)
    if not is_gather(first) or not others:
        return ()
    return tuple(f"{_TRAIT}{o.slot}" for o in others[0].inputs if o.buffer == first.out)


def is_gather(step: Step) -> bool:
    """Whether it gives the rows of tokens, and nothing else."""
    return step.primitive == GATHER_ROWS.name


def may_gather(step: Step, rows: str) -> bool:
    """Whether a step is a GEMM in groups one of whose operands, in 16 bits, are these rows."""
    operands = [each.slot for each in step.inputs if each.buffer == rows]
    return step.primitive in _GATHERING and not step.copies and operands in (["a"], ["b"])


def multiplies_rows_of(step: Step, tokens: str) -> bool:
    """Whether a step is a GEMM that gathers rows of these tokens, and gives rows for them."""
    rows = step.primitive in GATHERED_GEMMS and step.kind != GemmKind.WGRAD.value
    return rows and step.input("a") == tokens


def gathered(gather: Step, gemm: Step) -> Step:
    """One step for the rows of tokens and a GEMM that reads them, without its kernel."""
    inputs = (
        replace(each, buffer=gather.reads[0]) if each.buffer == gather.out else each
        for each in gemm.inputs
    )
    return replace(
        gemm,
        primitive=_GATHERING[gemm.primitive].name,
        inputs=(*inputs, *(Operand(name, gather.input(name) or "") for name in _MAPS)),
        sizes=(*gemm.sizes, *(each for each in gather.sizes if each[0] == "choices")),
        kernels=None,
        alignment=1,
        parts=(gather, *(gemm.parts or (gemm,))),
    )


LAUNCH = Launch(
    "GatheredGemmArguments",
    "gemm/gathered.h",
    (
        Field("row_slot", Origin.OPERAND, "row_slot"),
        *sizes("choices"),
        Field("arriving", Origin.ARRIVING),
    ),
    base=gemm.PLAIN,
)


def _launch(step: Step) -> Launch:
    """That of the GEMM, and where its rows are."""
    return replace(LAUNCH, base=gemm_pointwise.launch(step))


def _gathered(name: str, kind: StepDef) -> StepDef:
    return StepDef(
        name,
        results=kind.results,
        kinds=KINDS,
        parts=tuple((GATHER_ROWS.name, *row) for row in kind.parts or ((kind.name,),)),
        traits=kind.traits,
        launch=_launch,
    )


GATHERED_GEMM = _gathered("gathered_gemm", GROUPED_GEMM)
GATHERED_GEMM_POINTWISE = _gathered("gathered_gemm_pointwise", GROUPED_GEMM_POINTWISE)

_GATHERING = {
    GROUPED_GEMM.name: GATHERED_GEMM,
    GROUPED_GEMM_POINTWISE.name: GATHERED_GEMM_POINTWISE,
}
"""What a GEMM becomes that gathers."""

GATHERED_GEMMS = (GATHERED_GEMM.name, GATHERED_GEMM_POINTWISE.name)
"""Kinds that families of GEMMs implement which gather rows."""
