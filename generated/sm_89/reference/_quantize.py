"""Quantisation in plain PyTorch: the normative numerics of every recipe.

A tensor is quantised in up to two orientations, each from high precision.  The *rowwise* copy has
its blocks along the last dimension, which fprop and dgrad contract over; the *columnwise* copy has
them along the rows, tokens or a weight's output features.  Everything is computed in fp32, one
rounding per written operation, in the order written here: kernels match these bits.

Scales are stored in logical order: row block first, then column block, in the orientation of the
unquantised tensor, whatever the layout of the data; a block that spans a whole dimension has no
dimension there, and a single scale is ``[1]``.  Where matrix instructions read scales of blocks
(``Layout.atoms``) these lie in atoms of 128 rows by 4 blocks instead.

Rows in groups (``group_sizes``): blocks start at every group's first row.  With b rows to a block,
scale blocks of group g start at ``first[g] // b + g`` of ``T // b + E``; transposed data of group g
starts at ``a * (first[g] // a + g)`` of ``a * (T // a + E)``, a = ``Layout.align``.  Padding, and
rows past the last group, are what zeros quantise to: code 0, scale 1 (E8M0 0, E4M3 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

Format = Literal["e4m3", "e5m2", "e2m1"]
ScaleDType = Literal["float32", "e8m0", "e4m3"]
ScaleRule = Literal["max_over_amax", "mx", "nvfp4"]
ScaleRounding = Literal["none", "pow2_down", "pow2_up"]
AmaxSource = Literal["current", "history"]
Rounding = Literal["nearest", "stochastic"]
Orientation = Literal["rowwise", "columnwise"]

MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
"""Largest finite value of each format."""

DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.float4_e2m1fn_x2,
    "e8m0": torch.float8_e8m0fnu,
    "float32": torch.float32,
}

_EMAX = {"e4m3": 8, "e5m2": 15, "e2m1": 2}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NVFP4_RANGE = 448.0 * 6.0
_FP32_MAX = torch.finfo(torch.float32).max
_RUN = 16  # elements along a block that share one Philox call; also the size of the transform
_NEGATIVE = 0b1101_0111_1110_1000  # signs of the transform, first element in the lowest bit


@dataclass(frozen=True, slots=True)
class Quantization:
    """How one role of a recipe is quantised.

    Attributes:
        format: of the elements.
        block: rows and columns that share a scale in the rowwise copy, None for all of them (of a
            tensor, or of a group of rows); the columnwise copy swaps the two.
        scale_dtype: of the stored scale, the factor that decodes.
        rule: how the scale follows from an amax.
        round: of the scale; for ``mx``, up is NVIDIA's rule and down is OCP's FLOOR.
        source: this tensor's amax, or the scale that the caller keeps from a history.
        epsilon: an amax below it is raised to it.
        margin: a scale from a history is divided by 2^margin.
        history: amaxes kept.
        tensor_scale: whether a second, fp32 scale spans the tensor or group (``nvfp4``).
        rounding: of elements.
        hadamard: orientation whose blocks are transformed first, or None.
    """

    format: Format
    block: tuple[int | None, int | None]
    scale_dtype: ScaleDType
    rule: ScaleRule
    round: ScaleRounding = "none"
    source: AmaxSource = "current"
    epsilon: float = 0.0
    margin: int = 0
    history: int = 0
    tensor_scale: bool = False
    rounding: Rounding = "nearest"
    hadamard: Orientation | None = None

    def blocks(self, columnwise: bool) -> tuple[int | None, int | None]:
        """Rows and columns of a block in one orientation."""
        rows, columns = self.block
        return (columns, rows) if columnwise else (rows, columns)


class Layout(NamedTuple):
    """How an architecture's kernels store quantised copies.

    Attributes:
        transposed: whether columnwise data is ``[K, rows]`` (a K-major only MMA) or ``[rows, K]``.
        align: elements that a group's transposed data starts at a multiple of.
        pitch: bytes that the innermost dimension of every copy is padded to a multiple of.
        atoms: whether scales of blocks lie where block-scaled MMA instructions load them: row m and
            block k at ``[m // 128, k // 4, m % 32, m % 128 // 32, k % 4]``, a row's blocks being
            those of 32 elements, or of 16 under E4M3 scales.  Rows of a columnwise copy are the
            tensor's columns.  Places of no block are 0.  ``align`` is 128 then.
    """

    transposed: bool = True
    align: int = 32
    pitch: int = 16
    atoms: bool = False


LAYOUT = Layout()
_ATOM_ROWS, _ATOM_BLOCKS = 128, 4


class Operand(NamedTuple):
    """One quantised copy of a tensor, with what it takes to read it.

    Attributes:
        data: codes.  Rowwise ``[..., R, pitch(C)]``; columnwise the same, or transposed
            ``[..., C, pitch(R)]``, in groups ``[C, pitch(align * (T // align + E))]``.  E2M1 has
            two codes to a byte, low nibble first.
        scale: stored scales, see the head of this file.
        quantization: how it was made.
        shape: of the unquantised tensor, ``[R, C]`` or ``[E, R, C]``.
        amax: fp32 ``[1]`` or ``[E]`` of the tensor or groups, where a scale spans them.
        columnwise: the orientation.
        layout: of data and scales.
    """

    data: Tensor
    scale: Tensor
    quantization: Quantization
    shape: tuple[int, ...]
    amax: Tensor | Any = None  # what reads it knows that it is there
    columnwise: bool = False
    layout: Layout = LAYOUT


class Quantized(NamedTuple):
    """The copies of one tensor; None in the place of one that was not asked for."""

    rowwise: Operand | Any
    columnwise: Operand | Any


# Rows, groups and blocks


class _Rows(NamedTuple):
    """Where the rows of a flattened tensor belong.

    E groups: those of ``group_sizes``, or the matrices of a stack, which are equally long.

    Attributes:
        ragged: whether the groups are those of ``group_sizes``.
        extent: rows in all where ragged, else rows of one matrix.
        first: [E], first row of each group.
        size: [E].
        group: [R]; the last group for a row past all groups.
        within: [R], row of the group; 0 for a row past all groups.
        valid: [R], whether the row belongs to a group.
    """

    ragged: bool
    extent: int
    first: Tensor
    size: Tensor
    group: Tensor
    within: Tensor
    valid: Tensor

    @property
    def groups(self) -> int:
        return self.first.shape[0]

    def starts(self, block: int) -> tuple[Tensor, int]:
        """[E], the block each group starts with, and the number of blocks."""
        order = torch.arange(self.groups, device=self.first.device)
        if self.ragged:
            return self.first // block + order, self.extent // block + self.groups
        blocks = -(-self.extent // block)
        return order * blocks, self.groups * blocks

    def places(self, block: int) -> tuple[Tensor, int]:
        """[R], where each row lies if every group starts on a block; and the number of places."""
        starts, count = self.starts(block)
        return starts[self.group] * block + self.within, count * block

    def blocks(self, block: int | None) -> tuple[Tensor, int]:
        """[R], the block of each row, and the number of blocks."""
        if block is None:
            return self.group, self.groups
        if block == 1:
            return torch.arange(len(self.group), device=self.group.device), len(self.group)
        places, count = self.places(block)
        return places // block, count // block


def _rows(shape: tuple[int, ...], group_sizes: Tensor | None, device: torch.device) -> _Rows:
    total = shape[-2]
    if group_sizes is None:
        groups = shape[0] if len(shape) == 3 else 1
        order = torch.arange(groups, device=device)
        row = torch.arange(groups * total, device=device)
        group = order.repeat_interleave(total)
        first, size = order * total, torch.full_like(order, total)
        return _Rows(False, total, first, size, group, row - first[group], row >= 0)
    ends = group_sizes.clamp(0, total).cumsum(0).clamp(max=total)
    first = pad(ends[:-1], (1, 0))
    row = torch.arange(total, device=device)
    group = torch.searchsorted(ends, row, right=True)
    valid = group < len(ends)
    group = group.clamp(max=len(ends) - 1)
    within = torch.where(valid, row - first[group], 0)
    return _Rows(True, total, first, ends - first, group, within, valid)


def _padded(rows: _Rows) -> _Rows:
    """The rows that transformed blocks of 16 have: each group's last block is a whole one."""
    starts, count = rows.starts(_RUN)
    row = torch.arange(count * _RUN, device=rows.first.device)
    group = torch.searchsorted(starts, row // _RUN, right=True) - 1
    within = row - starts[group] * _RUN
    valid = within < -(-rows.size[group] // _RUN) * _RUN
    return rows._replace(group=group, within=torch.where(valid, within, 0), valid=valid)


def _spread(scale: Tensor, index: Tensor, columns: int, block: int | None) -> Tensor:
    """[blocks, column blocks] -> [R, C], every element its block's."""
    return scale[index].repeat_interleave(block or columns, dim=1)[:, :columns]


# Formats


def _encode_fp8(x: Tensor, fmt: Format) -> Tensor:
    limit = MAX[fmt]
    codes = x.clamp(-limit, limit).to(DTYPES[fmt]).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, codes)


def _count(x: Tensor, at_least: tuple[float, ...], above: tuple[float, ...]) -> Tensor:
    code = torch.zeros_like(x, dtype=torch.uint8)
    for bound in at_least:
        code += x >= bound
    for bound in above:
        code += x > bound
    return code


def _encode_e2m1(x: Tensor, noise: Tensor | None) -> Tensor:
    """Nearest, ties to the even code; or, given noise in [0, 1), down after adding it in steps."""
    size = x.clamp(-6.0, 6.0).abs()
    if noise is None:
        code = _count(size, at_least=(0.75, 1.75, 3.5), above=(0.25, 1.25, 2.5, 5.0))
    else:
        step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
        code = _count(size + noise * step, at_least=_E2M1[1:], above=())
    code |= x.signbit().to(torch.uint8) << 3
    return torch.where(x.isnan(), 0x7, code)


def _encode(x: Tensor, fmt: Format, noise: Tensor | None) -> Tensor:
    """fp32 -> codes, uint8, saturating; the sign of zero is kept."""
    return _encode_e2m1(x, noise) if fmt == "e2m1" else _encode_fp8(x, fmt)


def _decode(codes: Tensor, fmt: Format) -> Tensor:
    if fmt != "e2m1":
        return codes.view(DTYPES[fmt]).float()
    size = (codes & 0x7).float()
    value = torch.where(size < 4, size * 0.5, torch.where(size < 6, size - 2, size * 2 - 8))
    return torch.where(codes < 8, value, -value)


def _power_of_two(biased: Tensor) -> Tensor:
    """2^(biased - 127) in fp32 for 0 to 254, NaN elsewhere."""
    bits = torch.where(biased == 0, 0x00400000, biased << 23)
    bits = torch.where((biased < 0) | (biased > 254), 0x7FC00000, bits)
    return bits.to(torch.int32).view(torch.float32)


def _store(codes: Tensor, fmt: Format, pitch: int) -> Tensor:
    """[..., n] codes -> the buffer: padded with zeros, E2M1 packed."""
    per_byte = 2 if fmt == "e2m1" else 1
    codes = pad(codes, (0, -codes.shape[-1] % (pitch * per_byte)))
    if per_byte == 2:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return codes.contiguous().view(DTYPES[fmt])


def _load(data: Tensor, fmt: Format) -> Tensor:
    """The buffer -> [..., n] codes, with their padding."""
    codes = data.view(torch.uint8)
    if fmt == "e2m1":
        codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    return codes


# Random numbers


def _multiply(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a product of two 32-bit words held in int64."""
    low, high = factor * (x & 0xFFFF), factor * (x >> 16)
    high = high + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Args:
        counter, key: 32-bit words in int64 tensors of one shape, or shapes that broadcast.

    Returns:
        [..., 4] int64, 32-bit words.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        (h0, l0), (h1, l1) = _multiply(0xD2511F53, c0), _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return torch.stack((c0, c1, c2, c3), dim=-1)


def _random_bytes(runs: Tensor, columnwise: bool, rng_state: Tensor) -> Tensor:
    """[...] logical index of a run of 16 elements -> [..., 16], byte i of little-endian words."""
    word = 0xFFFFFFFF
    seed, offset = rng_state.unbind()
    stream = torch.full_like(seed, int(columnwise))
    counter = (runs & word, runs >> 32 & word, stream, offset & word)
    words = philox(counter, (seed & word, seed >> 32 & word))
    return (words.unsqueeze(-1) >> torch.arange(0, 32, 8, device=runs.device) & 0xFF).flatten(-2)


def _noise(rows: _Rows, columns: int, columnwise: bool, rng_state: Tensor) -> Tensor:
    """[R, C] in [0, 1): one Philox call per run of 16 elements along the blocks.

    A run's index is its place in logical scales of one per run: ``[R, ceil(C / 16)]`` rowwise,
    ``[blocks of 16 rows, C]`` columnwise.
    """
    if not columnwise:
        across = -(-columns // _RUN)
        count = rows.group.shape[0]
        runs = torch.arange(count * across, device=rows.group.device).view(count, across)
        return _random_bytes(runs, columnwise, rng_state).flatten(1)[:, :columns] / 256
    places, count = rows.places(_RUN)
    runs = torch.arange(count // _RUN * columns, device=places.device).view(-1, columns)
    drawn = _random_bytes(runs, columnwise, rng_state).transpose(1, 2)
    return drawn.reshape(count, columns)[places] / 256


def advance(rng_state: Tensor, steps: int = 1) -> Tensor:
    """[seed, offset] after so many quantise steps that round stochastically."""
    return rng_state + steps * torch.arange(2, device=rng_state.device)


# Random Hadamard transform


def _butterflies(x: Tensor) -> Tensor:
    """[n, 16, C] -> H16 / 4 along the middle, Sylvester order.

    Quarters come first, which is exact for values of 16 bits: their sums overflow only where a
    result does, so that it is infinite, and the amax with it, rather than NaN, which no amax sees.
    """
    shape = x.shape
    x = x * 0.25
    for stride in (1, 2, 4, 8):
        first, second = x.reshape(shape[0], 8 // stride, 2, stride, shape[2]).unbind(2)
        x = torch.stack((first + second, first - second), dim=2)
    return x.reshape(shape)


def _signs(device: torch.device) -> Tensor:
    """[16, 1]"""
    negative = _NEGATIVE >> torch.arange(_RUN, device=device) & 1
    return (1.0 - 2.0 * negative).unsqueeze(-1)


def _transform(values: Tensor, rows: _Rows) -> tuple[Tensor, _Rows]:
    """Every 16 rows of a group times signs and H16 / 4, as bf16; a last block is filled up."""
    places, count = rows.places(_RUN)
    blocks = values.new_zeros(count, values.shape[1])
    blocks[places[rows.valid]] = values[rows.valid]
    blocks = blocks.view(-1, _RUN, values.shape[1]) * _signs(values.device)
    return _butterflies(blocks).bfloat16().float().flatten(0, 1), _padded(rows)


def _transform_back(values: Tensor, rows: _Rows) -> Tensor:
    """The inverse, in fp32: values of padded rows -> values of `rows`."""
    blocks = values.view(-1, _RUN, values.shape[1])
    places, _ = rows.places(_RUN)
    return (_butterflies(blocks) * _signs(values.device)).flatten(0, 1)[places]


# Scales


def _magnitude(values: Tensor) -> Tensor:
    """|x|, and 0 for NaN, which no amax sees."""
    return torch.where(values.isnan(), 0.0, values.abs())


def _gather_max(values: Tensor, index: Tensor, count: int) -> Tensor:
    """[R, n] -> [count, n], the largest of the rows that share an index; 0 where there are none."""
    zeros = values.new_zeros(count, values.shape[1])
    return zeros.scatter_reduce(0, index.unsqueeze(1).expand_as(values), values, "amax")


def _block_amax(values: Tensor, index: Tensor, count: int, block: int | None) -> Tensor:
    """[R, C] -> [count, column blocks]."""
    columns = values.shape[1]
    width = block or columns
    size = pad(_magnitude(values), (0, -columns % width))
    size = size.view(len(values), -(-columns // width), width)
    return _gather_max(size.amax(-1), index, count)


def group_amax(
    x: Tensor, q: Quantization, *, columnwise: bool = False, group_sizes: Tensor | None = None
) -> Tensor:
    """Largest |x| of the tensor ``[1]``, or of each group or matrix ``[E]``, fp32.

    NaN counts for nothing.  Columnwise it is taken after the transform, where the recipe has one.
    """
    values, rows = _values(x, q, columnwise, group_sizes)
    return _gather_max(_magnitude(values).amax(1, keepdim=True), rows.group, rows.groups).flatten()


def _largest(q: Quantization, dtype: torch.dtype) -> float:
    """What an infinite scale becomes."""
    return torch.finfo(torch.float32 if None in q.block else dtype).max


def _ratio_scale(amax: Tensor, q: Quantization, dtype: torch.dtype) -> Tensor:
    scale = torch.full_like(amax, MAX[q.format]) / amax
    scale = torch.where(scale.isinf(), _largest(q, dtype), scale)
    if q.round == "pow2_down":
        scale = (scale.view(torch.int32) & -0x00800000).view(torch.float32)
    return torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)


def _mx_exponent(amax: Tensor, q: Quantization) -> Tensor:
    """Biased exponents, int64.  Rounding down reads an infinite amax as 2^128."""
    if q.round == "pow2_down":
        return (amax.view(torch.int32).long() >> 23).sub(_EMAX[q.format]).clamp(min=0)
    one = torch.ones(())
    v = amax * (one / MAX[q.format])
    bits = v.view(torch.int32).long()
    exponent, mantissa = bits >> 23, bits & 0x007FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x00400000))
    exponent = torch.where(v.isinf(), 0xFE, exponent + up)
    return torch.where(v.isnan(), 0xFF, exponent)


def _quotient(numerator: float, denominator: Tensor) -> Tensor:
    """fp32 numerator / denominator, rounded to nearest; compiled too, where fp32 divisions are not.

    A quotient of fp32 numbers in fp64 has more than twice their digits and two more, so that
    rounding it once again changes nothing.
    """
    return (numerator / denominator.double()).float()


def _tensor_encode(amax: Tensor) -> Tensor:
    """NVFP4's fp32 encoding scale of a tensor or group."""
    scale = _quotient(_NVFP4_RANGE, amax).clamp(max=_FP32_MAX)
    return torch.where((amax == 0) | amax.isinf(), 1.0, scale)


def _nvfp4_scale(block_amax: Tensor, tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
    """[count, n] and its tensor scale [count, 1] -> encoding factors, codes of E4M3 scales."""
    one = torch.ones(())
    codes = _encode_fp8(block_amax * (tensor_scale * (one / 6)), "e4m3")
    decode = _decode(codes, "e4m3")
    factor = (one / (decode * (one / tensor_scale))).clamp(max=_FP32_MAX)
    return factor, codes


def _scales(
    block_amax: Tensor, tensor_scale: Tensor, q: Quantization, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[count, n] amaxes -> factors that encode, fp32, and scales as stored."""
    if q.rule == "mx":
        exponent = _mx_exponent(block_amax, q)
        return _power_of_two(254 - exponent), exponent.to(torch.uint8).view(DTYPES["e8m0"])
    if q.rule == "nvfp4":
        factor, codes = _nvfp4_scale(block_amax, tensor_scale)
        return factor, codes.view(DTYPES["e4m3"])
    factor = _ratio_scale(block_amax, q, dtype)
    if q.scale_dtype == "e8m0":
        exponent = 254 - (factor.view(torch.int32) >> 23)
        return factor, exponent.to(torch.uint8).view(DTYPES["e8m0"])
    return factor, torch.ones(()) / factor


def _scale_shape(
    rows: _Rows, lead: int, count: int, across: int, q: Quantization, columnwise: bool
) -> list[int]:
    """Shape of stored scales; `lead` is the rank of the unquantised tensor less two."""
    of_rows, of_columns = q.blocks(columnwise)
    stack = [rows.groups] if lead or (rows.ragged and of_rows is None) else []
    along = [] if of_rows is None else [count // rows.groups if lead else count]
    return [*stack, *along, *([] if of_columns is None else [across])] or [1]


# Quantise and dequantise


def _values(
    x: Tensor, q: Quantization, columnwise: bool, group_sizes: Tensor | None
) -> tuple[Tensor, _Rows]:
    """x [..., R, C] as fp32 [rows, C], zero past the last group, transformed where asked for."""
    rows = _rows(tuple(x.shape), group_sizes, x.device)
    values = torch.where(rows.valid.unsqueeze(1), x.reshape(-1, x.shape[-1]).float(), 0.0)
    if columnwise and q.hadamard == "columnwise":
        return _transform(values, rows)
    return values, rows


def _place(
    codes: Tensor, rows: _Rows, shape: tuple[int, ...], columnwise: bool, layout: Layout
) -> Tensor:
    """[rows, C] codes -> the copy's logical layout, before padding of the pitch."""
    columns = shape[-1]
    if not (columnwise and layout.transposed):
        return codes.view(shape)
    if not rows.ragged:
        return codes.view(*shape[:-2], -1, columns).transpose(-1, -2)
    places, count = rows.places(layout.align)
    result = codes.new_zeros(columns, count)
    result[:, places[rows.valid]] = codes[rows.valid].T
    return result


def _raised(
    block_amax: Tensor, q: Quantization, of_rows: int | None, index: Tensor, rows: _Rows
) -> Tensor:
    """Amaxes of at least epsilon, those of empty groups too, but 0 in blocks of padding."""
    raised = block_amax.clamp(min=q.epsilon)
    if of_rows is None or q.epsilon == 0:
        return raised
    used = torch.zeros_like(block_amax[:, 0], dtype=torch.bool)
    used[index[rows.valid]] = True
    return torch.where(used.unsqueeze(1), raised, 0.0)


def _quantize(
    x: Tensor,
    q: Quantization,
    columnwise: bool,
    group_sizes: Tensor | None,
    layout: Layout,
    scale: Tensor | None,
    amax: Tensor | None,
    rng_state: Tensor | None,
) -> Operand:
    values, rows = _values(x, q, columnwise, group_sizes)
    columns = values.shape[1]
    of_rows, of_columns = q.blocks(columnwise)
    index, count = rows.blocks(of_rows)
    block_amax = _block_amax(values, index, count, of_columns)
    whole = q.block == (None, None)
    if amax is None and (whole or q.tensor_scale):
        of_row = block_amax.amax(1, keepdim=True)[index]
        amax = _gather_max(of_row, rows.group, rows.groups).flatten()
    if amax is not None and whole:
        block_amax = amax.view(-1, 1)
    tensor_scale = values.new_ones(count, 1)
    if amax is not None and q.tensor_scale:
        tensor_scale[index] = _tensor_encode(amax)[rows.group].unsqueeze(1)
    if scale is not None:
        factor, stored = scale.view(-1, 1), torch.ones(()) / scale.view(-1, 1)
    else:
        factor, stored = _scales(
            _raised(block_amax, q, of_rows, index, rows), tensor_scale, q, x.dtype
        )
    noise = None
    if q.rounding == "stochastic" and rng_state is not None:
        noise = _noise(rows, columns, columnwise, rng_state)
    scaled = values * _spread(factor, index, columns, of_columns)
    codes = _encode(scaled, q.format, noise)
    placed = _place(codes, rows, tuple(x.shape), columnwise, layout)
    shape = _scale_shape(rows, x.dim() - 2, count, factor.shape[1], q, columnwise)
    stored = stored.reshape(shape)
    if layout.atoms:
        stored = _into_atoms(stored, _atoms(rows, q, tuple(x.shape), columnwise))
    data = _store(placed, q.format, layout.pitch)
    return Operand(data, stored, q, tuple(x.shape), amax, columnwise, layout)


def quantize(
    x: Tensor,
    q: Quantization,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    group_sizes: Tensor | None = None,
    layout: Layout = LAYOUT,
    scale: Tensor | None = None,
    rowwise_amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    rng_state: Tensor | None = None,
) -> Quantized:
    """Quantise a tensor in one or both orientations.

    Args:
        x: bf16, fp16 or fp32; ``[R, C]``, or a stack of matrices ``[E, R, C]`` that share nothing.
        q: how.
        rowwise, columnwise: the copies that are wanted.
        group_sizes: int64 ``[E]``, rows of each group of a ``[T, C]``; negative ones count as 0.
        layout: of the copies.
        scale: fp32 ``[1]`` or ``[E]``, the scale kept from a history; given for source
            ``history`` alone.
        rowwise_amax, columnwise_amax: fp32 ``[1]`` or ``[E]``, in place of this tensor's own
            (``group_amax``), such as the largest over a process group.
        rng_state: int64 ``[seed, offset]``, for stochastic rounding; see ``advance``.

    Raises:
        ValueError: an argument does not fit the recipe, or is missing for it.
    """
    _check(x, q, columnwise, group_sizes, layout, scale, rng_state)
    rest = (group_sizes, layout, scale)
    return Quantized(
        _quantize(x, q, False, *rest, rowwise_amax, rng_state) if rowwise else None,
        _quantize(x, q, True, *rest, columnwise_amax, rng_state) if columnwise else None,
    )


def _check(
    x: Tensor,
    q: Quantization,
    columnwise: bool,
    group_sizes: Tensor | None,
    layout: Layout,
    scale: Tensor | None,
    rng_state: Tensor | None,
) -> None:
    problems = {
        f"x is bf16, fp16 or fp32, got {x.dtype}": x.dtype
        not in (torch.bfloat16, torch.float16, torch.float32),
        f"x is [R, C] or [E, R, C], got rank {x.dim()}": x.dim() not in (2, 3),
        "rows are grouped in an x of rank 2": group_sizes is not None and x.dim() != 2,
        "the scale is given for source 'history', and only there": (q.source == "history")
        != (scale is not None),
        "stochastic rounding needs rng_state": q.rounding == "stochastic" and rng_state is None,
        "columnwise e2m1 and transformed copies are transposed": columnwise
        and not layout.transposed
        and (q.format == "e2m1" or q.hadamard is not None),
        f"a transform needs an alignment of a multiple of {_RUN}": q.hadamard is not None
        and layout.align % _RUN != 0,
        f"atoms have {_ATOM_ROWS} rows, which align is": layout.atoms
        and layout.align != _ATOM_ROWS,
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(problem)


def _read_codes(operand: Operand, group_sizes: Tensor | None) -> tuple[Tensor, _Rows]:
    """What codes [rows, C] alone stand for, and their rows, which a transform has padded."""
    q, columns = operand.quantization, operand.shape[-1]
    rows = _rows(operand.shape, group_sizes, operand.data.device)
    if operand.columnwise and q.hadamard == "columnwise":
        rows = _padded(rows)
    codes = _load(operand.data, q.format)
    if not (operand.columnwise and operand.layout.transposed):
        codes = codes[..., :columns].reshape(-1, columns)
    elif rows.ragged:
        codes = codes.T[rows.places(operand.layout.align)[0]]
    else:
        length = len(rows.group) // rows.groups
        codes = codes[..., :length].transpose(-1, -2).reshape(-1, columns)
    values = _decode(codes.contiguous(), q.format)
    return torch.where(rows.valid.unsqueeze(1), values, 0.0), rows


def _read(operand: Operand, group_sizes: Tensor | None) -> tuple[Tensor, _Rows]:
    """Values [rows, C] before the tensor scale, and their rows, which a transform has padded."""
    values, rows = _read_codes(operand, group_sizes)
    q, columns = operand.quantization, operand.shape[-1]
    of_rows, of_columns = q.blocks(operand.columnwise)
    index, count = rows.blocks(of_rows)
    across = -(-columns // (of_columns or columns))
    stored = operand.scale
    if operand.layout.atoms:
        places = _atoms(rows, q, operand.shape, operand.columnwise)
        stored = _out_of_atoms(stored, places, count * across)
    scale = _spread(stored.float().view(count, across), index, columns, of_columns)
    return torch.where(rows.valid.unsqueeze(1), values * scale, 0.0), rows


def dequantize(operand: Operand, *, group_sizes: Tensor | None = None) -> Tensor:
    """What a copy stands for: fp32, in the shape of the unquantised tensor; zero past the groups.

    A transform is undone in fp32. A tensor scale is decoded by the reciprocal of the factor it was
    encoded with, at the end: all before it are exact products and sums, so that a compiler that
    contracts them changes nothing.
    """
    values, rows = _read(operand, group_sizes)
    q = operand.quantization
    if operand.columnwise and q.hadamard == "columnwise":
        rows = _rows(operand.shape, group_sizes, values.device)
        values = torch.where(rows.valid.unsqueeze(1), _transform_back(values, rows), 0.0)
    if q.tensor_scale and operand.amax is not None:
        decode = _quotient(1.0, _tensor_encode(operand.amax))
        values = values * decode[rows.group].unsqueeze(1)
    return values.view(operand.shape)


# GEMMs


def _alpha(a: Operand, b: Operand) -> Tensor:
    """[1] or [E], what tensor scales leave for the end of a GEMM."""
    if not (a.quantization.tensor_scale and b.quantization.tensor_scale):
        return a.scale.new_ones(1, dtype=torch.float32)
    if a.amax is None or b.amax is None:
        raise ValueError("an operand with a tensor scale comes with its amax")
    return a.amax * b.amax / _NVFP4_RANGE**2


def _runs_along(operand: Operand, columnwise: bool) -> bool:
    """Whether blocks run so: those as high as wide do in both ways, of codes that lie as rows."""
    rows, columns = operand.quantization.block
    either = rows == columns and not (operand.layout.transposed or operand.layout.atoms)
    return either or operand.columnwise == columnwise


def _check_gemm(a: Operand, b: Operand, a_columnwise: bool, b_columnwise: bool) -> None:
    if not (_runs_along(a, a_columnwise) and _runs_along(b, b_columnwise)):
        raise ValueError("the copies run along another dimension than the GEMM contracts over")
    transformed = [
        operand.columnwise and operand.quantization.hadamard is not None for operand in (a, b)
    ]
    if transformed[0] != transformed[1]:
        raise ValueError("a transformed copy takes another one in its GEMM")
    if a.quantization.tensor_scale != b.quantization.tensor_scale:
        raise ValueError("both operands of a GEMM have a tensor scale, or none")


def gemm_fprop(a: Operand, b: Operand, dtype: torch.dtype, add: Tensor | None = None) -> Tensor:
    """Rowwise x [T, K] @ rowwise weight [N, K].T + add [N] -> [T, N]; fp32, rounded once."""
    _check_gemm(a, b, False, False)
    y = _read(a, None)[0] @ _read(b, None)[0].T * _alpha(a, b)
    return (y if add is None else y + add.float()).to(dtype)


def gemm_dgrad(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Rowwise dy [T, N] @ columnwise weight [N, K] -> [T, K]."""
    _check_gemm(a, b, False, True)
    return (_read(a, None)[0] @ _read(b, None)[0] * _alpha(a, b)).to(dtype)


def gemm_wgrad(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Columnwise dy [T, N].T @ columnwise x [T, K] -> [N, K]."""
    _check_gemm(a, b, True, True)
    return (_read(a, None)[0].T @ _read(b, None)[0] * _alpha(a, b)).to(dtype)


def _rows_by_weights(a: Operand, b: Operand, groups: Tensor, transpose: bool) -> Tensor:
    """Every row of a times its group's matrix of b, fp32; zero past the last group."""
    left, rows = _read(a, groups)
    right = _read(b, None)[0].view(b.shape)
    right = right.transpose(1, 2) if transpose else right
    alpha = _alpha(a, b).expand(rows.groups)
    y = left.new_zeros(left.shape[0], right.shape[2])
    for group in range(rows.groups):
        own = rows.valid & (rows.group == group)
        y[own] = left[own] @ right[group] * alpha[group]
    return y


def grouped_gemm_fprop(
    a: Operand,
    b: Operand,
    groups: Tensor,
    dtype: torch.dtype,
    add: Tensor | None = None,
    add_scales: Tensor | None = None,
) -> Tensor:
    """Rowwise x [T, K], rowwise weight [E, N, K], add [E, N] times add_scales [T] -> [T, N].

    Rows past the groups are zero.
    """
    _check_gemm(a, b, False, False)
    y = _rows_by_weights(a, b, groups, transpose=True)
    if add is not None:
        rows = _rows(a.shape, groups, y.device)
        bias = add.float()[rows.group]
        if add_scales is not None:
            bias = add_scales.unsqueeze(1) * bias
        y = torch.where(rows.valid.unsqueeze(1), y + bias, 0.0)
    return y.to(dtype)


def grouped_gemm_dgrad(a: Operand, b: Operand, groups: Tensor, dtype: torch.dtype) -> Tensor:
    """Rowwise dy [T, N], columnwise weight [E, N, K] -> [T, K]; zero past the groups."""
    _check_gemm(a, b, False, True)
    return _rows_by_weights(a, b, groups, transpose=False).to(dtype)


def grouped_gemm_wgrad(a: Operand, b: Operand, groups: Tensor, dtype: torch.dtype) -> Tensor:
    """Columnwise dy [T, N], columnwise x [T, K] -> [E, N, K]; an empty group gives zeros."""
    _check_gemm(a, b, True, True)
    (left, rows), (right, _) = _read(a, groups), _read(b, groups)
    alpha = _alpha(a, b).expand(rows.groups)
    dw = left.new_zeros(rows.groups, left.shape[1], right.shape[1])
    for group in range(rows.groups):
        own = rows.valid & (rows.group == group)
        dw[group] = left[own].T @ right[own] * alpha[group]
    return dw.to(dtype)


# State of delayed scaling


def delayed_state(q: Quantization, groups: int = 1) -> tuple[Tensor, Tensor]:
    """A new amax history, fp32 ``[history, E]`` of zeros, and scale ``[E]`` of ones."""
    return torch.zeros(q.history, groups), torch.ones(groups)


def delayed_update(
    history: Tensor, scale: Tensor, amax: Tensor, q: Quantization, *, grouped: bool = False
) -> tuple[Tensor, Tensor]:
    """The history and scale after a step; the step itself quantised with the scale before.

    The newest amax goes to slot 0, which is empty between steps; the scale follows the largest of
    the history; then the history rolls towards its start and slot 0 is cleared, so that slot 1
    holds the oldest.

    Args:
        history: fp32 ``[history, E]``.
        scale: fp32 ``[E]``.
        amax: fp32 ``[E]`` of this step, reduced over ranks where they share a scale.
        q: with ``margin``.
        grouped: whether a group whose amax is 0 keeps its history as it is.

    Returns:
        new history and scale; the arguments are left alone.
    """
    current = history.clone()
    current[0] = torch.maximum(current[0], amax)
    largest = current.amax(0)
    wanted = torch.full_like(largest, MAX[q.format]) / largest / 2.0**q.margin
    wanted = torch.where(wanted.isinf(), _FP32_MAX, wanted)
    new_scale = torch.where((largest == 0) | ~largest.isfinite(), scale, wanted)
    rolled = current.roll(-1, dims=0)
    rolled[0] = 0.0
    if grouped:
        rolled = torch.where(current[0] == 0, current, rolled)
    return rolled, new_scale


def join_states(*states: Tensor) -> Tensor:
    """Histories ``[history, E]`` and scales ``[E]`` as rows of one tensor, in their order."""
    return torch.cat([torch.atleast_2d(state) for state in states])


def join_amaxes(*amaxes: Tensor | None) -> Tensor:
    """Amaxes ``[E]``, of which one at least is there, as rows of one tensor; 0 for absent ones."""
    absent = torch.zeros_like(next(each for each in amaxes if each is not None))
    return torch.stack([absent if each is None else each for each in amaxes])


def join_bytes(size: int, *places: tuple[int, Tensor | None]) -> Tensor:
    """Tensors of any type, each from its place on, in one of ``size`` bytes; 0 where there is none.

    One of them at least is there.
    """
    device = next(each.device for _, each in places if each is not None)
    joined = torch.zeros(size, dtype=torch.uint8, device=device)
    for place, tensor in places:
        if tensor is not None:
            joined[place : place + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
    return joined


def bytes_at(joined: Tensor, place: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """A view of one of the tensors that ``join_bytes`` put into one."""
    size = math.prod(shape) * dtype.itemsize
    return joined[place : place + size].view(dtype).view(shape)


# Layouts of scales that kernels read


def _atoms(rows: _Rows, q: Quantization, shape: tuple[int, ...], columnwise: bool) -> Tensor:
    """[..., M / 128, n / 4, 32, 4, 4], the scale of each place, in logical order; -1 for none.

    M are the rows of each matrix, or those of all groups, each of which begins at a multiple of
    128; n are blocks of as many elements as the instruction has a scale for, of which a longer
    block of the recipe's has several.
    """
    columns, stack = shape[-1], shape[:-2]
    of_rows, of_columns = q.blocks(columnwise)
    assert of_rows is not None and of_columns is not None, "only blocks lie in atoms"
    size = 16 if q.scale_dtype == "e4m3" else 32
    across = torch.arange(-(-columns // of_columns), device=rows.first.device)
    block, _ = rows.blocks(of_rows)
    places, count = rows.places(_ATOM_ROWS)
    if not columnwise:
        index = block.new_full((count, len(across)), -1)
        index[places[rows.valid]] = block[rows.valid].unsqueeze(1) * len(across) + across
        index = index.repeat_interleave(of_columns // size, dim=1)
        return _tiled(index.view(*stack, -1, index.shape[1]))
    own = block.new_full((count // of_rows,), -1)
    own[places[rows.valid] // of_rows] = block[rows.valid]
    own = own.repeat_interleave(of_rows // size).view(*stack, 1, -1)
    if not rows.ragged:
        atom = _ATOM_BLOCKS * size
        own = own[..., : -(-rows.extent // atom) * _ATOM_BLOCKS]
    column = across.repeat_interleave(of_columns)[:columns].unsqueeze(1)
    return _tiled(torch.where(own < 0, -1, own * len(across) + column))


def _tiled(index: Tensor) -> Tensor:
    """[..., M, n] -> [..., ceil(M / 128), ceil(n / 4), 32, 4, 4], padded with -1."""
    *stack, lines, blocks = index.shape
    index = pad(index, (0, -blocks % _ATOM_BLOCKS, 0, -lines % _ATOM_ROWS), value=-1)
    part = _ATOM_ROWS // _ATOM_BLOCKS
    wide = index.shape[-1] // _ATOM_BLOCKS
    high = index.shape[-2] // _ATOM_ROWS
    tiles = index.reshape(*stack, high, _ATOM_BLOCKS, part, wide, _ATOM_BLOCKS)
    return tiles.transpose(-4, -2).contiguous()


def _into_atoms(scale: Tensor, places: Tensor) -> Tensor:
    """Scales of one byte in logical order -> in atoms, 0 in places of none."""
    return pad(scale.view(torch.uint8).flatten(), (0, 1))[places].view(scale.dtype)


def _out_of_atoms(scale: Tensor, places: Tensor, count: int) -> Tensor:
    """The inverse: [count], 0 where a block has no place."""
    codes = torch.zeros(count + 1, dtype=torch.uint8, device=scale.device)
    codes[places.flatten()] = scale.view(torch.uint8).flatten()
    return codes[:count].view(scale.dtype)


def token_major(scale: Tensor, group_sizes: Tensor | None = None, align: int = 4) -> Tensor:
    """fp32 scales of rows [T, n] -> [n, align * (T // align + E)].

    Groups lie where they do in transposed data; rows without groups are one.  Padding is 1.
    """
    rows = _token_rows(tuple(scale.shape), group_sizes, scale.device)
    places, count = rows.places(align)
    result = scale.new_ones(scale.shape[1], count)
    result[:, places[rows.valid]] = scale[rows.valid].T
    return result


def row_major(
    scale: Tensor, tokens: int, group_sizes: Tensor | None = None, align: int = 4
) -> Tensor:
    """The inverse of ``token_major``: [T, n], 1 past the groups."""
    rows = _token_rows((tokens, scale.shape[0]), group_sizes, scale.device)
    places, _ = rows.places(align)
    read = scale[:, torch.where(rows.valid, places, 0)].T
    return torch.where(rows.valid.unsqueeze(-1), read, 1).contiguous()


def _token_rows(shape: tuple[int, ...], group_sizes: Tensor | None, device: torch.device) -> _Rows:
    alone = torch.full((1,), shape[0], device=device)
    return _rows(shape, alone if group_sizes is None else group_sizes, device)
