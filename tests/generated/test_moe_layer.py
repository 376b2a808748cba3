"""Experts behind a router, from tokens to tokens: against a loop over experts, and as generated."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusegen.ir.naming import Cell

from .loading import load_cells, run_generated_tests

pytestmark = pytest.mark.usefixtures("fresh_compiler")

HIDDEN, INTERMEDIATE = 32, 24
CELLS = tuple(
    Cell(*names)
    for names in (
        ("moe_layer", "bf16"),
        ("moe_layer_srelu", "bf16"),
        ("moe_layer", "fp8_block"),
        ("moe_layer", "nvfp4"),
        ("gather", "bf16"),
        ("combine", "bf16"),
        ("combine_extra", "bf16"),
        ("moe_permute", "bf16"),
        ("routed_moe_layer", "bf16"),
        ("routed_moe_layer", "fp8_delayed"),
        ("shared_moe_layer", "bf16"),
        ("shared_moe_layer", "nvfp4"),
        ("moe_layer", "bf16", ("delayed_wgrad",)),
        ("shared_moe_layer", "fp8_block", ("delayed_wgrad",)),
        ("mlp_swiglu", "bf16"),
    )
)
# Tokens, choices, experts, capacity: none, one, ragged, one choice, more choices than experts.
PROBLEMS = ((0, 2, 4, 0), (1, 1, 1, 0), (37, 2, 4, 0), (50, 1, 7, 0), (19, 12, 5, 0), (40, 3, 6, 7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moe_layer")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> str:
    return load_cells("moe_layer", folder, CELLS)


def cell(bundle: str, name: str) -> ModuleType:
    return importlib.import_module(f"{bundle}.{name}")


def test_generated_tests_pass(bundle: str, folder: Path) -> None:
    assert run_generated_tests(folder / "cpu") > 100


def tensors(tokens: int, choices: int, experts: int, seed: int = 0) -> dict[str, Any]:
    """Arguments of the layer; of the ids some belong to nobody, and the last expert is empty."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    ids = torch.randint(-1, max(experts - 1, 1), (tokens, choices), generator=generator)
    if tokens > 2:
        ids[2] = experts
    own = ids[(ids >= 0) & (ids < experts)]
    return {
        "x": normal(tokens, HIDDEN),
        "fc1_weight": normal(experts, 2 * INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
        "fc2_weight": normal(experts, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5),
        "probs": torch.rand(tokens, choices, generator=generator),
        "ids": ids.to(torch.int32),
        "counts": own.bincount(minlength=experts),
        "fc1_bias": normal(experts, 2 * INTERMEDIATE, scale=0.1),
        "fc2_bias": normal(experts, HIDDEN, scale=0.1),
    }


def looped(capacity: int, **given: Tensor) -> Tensor:
    """The layer as a loop over experts, each over its tokens in their order."""
    x, ids = given["x"], given["ids"].long()
    y = torch.zeros_like(x)
    for expert in range(len(given["fc1_weight"])):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if capacity:
            token, choice = token[:capacity], choice[:capacity]
        h = x[token] @ given["fc1_weight"][expert].T + given["fc1_bias"][expert]
        gate, up = h.chunk(2, -1)
        a = functional.silu(gate) * up * given["probs"][token, choice, None]
        rows = a @ given["fc2_weight"][expert].T + given["fc2_bias"][expert]
        y = y.index_add(0, token, rows)
    return y


DIFFERENTIABLE = ("x", "fc1_weight", "fc2_weight", "probs", "fc1_bias", "fc2_bias")


def leaves(given: dict[str, Any], *, wide: bool) -> dict[str, Any]:
    found = dict(given)
    for name in DIFFERENTIABLE:
        value = given[name].double() if wide else given[name].clone()
        found[name] = value.requires_grad_()
    return found


def error(got: Tensor, wanted: Tensor) -> float:
    scale = wanted.norm()
    return float((got.double() - wanted).norm() / scale) if scale > 0 else float(got.norm())


@pytest.mark.parametrize(
    ("name", "tolerance"), [("bf16", 0.01), ("fp8_block", 0.1), ("nvfp4", 0.4)]
)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_it_is_the_loop_over_experts(
    bundle: str, problem: tuple[int, int, int, int], name: str, tolerance: float
) -> None:
    *sizes, capacity = problem
    given = tensors(*sizes)
    module = cell(bundle, f"moe_layer__{name}")
    own, exact = leaves(given, wide=False), leaves(given, wide=True)
    extra = {"rng_state": torch.tensor([1, 0])} if name == "nvfp4" else {}
    y = module.moe_layer(**own, **extra, plan_capacity=capacity)
    wanted = looped(capacity, **exact)
    assert error(y.detach(), wanted.detach()) <= tolerance
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    got = torch.autograd.grad(y, [own[n] for n in DIFFERENTIABLE], dy)
    exactly = torch.autograd.grad(
        wanted, [exact[n] for n in DIFFERENTIABLE], dy.double(), materialize_grads=True
    )
    for leaf, one, other in zip(DIFFERENTIABLE, got, exactly, strict=True):
        assert error(one, other) <= tolerance, leaf


@pytest.mark.parametrize("name", ("bf16", "fp8_block"))
def test_all_tokens_may_choose_one_expert_or_none(bundle: str, name: str) -> None:
    for expert in (2, 9):
        given = tensors(33, 2, 4)
        given["ids"].fill_(expert)
        given["counts"] = torch.tensor([0, 0, 66 * (expert == 2), 0])
        y = cell(bundle, f"moe_layer__{name}").moe_layer(**leaves(given, wide=False))
        assert bool(y.any()) is (expert == 2)
        assert error(y.detach(), looped(0, **leaves(given, wide=True)).detach()) <= 0.1


def test_between_forward_and_backward_it_holds_tokens_and_not_their_copies(bundle: str) -> None:
    """Of a row h, its weight and its two places; of a token x."""
    given = leaves(tensors(64, 4, 8), wide=False)
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        cell(bundle, "moe_layer__bf16").moe_layer(**given)
    parameters = {given[name].data_ptr() for name in DIFFERENTIABLE if "fc" in name}
    found = sorted(t.nbytes for pointer, t in held.items() if pointer not in parameters)
    rows = 64 * 4
    x, h, maps = 2 * 64 * HIDDEN, 4 * rows * INTERMEDIATE, [4 * rows] * 3
    assert found == sorted([x, h, *maps, 8 * 8])


def test_extra_is_added_before_the_sum_is_rounded(bundle: str) -> None:
    """1 + 2^-8 is no bfloat16, 1 + 2^-8 + 2^-8 is one."""
    module = cell(bundle, "combine_extra__bf16")
    x = torch.tensor([1.0, 2.0**-8]).bfloat16().unsqueeze(1).expand(2, 8).contiguous()
    extra = torch.full((1, 8), 2.0**-8).bfloat16().requires_grad_()
    maps = {
        "row_slot": torch.tensor([0, 1], dtype=torch.int32),
        "slot_row": torch.tensor([[0, 1]], dtype=torch.int32),
    }
    y = module.combine_extra(x.requires_grad_(), **maps, extra=extra)
    assert torch.equal(y, torch.full((1, 8), 1 + 2.0**-7).bfloat16())
    (dextra,) = torch.autograd.grad(y, extra, dy := torch.ones_like(y))
    assert torch.equal(dextra, dy)


def test_modules_train(bundle: str) -> None:
    given = tensors(40, 2, 4)
    layer = cell(bundle, "moe_layer__bf16").MoELayer(
        num_experts=4, hidden=HIDDEN, intermediate=INTERMEDIATE
    )
    inputs = [given[name] for name in ("x", "probs", "ids", "counts")]
    losses = []
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (layer(*inputs).float() - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0]


def test_a_router_in_front_is_the_router_and_the_layer(bundle: str, folder: Path) -> None:
    routers = load_cells("router_alone", folder / "router", (Cell("router", "bf16"),))
    routed = cell(bundle, "routed_moe_layer__bf16").RoutedMoELayer(
        num_experts=16, hidden=HIDDEN, intermediate=INTERMEDIATE
    )
    x = tensors(30, 8, 16)["x"]
    y, aux, z, counts = routed(x)
    weight = routed.router.weight
    probs, own_aux, own_z, ids, own_counts = cell(routers, "router__bf16").router(x, weight)
    layer = cell(bundle, "moe_layer__bf16").moe_layer
    parts = (routed.fc1.weight, routed.fc2.weight)
    assert torch.equal(y, layer(x, *parts, probs, ids, own_counts))
    assert torch.equal(counts, own_counts) and torch.equal(aux, own_aux) and torch.equal(z, own_z)
    assert int(counts.sum()) == 30 * 8


def test_shared_experts_are_a_dense_mlp_beside_the_others(bundle: str) -> None:
    """What they give is added up with what the others give, before that is rounded."""
    given = tensors(37, 2, 4)
    torch.manual_seed(0)
    layer = cell(bundle, "shared_moe_layer__bf16").SharedMoELayer(
        num_experts=4, hidden=HIDDEN, intermediate=INTERMEDIATE, shared_intermediate=40
    )
    experts = cell(bundle, "moe_layer__bf16").MoELayer(
        num_experts=4, hidden=HIDDEN, intermediate=INTERMEDIATE
    )
    shared = cell(bundle, "mlp_swiglu__bf16").SwiGLUMLP(hidden=HIDDEN, intermediate=40)
    for name, parameter in layer.named_parameters():
        own = shared.get_parameter(name[7:]) if name.startswith("shared_") else None
        own = experts.get_parameter(name) if own is None else own
        own.data.copy_(parameter.data)
    x, probs = (torch.randn(37, HIDDEN).bfloat16(), torch.rand(37, 2))
    results = []
    for call in (
        lambda x: layer(x, probs, given["ids"], given["counts"]),
        lambda x: experts(x, probs, given["ids"], given["counts"]).float() + shared(x).float(),
    ):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.float().square().sum().backward()
        results.append((y.float(), leaf.grad.float()))
    for one, other in zip(*results, strict=True):
        assert error(one.detach(), other.detach()) < 5e-3
