"""Copies of several tensors in the same formats, made by one launch."""

from __future__ import annotations

from ..steps import quantize_several
from .contract import Contract
from .family import Family, LayoutNeeds
from .scalings import AT_ONCE, CODES, FP8, GROUPS_START

QUANTIZE_SEVERAL = Family(
    "quantize_several",
    (quantize_several.QUANTIZE_SEVERAL.name,),
    launch=quantize_several.LAUNCH,
    summary="Quantises several tensors, each in one or both orientations.",
    formats=CODES,
    converts=AT_ONCE,
    row_alignment=8,
    layout=LayoutNeeds(GROUPS_START, untransposed=FP8),
    most_history=1024,  # `kMostSlots` of quantize.h
    most_parts=4,  # `kMost` of several.h
    contracts=(Contract(registers=80),),
)
