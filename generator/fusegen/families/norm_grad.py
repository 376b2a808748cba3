"""Gradients of norms of rows."""

from __future__ import annotations

from ..steps import norm
from .contract import Contract
from .family import Family

NORM_GRAD = Family(
    "norm_grad",
    (norm.NORM_GRAD.name,),
    launch=norm.GRADIENT_LAUNCH,
    summary="The gradients of a norm of rows.",
    device="norm/norm_grad.cuh",
    row_alignment=8,
    contracts=(Contract(registers=128, cpu_seconds=60),),
)
