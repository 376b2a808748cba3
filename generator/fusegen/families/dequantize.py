"""What quantised copies stand for, in 16 bits."""

from __future__ import annotations

from ..steps import dequantize
from .contract import Contract
from .family import Family, LayoutNeeds
from .scalings import ALL, CODES, FP8, GROUPS_START

DEQUANTIZE = Family(
    "dequantize",
    (dequantize.DEQUANTIZE.name,),
    launch=dequantize.PLAIN,
    summary="Decodes a quantised copy.",
    formats=CODES,
    converts=ALL,
    row_alignment=8,
    layout=LayoutNeeds(GROUPS_START, untransposed=FP8),
    contracts=(Contract(registers=64),),
)
