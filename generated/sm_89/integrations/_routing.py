"""Rows of tokens in the order of their experts, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Spread(torch.autograd.Function):
    """A row for each choice of a token, in the order of experts; gradients add in one rounding."""

    @staticmethod
    def forward(
        x: Tensor, order: Tensor, inverse: Tensor, top_k: int, dtype: torch.dtype
    ) -> Tensor:
        return x.to(dtype)[order // top_k]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, order, inverse, ctx.top_k, _ = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(order, inverse)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dx = Gather.apply(*grad_outputs, *ctx.saved_tensors, ctx.top_k, ctx.dtype)
        return dx, None, None, None, None


class Gather(torch.autograd.Function):
    """The sum of the rows of each token, in fp32 and rounded once."""

    @staticmethod
    def forward(
        y: Tensor, order: Tensor, inverse: Tensor, top_k: int, dtype: torch.dtype
    ) -> Tensor:
        return (
            y[inverse]
            .unflatten(0, (-1, top_k))
            .sum(dim=1, dtype=torch.promote_types(dtype, torch.float32))
            .to(dtype)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        y, order, inverse, ctx.top_k, _ = inputs
        ctx.dtype = y.dtype
        ctx.save_for_backward(order, inverse)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dy = Spread.apply(*grad_outputs, *ctx.saved_tensors, ctx.top_k, ctx.dtype)
        return dy, None, None, None, None
