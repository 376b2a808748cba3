"""Where choices of tokens lie among the rows of experts."""

from __future__ import annotations

from ..steps import routing
from .contract import Contract
from .family import Family

ROUTING_PLAN = Family(
    "routing_plan",
    (routing.ROUTING_PLAN.name,),
    launch=routing.PLAN_LAUNCH,
    summary="Stable ranks of choices among those of their expert.",
    device="routing/routing_plan.cuh",
    contracts=(Contract(registers=64),),
)
