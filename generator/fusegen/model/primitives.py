"""The steps a plan is made of: one signature per primitive, stated here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Primitive(str, Enum):
    """What one step does."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    COLUMN_SUM = "column_sum"
    GROUP_SUM = "group_sum"
    GROUP_ROW_DOT = "group_row_dot"
    POINTWISE = "pointwise"
    POINTWISE_GRAD = "pointwise_grad"
    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"
    POINTWISE_QUANTIZE = "pointwise_quantize"
    POINTWISE_GRAD_QUANTIZE = "pointwise_grad_quantize"
    NORM = "norm"
    NORM_GRAD = "norm_grad"
    DROPOUT = "dropout"
    DROPOUT_GRAD = "dropout_grad"
    RESHAPE = "reshape"
    COLLECTIVE = "collective"


class GemmKind(str, Enum):
    """Which of the three products of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True, slots=True)
class Signature:
    """What a step may say.

    Attributes:
        inputs: required operand slots.
        optional_inputs: operand slots that may be left out.
        outputs: result slots; a step may leave out all but the first.
        kinds: allowed values of ``kind``; empty where the primitive has none.
        attributes: names of attributes of the op that the step may refer to.
        variadic: operands and results are the op's own tensors, named by the expression.
    """

    inputs: tuple[str, ...] = ()
    optional_inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("out",)
    kinds: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    variadic: bool = False


_GEMM_KINDS = tuple(kind.value for kind in GemmKind)
_NORM_KINDS = ("layer", "rms", "l2")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")

SIGNATURES: dict[Primitive, Signature] = {
    Primitive.GEMM: Signature(("a", "b"), ("add",), kinds=_GEMM_KINDS),
    Primitive.GROUPED_GEMM: Signature(
        ("a", "b", "groups"), ("add", "add_scales"), kinds=_GEMM_KINDS
    ),
    Primitive.COLUMN_SUM: Signature(("a",), ("scales",)),
    Primitive.GROUP_SUM: Signature(("a", "groups"), ("scales",)),
    Primitive.GROUP_ROW_DOT: Signature(("a", "b", "groups")),
    Primitive.POINTWISE: Signature(variadic=True),
    Primitive.POINTWISE_GRAD: Signature(variadic=True),
    Primitive.QUANTIZE: Signature(("a",), ("groups",), outputs=("out",)),
    Primitive.DEQUANTIZE: Signature(("a",), ("groups",)),
    Primitive.POINTWISE_QUANTIZE: Signature(variadic=True),
    Primitive.POINTWISE_GRAD_QUANTIZE: Signature(variadic=True),
    Primitive.NORM: Signature(
        ("a",),
        ("weight", "bias"),
        outputs=("out", "mean", "rstd"),
        kinds=_NORM_KINDS,
        attributes=("eps", "zero_centered_gamma"),
    ),
    Primitive.NORM_GRAD: Signature(
        ("grad", "a"),
        ("weight", "mean", "rstd"),
        outputs=("out", "dweight", "dbias"),
        kinds=_NORM_KINDS,
        attributes=("eps", "zero_centered_gamma"),
    ),
    Primitive.DROPOUT: Signature(("a",), outputs=("out", "mask"), attributes=("p",)),
    Primitive.DROPOUT_GRAD: Signature(("grad", "mask"), attributes=("p",)),
    Primitive.RESHAPE: Signature(("a",), attributes=("shape",)),
    Primitive.COLLECTIVE: Signature(("a",), kinds=_COLLECTIVES, attributes=("group",)),
}
