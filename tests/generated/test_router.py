"""Routers of the CPU bundle: against the classes of transformers, float64 and what is odd."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen.ir.naming import Cell

from .loading import load_cells, run_generated_tests, write_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

GENERATED = (
    Cell("router_llama4", "bf16"),
    Cell("router_deepseek_v3", "bf16"),
    Cell("router_longcat", "bf16", ("add_to_main_grad",)),
    Cell("router", "fp8_block"),
    Cell("router_gpt_oss", "bf16", ("fp32_router_weight",)),
    Cell("router_longcat", "bf16", ("fp32_router_weight", "add_to_main_grad")),
)
"""Cells of no committed bundle: one choice, groups, main_grad, weights in fp32."""
FP32 = "router with its weight in fp32"
TOKENS, HIDDEN = 40, 64


@dataclass(frozen=True)
class Peer:
    """A router class of transformers, and the module that is to give the same.

    Attributes:
        module: ours.
        folder, name: of the class.
        experts, top_k: of its configuration.
        config: further words of it.
        scalars: of our module.
        bias: where the class has the bias of the choice; empty where it has none.
    """

    module: str
    folder: str
    name: str
    experts: int
    top_k: int
    config: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    bias: str = ""


_SCORED = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1}
_V4 = {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5}
_BIAS = "e_score_correction_bias"
PEERS = (
    Peer("router_mixtral", "mixtral", "MixtralTopKRouter", 8, 2),
    Peer("router", "qwen3_moe", "Qwen3MoeTopKRouter", 128, 8, {"norm_topk_prob": True}),
    Peer("router", "qwen3_5_moe", "Qwen3_5MoeTopKRouter", 256, 8, {"norm_topk_prob": True}),
    Peer("router_olmoe", "olmoe", "OlmoeTopKRouter", 64, 8, {"norm_topk_prob": False}),
    Peer("router_gpt_oss", "gpt_oss", "GptOssTopKRouter", 32, 4),
    Peer("router_gpt_oss", "gpt_oss", "GptOssTopKRouter", 128, 4),
    Peer("router_mixtral", "minimax", "MiniMaxTopKRouter", 32, 2),
    Peer("router_llama4", "llama4", "Llama4Router", 16, 1),
    Peer("router_llama4", "llama4", "Llama4Router", 128, 1),
    Peer(
        "router_deepseek_v2",
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        160,
        6,
        {
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "routed_scaling_factor": 16.0,
        },
    ),
    Peer(
        "router_deepseek_v3",
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        256,
        8,
        {"norm_topk_prob": True, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
        bias=_BIAS,
    ),
    Peer("router_deepseek_v4", "deepseek_v4", "DeepseekV4TopKRouter", 256, 6, _V4, bias=_BIAS),
    Peer("router_deepseek_v4", "deepseek_v4", "DeepseekV4TopKRouter", 384, 6, _V4, bias=_BIAS),
    Peer(
        "router_sigmoid",
        "glm4_moe",
        "Glm4MoeTopkRouter",
        128,
        8,
        {**_SCORED, "routed_scaling_factor": 1.0},
        bias=_BIAS,
    ),
    Peer(
        "router_sigmoid",
        "glm4_moe",
        "Glm4MoeTopkRouter",
        160,
        8,
        {**_SCORED, "routed_scaling_factor": 2.5},
        {"scale": 2.5},
        _BIAS,
    ),
    # Kimi-K2 has DeepSeek-V3's class, with one group.
    Peer(
        "router_sigmoid",
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        384,
        8,
        {**_SCORED, "routed_scaling_factor": 2.827},
        {"scale": 2.827},
        _BIAS,
    ),
    Peer("router_sigmoid", "minimax_m2", "MiniMaxM2TopKRouter", 256, 8, bias="given"),
    Peer(
        "router_ernie",
        "ernie4_5_moe",
        "Ernie4_5_MoeTopKRouter",
        64,
        6,
        {"moe_norm_min": 1e-12},
        bias="moe_statics.e_score_correction_bias",
    ),
    Peer(
        "router_longcat",
        "longcat_flash",
        "LongcatFlashTopkRouter",
        768,
        12,
        {"n_routed_experts": 512, "zero_expert_num": 256, "routed_scaling_factor": 6.0},
        bias=_BIAS,
    ),
)
"""Every row of the models that transformers has a class of."""
MODULES = tuple(dict.fromkeys(peer.module for peer in PEERS))


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Modules of the bundle by name."""
    folder = tmp_path_factory.mktemp("routers")
    made = {module: Cell(module, "bf16") for module in MODULES}
    made |= {FP32: Cell("router", "bf16", ("fp32_router_weight",))}
    name = load_cells("routers", folder, [*made.values()])
    return {module: importlib.import_module(f"{name}.{cell}") for module, cell in made.items()}


