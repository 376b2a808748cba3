"""Softmax and cross entropy against the bandwidth of a device copy, torch eager and compiled."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import torch
from common import OURS, Case, Row
from torch import Tensor
from torch.nn import functional

Formula = Callable[..., Tensor]

SCALE = 0.125
ROWS = ((65536, 2048), (32768, 4096), (16384, 8192), (8192, 16384), (4096, 32768))
"""Rows and columns of 256 MiB each: every team, and rows that are read twice."""
MATRICES, QUERIES = 32, 2048
LOGITS = ((16384, 32000), (8192, 128256))
IGNORED = -100


def _softmax(x: Tensor) -> Tensor:
    return functional.softmax(SCALE * x.float(), dim=-1).to(x.dtype)


def _causal(x: Tensor, left_out: Tensor) -> Tensor:
    scores = (SCALE * x.float()).masked_fill(left_out, -torch.inf)
    return functional.softmax(scores, dim=-1).to(x.dtype)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    scores = (SCALE * x.float()).masked_fill(mask.bool().unsqueeze(1), -torch.inf)
    return functional.softmax(scores, dim=-1).to(x.dtype)


def _softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    gradients, values = dy.float(), y.float()
    dot = (gradients * values).sum(dim=-1, keepdim=True)
    return (SCALE * (values * (gradients - dot))).to(y.dtype)


def _losses(x: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(x.float(), targets, reduction="none", ignore_index=IGNORED)


def _losses_backward(dloss: Tensor, x: Tensor, targets: Tensor, lse: Tensor) -> Tensor:
    probabilities = torch.exp(x.float() - lse[:, None])
    hit = torch.arange(x.shape[-1], device=x.device) == targets[:, None]
    return (dloss[:, None] * (probabilities - hit.float())).to(x.dtype)


@dataclass(frozen=True)
class Problem:
    """One op on tensors of one size.

    Attributes:
        name: of the case.
        op: of the bundle.
        formula: the same in torch.
        tensors: that both take.
        own: that only the formula takes, behind these.
        scalars: that only the op takes, behind them.
        moved: bytes that are read and written, each once.
    """

    name: str
    op: str
    formula: Formula
    tensors: tuple[Tensor, ...]
    moved: int
    own: tuple[Tensor, ...] = ()
    scalars: tuple[Any, ...] = (SCALE,)


def _first(result: Any) -> Tensor:
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


def _measure(package: Any, copy: float, problem: Callable[[], Problem]) -> list[Row]:
    p = problem()
    compiled = torch.compile(p.formula, fullgraph=True, dynamic=False)
    ours, words, own = common.op(package, p.op), (*p.tensors, *p.scalars), (*p.tensors, *p.own)
    common.require_close(p.name, _first(ours(*words)), p.formula(*own))
    samples: Mapping[str, Any] = common.compare(
        {
            OURS: lambda _: ours(*words),
            "torch eager": lambda _: p.formula(*own),
            "torch compiled": lambda _: compiled(*own),
        }
    )
    return [
        common.row(
            *(p.name, name, "ms", times),
            floor=p.moved / copy * 1e3,
            rate=p.moved / statistics.median(times) / 1e9,
            rate_unit="TB/s",
            fraction=p.moved / statistics.median(times) * 1e3 / copy,
        )
        for name, times in samples.items()
    ]


def _of_rows(rows: int, columns: int) -> Problem:
    x = common.normal(rows, columns, scale=8)
    name, moved = f"softmax {rows}x{columns} forward", 4 * x.numel()
    return Problem(name, "softmax__bf16_forward", _softmax, (x,), moved)


def _of_rows_backward(rows: int, columns: int) -> Problem:
    y, dy = _softmax(common.normal(rows, columns, scale=8)), common.normal(rows, columns)
    name, moved = f"softmax {rows}x{columns} backward", 6 * y.numel()
    return Problem(name, "softmax__bf16_backward", _softmax_backward, (dy, y), moved)


def _of_causal_rows() -> Problem:
    """Half of x is left out, and need not be read."""
    x = common.normal(MATRICES, QUERIES, QUERIES, scale=8)
    left_out = torch.ones(QUERIES, QUERIES, dtype=torch.bool, device=common.DEVICE).triu(1)
    name, moved = "causal_softmax forward", 3 * x.numel()
    op = "causal_softmax__bf16_forward"
    return Problem(name, op, _causal, (x,), moved, own=(left_out,))


def _of_masked_rows() -> Problem:
    x = common.normal(2, MATRICES // 2, QUERIES, QUERIES, scale=8)
    mask = (torch.rand(2, QUERIES, QUERIES, device=common.DEVICE) < 0.5).to(torch.uint8)
    name, moved = "masked_softmax forward", 4 * x.numel() + mask.numel()
    return Problem(name, "masked_softmax__bf16_forward", _masked, (x, mask), moved)


def _of_logits(rows: int, columns: int) -> Problem:
    x = common.normal(rows, columns, scale=4)
    targets = torch.randint(columns, (rows,), device=common.DEVICE)
    name, moved = f"cross_entropy {rows}x{columns} forward", 2 * x.numel() + 16 * rows
    op, scalars = "cross_entropy__bf16_forward", (True, IGNORED, 0.0, 0.0)
    return Problem(name, op, _losses, (x, targets), moved, scalars=scalars)


def _of_logits_backward(rows: int, columns: int) -> Problem:
    x = common.normal(rows, columns, scale=4)
    targets = torch.randint(columns, (rows,), device=common.DEVICE)
    dloss = torch.rand(rows, device=common.DEVICE)
    tensors = (dloss, x, targets, torch.logsumexp(x.float(), dim=-1))
    name, moved = f"cross_entropy {rows}x{columns} backward", 4 * x.numel() + 16 * rows
    op, scalars = "cross_entropy__bf16_backward", (IGNORED, 0.0, 0.0)
    return Problem(name, op, _losses_backward, tensors, moved, scalars=scalars)


def softmax() -> Iterator[Case]:
    """Every op and direction; tensors of a case are made when it is measured."""
    package, copy = common.bundle(), common.copy_rate()
    problems: dict[str, Callable[[], Problem]] = {}
    for rows, columns in ROWS:
        problems[f"softmax {rows}x{columns} forward"] = partial(_of_rows, rows, columns)
        problems[f"softmax {rows}x{columns} backward"] = partial(_of_rows_backward, rows, columns)
    problems["causal_softmax forward"] = _of_causal_rows
    problems["masked_softmax forward"] = _of_masked_rows
    for rows, columns in LOGITS:
        name = f"cross_entropy {rows}x{columns}"
        problems[f"{name} forward"] = partial(_of_logits, rows, columns)
        problems[f"{name} backward"] = partial(_of_logits_backward, rows, columns)
    for name, problem in problems.items():
        yield Case(name, partial(_measure, package, copy, problem))
