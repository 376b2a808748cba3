"""GEMMs of 16-bit operands by ``mma.sync``."""

from __future__ import annotations

from ..ir.kernel import STORES
from ..steps import gemm
from ..steps.gemm_pointwise import GEMMS
from .family import Family
from .mma_sync import Operands, contract_by

GEMM_MMA = Family(
    "gemm_mma",
    GEMMS,
    launch=gemm.PLAIN,
    summary="Chooses the kernel of a {kind} GEMM by its sizes.",
    stores=STORES,
    most_gated_cost=64,  # SiTUGLU has 95, and spills beside 128 sums; all others have 33 at most
    row_alignment=8,
    configured=Operands(element_bits=16).configured,
    contracts=(contract_by(r"HMMA\.16816\.F32"),),
)
