"""GEMMs with E8M0 scales with sums in tensor memory, into which scales come, too.

Which scales are read, and how they are stored, is what ``mma.sync`` reads of them; codes are read
in either major.
"""

from __future__ import annotations

from dataclasses import replace

from .family import LayoutNeeds
from .gemm_mx_mma import GEMM_MX_MMA
from .scalings import FP8
from .tcgen05 import ARCH, Operands, contracts_of

GEMM_MX_TCGEN05 = replace(
    GEMM_MX_MMA,
    name="gemm_mx_tcgen05",
    arch=ARCH,
    layout=LayoutNeeds(scale_atoms=GEMM_MX_MMA.scalings, transposed=(), untransposed=FP8),
    configured=Operands(element_bits=8, scale_block=32).configured,
    contracts=contracts_of("UTCQMMA", "UTCCP", "UBLKCP"),
)
