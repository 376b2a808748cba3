"""Activations against the bandwidth of a device copy, and against torch eager and compiled."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import torch
from common import OURS, Case, Row
from torch import Tensor

ROWS, COLUMNS = 32768, 7168

Formula = Callable[..., Any]


def _silu(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x.float()).to(x.dtype)


def _silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    wide = x.float()
    sigmoid = torch.sigmoid(wide)
    return (dy.float() * sigmoid * (1 + wide * (1 - sigmoid))).to(x.dtype)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def _swiglu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((dgate, dy * gate * sigmoid), dim=-1).to(x.dtype)


def _swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return _swiglu_gradient(dy.float(), x)


def _scaled_swiglu(x: Tensor, scales: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up * scales[:, None]).to(x.dtype)


def _scaled_swiglu_backward(dy: Tensor, x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.float().chunk(2, dim=-1)
    dscales = (dy.float() * torch.nn.functional.silu(gate) * up).sum(-1)
    return _swiglu_gradient(dy.float() * scales[:, None], x), dscales


@dataclass(frozen=True)
class Activation:
    """One activation; bytes per element of y in each direction, as its plan counts them."""

    name: str
    gated: bool
    forward: Formula
    backward: Formula
    forward_bytes: int
    backward_bytes: int
    row_bytes: tuple[int, int] = (0, 0)  # of the scales, per row


ACTIVATIONS = (
    Activation("silu", False, _silu, _silu_backward, 4, 6),
    Activation("swiglu", True, _swiglu, _swiglu_backward, 6, 10),
    Activation("scaled_swiglu", True, _scaled_swiglu, _scaled_swiglu_backward, 6, 10, (4, 8)),
)


def _first(result: Any) -> Tensor:
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


def _measure(
    case: str, ours: Formula, formula: Formula, arguments: list[Any], moved: int, copy: float
) -> list[Row]:
    # Only an op with several gradients asks which of them are wanted.
    flags = (True, True) if case == "scaled_swiglu backward" else ()
    compiled = torch.compile(formula, fullgraph=True, dynamic=False)
    common.require_close(case, _first(ours(*arguments, *flags)), _first(formula(*arguments)))
    samples = common.compare(
        {
            OURS: lambda _: ours(*arguments, *flags),
            "torch eager": lambda _: formula(*arguments),
            "torch compiled": lambda _: compiled(*arguments),
        }
    )
    return [
        common.row(
            *(case, name, "ms", times),
            floor=moved / copy * 1e3,
            rate=moved / statistics.median(times) / 1e9,
            rate_unit="TB/s",
            fraction=moved / statistics.median(times) * 1e3 / copy,
        )
        for name, times in samples.items()
    ]


def _directions(package: Any, activation: Activation, copy: float) -> list[Row]:
    x = common.normal(ROWS, COLUMNS * (2 if activation.gated else 1))
    dy = common.normal(ROWS, COLUMNS)
    scales = [torch.rand(ROWS, device=common.DEVICE)] if any(activation.row_bytes) else []
    forward = common.op(package, f"{activation.name}__bf16_forward")
    backward = common.op(package, f"{activation.name}__bf16_backward")
    moved = [
        ROWS * (COLUMNS * each + per_row)
        for each, per_row in zip(
            (activation.forward_bytes, activation.backward_bytes), activation.row_bytes, strict=True
        )
    ]
    return [
        *_measure(
            f"{activation.name} forward", forward, activation.forward, [x, *scales], moved[0], copy
        ),
        *_measure(
            *(f"{activation.name} backward", backward, activation.backward, [dy, x, *scales]),
            *(moved[1], copy),
        ),
    ]


def pointwise() -> Iterator[Case]:
    """Every activation in both directions."""
    package, copy = common.bundle(), common.copy_rate()
    for each in ACTIVATIONS:
        yield Case(each.name, partial(_directions, package, each, copy))
