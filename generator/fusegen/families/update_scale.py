"""Scales of delayed scaling that follow from amaxes found elsewhere."""

from __future__ import annotations

from ..steps import update_scale
from .contract import Contract
from .family import Family

UPDATE_SCALE = Family(
    "update_scale",
    (update_scale.UPDATE_SCALE.name,),
    launch=update_scale.LAUNCH,
    summary="Moves the state of delayed scaling on by an amax that is given.",
    device="quantize/update_scale.cuh",
    contracts=(Contract(registers=64),),
)
