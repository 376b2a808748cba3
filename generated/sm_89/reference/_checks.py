"""Argument checks of references and fakes.  Compiled launchers raise the same words."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _fail(cell: str, name: str, expected: str, got: object) -> None:
    raise RuntimeError(f"{cell}: {name}: expected {expected}, got {got}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def io_dtype(cell: str, name: str, tensor: Tensor) -> None:
    """The tensor that fixes the module's own type."""
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        _fail(cell, name, "dtype bfloat16 or float16", _dtype_name(tensor.dtype))


def same_dtype(cell: str, name: str, tensor: Tensor | None, first: str, like: Tensor) -> None:
    """A tensor of the module's own type."""
    if tensor is not None and tensor.dtype != like.dtype:
        expected = f"dtype {_dtype_name(like.dtype)}, as {first}"
        _fail(cell, name, expected, _dtype_name(tensor.dtype))


def dtype(cell: str, name: str, tensor: Tensor | None, expected: torch.dtype) -> None:
    """A tensor of a fixed type."""
    if tensor is not None and tensor.dtype != expected:
        _fail(cell, name, f"dtype {_dtype_name(expected)}", _dtype_name(tensor.dtype))


def device(cell: str, name: str, tensor: Tensor | None, first: str, like: Tensor) -> None:
    """All tensors of a call are on one device."""
    if tensor is not None and tensor.device != like.device:
        _fail(cell, name, f"device {like.device}, as {first}", tensor.device)


def rank(
    cell: str, name: str, tensor: Tensor | None, number: int, shape: str, exact: bool = True
) -> None:
    """The number of dimensions, or the least number where leading ones are free."""
    if tensor is None or tensor.dim() == number or (not exact and tensor.dim() > number):
        return
    dimensions = "dimension" if number == 1 else "dimensions"
    least = "" if exact else "at least "
    _fail(cell, name, f"{least}{number} {dimensions} {shape}", tensor.dim())


def contiguous(cell: str, name: str, tensor: Tensor | None) -> None:
    """A tensor that is changed in place, element by element as it lies in memory."""
    if tensor is not None and not tensor.is_contiguous():
        _fail(cell, name, "a contiguous tensor", f"strides {list(tensor.stride())}")


def size(cell: str, name: str, tensor: Tensor | None, axis: int, expected: int, label: str) -> None:
    """One dimension; axis counts from the end."""
    if tensor is not None and tensor.shape[axis] != expected:
        place = tensor.dim() + axis
        _fail(cell, name, f"{label} = {expected} in dimension {place}", tensor.shape[axis])


def leading(
    cell: str, name: str, tensor: Tensor | None, trailing: int, expected: int, label: str
) -> None:
    """The product of all but the last dimensions."""
    if tensor is None:
        return
    rows = math.prod(tensor.shape[: tensor.dim() - trailing])
    if rows != expected:
        _fail(cell, name, f"{label} = {expected} in the leading dimensions", rows)


def least(cell: str, label: str, value: int, number: int) -> None:
    """A size that has as many elements as are chosen from it."""
    if value < number:
        _fail(cell, label, f"at least {number}", value)


def multiple(cell: str, label: str, value: int, divisor: int, arch: str) -> None:
    """A size that the kernels of an architecture can address."""
    if value % divisor:
        _fail(cell, label, f"a multiple of {divisor} on {arch}", value)
