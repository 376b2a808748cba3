"""Quantisation once more, one element at a time: no tensors, no casts, no shared code.

Written from the statement of the recipes.  fp32 arithmetic is numpy's, one scalar operation at a
time; codes are found by searching the exact values of a format, ties by the last bit of the code.
Buffers are filled place by place from the formulas of the layout.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

F = np.float32
FP32_MAX = F(np.finfo(np.float32).max)
LARGEST = {"bfloat16": F(2.0**127 * (2 - 2**-7)), "float16": F(65504.0), "float32": FP32_MAX}
SIGNS = [+1, +1, +1, -1, +1, -1, -1, -1, -1, -1, -1, +1, -1, +1, -1, -1]
EXPONENT_OF_MAX = {"e4m3": 8, "e5m2": 15, "e2m1": 2}
# Exponent bits, mantissa bits, code of the largest finite value, code of NaN.
FORMATS = {
    "e4m3": (4, 3, 0x7E, 0x7F),
    "e5m2": (5, 2, 0x7B, 0x7F),
    "e2m1": (2, 1, 0x7, 0x7),
}
SIGN_BIT = {"e4m3": 0x80, "e5m2": 0x80, "e2m1": 0x8}
POWERS = [2.0 ** (e - 127) for e in range(255)]


def ceildiv(a: int, b: int) -> int:
    return (a + b - 1) // b


# Formats


@cache
def grid(fmt: str) -> list[float]:
    """Every finite non-negative value of a format; the place in the list is the code."""
    exponent_bits, mantissa_bits, last, _ = FORMATS[fmt]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(last + 1):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        if exponent == 0:
            values.append(mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            values.append((2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits))
    return values


def encode(value: float, fmt: str) -> int:
    """The code nearest to a value, the even one of two; saturating."""
    if math.isnan(value):
        return FORMATS[fmt][3]
    return sign_bit(value, fmt) | nearest(abs(value), fmt)


@cache
def nearest(size: float, fmt: str) -> int:
    values = grid(fmt)
    below = bisect_right(values, size) - 1
    if below == len(values) - 1:
        return below
    middle = (values[below] + values[below + 1]) / 2
    return below + (size > middle or (size == middle and below % 2 == 1))


def encode_stochastic(value: float, byte: int) -> int:
    """E2M1, rounded down after adding byte / 256 of a step in fp32."""
    if math.isnan(value):
        return 0x7
    size = min(abs(value), 6.0)
    step = 0.5 if size < 2 else 1.0 if size < 4 else 2.0
    t = float(F(size) + F(byte / 256) * F(step))
    return sign_bit(value, "e2m1") | bisect_right(grid("e2m1"), t) - 1


def sign_bit(value: float, fmt: str) -> int:
    return SIGN_BIT[fmt] if math.copysign(1.0, value) < 0 else 0


def decode(code: int, fmt: str) -> float:
    size = code & (SIGN_BIT[fmt] - 1)
    values = grid(fmt)
    value = values[size] if size < len(values) else math.nan
    return -value if code & SIGN_BIT[fmt] else value


def bfloat16(value: F) -> F:
    """Nearest bf16, ties to even, as fp32."""
    if math.isnan(value):
        return F(math.nan)
    bits = int(value.view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1)
    return np.uint32(bits & 0xFFFF0000).view(F)


# Random numbers


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers."""
    c, k = list(counter), list(key)
    for round_ in range(10):
        if round_:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 % 2**32, p0 >> 32 ^ c[3] ^ k[1], p0 % 2**32]
    return c


@cache
def random_bytes(block: int, stream: int, seed: int, offset: int) -> bytes:
    counter = [block % 2**32, block >> 32, stream, offset % 2**32]
    words = philox(counter, [seed % 2**32, (seed >> 32) % 2**32])
    return b"".join(word.to_bytes(4, "little") for word in words)


# Scales


def amax_of(values: np.ndarray) -> F:
    """Largest magnitude; NaN counts for nothing."""
    return F(max((abs(value) for value in values.ravel().tolist() if value == value), default=0.0))


def ratio_scale(amax: F, q: Any, io: str, per_block: bool) -> tuple[F, F]:
    """Encoding and stored scale."""
    amax = max(amax, F(q.epsilon))
    if amax == 0 or math.isinf(amax):
        return F(1), F(1)
    scale = F(grid(q.format)[-1]) / amax
    if math.isinf(scale):
        scale = LARGEST[io] if per_block else FP32_MAX
    if q.round == "pow2_down":
        scale = F(2.0 ** (math.frexp(float(scale))[1] - 1))
    return scale, F(1) / scale


def mx_scale(amax: F, q: Any) -> tuple[F, int]:
    """The smallest power of two that loses nothing at the top, or OCP's."""
    if q.round == "pow2_up":
        v = float(amax * (F(1) / F(grid(q.format)[-1])))
        e = min(bisect_left(POWERS, v), 254)
    else:
        wanted = math.frexp(float(amax))[1] - 1 if math.isfinite(amax) and amax else -999
        wanted = 128 if math.isinf(amax) else wanted
        e = max(wanted - EXPONENT_OF_MAX[q.format] + 127, 0)
    return F(2.0 ** (127 - e)), e


def nvfp4_scale(amax: F, tensor_amax: F) -> tuple[F, int]:
    encode_tensor = F(1)
    if tensor_amax != 0 and not math.isinf(tensor_amax):
        encode_tensor = min(F(448 * 6) / tensor_amax, FP32_MAX)
    code = encode(float(amax * (encode_tensor * (F(1) / F(6)))), "e4m3")
    decoded = F(decode(code, "e4m3"))
    return min(F(1) / (decoded * (F(1) / encode_tensor)), FP32_MAX), code


# One group of rows


