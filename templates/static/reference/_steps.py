"""The steps that plans are made of, in plain PyTorch.

Operands of 16 bits are widened to fp32 before any arithmetic, every result is rounded once to its
buffer's type.  float64 stays float64, so that the same program serves as its own exact oracle.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

Rows = TypeVar("Rows", Tensor, tuple[Tensor, ...])

IfAsked = Tensor
"""A tensor where flags ask for a step that reads it, else None; type checkers follow no flags."""

ABSENT: Any = None
"""What stands for a result until the flags ask for the step that gives it."""


def wide(x: Tensor) -> Tensor:
    """x in the type that arithmetic is done in: fp32, or float64 if it came so."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def per_row(scales: Tensor) -> Tensor:
    """[T] as [T, 1], to multiply rows.

    Contiguous, as what `wide` converts is: functions of PyTorch round otherwise where it is not.
    """
    return wide(scales).contiguous().unsqueeze(-1)


def halves(x: Tensor, block: int = 0) -> tuple[Tensor, Tensor]:
    """[..., 2 D] -> its first and second half, [..., D] each, widened.

    With `block` they alternate: so many columns of the first, so many of the second, and so on.
    """
    if not block:
        first, second = wide(x).chunk(2, dim=-1)
        return first, second
    first, second = wide(x).unflatten(-1, (-1, 2, block)).unbind(-2)
    return first.flatten(-2), second.flatten(-2)


def join(first: Tensor, second: Tensor, dtype: torch.dtype, block: int = 0) -> Tensor:
    """[..., D] twice -> [..., 2 D], rounded to `dtype`; inverse of `halves`."""
    if not block:
        return torch.cat((first, second), dim=-1).to(dtype)
    blocks = [half.unflatten(-1, (-1, block)) for half in (first, second)]
    return torch.stack(blocks, dim=-2).flatten(-3).to(dtype)


def rows(x: Tensor) -> Tensor:
    """[..., K] -> [T, K]."""
    return x.reshape(-1, x.shape[-1])


def with_leading(y: Tensor, like: Tensor) -> Tensor:
    """[T, N] with the leading dimensions of `like`."""
    return y.reshape(*like.shape[:-1], y.shape[-1])


def row_sum(x: Tensor) -> Tensor:
    """[T, D] -> [T], kept in the type it was computed in."""
    return x.sum(dim=-1)


def bounds(group_sizes: Tensor, tokens: int) -> list[tuple[int, int]]:
    """First and last row of every group: sizes count from 0, offsets end at `tokens`."""
    result, start = [], 0
    for size in group_sizes.tolist():
        end = min(start + max(size, 0), tokens)
        result.append((start, end))
        start = end
    return result


def within(results: Rows, groups: Tensor) -> Rows:
    """The same, but for rows past the last group, which are zero."""
    if isinstance(results, tuple):
        return tuple(within(each, groups) for each in results)
    end = bounds(groups, results.shape[0])[-1][1]
    return torch.cat((results[:end], torch.zeros_like(results[end:])))


def gemm_fprop(
    a: Tensor, b: Tensor, add: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """a [..., K] @ b [N, K].T + add [N] -> [..., N]."""
    y = wide(a) @ wide(b).T
    return (y if add is None else y + wide(add)).to(dtype or a.dtype)


def gemm_dgrad(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """a [..., N] @ b [N, K] -> [..., K]."""
    return (wide(a) @ wide(b)).to(dtype or a.dtype)


def gemm_wgrad(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """a [..., N] and b [..., K] -> a.T @ b [N, K], summed over all leading dimensions."""
    return (wide(a).flatten(0, -2).T @ wide(b).flatten(0, -2)).to(dtype or a.dtype)


def add(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    d: Tensor | None = None,
    e: Tensor | None = None,
    f: Tensor | None = None,
    g: Tensor | None = None,
    h: Tensor | None = None,
) -> Tensor:
    """The sum from left to right in fp32, rounded once to the type of a."""
    total = wide(a) + wide(b)
    for more in (c, d, e, f, g, h):
        total = total if more is None else total + wide(more)
    return total.to(a.dtype)


def column_sum(a: Tensor, scales: Tensor | None = None) -> Tensor:
    """a [..., N], its rows times scales [...] -> [N]."""
    rows = wide(a) if scales is None else scales[..., None] * wide(a)
    return rows.reshape(-1, a.shape[-1]).sum(dim=0).to(a.dtype)


def grouped_gemm_fprop(
    a: Tensor,
    b: Tensor,
    groups: Tensor,
    add: Tensor | None = None,
    add_scales: Tensor | None = None,
) -> Tensor:
    """a [T, K], b [E, N, K], add [E, N] times add_scales [T] -> [T, N]; zero past the groups."""
    y = a.new_zeros(a.shape[0], b.shape[1])
    for group, (start, end) in enumerate(bounds(groups, a.shape[0])):
        if end > start:
            bias = None if add is None else wide(add[group])
            if bias is not None and add_scales is not None:
                bias = per_row(add_scales[start:end]) * bias
            y[start:end] = gemm_fprop(a[start:end], b[group], bias)
    return y


def grouped_gemm_dgrad(a: Tensor, b: Tensor, groups: Tensor) -> Tensor:
    """a [T, N], b [E, N, K] -> [T, K]; rows past the last group are zero."""
    dx = a.new_zeros(a.shape[0], b.shape[2])
    for group, (start, end) in enumerate(bounds(groups, a.shape[0])):
        if end > start:
            dx[start:end] = gemm_dgrad(a[start:end], b[group])
    return dx


def grouped_gemm_wgrad(
    a: Tensor, b: Tensor, groups: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """a [T, N], b [T, K] -> [E, N, K]; an empty group gives zeros."""
    dw = a.new_zeros(groups.shape[0], a.shape[1], b.shape[1], dtype=dtype)
    for group, (start, end) in enumerate(bounds(groups, a.shape[0])):
        if end > start:
            dw[group] = gemm_wgrad(a[start:end], b[start:end], dtype)
    return dw


def group_sum(a: Tensor, groups: Tensor, scales: Tensor | None = None) -> Tensor:
    """a [T, N], its rows times scales [T] -> [E, N], summed over the rows of each group."""
    db = a.new_zeros(groups.shape[0], a.shape[1])
    for group, (start, end) in enumerate(bounds(groups, a.shape[0])):
        rows = a[start:end]
        if scales is not None:
            rows = per_row(scales[start:end]) * wide(rows)
        db[group] = column_sum(rows)
    return db


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """a [T, N], b [N] -> [T]: each row times b, in fp32."""
    return (wide(a) * wide(b)).sum(dim=-1)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a [T], b [N] -> [T, N] in the type of b."""
    return (a[:, None] * wide(b)).to(b.dtype)


def group_row_dot(a: Tensor, b: Tensor | None, groups: Tensor, add: Tensor | None = None) -> Tensor:
    """a [T, N], b [E, N], add [T] -> [T]: each row times its group's, and nothing past the groups.

    Without b, as with one of zeros.
    """
    dots = wide(a).new_zeros(a.shape[0]) if add is None else add.clone()
    for group, (start, end) in enumerate(bounds(groups, a.shape[0])):
        if b is not None:
            dots[start:end] += (wide(a[start:end]) * wide(b[group])).sum(dim=-1)
    return dots
