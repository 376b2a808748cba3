"""Quantised copies of what a norm gives, which itself has no memory."""

from __future__ import annotations

from ..steps import norm_quantize
from .contract import Contract
from .family import Family, LayoutNeeds
from .scalings import CODES, FP8, GROUPS_START, OF_TOKENS

NORM_QUANTIZE = Family(
    "norm_quantize",
    (norm_quantize.NORM_QUANTIZE.name,),
    launch=norm_quantize.LAUNCH,
    summary="Norms rows and quantises what that gives, in one or both orientations.",
    formats=CODES,
    converts=OF_TOKENS,
    row_alignment=8,
    layout=LayoutNeeds(GROUPS_START, untransposed=FP8),
    most_history=1024,  # `kMostSlots` of quantize.h
    contracts=(Contract(registers=128, cpu_seconds=60),),
)
