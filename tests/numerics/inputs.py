"""Inputs that reach every edge of a recipe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = [0, 1, 15, 16, 17, 31, 33, 127, 128, 129, 0, -3, 5]
TRAILING = 6


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=_generator(1)).to(dtype)


def heavy_tailed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Magnitudes from far below to far above one, some signs of zero."""
    generator = _generator(2)
    exponent = torch.randn(shape, generator=generator) * 6
    x = torch.randn(shape, generator=generator) * torch.exp2(exponent)
    return x.clamp(-6e4, 6e4).to(dtype)


def zero(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.zeros(shape, dtype=dtype)
    x.view(-1)[::3] = -0.0
    return x


def single(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.zeros(shape, dtype=dtype)
    x.view(-1)[-7] = -0.3
    return x


def denormal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Multiples of the smallest positive value of the type, up to a few hundred of them."""
    info = torch.finfo(dtype)
    size = torch.randint(-300, 301, shape, generator=_generator(3)).double()
    return (size * info.smallest_normal * info.eps).to(dtype)


def edge_of_range(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows so small that scales leave the range of fp32, and rows of ordinary ones."""
    x = torch.randn(shape, generator=_generator(4)).double()
    rows = torch.exp2(-torch.arange(shape[-2]).double() * 7 - 1).unsqueeze(1)
    return (x * rows).to(dtype)


def finite_max(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = normal(shape, dtype)
    x.view(-1)[::11] = torch.finfo(dtype).max
    x.view(-1)[5::13] = torch.finfo(dtype).min
    return x


def infinite(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = normal(shape, dtype)
    x.view(-1)[7::101] = torch.inf
    x.view(-1)[9::107] = -torch.inf
    return x


def nan(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = normal(shape, dtype)
    x.view(-1)[3::53] = torch.nan
    x.view(-1)[4::59] = -torch.nan
    x[..., -1, :] = torch.nan
    return x


def ties(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small integers and halves under power-of-two maxima: values half-way between codes."""
    return torch.randint(-28, 29, shape, generator=_generator(5)).to(dtype) / 4


INPUTS: dict[str, Callable[[tuple[int, ...], torch.dtype], Tensor]] = {
    function.__name__: function
    for function in (
        normal,
        heavy_tailed,
        zero,
        single,
        denormal,
        edge_of_range,
        finite_max,
        infinite,
        nan,
        ties,
    )
}
