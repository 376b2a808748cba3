"""Quantised copies of rows of tokens, which themselves have no memory."""

from __future__ import annotations

from ..steps import gather_quantize
from .contract import Contract
from .family import Family, LayoutNeeds
from .scalings import CODES, FP8, GROUPS_START, NV_1X16, OF_TOKENS

GATHER_QUANTIZE = Family(
    "gather_quantize",
    (gather_quantize.GATHER_QUANTIZE.name,),
    launch=gather_quantize.LAUNCH,
    summary="Quantises each token in the rows of its choices, in one or both orientations.",
    formats=CODES,
    converts=OF_TOKENS,
    row_alignment=8,
    layout=LayoutNeeds(GROUPS_START, untransposed=FP8),
    transformed=(NV_1X16,),
    most_history=1024,  # `kMostSlots` of quantize.h
    contracts=(Contract("e2m1", 128), Contract("", 80)),
)
