"""GEMMs of 16-bit operands with sums in tensor memory."""

from __future__ import annotations

from ..ir.kernel import STORES
from ..steps import gemm
from ..steps.gemm_pointwise import GEMMS
from .family import Family
from .tcgen05 import ARCH, Operands, contracts_of

GEMM_TCGEN05 = Family(
    "gemm_tcgen05",
    GEMMS,
    launch=gemm.PLAIN,
    summary="Chooses the kernel of a {kind} GEMM by its sizes.",
    stores=STORES,
    arch=ARCH,
    row_alignment=8,
    configured=Operands(element_bits=16).configured,
    contracts=contracts_of("UTCHMMA"),
)
