"""Cross entropy and its gradient on the CPU: every team, odd targets, logits not finite."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .launches import launches
from .quantize_harness import Buffer, Float, Kernels, Long, Pointer, address

DTYPES = (torch.bfloat16, torch.float16)
IGNORED = -100
# Columns: one vector; the widest row of a warp and the next; a CTA without and with four vectors a
# thread, and with some more; one piece of a gradient and the next; many.
COLUMNS = (8, 1024, 1032, 8192, 8200, 16384, 16392, 50264)
OPTIONS = ((0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.1, 1e-2))
"""Label smoothing, and the factor of the square of lse."""
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative error of one rounding."""


class _Forward(ctypes.Structure):
    _fields_ = [
        ("x", Pointer),
        ("targets", Pointer),
        ("loss", Pointer),
        ("lse", Pointer),
        ("label_smoothing", Float),
        ("z_loss", Float),
        ("ignore_index", Long),
        ("rows", Long),
        ("columns", Long),
    ]


class _Backward(ctypes.Structure):
    _fields_ = [
        ("dloss", Pointer),
        ("x", Pointer),
        ("targets", Pointer),
        ("lse", Pointer),
        ("dx", Pointer),
        ("label_smoothing", Float),
        ("z_loss", Float),
        ("ignore_index", Long),
        ("rows", Long),
        ("columns", Long),
    ]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return launches(
        tmp_path_factory.mktemp("cross_entropy"),
        "softmax",
        cross_entropy="CrossEntropyArguments",
        cross_entropy_grad="CrossEntropyGradArguments",
    )


Options = tuple[float, float]


