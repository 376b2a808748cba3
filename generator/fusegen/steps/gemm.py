"""GEMMs of a linear layer, dense and in groups."""

from __future__ import annotations

from dataclasses import replace

from ..ir.dtypes import DType
from ..ir.kernel import GemmKind
from ..ir.shapes import Const, Expr, mul, product
from ..ir.step import LIKE, Step
from .definition import Reference, StepDef, Trait
from .launch import GROUP_SIZES, MULTIPROCESSORS, Field, Launch, Origin, sizes

OPERANDS = ("a", "b")
"""Slots of what is multiplied."""

KINDS = tuple(kind.value for kind in GemmKind)
"""Names of the three GEMMs."""

_COPIES = frozenset(("a_scale", "a_amax", "b_scale", "b_amax", LIKE))
_SIZES = {"tokens": "T", "groups": "E", "n": "N", "k": "K"}

PLAIN = Launch(
    "GemmArguments",
    "gemm/gemm.h",
    (
        Field("a", Origin.OPERAND, "a"),
        Field("b", Origin.OPERAND, "b"),
        Field("bias", Origin.OPERAND, "add"),
        Field("out", Origin.RESULT, "out"),
        GROUP_SIZES,
        *sizes("tokens", "groups", "n", "k"),
        MULTIPROCESSORS,
        Field("row_scales", Origin.FLOAT_OPERAND, "add_scales", optional=True),
    ),
)
OF_COPIES = Launch(
    "Fp8GemmArguments",
    "gemm/gemm_fp8.h",
    (
        Field("pitch_a", Origin.PITCH, "a"),
        Field("pitch_b", Origin.PITCH, "b"),
        Field("scale_a", Origin.FLOAT_OPERAND, "a_scale"),
        Field("scale_b", Origin.FLOAT_OPERAND, "b_scale"),
    ),
    base=PLAIN,
)
OF_ATOMS = Launch(
    "ScaledGemmArguments",
    "gemm/gemm_scaled.h",
    (
        Field("pitch_a", Origin.PITCH, "a"),
        Field("pitch_b", Origin.PITCH, "b"),
        Field("scale_a", Origin.OPERAND, "a_scale"),
        Field("scale_b", Origin.OPERAND, "b_scale"),
        Field("amax_a", Origin.FLOAT_OPERAND, "a_amax", optional=True),
        Field("amax_b", Origin.FLOAT_OPERAND, "b_amax", optional=True),
    ),
    base=PLAIN,
)
DECODED = Launch(
    "DecodedGemmArguments",
    "gemm/gemm.h",
    (
        Field("amax_a", Origin.FLOAT_OPERAND, "a_amax"),
        Field("amax_b", Origin.FLOAT_OPERAND, "b_amax"),
        Field("scale_a", Origin.FLOAT_OPERAND, "a_scale", optional=True),
        Field("scale_b", Origin.FLOAT_OPERAND, "b_scale", optional=True),
    ),
    base=PLAIN,
)


def reads_decoded(step: Step) -> bool:
    """Whether a GEMM of quantised copies reads them decoded to 16 bits."""
    return bool(step.copies) and step.input("a") != step.copies[0].data


EPILOGUE = Field("", Origin.EPILOGUE)
_LEFT = (EPILOGUE, Field("clears", Origin.CLEARS))


def extended(launch: Launch, *fields: Field) -> Launch:
    """A launch with more fields of ``GemmArguments``, with which every one of a GEMM begins."""
    if launch.base:
        return replace(launch, base=extended(launch.base, *fields))
    return replace(launch, fields=(*launch.fields, *fields))


def launch(step: Step) -> Launch:
    """The arguments of the kernel that multiplies what a step reads."""
    stated = _of_operands(step)
    return extended(stated, *_LEFT) if step.leaves else stated


def _of_operands(step: Step) -> Launch:
    if not step.copies:
        return PLAIN
    if reads_decoded(step):
        return DECODED
    return OF_ATOMS if step.copies[0].atoms else OF_COPIES


def _flops(step: Step) -> Expr:
    """A multiplication and an addition for each of M N K."""
    sizes = dict(step.sizes)
    return mul(Const(2), product((sizes["tokens"], sizes["n"], sizes["k"])))


GEMM = StepDef(
    "gemm",
    operands=OPERANDS,
    optional=("add", "accumulate"),
    kinds=KINDS,
    shapes={
        "fprop": {"a": "T... K", "b": "N K", "add": "N", "out": "T... N"},
        "dgrad": {"a": "T... N", "b": "N K", "out": "T... K"},
        "wgrad": {"a": "T... N", "b": "T... K", "out": "N K"},
    },
    dtypes={"out": (DType.IO, DType.FLOAT32)},
    traits=frozenset((Trait.GEMM,)),
    reference=Reference("steps.gemm", frozenset(("a", "b", "add")) | _COPIES, "quantized.gemm"),
    sizes={**_SIZES, "groups": ""},
    flops=_flops,
    launch=launch,
)

GROUPED_GEMM = StepDef(
    "grouped_gemm",
    operands=(*OPERANDS, "groups"),
    optional=("add", "add_scales", "accumulate"),
    kinds=KINDS,
    shapes={
        "fprop": {
            "a": "T K",
            "b": "E N K",
            "groups": "E",
            "add": "E N",
            "add_scales": "T",
            "out": "T N",
        },
        "dgrad": {"a": "T N", "b": "E N K", "groups": "E", "out": "T K"},
        "wgrad": {"a": "T N", "b": "T K", "groups": "E", "out": "E N K"},
    },
    dtypes={"groups": (DType.INT64,), "add_scales": (DType.FLOAT32,)},
    traits=frozenset((Trait.GEMM,)),
    reference=Reference(
        "steps.grouped_gemm",
        frozenset(("a", "b", "groups", "add", "add_scales")) | _COPIES,
        "quantized.grouped_gemm",
    ),
    sizes=_SIZES,
    flops=_flops,
    launch=launch,
)
