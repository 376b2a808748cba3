"""The choice of experts by a router's logits."""

from __future__ import annotations

from ..steps import route
from .contract import Contract
from .family import Family

ROUTE = Family(
    "route",
    (route.ROUTE.name,),
    launch=route.LAUNCH,
    summary="The experts that logits choose, their weights, and a router's losses.",
    device="router/route.cuh",
    contracts=(Contract(registers=255),),
)
