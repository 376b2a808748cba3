"""What transposed copies of rows in groups stand for, groups where the copies have them.

Others have no groups of their own, and are decoded as rowwise ones are.
"""

from __future__ import annotations

from ..steps import dequantize
from .contract import Contract
from .family import Family, LayoutNeeds
from .scalings import ALL, CODES, FP8, GROUPS_START

DEQUANTIZE_GROUPS = Family(
    "dequantize_groups",
    (dequantize.DEQUANTIZE_GROUPS.name,),
    launch=dequantize.PADDED,
    summary="Decodes the columnwise copy of rows in groups.",
    formats=CODES,
    converts=ALL,
    row_alignment=8,
    layout=LayoutNeeds(GROUPS_START, untransposed=FP8),
    contracts=(Contract(registers=64),),
)
