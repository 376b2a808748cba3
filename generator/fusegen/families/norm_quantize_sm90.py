"""Quantised copies of what a norm gives on Hopper, whose clusters hold rows between the two."""

from __future__ import annotations

from dataclasses import replace

from .contract import Contract
from .norm_quantize import NORM_QUANTIZE
from .wgmma import ARCH

_BAND_BYTES = 220288  # of `BandShared` in norm/norm_quantize.sm90.cuh

NORM_QUANTIZE_SM90 = replace(
    NORM_QUANTIZE,
    name="norm_quantize_sm90",
    arch=ARCH,
    contracts=(
        Contract(
            registers=128,
            shared_memory=_BAND_BYTES,
            launch_memory={"norm_quantize_band_kernel": _BAND_BYTES},
        ),
    ),
)
