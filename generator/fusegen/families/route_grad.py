"""The gradient of a router's logits."""

from __future__ import annotations

from ..steps import route
from .contract import Contract
from .family import Family

ROUTE_GRAD = Family(
    "route_grad",
    (route.ROUTE_GRAD.name,),
    launch=route.GRAD_LAUNCH,
    summary="The gradient of the logits of a router.",
    device="router/route_grad.cuh",
    contracts=(Contract(registers=255),),
)
