"""Rotary embeddings: pairs of a head's elements, rotated by angles of their row, in plain PyTorch.

All arithmetic is in fp32, and every result is rounded once; float64 stays float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _steps as steps


def rotate_forward(a: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """a [..., N] by the angles whose cosines and sines are [..., P] -> [..., N].

    N is a number of heads, 2 P elements each.  Pair i of a head is its elements 2 i and 2 i + 1
    where they are interleaved, otherwise i and i + P.
    """
    pairs = cos.shape[-1]
    split = (-1, pairs, 2) if interleaved else (-1, 2, pairs)
    one, other = steps.wide(a).unflatten(-1, split).unbind(-1 if interleaved else -2)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated = torch.stack((one * c - other * s, other * c + one * s), -1 if interleaved else -2)
    return rotated.flatten(-3).to(a.dtype)


def rotate_inverse(a: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The same by the negative angles: the inverse of `rotate_forward`, and its gradient."""
    return rotate_forward(a, cos, -sin, interleaved=interleaved)


def part(
    a: Tensor, cos: Tensor, sin: Tensor, *, queries_per_key: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """a [..., (R + 2) V] -> queries [..., R V] and keys [..., V], rotated, and values [..., V].

    R is ``queries_per_key``; a has the heads of queries first, then those of keys, then of values.
    """
    width = a.shape[-1] // (queries_per_key + 2)
    queries, keys, values = a.split((queries_per_key * width, width, width), -1)
    return (
        rotate_forward(queries, cos, sin, interleaved=interleaved),
        rotate_forward(keys, cos, sin, interleaved=interleaved),
        values.clone(memory_format=torch.contiguous_format),
    )


def pack(
    grad: Tensor,
    grad_keys: Tensor,
    grad_values: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    queries_per_key: int,
    interleaved: bool,
) -> Tensor:
    """The gradient of `part`: [..., R V] and twice [..., V] -> [..., (R + 2) V]."""
    queries = rotate_inverse(grad, cos, sin, interleaved=interleaved)
    keys = rotate_inverse(grad_keys, cos, sin, interleaved=interleaved)
    return torch.cat((queries, keys, grad_values), -1)
