"""Tensors that go from module to module as the codes and scales of a recipe.

In the place of the tensor itself stands one of its shape and type that holds one element, NaN,
expanded: autograd passes gradients through it as through any other, and whoever reads it notices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

Scales = TypeVar("Scales", Tensor, Tensor | None)


class QuantizedTensor(NamedTuple):
    """A tensor as a recipe's copies of it; a copy that was not asked for is None.

    Attributes:
        tensor: NaN without memory, of the shape and type of what was quantised; its gradient is
            that of the tensor.
        format: what the copies are, and how they lie; modules take those of their own format.
        rowwise_data: codes, scaled along the last dimension.
        rowwise_scale_inv: what decodes them, as GEMMs read it.
        columnwise_data: codes, scaled along the rows; gradients of weights read them.
        columnwise_scale_inv: what decodes them, as GEMMs read it.
        rowwise_amax: largest magnitude, where the format has scales of a second level.
        columnwise_amax: the same of the columnwise copy.
        split_sizes: rows per group, where the rows are in groups.
    """

    tensor: Tensor
    format: str
    rowwise_data: Tensor
    rowwise_scale_inv: Tensor
    columnwise_data: Tensor | None = None
    columnwise_scale_inv: Tensor | None = None
    rowwise_amax: Tensor | None = None
    columnwise_amax: Tensor | None = None
    split_sizes: Tensor | None = None


def placeholder(
    shape: Sequence[int], device: torch.device | str | None, dtype: torch.dtype | None
) -> Tensor:
    """What stands in a tensor's place: NaN of a shape that holds one element."""
    return torch.full((), math.nan, device=device, dtype=dtype).expand(shape)


def is_placeholder(tensor: Tensor) -> bool:
    """Whether a tensor holds one element alone, however many it counts."""
    return tensor.numel() > 1 and not any(tensor.stride())


class _Placeholder(torch.autograd.Function):
    """A placeholder of a tensor, whose gradient is the tensor's."""

    @staticmethod
    def forward(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return placeholder(tensor.shape, tensor.device, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx, *grads):
        return grads[0].to(ctx.dtype), None


def placeholder_of(tensor: Tensor) -> Tensor:
    """What stands in the place of a tensor that has been quantised."""
    return _Placeholder.apply(tensor, tensor.dtype)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast makes of a placeholder: one of another type, where `to` would allocate all."""
    return tensor if tensor.dtype == dtype else _Placeholder.apply(tensor, dtype)


def opened(cell: str, name: str, given: Any, format: str) -> QuantizedTensor:
    """An argument that is to be copies of a format.

    Args:
        cell: for messages.
        name: of the argument.
        given: a tensor's copies; of a class like this one, which other bundles have, too.
        format: of the copies.

    Raises:
        RuntimeError: it is something else.
    """
    expected = f"{cell}: {name}: expected"
    if getattr(given, "_fields", ()) != QuantizedTensor._fields:
        raise RuntimeError(
            f"{expected} a tensor, or what `quantize_input` makes of one, got"
            f" {type(given).__name__}"
        )
    if given.format != format:
        raise RuntimeError(
            f"{expected} copies in format {format!r}, got {given.format!r}; quantise with this"
            " module's `quantize_input`, or with that of another one of its recipe"
        )
    return QuantizedTensor(*given)


def check_groups(cell: str, given: QuantizedTensor, split_sizes: Tensor) -> None:
    """Groups of a call are to be those that its copies were made for.

    Another tensor is compared with them where it is, so that the host need not wait.

    Raises:
        RuntimeError: they differ; on a GPU an assertion on the device fails.
    """
    own = given.split_sizes
    if own is not split_sizes and own is not None and own.shape == split_sizes.shape:
        same = (own == split_sizes).all()
        torch._assert_async(
            same, f"{cell}: expected the group sizes that the copies were made for, got others"
        )


def refuse_rowwise(cell: str, name: str) -> NoReturn:
    """Raise where the gradient of a weight needs a copy that is not there."""
    raise RuntimeError(
        f"{cell}: {name}: expected a columnwise copy, which gradients of weights read, got None;"
        " quantise with columnwise=True"
    )


def typed(scales: Scales, dtype: torch.dtype) -> Scales:
    """Scales of 8 bits as the type that a module takes them in, E8M0 or bytes."""
    if scales is None or scales.dtype == dtype or scales.element_size() > 1:
        return scales
    return scales.view(dtype)
