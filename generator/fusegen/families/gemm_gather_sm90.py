"""GEMMs of 16-bit operands on Hopper, one of which is gathered."""

from __future__ import annotations

from ..ir.kernel import STORES
from ..steps import gathered_gemm
from .family import Family
from .wgmma import ARCH, Operands, contracts_of

GEMM_GATHER_SM90 = Family(
    "gemm_gather_sm90",
    gathered_gemm.GATHERED_GEMMS,
    launch=gathered_gemm.LAUNCH,
    summary="Chooses the kernel of a {kind} GEMM that gathers rows by its sizes.",
    stores=STORES,
    arch=ARCH,
    row_alignment=8,
    configured=Operands(element_bytes=2).configured,
    contracts=contracts_of("HGMMA"),
)
