"""Copies of one tensor in quantised formats, rowwise, columnwise or both."""

from __future__ import annotations

from ..steps import quantize
from .contract import Contract
from .family import Family, LayoutNeeds
from .scalings import ALL, CODES, FP8, GROUPS_START, NV_1X16

QUANTIZE = Family(
    "quantize",
    (quantize.QUANTIZE.name,),
    launch=quantize.LAUNCH,
    summary="Quantises a tensor in one or both orientations.",
    formats=CODES,
    converts=ALL,
    row_alignment=8,
    layout=LayoutNeeds(GROUPS_START, untransposed=FP8),
    transformed=(NV_1X16,),
    most_history=1024,  # `kMostSlots` of quantize.h
    contracts=(Contract("e2m1_nv_1x16", registers=128), Contract(registers=80)),
)
