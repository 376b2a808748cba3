"""How elements share scales, where the shipped device code knows it."""

from __future__ import annotations

from ..ir.dtypes import DType
from ..ir.quantization import Extent, ScaleRule, Scaling

TENSOR = Scaling(Extent.ALL, Extent.ALL)
ROW = Scaling(1, Extent.ALL)
BLOCK_1X128 = Scaling(1, 128)
BLOCK_128X128 = Scaling(128, 128)
MX_1X32 = Scaling(1, 32, ScaleRule.MX, DType.E8M0)
MX_32X32 = Scaling(32, 32, ScaleRule.MX, DType.E8M0)
NV_1X16 = Scaling(1, 16, ScaleRule.NVFP4, DType.E4M3, tensor_scale=True)
NV_16X16 = Scaling(16, 16, ScaleRule.NVFP4, DType.E4M3, tensor_scale=True)

OF_TOKENS = (TENSOR, ROW, BLOCK_1X128, MX_1X32, NV_1X16)
"""Those whose scales no two tokens share, unless all do."""
ALL = (*OF_TOKENS, BLOCK_128X128, MX_32X32, NV_16X16)
"""``Scaling`` of ``quantize_config.cuh``."""

FP8 = (DType.E4M3, DType.E5M2)
CODES = (*FP8, DType.E2M1)
"""Formats that quantised tensors have."""

GROUPS_START = (32, 64, 128)
"""Alignments of groups in transposed copies that kernels other than products can have."""
