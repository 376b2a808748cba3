"""All kernel families, in tuples that are complete at import."""

from __future__ import annotations

from ..extensions import extended
from ..steps import BY_NAME
from .add_norm import ADD_NORM
from .add_products import ADD_PRODUCTS
from .combine_rows import COMBINE_ROWS
from .cross_entropy import CROSS_ENTROPY
from .cross_entropy_grad import CROSS_ENTROPY_GRAD
from .dequantize import DEQUANTIZE
from .dequantize_groups import DEQUANTIZE_GROUPS
from .dropout import DROPOUT
from .dropout_grad import DROPOUT_GRAD
from .family import Config, Family
from .gather_quantize import GATHER_QUANTIZE
from .gather_rows import GATHER_ROWS
from .gemm_codes_sm90 import GEMM_CODES_SM90
from .gemm_decoded_mma import GEMM_DECODED_MMA
from .gemm_decoded_sm90 import GEMM_DECODED_SM90
from .gemm_decoded_tcgen05 import GEMM_DECODED_TCGEN05
from .gemm_fp8_mma import GEMM_FP8_MMA
from .gemm_fp8_sm90 import GEMM_FP8_SM90
from .gemm_fp8_tcgen05 import GEMM_FP8_TCGEN05
from .gemm_gather_sm90 import GEMM_GATHER_SM90
from .gemm_mma import GEMM_MMA
from .gemm_mx_mma import GEMM_MX_MMA
from .gemm_mx_tcgen05 import GEMM_MX_TCGEN05
from .gemm_nv_mma import GEMM_NV_MMA
from .gemm_nv_tcgen05 import GEMM_NV_TCGEN05
from .gemm_sm90 import GEMM_SM90
from .gemm_tcgen05 import GEMM_TCGEN05
from .group_row_dot import GROUP_ROW_DOT
from .group_sum import GROUP_SUM
from .norm import NORM
from .norm_grad import NORM_GRAD
from .norm_quantize import NORM_QUANTIZE
from .pointwise import POINTWISE
from .pointwise_quantize import POINTWISE_QUANTIZE
from .quantize import QUANTIZE
from .quantize_several import QUANTIZE_SEVERAL
from .rotary import ROTARY
from .rotary_qkv import ROTARY_QKV
from .rotary_qkv_grad import ROTARY_QKV_GRAD
from .route import ROUTE
from .route_grad import ROUTE_GRAD
from .routing_plan import ROUTING_PLAN
from .softmax import SOFTMAX
from .softmax_grad import SOFTMAX_GRAD
from .split_weight import SPLIT_WEIGHT
from .statistics import STATISTICS
from .take import TAKE
from .update_scale import UPDATE_SCALE

SHIPPED: tuple[Family, ...] = (
    GEMM_SM90,
    GEMM_FP8_SM90,
    GEMM_DECODED_SM90,
    GEMM_GATHER_SM90,
    GEMM_CODES_SM90,
    GEMM_MMA,
    GEMM_FP8_MMA,
    GEMM_MX_MMA,
    GEMM_NV_MMA,
    GEMM_DECODED_MMA,
    GEMM_TCGEN05,
    GEMM_FP8_TCGEN05,
    GEMM_MX_TCGEN05,
    GEMM_NV_TCGEN05,
    GEMM_DECODED_TCGEN05,
    QUANTIZE,
    QUANTIZE_SEVERAL,
    POINTWISE_QUANTIZE,
    DEQUANTIZE,
    DEQUANTIZE_GROUPS,
    STATISTICS,
    UPDATE_SCALE,
    GROUP_SUM,
    GROUP_ROW_DOT,
    NORM,
    ADD_NORM,
    NORM_GRAD,
    NORM_QUANTIZE,
    GATHER_QUANTIZE,
    POINTWISE,
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
)
"""Families that come with fusegen."""


def _unfit(family: Family) -> str:
    """Why a family of an extension cannot be one; empty where it can."""
    unknown = [name for name in family.implements if name not in BY_NAME]
    return f"implements {unknown[0]!r}, which is no kind of step" if unknown else ""


FAMILIES: tuple[Family, ...] = extended(SHIPPED, Family, lambda each: each.families, _unfit)
"""Every family, those of extensions last."""

ADDED: tuple[Family, ...] = tuple(
    family for family in FAMILIES[len(SHIPPED) :] if family.configured is None
)
"""Families of extensions that have nothing to choose among: no spec need list them."""


CONFIGS: tuple[type[Config], ...] = tuple(
    dict.fromkeys(family.configured.config for family in FAMILIES if family.configured)
)
"""Every type of configuration that a spec may list."""


def known_family(template: str) -> Family | None:
    """The family behind a template; None of users' own, of which nothing is known."""
    return next((family for family in FAMILIES if family.name == template), None)


def enumerator(template: str, word: str) -> str:
    """C++ name of a scaling or an accumulation in a template.

    Users' own GEMMs take the arguments of ``gemm_fp8_sm90``, and are given its names.
    """
    return (known_family(template) or GEMM_FP8_SM90).enumerator(word)
