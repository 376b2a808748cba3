"""The steps a plan is made of: one signature per primitive, stated here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from .dtypes import DType


class Primitive(str, Enum):
    """What one step does."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    COLUMN_SUM = "column_sum"
    GROUP_SUM = "group_sum"
    GROUP_ROW_DOT = "group_row_dot"
    GATHER_GEMM = "gather_gemm"
    GEMM_SCATTER = "gemm_scatter"
    POINTWISE = "pointwise"
    POINTWISE_GRAD = "pointwise_grad"
    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"
    DEQUANTIZE_GROUPS = "dequantize_groups"
    SNAPSHOT = "snapshot"
    STATISTICS = "statistics"
    POINTWISE_QUANTIZE = "pointwise_quantize"
    POINTWISE_GRAD_QUANTIZE = "pointwise_grad_quantize"
    NORM = "norm"
    NORM_GRAD = "norm_grad"
    NORM_QUANTIZE = "norm_quantize"
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
        mutates: operand slots that the step changes in place.
        variadic: the passes write the step: operands and results are what the steps it replaces
            read and write.
    """

    inputs: tuple[str, ...] = ()
    optional_inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("out",)
    kinds: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    variadic: bool = False


_GEMM_KINDS = tuple(kind.value for kind in GemmKind)
_NORM_KINDS = ("layer", "rms", "l2")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")

SIGNATURES: dict[Primitive, Signature] = {
    Primitive.GEMM: Signature(("a", "b"), ("add", "accumulate"), kinds=_GEMM_KINDS),
    Primitive.GROUPED_GEMM: Signature(
        ("a", "b", "groups"), ("add", "add_scales", "accumulate"), kinds=_GEMM_KINDS
    ),
    Primitive.COLUMN_SUM: Signature(("a",), ("scales",)),
    Primitive.GROUP_SUM: Signature(("a", "groups"), ("scales",)),
    Primitive.GROUP_ROW_DOT: Signature(("a", "b", "groups"), ("add",)),
    Primitive.GATHER_GEMM: Signature(kinds=_GEMM_KINDS, variadic=True),
    Primitive.GEMM_SCATTER: Signature(kinds=_GEMM_KINDS, variadic=True),
    Primitive.POINTWISE: Signature(variadic=True),
    Primitive.POINTWISE_GRAD: Signature(variadic=True),
    Primitive.QUANTIZE: Signature(("a",), ("groups",), outputs=("out",)),
    Primitive.DEQUANTIZE: Signature(variadic=True),
    Primitive.DEQUANTIZE_GROUPS: Signature(variadic=True),
    Primitive.SNAPSHOT: Signature(variadic=True),
    Primitive.STATISTICS: Signature(variadic=True),
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
        ("weight", "mean", "rstd", "add"),
        outputs=("out", "dweight", "dbias"),
        kinds=_NORM_KINDS,
        attributes=("eps", "zero_centered_gamma"),
    ),
    Primitive.NORM_QUANTIZE: Signature(kinds=_NORM_KINDS, variadic=True),
    Primitive.DROPOUT: Signature(
        ("a", "rng"), outputs=("out", "mask"), attributes=("p",), mutates=("rng",)
    ),
    Primitive.DROPOUT_GRAD: Signature(("grad", "mask"), attributes=("p",)),
    Primitive.RESHAPE: Signature(("a",), attributes=("shape",)),
    Primitive.COLLECTIVE: Signature(("a",), kinds=_COLLECTIVES, attributes=("group",)),
}

SHAPES: Mapping[tuple[Primitive, str | None], Mapping[str, str]] = {
    (Primitive.GEMM, "fprop"): {"a": "T... K", "b": "N K", "add": "N", "out": "T... N"},
    (Primitive.GEMM, "dgrad"): {"a": "T... N", "b": "N K", "out": "T... K"},
    (Primitive.GEMM, "wgrad"): {"a": "T... N", "b": "T... K", "out": "N K"},
    (Primitive.GROUPED_GEMM, "fprop"): {
        "a": "T K",
        "b": "E N K",
        "groups": "E",
        "add": "E N",
        "add_scales": "T",
        "out": "T N",
    },
    (Primitive.GROUPED_GEMM, "dgrad"): {"a": "T N", "b": "E N K", "groups": "E", "out": "T K"},
    (Primitive.GROUPED_GEMM, "wgrad"): {"a": "T N", "b": "T K", "groups": "E", "out": "E N K"},
    (Primitive.COLUMN_SUM, None): {"a": "T... N", "out": "N"},
    (Primitive.GROUP_SUM, None): {"a": "T N", "groups": "E", "scales": "T", "out": "E N"},
    (Primitive.GROUP_ROW_DOT, None): {
        "a": "T N",
        "b": "E N",
        "groups": "E",
        "add": "T",
        "out": "T",
    },
    (Primitive.QUANTIZE, None): {"a": "T... K", "groups": "E", "out": "T... K"},
}
"""Dimensions of what steps read and write, by slot; a name is one size throughout a step, and
``T...`` any number of leading ones.  What is not named is no operand of that kind.  Steps that the
reference does not have are not here."""

_ROW_SCALES = {"groups": DType.INT64, "scales": DType.FLOAT32, "add_scales": DType.FLOAT32}
DTYPES: Mapping[Primitive, Mapping[str, DType]] = {
    Primitive.GROUPED_GEMM: _ROW_SCALES,
    Primitive.GROUP_SUM: _ROW_SCALES,
    Primitive.GROUP_ROW_DOT: {
        "groups": DType.INT64,
        "add": DType.FLOAT32,
        "out": DType.FLOAT32,
    },
    Primitive.QUANTIZE: {"groups": DType.INT64},
}
"""Types of operands and results by slot, where they are not the module's own."""

