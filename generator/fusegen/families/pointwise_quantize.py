"""Quantised copies of what an expression gives, which itself has no memory."""

from __future__ import annotations

from ..steps import pointwise_quantize
from .contract import Contract
from .family import Family, LayoutNeeds
from .scalings import CODES, FP8, GROUPS_START, NV_1X16, OF_TOKENS

# What two blocks on an SM leave to a thread; kernels of short formulas are bound to less.
_REGISTERS = 128
_SHARED = 72 * 1024
_PARKED = {"quantize_halves_kernel": 16 * 256 * 8}
"""``kSharedBytes`` of pointwise/pointwise_quantize.cuh: rows of the second half of a gradient wait
while the first is quantised."""

POINTWISE_QUANTIZE = Family(
    "pointwise_quantize",
    (pointwise_quantize.POINTWISE_QUANTIZE.name, pointwise_quantize.POINTWISE_GRAD_QUANTIZE.name),
    launch=pointwise_quantize.LAUNCH,
    summary="Quantises what an expression gives, in one or both orientations.",
    formats=CODES,
    converts=OF_TOKENS,
    row_alignment=8,
    layout=LayoutNeeds(GROUPS_START, untransposed=FP8),
    transformed=(NV_1X16,),
    most_history=1024,  # `kMostSlots` of quantize.h
    contracts=(Contract("", _REGISTERS, _SHARED, _PARKED, cpu_seconds=60),),
)
