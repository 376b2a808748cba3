"""Kinds of steps: one file per kind or small family of kinds, all of them in ``STEPS``.

Generic code asks what a kind is like, by the functions here or by ``definition``; only code that
writes a step of one kind names that kind, by its ``StepDef``.
"""

from __future__ import annotations

from ..extensions import extended
from ..ir.kernel import GemmKind
from ..ir.step import Copy, Step
from . import gemm
from .add import ADD
from .chunked import CHUNKED
from .cross_entropy import CROSS_ENTROPY, CROSS_ENTROPY_GRAD
from .definition import StepDef, Trait
from .dequantize import DEQUANTIZE, DEQUANTIZE_GROUPS
from .dropout import DROPOUT, DROPOUT_GRAD
from .fp32_weight import ADD_PRODUCTS, SPLIT_WEIGHT
from .gather_quantize import GATHER_QUANTIZE
from .gathered_gemm import GATHERED_GEMM, GATHERED_GEMM_POINTWISE
from .gemm import GEMM, GROUPED_GEMM
from .gemm_pointwise import (
    GEMM_POINTWISE,
    GEMM_POINTWISE_QUANTIZE,
    GROUPED_GEMM_POINTWISE,
    GROUPED_GEMM_POINTWISE_QUANTIZE,
)
from .group_row_dot import GROUP_ROW_DOT, ROW_DOT
from .narrow import NARROW
from .norm import ADD_NORM, NORM, NORM_GRAD
from .norm_quantize import NORM_QUANTIZE
from .outer import OUTER
from .pointwise import POINTWISE, POINTWISE_GRAD
from .pointwise_quantize import POINTWISE_GRAD_QUANTIZE, POINTWISE_QUANTIZE
from .quantize import QUANTIZE
from .quantize_several import QUANTIZE_SEVERAL
from .reshape import RESHAPE
from .rotary import ROTARY, ROTARY_QKV, ROTARY_QKV_GRAD
from .route import ROUTE, ROUTE_GRAD
from .routing import COMBINE_ROWS, GATHER_ROWS, ROUTING_PLAN, TAKE
from .snapshot import SNAPSHOT
from .softmax import SOFTMAX, SOFTMAX_GRAD
from .statistics import STATISTICS
from .sums import COLUMN_SUM, GROUP_SUM
from .update_scale import UPDATE_SCALE

SHIPPED: tuple[StepDef, ...] = (
    GEMM,
    GROUPED_GEMM,
    COLUMN_SUM,
    GROUP_SUM,
    GROUP_ROW_DOT,
    ROW_DOT,
    OUTER,
    NORM,
    ADD_NORM,
    NORM_GRAD,
    POINTWISE,
    POINTWISE_GRAD,
    ADD,
    QUANTIZE,
    QUANTIZE_SEVERAL,
    DEQUANTIZE,
    DEQUANTIZE_GROUPS,
    RESHAPE,
    SNAPSHOT,
    STATISTICS,
    UPDATE_SCALE,
    POINTWISE_QUANTIZE,
    POINTWISE_GRAD_QUANTIZE,
    GEMM_POINTWISE,
    GROUPED_GEMM_POINTWISE,
    GEMM_POINTWISE_QUANTIZE,
    GROUPED_GEMM_POINTWISE_QUANTIZE,
    GATHERED_GEMM,
    GATHERED_GEMM_POINTWISE,
    NORM_QUANTIZE,
    GATHER_QUANTIZE,
    SOFTMAX,
    SOFTMAX_GRAD,
    CROSS_ENTROPY,
    CROSS_ENTROPY_GRAD,
    DROPOUT,
    DROPOUT_GRAD,
    ROTARY,
    ROTARY_QKV,
    ROTARY_QKV_GRAD,
    ROUTING_PLAN,
    GATHER_ROWS,
    COMBINE_ROWS,
    TAKE,
    ROUTE,
    ROUTE_GRAD,
    SPLIT_WEIGHT,
    ADD_PRODUCTS,
    NARROW,
    CHUNKED,
)
"""Kinds that come with fusegen."""


def _unfit(kind: StepDef) -> str:
    """Why a kind of an extension cannot be one; empty where it can."""
    missing = [word for word in ("reference", "launch") if getattr(kind, word) is None]
    if missing:
        return f"has no {missing[0]}; every kind has a function of the reference and a kernel"
    if kind.of_passes:
        return "has no shapes; a kind that no op names is of no use without a pass"
    for name in kind.independent:
        if name not in kind.dimensions:
            known = ", ".join(sorted(kind.dimensions))
            return f"is independent along {name!r}; its rule has {known}"
    return ""