LIKE = "like"
"""Slot of a tensor of which nothing but its sizes is read."""

_COPIES = frozenset(("a_scale", "a_amax", "b_scale", "b_amax"))

REFERENCE_SLOTS: dict[Primitive, frozenset[str]] = {
    Primitive.GEMM: frozenset(("a", "b", "add")) | _COPIES,
    Primitive.GROUPED_GEMM: frozenset(("a", "b", "groups", "add", "add_scales")) | _COPIES,
    Primitive.QUANTIZE: frozenset(("a", "groups", "amax_history", "scale", "rng_state")),
    Primitive.DEQUANTIZE: frozenset(("a", "groups", LIKE)) | _COPIES,
    Primitive.DEQUANTIZE_GROUPS: frozenset(("a", "groups")) | _COPIES,
    Primitive.STATISTICS: frozenset(("a", "groups", "copy", "copy_scale", "copy_amax")),
    Primitive.COLUMN_SUM: frozenset(("a",)),
    Primitive.GROUP_SUM: frozenset(("a", "groups", "scales")),
    Primitive.GROUP_ROW_DOT: frozenset(("a", "b", "groups", "add")),
}
"""Operands that the functions of ``reference/_steps.py`` take, by step.  The reference is normative
for every architecture."""

ROW_GROUPS = "row groups"
"""Slot of the group sizes of a pointwise step whose results are zero past them.  No tensor of an op
can be called so."""

PADDED_SIZES = "padded_sizes"
"""Slot of the sizes that groups have in the padded space which one of those steps writes."""

MERGED = frozenset((Primitive.POINTWISE_QUANTIZE, Primitive.POINTWISE_GRAD_QUANTIZE))
"""Steps of one kernel that does what two steps of the plan say, its parts: an expression, and the
quantisation of what it gives."""

ROW_PARTIALS = "row_partials"
"""Slot of what a merged step leaves of a sum over a row, one number per tile of columns."""

DECODING = (Primitive.DEQUANTIZE, Primitive.DEQUANTIZE_GROUPS)
"""Steps from a quantised copy to 16 bits."""

SUMMED = "sum"
"""Slot of a sum over rows that a step which quantises them leaves, too."""

PARTIALS = "partials"
"""Slot of what the blocks of threads leave of statistics, to be added up in a fixed order."""

SUMS = (Primitive.COLUMN_SUM, Primitive.GROUP_SUM)
"""Sums over all rows, or over those of each group."""

PRODUCTS = (Primitive.GEMM, Primitive.GROUPED_GEMM)
"""Steps that multiply two operands, and read quantised copies of them where a recipe says so."""

PRINTED = frozenset((Primitive.POINTWISE, Primitive.POINTWISE_GRAD))
"""Steps whose math is printed from their expression, so that the reference needs no function."""

COPYING = frozenset((Primitive.SNAPSHOT,))
"""Steps that keep what a buffer holds before it changes.  PyTorch and CUDA copy memory themselves:
these need neither a function of the reference nor a kernel."""
