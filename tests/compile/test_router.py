"""The choice of experts and its gradient on the CPU: widths, ties, groups, odd logits."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from .launches import launches
from .quantize_harness import Bool, Buffer, Float, Kernels, Long, Pointer, address, reference_of

router = reference_of("_router")
PARTS = 132
SCORES = ("softmax", "sigmoid", "sqrt_softplus")
# One load of one lane, some lanes, all of them; 8, 16 and 32 experts of a lane, with lanes and
# loads that have none.
EXPERTS = (8, 40, 128, 136, 256, 264, 512, 520, 1024)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative error of one rounding."""
_SCALARS = [
    ("score", ctypes.c_int),
    ("normalized", Bool),
    ("scale", Float),
    ("eps", Float),
    ("least_sum", Float),
    ("aux_coefficient", Float),
    ("z_coefficient", Float),
    ("sequences", Long),
]
_SIZES = [("tokens", Long), ("experts", Long), ("choices", Long)]


class _Forward(ctypes.Structure):
    _fields_ = [
        ("logits", Pointer),
        ("choice_bias", Pointer),
        ("all_counts", Pointer),
        ("probs", Pointer),
        ("ids", Pointer),
        ("counts", Pointer),
        ("aux_loss", Pointer),
        ("z_loss", Pointer),
        ("sums", Pointer),
        ("chosen", Pointer),
        ("parts", Long),
        *_SCALARS,
        ("groups", Long),
        ("kept_groups", Long),
        ("group_top", Long),
        *_SIZES,
    ]


class _Backward(ctypes.Structure):
    _fields_ = [
        ("dprobs", Pointer),
        ("logits", Pointer),
        ("ids", Pointer),
        ("counts", Pointer),
        ("all_counts", Pointer),
        ("daux_loss", Pointer),
        ("dz_loss", Pointer),
        ("dlogits", Pointer),
        *_SCALARS,
        *_SIZES,
    ]


@dataclass(frozen=True)
class Case:
    """Scalars of a call, by the names that the reference has for them."""

    score: str = "softmax"
    normalized: bool = True
    scale: float = 1.0
    eps: float = 1e-20
    least_sum: float = 0.0
    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0
    sequences: int = 1
    top_k: int = 4
    groups: int = 1
    kept_groups: int = 1
    group_top: int = 1

    @property
    def weights(self) -> dict[str, Any]:
        """What forward and backward have."""
        return {name: getattr(self, name) for name, _ in _SCALARS}

    @property
    def all(self) -> dict[str, Any]:
        names = ("top_k", "groups", "kept_groups", "group_top")
        return self.weights | {name: getattr(self, name) for name in names}

    @property
    def scalars(self) -> Mapping[str, Any]:
        return self.weights | {"score": SCORES.index(self.score)}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return launches(
        tmp_path_factory.mktemp("router"),
        "router",
        route="RouteArguments",
        route_grad="RouteGradArguments",
    )


Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def route(
    kernels: Kernels,
    x: Tensor,
    case: Case,
    choice_bias: Tensor | None = None,
    all_counts: Tensor | None = None,
) -> Results:
    """As the reference has it: probs, both losses, ids and counts."""
    tokens, experts = x.shape
    slots = 4 * tokens * case.top_k
    buffers = {
        name: Buffer(size, "cpu")
        for name, size in {
            "probs": slots,
            "ids": slots,
            "counts": 8 * experts,
            "aux_loss": 4,
            "z_loss": 4,
            "sums": 4 * PARTS * (experts + 1),
            "chosen": 4 * PARTS * experts,
        }.items()
    }
    arguments = _Forward(
        logits=address(x),
        choice_bias=address(choice_bias),
        all_counts=address(all_counts),
        **{name: address(buffer) for name, buffer in buffers.items()},
        parts=PARTS,
        **case.scalars,
        groups=case.groups,
        kept_groups=case.kept_groups,
        group_top=case.group_top,
        tokens=tokens,
        experts=experts,
        choices=case.top_k,
    )
    kernels.call("run_route", 0, arguments)
    return (
        buffers["probs"].floats().view(tokens, case.top_k),
        buffers["aux_loss"].floats()[0],
        buffers["z_loss"].floats()[0],
        buffers["ids"].bytes().view(torch.int32).view(tokens, case.top_k),
        buffers["counts"].bytes().view(torch.int64),
    )