STEPS: tuple[StepDef, ...] = extended(SHIPPED, StepDef, lambda each: each.steps, _unfit)
"""Every kind of step, those of extensions last."""

BY_NAME: dict[str, StepDef] = {each.name: each for each in STEPS}


def definition(name: str) -> StepDef:
    """The kind of step of a name.

    Raises:
        KeyError: there is none; the message lists what there is.
    """
    if name not in BY_NAME:
        raise KeyError(f"no step {name!r}; there are {', '.join(BY_NAME)}")
    return BY_NAME[name]


def has(step: Step, trait: Trait) -> bool:
    """Whether a step's kind has a trait."""
    return trait in definition(step.primitive).traits


def is_gemm(step: Step) -> bool:
    """Whether it multiplies two operands."""
    return has(step, Trait.GEMM)


def gives_rows_of_groups(step: Step) -> bool:
    """Whether it is a GEMM in groups that gives a row per token."""
    return is_gemm(step) and bool(step.input("groups")) and step.kind != GemmKind.WGRAD


def sums_rows(step: Step) -> bool:
    """Whether it adds up rows."""
    return has(step, Trait.SUMS_ROWS)


def adds_named_rows(step: Step) -> bool:
    """Whether all it does is to add up, for each row of its result, the rows that one names."""
    kind = definition(step.primitive)
    return bool(kind.named) and {each.slot for each in step.inputs} == {kind.moves, kind.named}


def quantizes(step: Step) -> bool:
    """Whether it makes quantised copies, and nothing else."""
    return has(step, Trait.QUANTIZES)


def makes_copies(step: Step) -> bool:
    """Whether its copies are quantised ones that it makes, of what another part gives, too."""
    return not is_gemm(step) and (quantizes(step) or any(map(makes_copies, step.parts)))


def made_copies(step: Step) -> tuple[Copy, ...]:
    """Quantised copies that it makes; of a GEMM, those behind its operands'."""
    if is_gemm(step):
        return step.copies[len(gemm.OPERANDS) :]
    return step.copies if makes_copies(step) else ()


def read_copies(step: Step) -> tuple[Copy, ...]:
    """Quantised copies that it is given."""
    return step.copies[: len(step.copies) - len(made_copies(step))]


def decodes(step: Step) -> bool:
    """Whether it goes back from a quantised copy to 16 bits."""
    return has(step, Trait.DECODES)


def is_printed(step: Step) -> bool:
    """Whether its math is printed from its expression, and nothing else is done."""
    return has(step, Trait.PRINTED)


def is_derived(step: Step) -> bool:
    """Whether its expression is the derivative of an op's."""
    return has(step, Trait.DERIVED)


def copies_memory(step: Step) -> bool:
    """Whether it needs neither a function of the reference nor a kernel."""
    return has(step, Trait.COPIES_MEMORY)


def is_recomputed(step: Step) -> bool:
    """Whether a backward may run it again instead of the forward saving what it gives."""
    return has(step, Trait.RECOMPUTED)


def observes(step: Step) -> bool:
    """Whether what it leaves is for people, so that nothing runs for its sake."""
    return has(step, Trait.OBSERVES)


def moves_state(step: Step) -> bool:
    """Whether it moves the state of delayed scaling on, and does nothing else."""
    return has(step, Trait.MOVES_STATE)


def commutes(step: Step) -> bool:
    """Whether its first two operands may change places."""
    return has(step, Trait.COMMUTES)


def reads_decoded(step: Step) -> bool:
    """Whether it is a GEMM of quantised copies that reads them decoded to 16 bits."""
    return is_gemm(step) and gemm.reads_decoded(step)


def cancels(step: Step) -> bool:
    """Whether it gives differences of values that may be nearly equal."""
    return has(step, Trait.CANCELS)


def rounds(step: Step) -> bool:
    """Whether it gives its operand in another type, and nothing else."""
    return has(step, Trait.ROUNDS)


def takes(step: Step, slot: str) -> bool:
    """Whether the function of the reference has such an operand."""
    reference = definition(step.primitive).reference
    return reference is not None and slot in reference.slots


def row_sum(*, in_groups: bool) -> StepDef:
    """The kind that adds up all rows, or those of each group."""
    summing = (each for each in STEPS if Trait.SUMS_ROWS in each.traits)
    return next(each for each in summing if each.in_groups == in_groups)
