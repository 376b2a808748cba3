"""Quantised copies of what an expression gives, which itself has no memory."""

from __future__ import annotations

from ..steps import pointwise_quantize
from .family import Family, LayoutNeeds
from .scalings import CODES, GROUPS_START, NV_1X16, OF_TOKENS

POINTWISE_QUANTIZE = Family(
    "pointwise_quantize",
    (pointwise_quantize.POINTWISE_QUANTIZE.name, pointwise_quantize.POINTWISE_GRAD_QUANTIZE.name),
    launch=pointwise_quantize.LAUNCH,
    summary="Quantises what an expression gives, in one or both orientations.",
    formats=CODES,
    converts=OF_TOKENS,
    row_alignment=8,
    layout=LayoutNeeds(GROUPS_START),
    transformed=(NV_1X16,),
    most_history=1024,  # `kMostSlots` of quantize.h
)
