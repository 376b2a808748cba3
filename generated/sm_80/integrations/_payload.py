"""Rows as E4M3 codes with a power of two for each 128 elements: 129 bytes in the place of 256.

The codes are those of `reference.quantize` for E4M3, blocks of 1x128 and the rule `max_over_amax`
rounded down to a power of two, which is how `fp8_block` quantises tokens: where that follows, it
finds the same codes again, so that nothing changes.  What is not finite arrives as NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import _library
from ._fused import fused

FORMATS = (torch.float8_e4m3fn,)
BLOCK = 128
_LARGEST = 448.0  # 1.75 * 2**8


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[R, H] of a floating-point type -> codes and exponents, uint8 [R, H] and [R, ceil(H / 128)].

    An exponent is biased by 127, as E8M0 has it.
    """
    codes, exponents = _encode_rows(rows)
    return codes, exponents


def decode(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """What `encode` made of rows, in a type; what rounding took past its range is its end."""
    rows: Tensor = _decode_rows(codes, exponents, dtype)
    return rows


def _blocks(rows: Tensor) -> Tensor:
    """[R, H] -> [R, ceil(H / 128), 128], with zeros at the end."""
    lacking = -rows.shape[-1] % BLOCK
    whole = pad(rows, (0, lacking)) if lacking else rows
    return whole.unflatten(-1, (-1, BLOCK))


@fused
def _encode(blocks: Tensor) -> tuple[Tensor, Tensor]:
    values = blocks.float()
    exponents = _exponents(torch.where(values.isnan(), 0.0, values.abs()).amax(-1))
    scaled = values * ((254 - exponents) << 23).view(torch.float32).unsqueeze(-1)
    scaled = torch.where(values.isfinite(), scaled.clamp(-_LARGEST, _LARGEST), torch.nan)
    return scaled.to(torch.float8_e4m3fn), exponents.to(torch.uint8)


def _exponents(amax: Tensor) -> Tensor:
    """int32, biased by 127, of the powers of two that decode blocks.

    That which encodes is 448 / amax, rounded down: 2**8 over the power of two in amax, or half of
    it where amax has more than 1.75 of that.  At most 2**127; 1 where amax is 0 or infinite.
    """
    bits = amax.view(torch.int32)
    above = (bits & 0x007FFFFF) > 0x00600000
    exponents = ((bits >> 23) - 8 + above.int()).clamp(min=0)
    return torch.where((amax == 0) | amax.isinf(), 127, exponents)


@fused
def _decode(blocks: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    biased = exponents.int()
    scales = torch.where(biased == 0, 0x00400000, biased << 23).view(torch.float32)
    largest = torch.finfo(dtype).max
    return (blocks.float() * scales.unsqueeze(-1)).clamp(-largest, largest).to(dtype)


def _run_encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    width = rows.shape[-1]
    codes, exponents = _encode(_blocks(rows))
    return codes.flatten(-2).view(torch.uint8)[..., :width].contiguous(), exponents


def _fake_encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    blocks = (*rows.shape[:-1], (rows.shape[-1] + BLOCK - 1) // BLOCK)
    codes, exponents = (rows.new_empty(each, dtype=torch.uint8) for each in (rows.shape, blocks))
    return codes, exponents


def _run_decode(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    blocks = _blocks(codes).view(torch.float8_e4m3fn)
    rows: Tensor = _decode(blocks, exponents, dtype).flatten(-2)
    return rows[..., : codes.shape[-1]].contiguous()


# Ops, so that compilers trace calls and nothing inside: what they would make of it is theirs.
_encode_rows = _library.define(
    "payload_encode", "(Tensor rows) -> (Tensor, Tensor)", _run_encode, _fake_encode
)
_decode_rows = _library.define(
    "payload_decode",
    "(Tensor codes, Tensor exponents, ScalarType dtype) -> Tensor",
    _run_decode,
    lambda codes, exponents, dtype: torch.empty_like(codes, dtype=dtype),
)
