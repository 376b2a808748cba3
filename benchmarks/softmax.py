"""Softmax and cross entropy against a device copy of the same bytes, torch, and QuACK."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import bandwidth
import common
import torch
from common import OURS, Case, Row
from torch import Tensor
from torch.nn import functional

Formula = Callable[..., Tensor]

SCALE = 0.125
ROWS = ((65536, 2048), (32768, 4096), (16384, 8192), (8192, 16384), (4096, 32768))
"""Rows and columns of 256 MiB each: every team, and rows that are read twice."""
SMALL_ROWS = ((4096, 2048), (4096, 4096), (4096, 8192))
QUICK_ROWS = ((64, 256),)
BESIDE_QUACK = ((4096, 4096), (32768, 4096), (16384, 8192), (8192, 16384))
MATRICES, QUERIES = 32, 2048
LOGITS = ((16384, 32000), (8192, 128256))
SMALL_LOGITS = ((1024, 32000),)
QUICK_LOGITS = ((64, 256),)
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
        op: of the bundle.
        formula: the same in torch.
        tensors: that both take.
        moved: bytes that are read and written, each once.
        own: tensors that only the formula takes, behind the others.
        scalars: that only the op takes, behind the tensors.
        quack: what QuACK is given; None where it has no such op, or is not asked.
    """

    op: str
    formula: Formula
    tensors: tuple[Tensor, ...]
    moved: int
    own: tuple[Tensor, ...] = ()
    scalars: tuple[Any, ...] = (SCALE,)
    quack: tuple[Any, ...] | None = None

    @property
    def kind(self) -> str:
        """Module and direction."""
        module, _, direction = self.op.rpartition("_")
        return f"{module.removesuffix('__bf16')} {direction}"


def _measure(package: Any, case: str, make: Callable[[], Problem]) -> Iterator[Row]:
    problem = make()
    torch.compiler.reset()
    compiled = torch.compile(problem.formula, fullgraph=True, dynamic=False)
    op, words = common.op(package, problem.op), (*problem.tensors, *problem.scalars)
    own = (*problem.tensors, *problem.own)
    contenders: dict[str, bandwidth.Call] = {
        OURS: lambda: op(*words),
        "torch eager": lambda: problem.formula(*own),
        "torch compiled": lambda: compiled(*own),
    }
    bandwidth.require_results(case, contenders[OURS](), contenders["torch eager"]())
    if problem.quack is not None:
        contenders = bandwidth.with_peers(case, contenders, problem.kind, problem.quack)
    yield from bandwidth.measure(case, contenders, problem.moved)


def _beside(size: tuple[int, ...], *words: Any) -> tuple[Any, ...] | None:
    """What QuACK is given of a softmax, at the sizes where it is asked."""
    return words if size in BESIDE_QUACK else None


def _of_rows(*size: int) -> Problem:
    x = common.normal(*size, scale=8)
    quack = _beside(size, x, SCALE)
    return Problem("softmax__bf16_forward", _softmax, (x,), 4 * x.numel(), quack=quack)


def _of_rows_backward(*size: int) -> Problem:
    y, dy = _softmax(common.normal(*size, scale=8)), common.normal(*size)
    quack = _beside(size, dy, y, SCALE)
    return Problem("softmax__bf16_backward", _softmax_backward, (dy, y), 6 * y.numel(), quack=quack)


def _of_causal_rows(matrices: int, queries: int) -> Problem:
    """Half of x is left out, and need not be read."""
    x = common.normal(matrices, queries, queries, scale=8)
    left_out = torch.ones(queries, queries, dtype=torch.bool, device=common.DEVICE).triu(1)
    moved = 3 * x.numel()
    return Problem("causal_softmax__bf16_forward", _causal, (x,), moved, own=(left_out,))


def _of_masked_rows(matrices: int, queries: int) -> Problem:
    x = common.normal(2, matrices // 2, queries, queries, scale=8)
    mask = (torch.rand(2, queries, queries, device=common.DEVICE) < 0.5).to(torch.uint8)
    moved = 4 * x.numel() + mask.numel()
    return Problem("masked_softmax__bf16_forward", _masked, (x, mask), moved)


def _of_logits(rows: int, columns: int) -> Problem:
    x = common.normal(rows, columns, scale=4)
    targets = torch.randint(columns, (rows,), device=common.DEVICE)
    moved, scalars = 2 * x.numel() + 16 * rows, (True, IGNORED, 0.0, 0.0)
    op, tensors = "cross_entropy__bf16_forward", (x, targets)
    return Problem(op, _losses, tensors, moved, scalars=scalars, quack=tensors)


def _of_logits_backward(rows: int, columns: int) -> Problem:
    x = common.normal(rows, columns, scale=4)
    targets = torch.randint(columns, (rows,), device=common.DEVICE)
    dloss = torch.rand(rows, device=common.DEVICE)
    tensors = (dloss, x, targets, torch.logsumexp(x.float(), dim=-1))
    moved, scalars = 4 * x.numel() + 16 * rows, (IGNORED, 0.0, 0.0)
    op = "cross_entropy__bf16_backward"
    return Problem(op, _losses_backward, tensors, moved, scalars=scalars, quack=tensors)


def _problems(*, quick: bool) -> Iterator[tuple[str, Callable[[], Problem]]]:
    """Names of all cases, and what makes them."""
    for size in QUICK_ROWS if quick else (*ROWS, *SMALL_ROWS):
        name = f"softmax {size[0]}x{size[1]}"
        yield f"{name} forward", partial(_of_rows, *size)
        yield f"{name} backward", partial(_of_rows_backward, *size)
    matrices, queries = (2, 64) if quick else (MATRICES, QUERIES)
    yield "causal_softmax forward", partial(_of_causal_rows, matrices, queries)
    yield "masked_softmax forward", partial(_of_masked_rows, matrices, queries)
    for size in QUICK_LOGITS if quick else (*LOGITS, *SMALL_LOGITS):
        name = f"cross_entropy {size[0]}x{size[1]}"
        yield f"{name} forward", partial(_of_logits, *size)
        yield f"{name} backward", partial(_of_logits_backward, *size)


def softmax(*, quick: bool = False) -> Iterator[Case]:
    """Every op and direction; tensors of a case are made when it is measured."""
    package = common.bundle()
    for name, problem in _problems(quick=quick):
        yield Case(name, partial(_measure, package, name, problem))
