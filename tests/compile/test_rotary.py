"""Rotary embeddings on the CPU: both pairings, both directions, every number of heads."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from .launches import launches
from .quantize_harness import Buffer, Kernels, Long, Pointer, address

DTYPES = (torch.bfloat16, torch.float16)
FORWARD, INVERSE = 0, 1


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("x", Pointer),
        ("cos", Pointer),
        ("sin", Pointer),
        ("y", Pointer),
        ("rows", Long),
        ("columns", Long),
        ("pairs", Long),
        ("interleaved", ctypes.c_bool),
        ("kind", ctypes.c_int),
    ]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return launches(tmp_path_factory.mktemp("rotary"), "rotary", rotary="RotaryArguments")


def rotary(
    kernels: Kernels, x: Tensor, angles: Tensor, *, interleaved: bool, kind: int = FORWARD
) -> Tensor:
    """Of x [T, N] by angles [T, P]."""
    cos, sin, output = angles.cos(), angles.sin(), Buffer(2 * x.numel(), "cpu")
    arguments = _Arguments(
        address(x), address(cos), address(sin), address(output), *x.shape, angles.shape[1],
        interleaved, kind,
    )  # fmt: skip
    kernels.call("run_rotary", int(x.dtype == torch.float16), arguments)
    return output.bytes().view(x.dtype).view_as(x)


def exact(x: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """Each pair as a complex number, times that of its angle; products rounded to fp32."""
    pairs = angles.shape[1]
    heads = x.float().unflatten(1, (-1, pairs, 2) if interleaved else (-1, 2, pairs))
    one, other = heads.unbind(-1 if interleaved else -2)
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    rotated = torch.stack((one * c - other * s, other * c + one * s), -1 if interleaved else -2)
    return rotated.flatten(1).to(x.dtype)


def given(rows: int, heads: int, pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(heads)
    x = torch.randn(rows, 2 * heads * pairs, generator=rng).to(dtype)
    return x, 6 * torch.rand(rows, pairs, generator=rng)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("heads", (1, 3, 4, 9))
@pytest.mark.parametrize("pairs", (8, 24, 64))
def test_has_the_bits_of_the_formula(
    kernels: Kernels, pairs: int, heads: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """Rows that fill no block; heads that fill no thread."""
    x, angles = given(37, heads, pairs, dtype)
    y = rotary(kernels, x, angles, interleaved=interleaved)
    assert torch.equal(y, exact(x, angles, interleaved=interleaved))
    back = rotary(kernels, x, angles, interleaved=interleaved, kind=INVERSE)
    assert torch.equal(back, exact(x, -angles, interleaved=interleaved))
    assert not torch.equal(y, back)


@pytest.mark.parametrize("interleaved", (False, True))
def test_angles_of_0_change_nothing(kernels: Kernels, interleaved: bool) -> None:
    x, angles = given(5, 3, 8, torch.bfloat16)
    assert torch.equal(rotary(kernels, x, torch.zeros_like(angles), interleaved=interleaved), x)


@pytest.mark.parametrize(
    ("columns", "pairs", "message"),
    [
        (32, 12, "pairs of a head: a multiple of 8"),
        (32, 0, "pairs of a head: a multiple of 8"),
        (24, 8, "columns: a multiple of a head's"),
        (16 * 4 * 65536, 8, "heads: at most 262140"),
    ],
)
def test_sizes_that_no_kernel_has(kernels: Kernels, columns: int, pairs: int, message: str) -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    pointer = address(x)
    arguments = _Arguments(*[pointer] * 4, 1, columns, pairs, False, FORWARD)
    with pytest.raises(AssertionError, match=message):
        kernels.call("run_rotary", 0, arguments)


def test_no_rows(kernels: Kernels) -> None:
    x, angles = given(0, 2, 8, torch.float16)
    assert rotary(kernels, x, angles, interleaved=False).numel() == 0
