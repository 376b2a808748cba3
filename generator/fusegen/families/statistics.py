"""A few numbers on what a copy lost."""

from __future__ import annotations

from ..steps import statistics
from .contract import Contract
from .family import Family, LayoutNeeds
from .scalings import ALL, CODES, FP8, GROUPS_START, NV_1X16

STATISTICS = Family(
    "statistics",
    (statistics.STATISTICS.name,),
    launch=statistics.LAUNCH,
    summary="What a quantised copy lost of the tensor that it was made from.",
    formats=CODES,
    converts=ALL,
    layout=LayoutNeeds(GROUPS_START, untransposed=FP8),
    transformed=(NV_1X16,),
    contracts=(Contract(registers=128),),
)
