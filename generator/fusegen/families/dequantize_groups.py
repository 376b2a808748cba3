"""What transposed copies of rows in groups stand for, groups where the copies have them."""

from __future__ import annotations

from ..steps import dequantize
from .contract import Contract
from .family import Family, LayoutNeeds
from .scalings import ALL, CODES, GROUPS_START

DEQUANTIZE_GROUPS = Family(
    "dequantize_groups",
    (dequantize.DEQUANTIZE_GROUPS.name,),
    launch=dequantize.PADDED,
    summary="Decodes the columnwise copy of rows in groups.",
    formats=CODES,
    converts=ALL,
    row_alignment=8,
    layout=LayoutNeeds(GROUPS_START),
    contracts=(Contract(registers=64),),
)
