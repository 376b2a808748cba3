"""The whole expert MLP, forward and backward, against torch compiled with torch._grouped_mm."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import shapes
import torch
from common import OURS, Row
from torch import Tensor

DENSE = 8192

Function = Callable[..., Tensor]


def _torch_mlp(x: Tensor, fc1: Tensor, fc2: Tensor, probs: Tensor, ends: Tensor) -> Tensor:
    h = torch._grouped_mm(x, fc1.transpose(-2, -1), offs=ends)
    gate, up = h.float().chunk(2, dim=-1)
    a = (torch.nn.functional.silu(gate) * up * probs[:, None]).to(x.dtype)
    return torch._grouped_mm(a, fc2.transpose(-2, -1), offs=ends)


def _leaves(shape: shapes.Expert) -> list[Tensor]:
    hidden, inner = shape.hidden, shape.intermediate
    return [
        common.normal(shape.tokens, hidden).requires_grad_(),
        common.normal(shape.groups, 2 * inner, hidden, scale=hidden**-0.5).requires_grad_(),
        common.normal(shape.groups, hidden, inner, scale=inner**-0.5).requires_grad_(),
        torch.rand(shape.tokens, device=common.DEVICE).requires_grad_(),
    ]


def _step(function: Function, leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    y = function(*leaves)
    return (y.detach(), *torch.autograd.grad(y, leaves, dy))


def _run(step: Callable[[], Any], _: int) -> Any:
    """One step; its tensors exceed every cache, so there is one set of them."""
    return step()


def _peak_gib(step: Callable[[], Any]) -> float:
    """Memory in use at the worst moment of one step, above what the inputs take."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _floor(shape: shapes.Expert, dense_rate: float, copy_rate: float) -> float:
    """Milliseconds for the products at the dense rate, then the activation's bytes at the copy's.

    The activation reads h and writes a, its gradient reads h and da and writes dh.
    """
    products = 18 * shape.tokens * shape.hidden * shape.intermediate / dense_rate
    activation = shape.tokens * shape.intermediate * (2 * 3 + 2 * 5) / copy_rate
    return 1e3 * (products + activation)


def measure(package: Any, shape: shapes.Expert, copy_rate: float) -> list[Row]:
    """Check all gradients, then time a forward and backward of each in turns."""
    sizes = shapes.splits(shape.groups, shape.tokens)
    ends = sizes.cumsum(0).to(torch.int32)
    ours = package.grouped_mlp__bf16.grouped_mlp
    compiled = torch.compile(_torch_mlp, fullgraph=True, dynamic=False)
    functions: dict[str, Function] = {
        OURS: lambda x, fc1, fc2, probs: ours(x, fc1, fc2, sizes, probs),
        "torch compiled": lambda x, fc1, fc2, probs: compiled(x, fc1, fc2, probs, ends),
    }
    leaves, dy = _leaves(shape), common.normal(shape.tokens, shape.hidden)
    found = {name: _step(function, leaves, dy) for name, function in functions.items()}
    for got, expected in zip(*found.values(), strict=True):
        common.require_close(shape.name, got, expected, 2e-2)
    found.clear()
    torch.cuda.empty_cache()
    steps = {name: partial(_step, function, leaves, dy) for name, function in functions.items()}
    peaks = {name: _peak_gib(step) for name, step in steps.items()}
    a, b = common.normal(DENSE, DENSE), common.normal(DENSE, DENSE)
    contenders: dict[str, common.Contender] = {
        name: partial(_run, step) for name, step in steps.items()
    }
    samples = common.compare({**contenders, "dense": lambda _: a @ b.t()}, seconds=0.15)
    dense_rate = 2 * DENSE**3 / statistics.median(samples.pop("dense")) * 1e3
    flops = 18 * shape.tokens * shape.hidden * shape.intermediate
    return [
        common.row(
            *(shape.name, name, "ms", times),
            floor=_floor(shape, dense_rate, copy_rate),
            rate=flops / statistics.median(times) / 1e9,
            rate_unit="TFLOP/s",
            fraction=flops / statistics.median(times) * 1e3 / dense_rate,
            extra={"peak_gib": peaks[name], "dense_tflops": dense_rate / 1e12},
        )
        for name, times in samples.items()
    ]


def mlp() -> list[Row]:
    """The expert MLP of three models."""
    package, copy_rate = common.bundle(), common.copy_rate()
    rows = []
    for shape in shapes.EXPERTS:
        rows += measure(package, shape, copy_rate)
        torch.cuda.empty_cache()
    return rows
