"""Expressions of single elements, and their gradients."""

from __future__ import annotations

from ..steps import add, narrow, outer, pointwise
from .contract import Contract
from .family import Family

POINTWISE = Family(
    "pointwise",
    (
        pointwise.POINTWISE.name,
        pointwise.POINTWISE_GRAD.name,
        add.ADD.name,
        narrow.NARROW.name,
        outer.OUTER.name,
    ),
    launch=pointwise.LAUNCH,
    summary="A pointwise kernel per element type.",
    contracts=(Contract(registers=64),),
)
