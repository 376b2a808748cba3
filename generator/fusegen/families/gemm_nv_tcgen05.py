"""GEMMs of NVFP4 operands with sums in tensor memory, into which scales come, too.

Which scales are read, and how they are stored, is what ``mma.sync`` reads of them.
"""

from __future__ import annotations

from dataclasses import replace

from .gemm_nv_mma import GEMM_NV_MMA
from .tcgen05 import ARCH, Operands, contracts_of

GEMM_NV_TCGEN05 = replace(
    GEMM_NV_MMA,
    name="gemm_nv_tcgen05",
    arch=ARCH,
    configured=Operands(element_bits=4, scale_block=16).configured,
    contracts=contracts_of("UTCOMMA", "UTCCP", "UBLKCP"),
)