def transform(column: list[F]) -> list[F]:
    """Quarters of 16 values times signs, fp32 butterflies, bf16."""
    y = [value * F(sign) / F(4) for value, sign in zip(column, SIGNS, strict=True)]
    for stride in (1, 2, 4, 8):
        for i in range(16):
            if not i & stride:
                y[i], y[i + stride] = y[i] + y[i + stride], y[i] - y[i + stride]
    return [bfloat16(value) for value in y]


def transformed(x: np.ndarray) -> np.ndarray:
    """[n, C] -> [n rounded up to 16, C]."""
    rows = ceildiv(len(x), 16) * 16
    filled = np.zeros((rows, x.shape[1]), np.float32)
    filled[: len(x)] = x
    for start in range(0, rows, 16):
        for column in range(x.shape[1]):
            filled[start : start + 16, column] = transform(list(filled[start : start + 16, column]))
    return filled


@dataclass
class Group:
    """Codes of a group's rows (those of a filled last block included), stored scales by block."""

    codes: np.ndarray
    scales: dict[tuple[int, int], float]
    amax: F


def quantize_group(
    x: np.ndarray, q: Any, io: str, columnwise: bool, scale: F | None, noise: Any
) -> Group:
    """x: [n, C] fp32.  noise(row, column) is a byte, or noise is None."""
    if columnwise and q.hadamard:
        x = transformed(x)
    whole = amax_of(x)
    of_rows, of_columns = reversed(q.block) if columnwise else q.block
    height, width = of_rows or max(len(x), 1), of_columns or x.shape[1]
    codes = np.zeros(x.shape, np.uint8)
    scales: dict[tuple[int, int], float] = {}
    for block in range(max(ceildiv(len(x), height), of_rows is None)):
        for across in range(ceildiv(x.shape[1], width)):
            r0, c0 = block * height, across * width
            part = x[r0 : r0 + height, c0 : c0 + width]
            amax = amax_of(part)
            if scale is not None:
                factor, stored = scale, F(1) / scale
            elif q.rule == "mx":
                factor, stored = mx_scale(amax, q)
            elif q.rule == "nvfp4":
                factor, stored = nvfp4_scale(amax, whole if q.tensor_scale else F(math.inf))
            else:
                factor, stored = ratio_scale(amax, q, io, None not in q.block)
            scales[block, across] = stored
            for r, row in enumerate((part * factor).tolist(), start=r0):
                for c, value in enumerate(row, start=c0):
                    if noise is None:
                        codes[r, c] = encode(value, q.format)
                    else:
                        codes[r, c] = encode_stochastic(value, noise(r, c))
    return Group(codes, scales, whole)


# A whole tensor, as buffers


@dataclass
class Buffers:
    data: np.ndarray
    scale: np.ndarray
    amax: np.ndarray


def zero_scale(q: Any) -> float:
    return 1.0 if q.rule == "max_over_amax" else 0.0


def quantize_tokens(
    x: np.ndarray,
    q: Any,
    io: str,
    columnwise: bool,
    sizes: list[int] | None,
    *,
    transposed: bool = True,
    align: int = 32,
    pitch: int = 16,
    scale: list[float] | None = None,
    rng_state: tuple[int, int] | None = None,
) -> Buffers:
    """[T, C], in groups or not, to the buffers of one orientation."""
    T, C = x.shape
    groups, starts, at = 1 if sizes is None else len(sizes), [], 0
    for size in [T] if sizes is None else sizes:
        end = min(at + max(size, 0), T)
        starts.append((at, end))
        at = end
    of_rows, of_columns = reversed(q.block) if columnwise else q.block
    across = 1 if of_columns is None else ceildiv(C, of_columns)

    def first_block(g: int, block: int) -> int:
        return 0 if sizes is None else starts[g][0] // block + g

    def count(block: int) -> int:
        return ceildiv(T, block) if sizes is None else T // block + groups

    blocks = groups if of_rows is None else T if of_rows == 1 else count(of_rows)
    scales = np.full((blocks, across), zero_scale(q))
    length = pitch * (2 if q.format == "e2m1" else 1)
    across_rows = columnwise and transposed
    spaces = count(align) * align if sizes is not None else T
    shape = (
        (C, ceildiv(spaces, length) * length) if across_rows else (T, ceildiv(C, length) * length)
    )
    codes = np.zeros(shape, np.uint8)
    amax = []
    for g, (start, end) in enumerate(starts):

        def noise(row: int, column: int, start: int = start, g: int = g) -> int:
            assert rng_state is not None
            if columnwise:
                run = (first_block(g, 16) + row // 16) * C + column
                return random_bytes(run, 1, *rng_state)[row % 16]
            run = (start + row) * ceildiv(C, 16) + column // 16
            return random_bytes(run, 0, *rng_state)[column % 16]

        own = None if scale is None else F(scale[g])
        stochastic = noise if q.rounding == "stochastic" else None
        group = quantize_group(x[start:end], q, io, columnwise, own, stochastic)
        amax.append(group.amax)
        for (block, j), value in group.scales.items():
            i = (
                g
                if of_rows is None
                else start + block
                if of_rows == 1
                else first_block(g, of_rows) + block
            )
            scales[i, j] = value
        for r, row in enumerate(group.codes):
            if across_rows:
                codes[:, (align * (start // align + g) if sizes is not None else 0) + r] = row
            else:
                codes[start + r, :C] = row
    if q.format == "e2m1":
        codes = codes[:, 0::2] + 16 * codes[:, 1::2]
    kept = [n for n, extent in zip(scales.shape, (of_rows, of_columns), strict=True) if extent]
    if of_rows is None and sizes is not None:
        kept = [groups, *kept]
    return Buffers(codes, scales.reshape(kept or [1]), np.array(amax, np.float32))
