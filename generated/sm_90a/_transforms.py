"""Function transforms (`torch.func`) and forward-mode AD: what works under them, and what says no.

Transforms want an autograd function whose results and context are made apart, which takes longer
than to make them together, so a module has such a twin of its function, for them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

_transforms_active = torch._C._are_functorch_transforms_active


def active() -> bool:
    """Whether a function transform runs, or tensors may have tangents."""
    return _transforms_active() or forward_ad._current_level >= 0


def refusing(cell: str) -> Callable[..., Any]:
    """In place of a twin, for a module whose backward changes what is not its own."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError(
            f"{cell}: function transforms (torch.func) and forward-mode AD are not supported by a "
            "module whose backward writes main_grad, waits for backward_dw or reduces over ranks; "
            "use one generated without these options"
        )

    return refuse


def _refuse_tangents(cell: str) -> None:
    raise RuntimeError(
        f"{cell}: forward-mode AD (jvp, jacfwd, linearize, hessian, dual tensors) is not "
        "supported; use reverse mode: torch.func.vjp, jacrev or grad, or torch.autograd.grad"
    )


def _refuse_second(cell: str) -> None:
    raise RuntimeError(
        f"{cell}: double backward is not supported; differentiate the module once only"
    )


def _each(
    call: Callable[..., Any], size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Results of one call for each index of the mapped dimension, stacked, and where it is."""

    def result(index: int) -> Any:
        def pick(dim: int | None, value: Any) -> Any:
            return value if dim is None else value.select(dim, index)

        return call(*tree_map(pick, in_dims, args, is_leaf=lambda dim: dim is None))

    found = [result(index) for index in range(size)]
    if isinstance(found[0], Tensor):
        return _stack(found), 0
    stacked = tuple(map(_stack, zip(*found, strict=True)))
    return stacked, tuple(None if each is None else 0 for each in stacked)


def _stack(values: Any) -> Tensor | None:
    first = values[0]
    if first is None:
        return None
    if first.is_floating_point() and first.itemsize == 1:  # no arithmetic, not even copies of some
        return torch.stack([value.view(torch.uint8) for value in values]).view(first.dtype)
    return torch.stack(list(values))


class Twin(torch.autograd.Function):
    """A module's autograd function for transforms; `vmap` calls it once for each index.

    Attributes:
        cell: for messages.
        outputs: how many of its results are differentiable, the first ones.
        wanted: positions of flags that ask for gradients, and of the tensors that they are of.
        ordinary: the function that it is a twin of, which has the backward.
    """

    cell: ClassVar[str]
    outputs: ClassVar[int] = 1
    wanted: ClassVar[tuple[tuple[int, int], ...]]
    ordinary: ClassVar[type[torch.autograd.Function]]

    @classmethod
    def backward(cls, ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        if grads[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        given = (cls.outputs, ctx.needs_input_grad, dict(vars(ctx)), *grads[: cls.outputs])
        return _Once.apply(cls, *given, *ctx.saved_tensors)

    @classmethod
    def jvp(cls, ctx, *tangents):  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse_tangents(cls.cell)

    @classmethod
    def vmap(cls, info, in_dims, *args):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Tensors of this level hide whether one of a level below requires a gradient."""
        if torch.is_grad_enabled():
            args = [*args]
            for flag, tensor in cls.wanted:
                args[flag] |= args[tensor] is not None and args[tensor].requires_grad
        return _each(cls.apply, info.batch_size, in_dims, tuple(args))


def _keep() -> None:
    """Nothing goes before a transform is done with its graph."""


class _Once(torch.autograd.Function):
    """The backward of a twin, which is not differentiated again.

    `torch.func` always builds a graph of it, so only a backward through that graph can be refused.
    """

    @staticmethod
    def forward(twin, count, needs, carried, *tensors):
        incoming, saved = tensors[:count], tensors[count:]
        ctx = SimpleNamespace(
            needs_input_grad=needs,
            saved_tensors=saved,
            maybe_clear_saved_tensors=_keep,
            **carried,
        )
        return twin.ordinary.backward(ctx, *incoming)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.cell = inputs[0].cell

    @staticmethod
    def backward(ctx, *grads):
        _refuse_second(ctx.cell)

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_tangents(ctx.cell)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _each(_Once.apply, info.batch_size, in_dims, args)


class _Constant(torch.autograd.Function):
    """An op without derivative."""

    @staticmethod
    def forward(cell, op, *args):
        return op(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.cell = inputs[0]
        results = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*(each for each in results if each is not None))

    @staticmethod
    def backward(ctx, *grads):
        raise AssertionError("no result is differentiable")

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_tangents(ctx.cell)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _each(_Constant.apply, info.batch_size, in_dims, args)


def constant(cell: str, op: Callable[..., Any], *args: Any) -> Any:
    """What an op without derivative gives; it refuses tangents, which would be lost."""
    return _Constant.apply(cell, op, *args) if active() else op(*args)


class _Same(torch.autograd.Function):
    """Its input."""

    @staticmethod
    def forward(cell, x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.cell = inputs[0]

    @staticmethod
    def backward(ctx, *grads):
        return None, grads[0]

    @staticmethod
    def jvp(ctx, *tangents):
        _refuse_tangents(ctx.cell)

    @staticmethod
    def vmap(info, in_dims, *args):
        return _Same.apply(*args), in_dims[1]


def same(cell: str, x: Tensor) -> Tensor:
    """x; tangents are refused under every recipe, so that none trains what another cannot."""
    return _Same.apply(cell, x) if active() else x
