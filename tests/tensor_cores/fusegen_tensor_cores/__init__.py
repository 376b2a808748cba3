"""GEMMs of sm_100a for Hopper: their kernels as they are, but for a tensor core in software."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fusegen.extensions import Extension
from fusegen.families.family import Family
from fusegen.families.gemm_decoded_tcgen05 import GEMM_DECODED_TCGEN05
from fusegen.families.gemm_fp8_tcgen05 import GEMM_FP8_TCGEN05
from fusegen.families.gemm_mx_tcgen05 import GEMM_MX_TCGEN05
from fusegen.families.gemm_nv_tcgen05 import GEMM_NV_TCGEN05
from fusegen.families.gemm_tcgen05 import GEMM_TCGEN05
from fusegen.families.wgmma import ARCH

SOURCES = (
    GEMM_TCGEN05,
    GEMM_FP8_TCGEN05,
    GEMM_MX_TCGEN05,
    GEMM_NV_TCGEN05,
    GEMM_DECODED_TCGEN05,
)


def twin_of(family: Family) -> Family:
    """The same family, whose units include the software first."""
    return replace(family, name=f"{family.name}_twin", arch=ARCH, contracts=())


EXTENSION = Extension(
    families=tuple(map(twin_of, SOURCES)),
    folder=Path(__file__).parent,
)
