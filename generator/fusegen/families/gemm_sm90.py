"""GEMMs of 16-bit operands on Hopper."""

from __future__ import annotations

from ..ir.kernel import STORES
from ..steps import gemm
from ..steps.gemm_pointwise import GEMMS
from .family import Family
from .wgmma import ARCH, Operands, contracts_of

GEMM_SM90 = Family(
    "gemm_sm90",
    GEMMS,
    launch=gemm.PLAIN,
    summary="Chooses the kernel of a {kind} GEMM by its sizes.",
    stores=STORES,
    arch=ARCH,
    row_alignment=8,
    configured=Operands(element_bytes=2).configured,
    contracts=contracts_of("HGMMA"),
)