def losses(
    kernels: Kernels,
    x: Tensor,
    targets: Tensor,
    options: Options = (0.0, 0.0),
    *,
    wants_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    loss, lse = (Buffer(4 * x.shape[0], "cpu") for _ in range(2))
    kept = address(lse) if wants_lse else None
    arguments = _Forward(
        address(x), address(targets), address(loss), kept, *options, IGNORED, *x.shape
    )
    kernels.call("run_cross_entropy", int(x.dtype == torch.float16), arguments)
    return loss.floats(), lse.floats()


def gradient(
    kernels: Kernels,
    dloss: Tensor,
    x: Tensor,
    targets: Tensor,
    lse: Tensor,
    options: Options = (0.0, 0.0),
) -> Tensor:
    dx = Buffer(2 * x.numel(), "cpu")
    given = (address(each) for each in (dloss, x, targets, lse, dx))
    arguments = _Backward(*given, *options, IGNORED, *x.shape)
    kernels.call("run_cross_entropy_grad", int(x.dtype == torch.float16), arguments)
    return dx.bytes().view(x.dtype).view_as(x)


def random(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets with first and last columns and one that is ignored, and dloss."""
    rng = torch.Generator().manual_seed(columns)
    x = (4 * torch.randn(rows, columns, generator=rng)).to(dtype)
    targets = torch.randint(columns, (rows,), generator=rng)
    targets[:3] = torch.tensor([0, columns - 1, IGNORED])
    return x, targets, torch.randn(rows, generator=rng)


def exact(x: Tensor, targets: Tensor, options: Options) -> Tensor:
    """PyTorch's loss of float64 logits, with the part that it has no name for."""
    smoothing, z_loss = options
    loss = cross_entropy(
        x, targets, reduction="none", ignore_index=IGNORED, label_smoothing=smoothing
    )
    squares = x.logsumexp(-1).square() * (targets != IGNORED)
    return loss + z_loss * squares


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_against_pytorch_in_float64(
    kernels: Kernels, columns: int, dtype: torch.dtype, options: Options
) -> None:
    x, targets, dloss = random(5, columns, dtype)
    leaf = x.double().requires_grad_()
    wanted = exact(leaf, targets, options)
    loss, lse = losses(kernels, x, targets, options)
    bound = 3e-6 * (1.0 + wanted.detach().abs() + leaf.detach().abs().amax())
    assert ((loss.double() - wanted.detach()).abs() <= bound).all()
    assert loss[2] == 0.0 == lse[2]
    assert torch.equal(loss, losses(kernels, x, targets, options)[0])

    (expected,) = torch.autograd.grad(wanted, leaf, dloss.double())
    dx = gradient(kernels, dloss, x, targets, lse, options)
    bound = ROUNDING[dtype] * expected.abs() + 2e-6 * dloss.double().abs()[:, None]
    assert ((dx.double() - expected).abs() <= bound).all()
    assert not dx[2].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_a_gradient_may_lie_where_the_logits_do(
    kernels: Kernels, columns: int, dtype: torch.dtype
) -> None:
    x, targets, dloss = random(5, columns, dtype)
    targets[3] = columns  # no column
    _, lse = losses(kernels, x, targets)
    apart = gradient(kernels, dloss, x, targets, lse)
    given = (address(each) for each in (dloss, x, targets, lse, x))
    arguments = _Backward(*given, 0.0, 0.0, IGNORED, *x.shape)
    kernels.call("run_cross_entropy_grad", int(dtype == torch.float16), arguments)
    assert torch.equal(x.view(torch.int16), apart.view(torch.int16))


def test_without_lse(kernels: Kernels) -> None:
    x, targets, _ = random(5, 1032, torch.bfloat16)
    loss, lse = losses(kernels, x, targets, wants_lse=False)
    assert torch.equal(loss, losses(kernels, x, targets)[0])
    assert (lse.view(torch.uint8) == 0xA5).all()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("columns", (16, 1032))
def test_targets_that_are_no_columns(kernels: Kernels, columns: int, options: Options) -> None:
    """NaN in their rows and nowhere else, and nothing is read elsewhere."""
    x, targets, dloss = random(8, columns, torch.bfloat16)
    wrong = [3, 4, 5, 6]
    targets[wrong] = torch.tensor([-1, columns, 2**40, -(2**62)])
    loss, lse = losses(kernels, x, targets, options)
    dx = gradient(kernels, dloss, x, targets, lse, options)
    assert loss[wrong].isnan().all() and dx[wrong].isnan().all()
    assert loss[[0, 1, 2, 7]].isfinite().all() and dx[[0, 1, 2, 7]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", (16, 1032, 16392))
def test_logits_that_are_not_finite(kernels: Kernels, columns: int, dtype: torch.dtype) -> None:
    """-inf counts for nothing; NaN, +inf and a row of -inf alone give NaN, as PyTorch does."""
    x, targets, dloss = random(8, columns, dtype)
    x[2] = torch.nan  # ignored
    x[3, 1] = torch.nan
    x[4, 2] = torch.inf
    x[5] = -torch.inf
    x[6, ::2] = -torch.inf
    targets[6] = 3
    x[7, 4] = -torch.inf
    targets[7] = 4
    dloss[2] = torch.nan
    wanted = exact(x.double(), targets, (0.0, 0.0))
    loss, lse = losses(kernels, x, targets)
    dx = gradient(kernels, dloss, x, targets, lse)
    assert loss[3:6].isnan().all() and dx[3:6].isnan().all()
    assert wanted[3:6].isnan().all()
    assert loss[7] == torch.inf == wanted[7]
    assert (loss[6] - wanted[6]).abs() <= 1e-5
    assert not dx[6, ::2].any() and dx[6].isfinite().all() and dx[7].isfinite().all()
    assert loss[2] == 0.0 and not dx[2].any()


def test_no_rows(kernels: Kernels) -> None:
    x, targets, dloss = random(3, 8, torch.bfloat16)
    loss, lse = losses(kernels, x[:0], targets[:0])
    assert loss.numel() == 0
    assert gradient(kernels, dloss[:0], x[:0], targets[:0], lse).numel() == 0
