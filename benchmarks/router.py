"""Routers, logits included, against torch eager and compiled, and a copy of the same bytes; and how
much longer ours takes than the product that gives the logits.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import sub
from typing import Any

import bandwidth
import common
import torch
from bandwidth import Call
from common import OURS, Case, Row
from torch import Tensor

CHOICES = 8
SIZES = ((16384, 2048, 128), (16384, 2048, 256), (8192, 2048, 128), (8192, 7168, 256))
"""Tokens, width and experts: Qwen3-30B, Qwen3.5, and the last of DeepSeek-V3's size."""
QUICK_SIZES = ((64, 64, 16),)
PRODUCT = "product alone"
SCALARS = (1e-20, 0.0, 1.0, 1e-2, 1e-3, 1)
"""eps, least sum, scale, the coefficients of both losses, and of how many sequences."""


def _torch(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What models write: logits of 16 bits, and fp32 from there."""
    logits = (x @ weight.T).float()
    probabilities = logits.softmax(-1)
    values, ids = probabilities.topk(CHOICES)
    probs = values / values.sum(-1, keepdim=True)
    experts, rows = weight.shape[0], x.shape[0]
    counts = torch.zeros(experts, device=x.device).scatter_add(
        0, ids.flatten(), torch.ones((), device=x.device).expand(ids.numel())
    )
    factor = SCALARS[3] * experts / (CHOICES * rows * rows)
    aux_loss = factor * (counts * probabilities.sum(0)).sum()
    z_loss = SCALARS[4] * logits.logsumexp(-1).square().mean()
    return probs, aux_loss, z_loss, ids, counts


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Logits in fp32."""
    if common.DEVICE == "cpu":  # where PyTorch has no such product
        return x.float() @ weight.float().T
    return torch.mm(x, weight.T, out_dtype=torch.float32)


def _above_product(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows, of which ours says how much longer than the product it takes, round by round."""
    (product,) = (row for row in rows if row.contender == PRODUCT)
    for row in rows:
        if row.contender == OURS:
            longer = statistics.median(map(sub, row.samples, product.samples))
            row = replace(row, extra={**row.extra, "us_above_product": 1e3 * longer})
        yield row


def _rows(package: Any, tokens: int, hidden: int, experts: int) -> Iterator[Row]:
    forward = common.op(package, "router__bf16_forward")
    backward = common.op(package, "router__bf16_backward")
    x = common.normal(tokens, hidden)
    weight = (common.normal(experts, hidden).float() * hidden**-0.5).bfloat16()
    given = (x, weight, None, None, None, True, True, False, *SCALARS)
    torch.compiler.reset()
    compiled = torch.compile(_torch, fullgraph=True, dynamic=False)
    leaves = (x.detach().requires_grad_(), weight.detach().requires_grad_())
    case = f"router forward {tokens} x {hidden} x {experts}"
    results = forward(*given)
    logits, ids, counts = results[5], results[3], results[4]
    common.require_close(case, logits, x.float() @ weight.float().T)
    common.require_close(case, results[0].sum(-1), torch.ones(tokens, device=x.device))
    moved = 2 * (x.numel() + weight.numel()) + 8 * logits.numel() + 8 * ids.numel()
    forwards: dict[str, Call] = {
        OURS: lambda: forward(*given),
        "torch": lambda: _torch(*leaves),
        "torch compiled": lambda: compiled(*leaves),
    }
    forwards[PRODUCT] = lambda: _product(x, weight)
    yield from _above_product([*bandwidth.measure(case, forwards, moved)])
    case = f"router backward {tokens} x {hidden} x {experts}"
    dprobs = torch.randn(tokens, CHOICES, device=x.device)
    one = torch.ones((), device=x.device)
    kept = (x, None, weight, logits, ids, counts, True, True, False, *SCALARS)
    made = {"torch": _torch(*leaves), "torch compiled": compiled(*leaves)}
    backwards: dict[str, Call] = {
        OURS: lambda: backward(dprobs, one, one, *kept),
        **{
            name: partial(torch.autograd.grad, y[:3], leaves, (dprobs, one, one), retain_graph=True)
            for name, y in made.items()
        },
    }
    moved = 4 * (x.numel() + weight.numel()) + 8 * logits.numel() + 8 * ids.numel()
    yield from bandwidth.measure(case, backwards, moved)


def router(*, quick: bool = False) -> Iterator[Case]:
    """Both directions, with both losses."""
    package = common.bundle()
    for tokens, hidden, experts in QUICK_SIZES if quick else SIZES:
        size = f"{tokens} x {hidden} x {experts}"
        yield Case(f"router {size}", partial(_rows, package, tokens, hidden, experts))