def gradient(
    kernels: Kernels,
    dprobs: Tensor,
    x: Tensor,
    case: Case,
    ids: Tensor,
    counts: Tensor,
    like: Tensor,
    **others: Tensor | None,
) -> Tensor:
    dx = Buffer(2 * x.numel(), "cpu")
    names = {"grad_aux": "daux_loss", "grad_z": "dz_loss", "all_counts": "all_counts"}
    arguments = _Backward(
        dprobs=address(dprobs),
        logits=address(x),
        ids=address(ids),
        counts=address(counts),
        **{names[name]: address(other) for name, other in others.items()},
        dlogits=address(dx),
        **case.scalars,
        tokens=x.shape[0],
        experts=x.shape[1],
        choices=case.top_k,
    )
    kernels.call("run_route_grad", int(like.dtype == torch.float16), arguments)
    return dx.bytes().view(like.dtype).view_as(x)


def random(tokens: int, experts: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed + experts)
    return 2 * torch.randn(tokens, experts, generator=rng)


def same(got: Results, expected: Results, tolerance: float = 2e-6) -> None:
    """Choices and counts exactly, weights and losses but for rounding."""
    for one, other in zip(got[3:], expected[3:], strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    for one, other in zip(got[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("experts", EXPERTS)
def test_every_width(kernels: Kernels, experts: int, score: str) -> None:
    """More rows than blocks have at a time, with both losses."""
    tokens = 150
    case = Case(score, scale=2.5, aux_coefficient=0.3, z_coefficient=0.2, top_k=min(experts, 5))
    x = random(tokens, experts)
    got, expected = route(kernels, x, case), router.forward(x, **case.all)
    same(got, expected, 1e-5)
    dprobs, like = random(tokens, case.top_k, 1), torch.empty(0, dtype=torch.bfloat16)
    given = {"grad_aux": torch.tensor(0.7), "grad_z": torch.tensor(-1.3)}
    dx = gradient(kernels, dprobs, x, case, got[3], got[4], like, **given)
    wide = like.float()
    exact = router.backward(
        dprobs, x, ids=got[3], counts=got[4], like=wide, **case.weights, **given
    )
    assert ((dx - exact).abs() <= 1.01 * 2**-8 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("least_sum", [0.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights(
    kernels: Kernels, dtype: torch.dtype, least_sum: float, normalized: bool, score: str
) -> None:
    case = Case(score, normalized, 1.5, 1e-3, least_sum, 0.3, 0.0, top_k=3)
    x, bias = random(20, 24), random(1, 24, 5)[0]
    all_counts = torch.arange(24)
    got = route(kernels, x, case, bias, all_counts)
    same(got, router.forward(x, **case.all, choice_bias=bias, all_counts=all_counts))
    dprobs, like = random(20, 3, 1), torch.empty(0, dtype=dtype)
    given = {"grad_aux": torch.tensor(2.0), "all_counts": all_counts}
    dx = gradient(kernels, dprobs, x, case, got[3], got[4], like, **given)
    exact = router.backward(
        dprobs, x, ids=got[3], counts=got[4], like=like.float(), **case.weights, **given
    )
    assert ((dx - exact).abs() <= 1.01 * ROUNDING[dtype] * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("sequences", "length", "experts"),
    [(2, 75, 8), (3, 1, 40), (5, 40, 136), (66, 2, 264), (67, 3, 16), (132, 1, 1024), (4, 0, 8)],
)
def test_losses_of_sequences(
    kernels: Kernels, sequences: int, length: int, experts: int, score: str
) -> None:
    """More rows than a sequence's blocks have at a time, fewer, none; parts that none has."""
    case = Case(score, scale=1.5, aux_coefficient=0.3, z_coefficient=0.2, sequences=sequences)
    x = random(sequences * length, experts)
    got, expected = route(kernels, x, case), router.forward(x, **case.all)
    same(got, expected, 1e-5)
    one = router.forward(x, **{**case.all, "sequences": 1})
    assert length == 0 or not torch.allclose(one[1], expected[1], rtol=1e-3)
    dprobs, like = random(len(x), case.top_k, 1), torch.empty(0, dtype=torch.bfloat16)
    given = {"grad_aux": torch.tensor(7.0), "grad_z": torch.tensor(-1.3)}
    dx = gradient(kernels, dprobs, x, case, got[3], got[4], like, **given)
    wide = like.float()
    exact = router.backward(
        dprobs, x, ids=got[3], counts=got[4], like=wide, **case.weights, **given
    )
    assert ((dx - exact).abs() <= 1.01 * 2**-8 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("sequences", [0, 133, 4])
def test_sequences_that_there_are_not(kernels: Kernels, sequences: int) -> None:
    with pytest.raises(AssertionError, match="sequences: from 1 to 132, and a divisor of tokens"):
        route(kernels, random(6, 16), Case(sequences=sequences))


def test_counts_of_others_are_of_one_loss(kernels: Kernels) -> None:
    case, counts = Case(sequences=2, aux_coefficient=1.0), torch.ones(16, dtype=torch.int64)
    with pytest.raises(AssertionError, match="sequences: 1 beside all_counts"):
        route(kernels, random(6, 16), case, all_counts=counts)
    with pytest.raises(ValueError, match="sequences: expected 1 beside all_counts"):
        router.forward(random(6, 16), **case.all, all_counts=counts)
    with pytest.raises(ValueError, match="sequences: expected a divisor of 7 tokens, got 2"):
        router.forward(random(7, 16), **case.all)


@pytest.mark.parametrize(("group_top", "biased"), [(1, False), (2, True), (2, False), (3, True)])
@pytest.mark.parametrize(
    ("experts", "groups", "kept"),
    [(32, 4, 2), (256, 8, 4), (160, 8, 3), (48, 16, 9), (64, 32, 31), (1024, 4, 1)],
)
def test_groups(
    kernels: Kernels, experts: int, groups: int, kept: int, group_top: int, biased: bool
) -> None:
    case = Case("sigmoid", top_k=6, groups=groups, kept_groups=kept, group_top=group_top)
    x = random(12, experts)
    bias = random(1, experts, 3)[0] if biased else None
    same(route(kernels, x, case, bias), router.forward(x, **case.all, choice_bias=bias))


@pytest.mark.parametrize("top_k", [1, 2, 31, 32])
@pytest.mark.parametrize("experts", [32, 160])
def test_numbers_of_choices(kernels: Kernels, experts: int, top_k: int) -> None:
    """All experts among them; of equal logits, zeros of both signs too, the first comes first."""
    x = random(9, experts).round()
    x[0], x[1] = 0.0, -0.0
    x[1, ::2] = 0.0
    case = Case("sigmoid", normalized=False, top_k=top_k)
    got = route(kernels, x, case)
    same(got, router.forward(x, **case.all))
    assert got[3][:2].tolist() == [list(range(top_k))] * 2


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("group_top", [1, 2])
def test_logits_that_are_not_finite(kernels: Kernels, score: str, group_top: int) -> None:
    """Experts differ all the same, and what follows from NaN is NaN."""
    x = random(8, 16)
    x[0, 3], x[1], x[2, 5], x[3, 7], x[4] = torch.nan, torch.nan, torch.inf, -torch.inf, -torch.inf
    x[5, 2], x[5, 9], x[6, :9] = -torch.nan, torch.inf, -torch.inf
    case = Case(score, scale=2.0, top_k=4, groups=4, kept_groups=2, group_top=group_top)
    got = route(kernels, x, case)
    same(got, router.forward(x, **case.all))
    assert all(len({*row}) == 4 for row in got[3].tolist())
    assert got[0][0, 0].isnan() and got[0][1].isnan().all()
    assert score == "softmax" or got[3][0, 0] == 3


def test_no_rows(kernels: Kernels) -> None:
    case = Case(aux_coefficient=0.5, z_coefficient=0.5)
    probs, aux_loss, z_loss, ids, counts = route(kernels, torch.empty(0, 16), case)
    assert probs.shape == ids.shape == (0, 4)
    assert aux_loss == z_loss == 0.0 and not counts.any()


def test_losses_that_nobody_wants(kernels: Kernels) -> None:
    """Coefficients of 0, or no gradients of losses: what is infinite does no harm."""
    x = random(6, 16)
    x[2, 3] = torch.inf
    case = Case("sigmoid")
    got = route(kernels, x, case)
    assert got[1] == got[2] == 0.0
    like, dprobs = torch.empty(0, dtype=torch.bfloat16), random(6, 4, 1)
    dx = gradient(kernels, dprobs, x, case, got[3], got[4], like)
    coefficients = Case("sigmoid", aux_coefficient=1.0, z_coefficient=1.0)
    assert torch.equal(dx, gradient(kernels, dprobs, x, coefficients, got[3], got[4], like))
    assert dx.isfinite().all()
