"""Dropout against a device copy of the same bytes, and against torch eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import bandwidth
import common
import torch
from bandwidth import Call
from common import OURS, Case, Row
from torch import Tensor
from torch.nn import functional

P = 0.1
SIZES = ((4096, 2048), (4096, 8192), (16384, 4096), (16384, 16384), (65536, 2048), (65536, 8192))
QUICK_SIZES = ((64, 256),)
SEED, OFFSET = 7, 1
SHARE = 0.02
"""By how much the share of zeros may differ from `P`."""


def _torch(x: Tensor) -> Tensor:
    return functional.dropout(x, P)


def _require_dropped(case: str, x: Tensor, y: Tensor) -> None:
    """Elements are zero with probability `P`, and the others divided by 1 - P.

    Raises:
        SystemExit: they are not.
    """
    zero = y == 0
    common.require_close(case, y, (x.float() / (1 - P)).masked_fill(zero, 0.0))
    share = float(zero.float().mean())
    if abs(share - P) > SHARE:
        raise SystemExit(f"{case}: {share:.4f} of the elements are zero, expected {P}")


def _backwards(compiled: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> dict[str, Call]:
    """Backwards of graphs that are kept, so that each call runs them alone."""
    leaf = x.detach().requires_grad_()
    made = {"torch": _torch(leaf), "torch compiled": compiled(leaf)}
    return {
        name: partial(torch.autograd.grad, y, leaf, dy, retain_graph=True)
        for name, y in made.items()
    }


def _both(package: Any, rows: int, width: int) -> Iterator[Row]:
    forward = common.op(package, "dropout__bf16_forward")
    backward = common.op(package, "dropout__bf16_backward")
    x, dy = common.normal(rows, width), common.normal(rows, width)
    random = torch.tensor([SEED, OFFSET], device=common.DEVICE)
    torch.compiler.reset()
    compiled = torch.compile(_torch, fullgraph=True, dynamic=False)
    leaf = x.detach().requires_grad_()  # so that torch keeps a mask, as ours does
    y, mask = forward(x, random, True, P)
    moved = 4 * x.numel() + mask.numel()
    case = f"dropout forward {rows} x {width}"
    _require_dropped(case, x, y)
    forwards: dict[str, Call] = {
        OURS: lambda: forward(x, random, True, P),
        "torch": lambda: _torch(leaf),
        "torch compiled": lambda: compiled(leaf),
    }
    yield from bandwidth.measure(case, forwards, moved)
    case = f"dropout backward {rows} x {width}"
    kept = (dy.float() / (1 - P)).masked_fill(y == 0, 0.0)
    common.require_close(case, backward(dy, mask, P), kept)
    del kept, y
    backwards = {OURS: lambda: backward(dy, mask, P), **_backwards(compiled, x, dy)}
    yield from bandwidth.measure(case, backwards, moved)


def dropout(*, quick: bool = False) -> Iterator[Case]:
    """Both directions, at widths and rows of models."""
    package = common.bundle()
    for rows, width in QUICK_SIZES if quick else SIZES:
        yield Case(f"dropout {rows} x {width}", partial(_both, package, rows, width))
