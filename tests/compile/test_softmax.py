"""Softmax and its gradient on the CPU: every team, masks, rows that are not finite."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from .launches import launches
from .quantize_harness import Buffer, Float, Kernels, Long, Pointer, address

DTYPES = (torch.bfloat16, torch.float16)
SCALE = 0.37
# Columns: one vector; the widest and the next of each team of either kernel, forward or backward;
# rows that are read twice.
COLUMNS = (8, 512, 520, 1024, 1032, 2048, 2056, 4096, 4104, 8192, 8200, 16384, 16392, 40000)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative error of one rounding."""


class _Softmax(ctypes.Structure):
    _fields_ = [
        ("x", Pointer),
        ("mask", Pointer),
        ("bias", Pointer),
        ("y", Pointer),
        ("scale", Float),
        ("outer", Long),
        ("heads", Long),
        ("queries", Long),
        ("columns", Long),
        ("causal_queries", Long),
    ]


class _Grad(ctypes.Structure):
    _fields_ = [
        ("dy", Pointer),
        ("y", Pointer),
        ("dx", Pointer),
        ("scale", Float),
        ("rows", Long),
        ("columns", Long),
    ]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return launches(
        tmp_path_factory.mktemp("softmax"),
        "softmax",
        softmax="SoftmaxArguments",
        softmax_grad="SoftmaxGradArguments",
    )


def softmax(
    kernels: Kernels,
    x: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float = SCALE,
) -> Tensor:
    """Of x [T, H, S, N]."""
    output = Buffer(2 * x.numel(), "cpu")
    arguments = _Softmax(
        address(x), address(mask), address(bias), address(output), scale, *x.shape,
        x.shape[2] if causal else 0,
    )  # fmt: skip
    kernels.call("run_softmax", int(x.dtype == torch.float16), arguments)
    return output.bytes().view(x.dtype).view_as(x)


def gradient(kernels: Kernels, dy: Tensor, y: Tensor, scale: float = SCALE) -> Tensor:
    output = Buffer(2 * y.numel(), "cpu")
    rows, columns = y.flatten(0, -2).shape
    arguments = _Grad(address(dy), address(y), address(output), scale, rows, columns)
    kernels.call("run_softmax_grad", int(y.dtype == torch.float16), arguments)
    return output.bytes().view(y.dtype).view_as(y)


def exact(scores: Tensor) -> Tensor:
    """The softmax in float64; zeros where every score is -inf."""
    return torch.softmax(scores, dim=-1).masked_fill((scores == -torch.inf).all(-1, True), 0.0)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(*shape, generator=rng)).to(dtype)


def close(found: Tensor, wanted: Tensor) -> bool:
    """Within one rounding of its own, and of the smallest number that the type has."""
    smallest = torch.finfo(found.dtype).smallest_normal * ROUNDING[found.dtype]
    bound = (ROUNDING[found.dtype] + 1e-5) * wanted.abs() + smallest
    return bool(((found.double() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_of_every_length(kernels: Kernels, columns: int, dtype: torch.dtype) -> None:
    x = random(1, 1, 5, columns, dtype=dtype)
    y = softmax(kernels, x)
    assert close(y, exact(SCALE * x.double()))
    assert torch.equal(y, softmax(kernels, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_gradients_of_every_length(kernels: Kernels, columns: int, dtype: torch.dtype) -> None:
    x, dy = random(5, columns, dtype=dtype), random(5, columns, dtype=dtype, seed=1)
    y = exact(SCALE * x.double()).to(dtype)
    wide, gradients = y.double(), dy.double()
    wanted = SCALE * wide * (gradients - (gradients * wide).sum(-1, keepdim=True))
    found = gradient(kernels, dy, y)
    bound = ROUNDING[dtype] * wanted.abs() + 1e-5 * SCALE * wide * gradients.abs().amax()
    smallest = torch.finfo(dtype).smallest_normal * ROUNDING[dtype]
    assert ((found.double() - wanted).abs() <= bound + smallest).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("queries", "columns"), [(40, 40), (8, 64), (41, 16), (3, 16400)])
def test_causal(kernels: Kernels, queries: int, columns: int, dtype: torch.dtype) -> None:
    """The last row has all columns; with more queries than keys, the first rows have none."""
    x = random(2, 1, queries, columns, dtype=dtype)
    left_out = torch.ones(queries, columns, dtype=torch.bool).triu(columns - queries + 1)
    x[:, :, left_out] = torch.nan  # nobody reads it
    scores = (SCALE * x.double()).masked_fill(left_out, -torch.inf)
    y = softmax(kernels, x, causal=True)
    assert close(y, exact(scores))
    assert not y[:, :, left_out].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", (24, 1040, 16400))
@pytest.mark.parametrize("kind", ("mask", "bias"))
def test_what_heads_share(kernels: Kernels, kind: str, columns: int, dtype: torch.dtype) -> None:
    x = random(2, 3, 2, columns, dtype=dtype)
    rng = torch.Generator().manual_seed(1)
    left_out = torch.rand(2, 2, columns, generator=rng) < 0.5
    left_out[1, 0] = True  # a row without anything
    bias = random(2, 2, columns, dtype=dtype, seed=2).masked_fill(left_out, -torch.inf)
    if kind == "mask":
        mask = left_out * torch.randint(1, 256, left_out.shape, generator=rng)
        y = softmax(kernels, x, mask=mask.to(torch.uint8))
        scores = (SCALE * x.double()).masked_fill(left_out[:, None], -torch.inf)
    else:
        y = softmax(kernels, x, bias=bias)
        scores = SCALE * x.double() + bias[:, None].double()
    assert close(y, exact(scores))
    assert not y[1, :, 0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", (16, 2048, 16392))
def test_rows_that_are_not_finite(kernels: Kernels, columns: int, dtype: torch.dtype) -> None:
    """NaN and +inf make all of their row NaN, -inf alone makes it zero; others stay as they are."""
    x = random(1, 1, 6, columns, dtype=dtype)
    x[..., 1, :] = -torch.inf
    x[..., 2, 3] = torch.nan
    x[..., 3, columns - 1] = torch.inf
    x[..., 4, ::2] = -torch.inf
    x[..., 5, :] = -torch.finfo(dtype).max
    x[..., 5, 7] = torch.finfo(dtype).max
    y = softmax(kernels, x, scale=1.0)[0, 0]
    assert y[2].isnan().all() and y[3].isnan().all()
    assert not y[1].any()
    finite = [0, 1, 4, 5]
    assert close(y[finite], exact(x[0, 0, finite].double()))


def test_a_row_of_zeros_has_no_gradient(kernels: Kernels) -> None:
    dy, y = random(2, 16, dtype=torch.bfloat16), torch.zeros(2, 16, dtype=torch.bfloat16)
    assert not gradient(kernels, dy, y).any()


@pytest.mark.parametrize("columns", (0, 12, 2**31))
def test_widths_that_no_kernel_has(kernels: Kernels, columns: int) -> None:
    x = random(1, 8, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="columns: a multiple of 8"):
        gradient_of_width(kernels, x, columns)


def gradient_of_width(kernels: Kernels, x: Tensor, columns: int) -> None:
    arguments = _Grad(address(x), address(x), address(x), 1.0, 1, columns)
    kernels.call("run_softmax_grad", 0, arguments)


def test_no_rows(kernels: Kernels) -> None:
    x = torch.empty(0, 1, 1, 8, dtype=torch.bfloat16)
    assert softmax(kernels, x).numel() == 0
    assert math.prod(gradient(kernels, x, x).shape) == 0
