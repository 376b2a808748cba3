"""Dense square GEMMs of torch, against whose rates grouped ones are held."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import common
import torch
from floors import Mode, Rates

from fusegen.ir.dtypes import DType

SIZE = 8192
PREFIX = "dense "
CODES = {DType.E4M3: torch.float8_e4m3fn, DType.E5M2: torch.float8_e5m2}


def contender(mode: Mode) -> common.Contender:
    """The GEMM of a mode: bf16, or FP8 with one scale per operand.

    Torch has no dense GEMM with other scales that is as fast, and sums that are split stay split
    under any of them.
    """
    a, b = common.normal(SIZE, SIZE), common.normal(SIZE, SIZE)
    if not mode.formats:
        return lambda _: a @ b.t()
    codes: Any = [each.to(CODES[fmt]) for each, fmt in zip((a, b), mode.formats, strict=True)]
    one = torch.ones((), device=common.DEVICE)
    return lambda _: torch._scaled_mm(
        codes[0], codes[1].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=mode.fast
    )


def contenders(modes: Sequence[Mode]) -> dict[str, common.Contender]:
    """Those of several modes, by name."""
    return {f"{PREFIX}{mode}": contender(mode) for mode in modes}


def rates(samples: Mapping[str, Sequence[float]], modes: Sequence[Mode], copy: float) -> Rates:
    """Rates by mode, from the times of their contenders."""
    operations = 2e3 * SIZE**3
    return Rates(
        {mode: operations / statistics.median(samples[f"{PREFIX}{mode}"]) for mode in modes}, copy
    )
