"""GEMMs of FP8 operands by ``mma.sync``, which Ada was the first to have for them."""

from __future__ import annotations

from dataclasses import replace

from .gemm_fp8_sm90 import GEMM_FP8_SM90
from .mma_sync import Operands, contract_by

GEMM_FP8_MMA = replace(
    GEMM_FP8_SM90,
    name="gemm_fp8_mma",
    arch=None,
    capability=(8, 9),
    configured=Operands(element_bits=8).configured,
    contracts=(contract_by(r"QMMA\.16832\.F32"),),
)
"""The GEMMs that Hopper's has, of the same copies and scales."""
