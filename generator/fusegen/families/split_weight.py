"""A weight in fp32 as parts of 16 bits."""

from __future__ import annotations

from ..steps import fp32_weight
from .contract import Contract
from .family import Family

SPLIT_WEIGHT = Family(
    "split_weight",
    (fp32_weight.SPLIT_WEIGHT.name,),
    launch=fp32_weight.SPLIT_LAUNCH,
    summary="Splits a weight in fp32 into parts of 16 bits.",
    device="fp32_weight/split_weight.cuh",
    row_alignment=8,
    contracts=(Contract(registers=40),),
)
