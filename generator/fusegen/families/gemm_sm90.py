"""GEMMs of 16-bit operands on Hopper."""

from __future__ import annotations

from ..ir.kernel import Store
from ..steps import gemm
from .family import Family
from .wgmma import ARCH, Operands

GEMM_SM90 = Family(
    "gemm_sm90",
    (gemm.GEMM.name, gemm.GROUPED_GEMM.name),
    launch=gemm.PLAIN,
    summary="Chooses the kernel of a {kind} GEMM by its sizes.",
    stores=tuple(Store),
    arch=ARCH,
    row_alignment=8,
    configured=Operands(element_bytes=2).configured,
)
