"""Products with a weight in fp32 of those with its parts."""

from __future__ import annotations

from ..steps import fp32_weight
from .contract import Contract
from .family import Family

ADD_PRODUCTS = Family(
    "add_products",
    (fp32_weight.ADD_PRODUCTS.name,),
    launch=fp32_weight.ADD_LAUNCH,
    summary="Adds up products with the parts of a weight in fp32.",
    device="fp32_weight/add_products.cuh",
    row_alignment=8,
    contracts=(Contract(registers=40),),
)
