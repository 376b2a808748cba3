"""Random FP8 operands in the layouts of gemm_fp8.h, and the same values in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.build import Format, Kind, Scaling, Target

DTYPES = {Format.E4M3: torch.float8_e4m3fn, Format.E5M2: torch.float8_e5m2}
NAN_CODE = 0x7F  # in both formats
BLOCK = 128  # of Scaling.BLOCK
ALIGNMENT = 32  # of groups in padded tokens
Bounds = Sequence[tuple[int, int]]


def blocks(length: int, block: int = BLOCK) -> int:
    """Blocks that it takes to cover a length."""
    return -(-length // block)


def bounds(splits: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    """First token and end of every group: negative sizes count as 0, nothing passes the end."""
    found, total = [], 0
    for size in splits:
        begin = min(total, tokens)
        total += max(size, 0)
        found.append((begin, min(total, tokens)))
    return found


@dataclass(frozen=True, slots=True)
class Problem:
    """One GEMM: a kernel's mode and the sizes of its operands.

    Attributes:
        target: the kernel.
        tokens: T, rows of x.
        n: out_features.
        k: in_features.
        groups: first token and end of each; dense: one of all tokens.
        device: where operands lie.
    """

    target: Target
    tokens: int
    n: int
    k: int
    groups: Bounds
    device: str

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.n if self.target.kind is Kind.FPROP else self.k

    @property
    def contraction(self) -> int:
        """Its length, of fprop and dgrad."""
        return self.k if self.target.kind is Kind.FPROP else self.n

    @property
    def end(self) -> int:
        """The first token that belongs to no group."""
        return max((end for _, end in self.groups), default=0)

    @property
    def padded_tokens(self) -> int:
        """Of transposed codes and of scales per token."""
        return ALIGNMENT * (self.tokens // ALIGNMENT + len(self.groups))

    @property
    def token_blocks(self) -> int:
        """Rows of scales whose blocks run along tokens."""
        return self.tokens // BLOCK + len(self.groups)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Of d."""
        if self.target.kind is Kind.WGRAD:
            return len(self.groups), self.n, self.k
        return self.tokens, self.columns

    def padded(self, group: int) -> int:
        """Where a group starts in padded tokens."""
        return ALIGNMENT * (self.groups[group][0] // ALIGNMENT + group)

    def first_block(self, group: int) -> int:
        """Where a group starts in scales whose blocks run along tokens."""
        return self.groups[group][0] // BLOCK + group


# A group's operands in float64, scales applied: [rows, k] and [columns, k].
Values = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Operands:
    """What a kernel reads, and what it means.

    Attributes:
        a, b: uint8 codes, rows of `pitch_a` and `pitch_b` bytes; NaN where nothing may be read.
        scale_a, scale_b: fp32, NaN where nothing may be read.
        per_group: whether tensor scales are one per group.
        values: a group's operands in float64.
    """

    a: Tensor
    b: Tensor
    pitch_a: int
    pitch_b: int
    scale_a: Tensor
    scale_b: Tensor
    per_group: bool
    values: Values

    def copy_from(self, other: Operands) -> None:
        """Other values at the same addresses."""
        for name in ("a", "b", "scale_a", "scale_b"):
            getattr(self, name).copy_(getattr(other, name))


def make(problem: Problem, *, shared_scale: bool = False) -> Operands:
    """Random operands; `shared_scale`: of tensor scaling, one scale for all groups."""
    if problem.target.kind is Kind.WGRAD:
        return _along_tokens(problem, shared_scale)
    return _along_features(problem, shared_scale)


def value(codes: Tensor, fmt: Format) -> Tensor:
    """float64 of codes."""
    return codes.contiguous().view(DTYPES[fmt]).double()


def _codes(shape: tuple[int, ...], fmt: Format, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(DTYPES[fmt]).view(torch.uint8)


def _scales(shape: tuple[int, ...], device: str) -> Tensor:
    """Not powers of two: their products round."""
    spread = torch.rand(shape, device=device).mul(6).sub(3).exp2()
    return torch.rand(shape, device=device) * 1.5 + spread


def _tensor_scales(problem: Problem, shared: bool) -> tuple[Tensor, Tensor]:
    count = 1 if shared else len(problem.groups)
    return _scales((count,), problem.device), _scales((count,), problem.device)


def _of_group(scale: Tensor, group: int) -> Tensor:
    return scale[group % len(scale)].double()


def _pitched(codes: Tensor, pitch: int) -> Tensor:
    """Rows `pitch` bytes apart, NaN behind each."""
    shape = (*codes.shape[:-1], pitch)
    out = torch.full(shape, NAN_CODE, device=codes.device, dtype=torch.uint8)
    out[..., : codes.shape[-1]] = codes
    return out


# ---- fprop and dgrad: the contraction runs along features


def _along_features(problem: Problem, shared_scale: bool) -> Operands:
    target, device = problem.target, problem.device
    a = _codes((problem.tokens, problem.contraction), target.format_a, device)
    a[problem.end :] = NAN_CODE
    weight = _codes((len(problem.groups), problem.n, problem.k), target.format_b, device)
    b = weight if target.kind is Kind.FPROP else weight.transpose(1, 2).contiguous()
    scale_a, scale_b, scaled = _feature_scales(problem, shared_scale)

    def values(group: int) -> tuple[Tensor, Tensor]:
        begin, end = problem.groups[group]
        factor_a, factor_b = scaled(group)
        rows = value(a[begin:end], target.format_a) * factor_a
        return rows, value(b[group], target.format_b) * factor_b

    pitch = 16 * blocks(problem.contraction, 16)
    shared = shared_scale and target.scaling is Scaling.TENSOR
    return Operands(
        _pitched(a, pitch), _pitched(b, pitch), pitch, pitch, scale_a, scale_b, not shared, values
    )


def _feature_scales(problem: Problem, shared: bool) -> tuple[Tensor, Tensor, Values]:
    """Stored scales, and a group's factors that broadcast over its operands."""
    if problem.target.scaling is Scaling.TENSOR:
        a, b = _tensor_scales(problem, shared)
        return a, b, lambda group: (_of_group(a, group), _of_group(b, group))
    if problem.target.scaling is Scaling.ROW:
        return _feature_row_scales(problem)
    return _feature_block_scales(problem)


def _feature_row_scales(problem: Problem) -> tuple[Tensor, Tensor, Values]:
    a = _scales((problem.tokens,), problem.device)
    a[problem.end :] = torch.nan
    b = _scales((len(problem.groups), problem.columns), problem.device)

    def factors(group: int) -> tuple[Tensor, Tensor]:
        begin, end = problem.groups[group]
        return a[begin:end, None].double(), b[group][:, None].double()

    return a, b, factors


def _feature_block_scales(problem: Problem) -> tuple[Tensor, Tensor, Values]:
    shape = (problem.tokens, blocks(problem.contraction))
    by_token = _scales(shape, problem.device)
    a = torch.full((shape[1], problem.padded_tokens), torch.nan, device=problem.device)
    for group, (begin, end) in enumerate(problem.groups):
        at = problem.padded(group)
        a[:, at : at + end - begin] = by_token[begin:end].t()
    b = _scales((len(problem.groups), blocks(problem.n), blocks(problem.k)), problem.device)

    def factors(group: int) -> tuple[Tensor, Tensor]:
        begin, end = problem.groups[group]
        rows = by_token[begin:end].double().repeat_interleave(BLOCK, 1)[:, : problem.contraction]
        weight = b[group].double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        weight = weight[: problem.n, : problem.k]
        return rows, weight if problem.target.kind is Kind.FPROP else weight.t()

    return a, b, factors


# ---- wgrad: the contraction runs along a group's tokens


def _along_tokens(problem: Problem, shared_scale: bool) -> Operands:
    target, device = problem.target, problem.device
    dy = _codes((problem.tokens, problem.n), target.format_a, device)
    x = _codes((problem.tokens, problem.k), target.format_b, device)
    scale_a, scale_b, scaled = _token_scales(problem, shared_scale)

    def values(group: int) -> tuple[Tensor, Tensor]:
        begin, end = problem.groups[group]
        factor_a, factor_b = scaled(group)
        a = value(dy[begin:end], target.format_a) * factor_a
        return a.t(), (value(x[begin:end], target.format_b) * factor_b).t()

    pitch = problem.padded_tokens
    a, b = _transposed(problem, dy), _transposed(problem, x)
    shared = shared_scale and target.scaling is Scaling.TENSOR
    return Operands(a, b, pitch, pitch, scale_a, scale_b, not shared, values)


def _transposed(problem: Problem, codes: Tensor) -> Tensor:
    """[T, C] -> [C, padded tokens]: zeros up to a group's last multiple of 32, NaN beyond."""
    shape = (codes.shape[1], problem.padded_tokens)
    out = torch.full(shape, NAN_CODE, device=codes.device, dtype=torch.uint8)
    for group, (begin, end) in enumerate(problem.groups):
        at, length = problem.padded(group), end - begin
        out[:, at : at + ALIGNMENT * blocks(length, ALIGNMENT)] = 0
        out[:, at : at + length] = codes[begin:end].t()
    return out


def _token_scales(problem: Problem, shared: bool) -> tuple[Tensor, Tensor, Values]:
    """Stored scales, and a group's factors that broadcast over dy and x."""
    count, device = len(problem.groups), problem.device
    if problem.target.scaling is Scaling.TENSOR:
        a, b = _tensor_scales(problem, shared)
        return a, b, lambda group: (_of_group(a, group), _of_group(b, group))
    if problem.target.scaling is Scaling.ROW:
        a, b = _scales((count, problem.n), device), _scales((count, problem.k), device)
        return a, b, lambda group: (a[group].double(), b[group].double())
    return _token_block_scales(problem)


def _token_block_scales(problem: Problem) -> tuple[Tensor, Tensor, Values]:
    a, b = (
        torch.full((problem.token_blocks, width), torch.nan, device=problem.device)
        for width in (problem.n, problem.k)
    )
    for group, (begin, end) in enumerate(problem.groups):
        own = slice(problem.first_block(group), problem.first_block(group) + blocks(end - begin))
        a[own] = _scales(tuple(a[own].shape), problem.device)
        b[own] = _scales(tuple(b[own].shape), problem.device)

    def factors(group: int) -> tuple[Tensor, Tensor]:
        begin, end = problem.groups[group]
        within = torch.arange(end - begin, device=problem.device) // BLOCK
        at = problem.first_block(group) + within
        return a[at].double(), b[at].double()

    return a, b, factors


# ---- reference


def reference(problem: Problem, operands: Operands, bias: Tensor | None = None) -> Tensor:
    """The GEMM in float64; zeros past the groups and for empty ones."""
    out = torch.zeros(problem.result_shape, device=problem.device, dtype=torch.float64)
    for group, (begin, end) in enumerate(problem.groups):
        if end <= begin:
            continue
        a, b = operands.values(group)
        result = a @ b.t()
        if problem.target.kind is Kind.WGRAD:
            out[group] = result
        else:
            out[begin:end] = result if bias is None else result + bias[group].double()
    return out