def test_generated_tests_pass(tmp_path: Path) -> None:
    run_generated_tests(write_cells("routers_alone", "cpu", tmp_path, GENERATED))


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Values that bfloat16 has, in float64."""
    rng = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=rng)).bfloat16().double()


def bias_of_choice(experts: int) -> Tensor:
    """As large as scores differ."""
    return 0.1 * random(experts, seed=5)


# ---- models


def its_router(peer: Peer) -> Any:
    """The class of transformers in float64, with random weights."""
    path = f"transformers.models.{peer.folder}.modeling_{peer.folder}"
    words = {"num_experts": peer.experts, "num_local_experts": peer.experts} | peer.config
    config = SimpleNamespace(num_experts_per_tok=peer.top_k, hidden_size=HIDDEN, **words)
    router = getattr(importlib.import_module(path), peer.name)(config).double()
    for seed, parameter in enumerate(router.parameters(), 1):
        parameter.data = random(*parameter.shape, seed=seed, scale=HIDDEN**-0.5)
    if peer.bias not in ("", "given"):
        *owners, name = peer.bias.split(".")
        owner = router.get_submodule(".".join(owners))
        getattr(owner, name).data = bias_of_choice(peer.experts).view_as(getattr(owner, name))
    return router


def its_weights(peer: Peer, router: Any, x: Tensor) -> Tensor:
    """What each expert has of each token, [T, E]."""
    given = [bias_of_choice(peer.experts)] if peer.bias == "given" else []
    first, *rest = router(x, *given)
    if len(rest) == 1:  # scores of all experts, and logits
        return first
    probs, ids = rest
    return x.new_zeros(x.shape[0], peer.experts).scatter(1, ids, probs.to(x.dtype))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.folder}-{peer.experts}")
def test_models(cells: dict[str, Any], peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same experts of every token, the same weights and the same gradients.

    Those classes compute in fp32 what they are told to, whatever they are given: here in float64.
    """
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    router = its_router(peer)
    x = random(TOKENS, HIDDEN, seed=9).requires_grad_()
    expected = its_weights(peer, router, x)
    weight = next(each for each in router.parameters() if each.dim() == 2 and each.requires_grad)
    bias = getattr(router, "bias", None)
    leaves = [x, weight, *([] if bias is None else [bias])]
    dy = random(TOKENS, peer.experts, seed=10)
    gradients = torch.autograd.grad(expected, leaves, dy)
    monkeypatch.undo()
    cell = cells[peer.module]
    own = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    choice_bias = bias_of_choice(peer.experts).float() if peer.bias else None
    called = {"bias": own[2]} if bias is not None else {}
    defaults = {**scalars_of(cell), **peer.scalars}
    probs, aux_loss, z_loss, ids, counts = getattr(cell, peer.module)(
        *own[:2], choice_bias, **called, **defaults
    )
    slots = ids.long()
    assert torch.equal(counts, slots.flatten().bincount(minlength=peer.experts))
    assert aux_loss == z_loss == 0.0
    got = torch.zeros(TOKENS, peer.experts).scatter(1, slots, probs)
    assert torch.equal(got != 0.0, expected != 0.0)
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=1e-6)
    found = torch.autograd.grad(probs, own, dy.float().gather(1, slots))
    for one, other in zip(found, gradients, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 5e-3


def scalars_of(cell: Any) -> dict[str, float]:
    """What a module of the cell passes to its function."""
    names = ("eps", "least_sum", "scale", "aux_coefficient", "z_coefficient")
    own: Any = next(
        v
        for v in vars(cell).values()
        if isinstance(v, type) and v.__module__ == cell.__name__ and issubclass(v, torch.nn.Module)
    )
    layer = own(hidden=8, num_experts=1024)
    return {name: getattr(layer, name) for name in names}


# ---- losses and gradients, in float64


def route64(
    x: Tensor, weight: Tensor, coefficients: dict[str, float], all_counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Qwen3's router and the losses as papers have them, by autograd's own rules."""
    logits = x @ weight.T
    probabilities = logits.softmax(-1)
    values, ids = probabilities.topk(8)
    probs = values / values.sum(-1, keepdim=True)
    counts = ids.flatten().bincount(minlength=weight.shape[0])
    number = counts if all_counts is None else all_counts
    rows = number.sum() / 8
    shares = (number * probabilities.sum(0)).sum() * weight.shape[0] / (8 * rows**2)
    aux_loss = coefficients["aux_coefficient"] * shares
    z_loss = coefficients["z_coefficient"] * logits.logsumexp(-1).square().mean()
    return probs, aux_loss, z_loss, ids, counts


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("asked", ["probs", "aux_loss", "z_loss", "all"])
def test_losses(cells: dict[str, Any], asked: str, given: bool) -> None:
    x, weight = random(TOKENS, HIDDEN), random(24, HIDDEN, seed=1, scale=HIDDEN**-0.5)
    all_counts = torch.arange(24) if given else None
    coefficients = {"aux_coefficient": 0.5, "z_coefficient": 0.25}
    own = [each.bfloat16().requires_grad_() for each in (x, weight)]
    got = cells["router"].router(*own, None, all_counts, **coefficients)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    expected = route64(*leaves, coefficients, all_counts)
    assert torch.equal(got[3].long(), expected[3]) and torch.equal(got[4], expected[4])
    for one, other in zip(got[:3], expected[:3], strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    dprobs = random(TOKENS, 8, seed=2)
    factors = {"probs": (1.0, 0.0, 0.0), "aux_loss": (0.0, 30.0, 0.0), "z_loss": (0.0, 0.0, 30.0)}
    wanted = factors.get(asked, (1.0, 30.0, -20.0))

    def total(results: Any, dy: Tensor) -> Tensor:
        terms = ((results[0] * dy).sum(), results[1], results[2])
        chosen = [f * term for f, term in zip(wanted, terms, strict=True) if f]
        return torch.stack(chosen).sum()

    found = torch.autograd.grad(total(got, dprobs.float()), own)
    exact = torch.autograd.grad(total(expected, dprobs), leaves)
    for one, other in zip(found, exact, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 5e-3


def test_losses_of_sequences(cells: dict[str, Any]) -> None:
    """The mean of what each sequence by itself has, and of its gradients."""
    x, weight = random(4 * 16, HIDDEN), random(24, HIDDEN, seed=1, scale=HIDDEN**-0.5)
    coefficients = {"aux_coefficient": 0.5, "z_coefficient": 0.25}
    own = [each.bfloat16().requires_grad_() for each in (x, weight)]
    got = cells["router"].router(*own, **coefficients, sequences=4)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    each = [route64(part, leaves[1], coefficients)[1] for part in leaves[0].chunk(4)]
    expected = torch.stack(each).mean()
    torch.testing.assert_close(got[1].double(), expected, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(30 * got[1], own)
    exact = torch.autograd.grad(30 * expected, leaves)
    for one, other in zip(found, exact, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 5e-3


@pytest.mark.parametrize("module", ["router", "router_deepseek_v3"])
def test_losses_of_ranks_add_up(cells: dict[str, Any], module: str) -> None:
    """With the counts of all, to that of the whole batch, and so do gradients: a sum, no mean.

    Ranks of one process, which have as many tokens as they like.
    """
    route = getattr(cells[module], module)
    x, weight = random(TOKENS, HIDDEN).bfloat16(), random(32, HIDDEN, seed=1).bfloat16()
    x, weight = x.requires_grad_(), (0.125 * weight).requires_grad_()
    whole = route(x, weight, aux_coefficient=0.5)
    ranks = x.split([TOKENS // 4, TOKENS - TOKENS // 4])
    all_counts = torch.stack([route(rank, weight)[4] for rank in ranks]).sum(0)
    assert torch.equal(all_counts, whole[4])
    losses = [route(rank, weight, None, all_counts, aux_coefficient=0.5)[1] for rank in ranks]
    torch.testing.assert_close(torch.stack(losses).sum(), whole[1], rtol=1e-6, atol=0.0)
    alone = [route(rank, weight, aux_coefficient=0.5)[1] for rank in ranks]
    assert abs(torch.stack(alone).mean() - whole[1]) > 1e-3 * whole[1], "counts are of all"
    exact = torch.autograd.grad(30 * whole[1], (x, weight))
    found = torch.autograd.grad([30 * loss for loss in losses], (x, weight))
    for one, other in zip(found, exact, strict=True):
        assert ((one - other).double().norm() / other.double().norm()).item() < 5e-3


@pytest.mark.parametrize("sequences", [-1, 0, 3])
def test_sequences_have_the_same_length(cells: dict[str, Any], sequences: int) -> None:
    x, weight = random(8, HIDDEN).bfloat16(), random(24, HIDDEN).bfloat16()
    with pytest.raises(
        ValueError, match=f"sequences: expected a divisor of 8 tokens, got {sequences}"
    ):
        cells["router"].router(x, weight, sequences=sequences)


def test_of_equal_logits_the_first_comes_first(cells: dict[str, Any]) -> None:
    x, weight = torch.ones(3, 8).bfloat16(), torch.zeros(24, 8).bfloat16()
    weight[20] = 1.0
    *_, ids, counts = cells["router"].router(x, weight)
    assert ids.tolist() == [[20, *range(7)]] * 3
    assert counts.tolist() == [3] * 7 + [0] * 13 + [3] + [0] * 3


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens_and_experts(cells: dict[str, Any], tokens: int) -> None:
    """As many experts as are chosen, one of them, and no token at all."""
    for module, experts in (("router", 8), ("router_llama4", 1), ("router_longcat", 12)):
        x, weight = random(tokens, 8).bfloat16(), random(experts, 8, seed=1).bfloat16()
        leaf = x.requires_grad_()
        coefficients = {"aux_coefficient": 1.0, "z_coefficient": 1.0}
        probs, aux_loss, z_loss, ids, counts = getattr(cells[module], module)(
            leaf, weight, **coefficients
        )
        assert sorted(ids.flatten().tolist()) == [*range(experts)] * tokens
        assert counts.tolist() == [tokens] * experts
        (dx,) = torch.autograd.grad(probs.sum() + aux_loss + z_loss, leaf)
        assert dx.isfinite().all() and dx.shape == x.shape
        if not tokens:
            assert aux_loss == z_loss == 0.0


@pytest.mark.parametrize(
    ("module", "experts", "message"),
    [
        ("router", 4, r"E \(num_experts\): expected at least 8, got 4"),
        ("router_deepseek_v3", 36, r"E \(num_experts\): expected a multiple of 8 on cpu, got 36"),
        ("router_deepseek_v3", 8, r"E \(num_experts\): expected at least 16, got 8"),
    ],
)
def test_too_few_experts_are_refused(
    cells: dict[str, Any], module: str, experts: int, message: str
) -> None:
    function: Callable[..., Any] = getattr(cells[module], module)
    with pytest.raises(RuntimeError, match=message):
        function(torch.zeros(2, 8).bfloat16(), torch.zeros(experts, 8).bfloat16())


def test_weights_in_fp32_are_refused(cells: dict[str, Any]) -> None:
    """Rounding them would not be what a model asks for that has them so."""
    with pytest.raises(RuntimeError, match="weight: expected dtype bfloat16, as x, got float32"):
        cells["router"].router(torch.zeros(2, 8).bfloat16(), torch.zeros(8, 8))


def odd_weight(experts: int, seed: int = 1) -> Tensor:
    """Numbers of 24 bits, in float64."""
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(experts, HIDDEN, generator=rng) * HIDDEN**-0.5).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_of_a_weight_are_the_weight(cells: dict[str, Any], dtype: torch.dtype) -> None:
    """All of its bits; in fp16 those above 2^-47. Infinities and NaN are what they were."""
    package = cells[FP32].__name__.rpartition(".")[0]
    reference = importlib.import_module(f"{package}.reference._fp32_weight")
    weight = torch.cat([odd_weight(24, seed).float() * 4.0 ** (seed - 5) for seed in range(10)])
    parts = reference.split(weight, like=torch.empty(0, dtype=dtype))
    assert parts.dtype is dtype and parts.shape == (3 * len(weight), HIDDEN)
    first, second, third = parts.double().chunk(3)
    missed = (first + second * 2.0**-11 + third * 2.0**-22 - weight.double()).abs().max()
    assert missed <= (0.0 if dtype is torch.bfloat16 else 2.0**-47)
    odd = torch.tensor([[0.0, -0.0, torch.inf, torch.nan]])
    first, *rest = reference.split(odd, like=torch.empty(0, dtype=dtype)).chunk(3)
    assert first[0, 2].isinf() and first[0, 3].isnan()
    assert all(torch.equal(each[:, :2].abs(), torch.zeros(1, 2, dtype=dtype)) for each in rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_in_fp32_is_not_rounded(cells: dict[str, Any], dtype: torch.dtype) -> None:
    """Weights, losses and gradients are those of float64 and the weight as it is."""
    x, weight, dprobs = random(TOKENS, HIDDEN), odd_weight(24), random(TOKENS, 8, seed=2)
    coefficients = {"aux_coefficient": 0.5, "z_coefficient": 0.25}
    own = [x.to(dtype).requires_grad_(), weight.float().requires_grad_()]
    got = cells[FP32].router(*own, **coefficients)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    expected = route64(*leaves, coefficients)
    rounded = route64(x, weight.to(dtype).double(), coefficients)
    assert torch.equal(got[3].long(), expected[3])
    for one, other, off in zip(got[:3], expected[:3], rounded[:3], strict=True):
        assert (one - other).abs().max() < 2e-6 < (off - other).abs().max()

    def total(results: Any, dy: Tensor) -> Tensor:
        return (results[0] * dy).sum() + 30 * results[1] - 20 * results[2]

    found = torch.autograd.grad(total(got, dprobs.float()), own)
    assert [each.dtype for each in found] == [dtype, torch.float32]
    exact = torch.autograd.grad(total(expected, dprobs), leaves)
    for one, other in zip(found, exact, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 5e-3


def test_a_module_has_its_weight_in_fp32(cells: dict[str, Any]) -> None:
    """Whatever type it is asked for; a module that was put into 16 bits says what it lacks."""
    layer = cells[FP32].Router(hidden=HIDDEN, num_experts=24, dtype=torch.float16)
    assert layer.weight.dtype is torch.float32
    layer(random(4, HIDDEN).half())[0].sum().backward()
    assert layer.weight.grad.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(random(4, HIDDEN).float())[0].dtype is torch.float32
    with pytest.raises(RuntimeError, match="weight: expected dtype float32, got bfloat16"):
        layer.bfloat16()(random(4, HIDDEN).bfloat16())


@pytest.mark.parametrize("module", ["router", "router_sigmoid", "router_deepseek_v3"])
def test_logits_that_are_not_finite(cells: dict[str, Any], module: str) -> None:
    """Each token chooses experts that differ, and its weights say what it had; others do not."""
    x, weight = random(4, 8).bfloat16(), random(32, 8, seed=1).bfloat16()
    clean = getattr(cells[module], module)(x, weight)
    x[1, 3] = torch.nan
    probs, _, _, ids, counts = getattr(cells[module], module)(x, weight)
    assert all(len({*row}) == 8 for row in ids.tolist())
    assert ((ids >= 0) & (ids < 32)).all() and counts.sum() == 32
    assert probs[1].isnan().all()
    others = [0, 2, 3]
    assert torch.equal(probs[others], clean[0][others])
    assert torch.equal(ids[others], clean[3][others])


def test_a_bias_chooses_and_weighs_nothing(cells: dict[str, Any]) -> None:
    x, weight = random(TOKENS, 16), random(24, 16, seed=1)
    bias = torch.full((24,), -9.0)
    bias[3:11] = 9.0
    probs, _, _, ids, _ = cells["router_sigmoid"].router_sigmoid(
        x.bfloat16(), weight.bfloat16(), bias
    )
    assert (ids.sort(-1).values == torch.arange(3, 11)).all()
    scores = (x @ weight.T).sigmoid().gather(1, ids.long())
    expected = scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(probs.double(), expected, rtol=1e-5, atol=1e-6)


# ---- modules, compilers and transforms


def test_a_module_keeps_no_bias_of_the_choice(cells: dict[str, Any]) -> None:
    """What it adds is the caller's, who updates it: an argument, and nothing of the state."""
    layer = cells["router_deepseek_v3"].DeepSeekV3Router(hidden=16, num_experts=32)
    assert [*layer.state_dict()] == ["weight"] and layer.scale == 2.5
    x = random(6, 16).bfloat16()
    alone, biased = layer(x), layer(x, torch.linspace(-1.0, 1.0, 32))
    assert not torch.equal(alone[3], biased[3])
    with pytest.raises(RuntimeError, match="choice_bias: expected a tensor, got list"):
        layer(x, [0.0] * 32)


def test_what_is_saved(cells: dict[str, Any]) -> None:
    """The input, logits in fp32, whom they chose, and counts; no weights of experts."""
    layer = cells["router"].Router(hidden=16, num_experts=32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(random(6, 16).bfloat16())
    found = sorted((tuple(each.shape), str(each.dtype)) for each in kept)
    assert found == [
        ((6, 8), "torch.int32"),
        ((6, 16), "torch.bfloat16"),
        ((6, 32), "torch.float32"),
        ((32,), "torch.int64"),
    ]


def test_integers_have_no_gradient(cells: dict[str, Any]) -> None:
    layer = cells["router"].Router(hidden=16, num_experts=32)
    probs, aux_loss, z_loss, ids, counts = layer(random(6, 16).bfloat16())
    assert probs.requires_grad and aux_loss.requires_grad and z_loss.requires_grad
    assert not ids.requires_grad and not counts.requires_grad


def test_any_number_of_tokens_compiles_and_exports(cells: dict[str, Any]) -> None:
    layer = cells["router_deepseek_v3"].DeepSeekV3Router(16, 32, aux_coefficient=0.5)
    bias = torch.linspace(-0.1, 0.1, 32)
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend="aot_eager")
    rows = torch.export.Dim("rows")
    sample = (random(6, 16).bfloat16(), bias)
    exported = torch.export.export(layer, sample, dynamic_shapes=({0: rows}, None)).module()
    for tokens in (5, 7, 64):
        x = random(tokens, 16, seed=tokens).bfloat16()
        results = [each(x, bias) for each in (layer, compiled, exported)]
        for others in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


def test_transforms(cells: dict[str, Any]) -> None:
    x, weight = random(6, 16).bfloat16(), random(32, 16, seed=1).bfloat16()

    def loss(each: Tensor) -> Tensor:
        probs, aux_loss, _, ids, _ = cells["router"].router(x, each, aux_coefficient=0.5)
        return (probs * ids).sum() + aux_loss

    leaf = weight.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(torch.func.grad(loss)(weight), expected)
