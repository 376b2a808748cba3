"""Numbers of slots as rows have them, and back."""

from __future__ import annotations

from ..steps import routing
from .contract import Contract
from .family import Family

TAKE = Family(
    "take",
    (routing.TAKE.name,),
    launch=routing.TAKE_LAUNCH,
    summary="Numbers at the places that a map names.",
    device="routing/take.cuh",
    contracts=(Contract(registers=64),),
)
