"""Plans of routing and what moves rows by them, at sizes and in orders that CPUs do not reach."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import gpu_support as support
import pytest
import torch
from torch import Tensor

# Tokens, choices, experts: as models have them, one expert, one choice, millions of choices.
PROBLEMS = (
    (8192, 8, 256),
    (8192, 8, 1024),
    (16384, 2, 8),
    (4099, 12, 1),
    (65537, 1, 33),
    (2**20 + 3, 6, 384),
)
HIDDEN = 64
REPLAYS = {"bf16": 10_000, "fp8_block": 1000}
ROUTED_REPLAYS = 500
ROUTES = ("skewed", "one", "skewed", "few", "none")
"""In turn: many experts, of whom tokens are dropped; all to one; none to most; all dropped."""


def module(bundle: ModuleType, name: str, recipe: str = "bf16") -> ModuleType:
    return importlib.import_module(f"{bundle.__name__}.{name}__{recipe}")


def routed(tokens: int, choices: int, experts: int, seed: int, draw: str = "skewed") -> Any:
    """ids, of which some belong to nobody, and how many each expert has."""
    generator = torch.Generator(support.DEVICE).manual_seed(seed)
    shape, device = (tokens, choices), support.DEVICE
    if draw == "one":
        ids = torch.full(shape, seed % experts, device=device)
    elif draw == "few":
        ids = torch.randint(2, shape, generator=generator, device=device) * (experts - 1)
    elif draw == "none":
        ids = torch.full(shape, -1, device=device)
    else:
        drawn = torch.rand(shape, generator=generator, device=device) ** 3
        ids = (drawn * (experts + 2)).long() - 1
    own = ids[(ids >= 0) & (ids < experts)]
    return ids.to(torch.int32), own.bincount(minlength=experts)


def sorted_by_expert(ids: Tensor, counts: Tensor, capacity: int = 0) -> tuple[Tensor, Tensor]:
    """row_slot and slot_row, of a stable sort."""
    flat, experts = ids.flatten().long(), len(counts)
    slots = torch.arange(len(flat), device=flat.device)
    own = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = torch.argsort(own, stable=True)
    begin = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    rank = slots - begin[own[order]]
    kept = (own[order] < experts) & ((rank < capacity) | (capacity == 0))
    rows = order[kept]
    row_slot = torch.full_like(flat, -1)
    row_slot[: len(rows)] = rows
    slot_row = torch.full_like(flat, -1)
    slot_row[rows] = slots[: len(rows)]
    return row_slot.int(), slot_row.int().view_as(ids)


def permuted(bundle: ModuleType, x: Tensor, ids: Tensor, counts: Tensor, capacity: int = 0) -> Any:
    probs = torch.rand(ids.shape, device=support.DEVICE)
    call = module(bundle, "moe_permute").moe_permute
    return probs, call(x, probs, ids, counts, plan_capacity=capacity)


@pytest.mark.parametrize("capacity", (0, 100))
@pytest.mark.parametrize("draw", ("skewed", "one"))
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_plans_are_stable_sorts(
    bundle: ModuleType, problem: tuple[int, int, int], draw: str, capacity: int
) -> None:
    tokens, choices, _ = problem
    ids, counts = routed(*problem, seed=3, draw=draw)
    x = support.randn((tokens, HIDDEN), torch.bfloat16, 1)
    probs, (rows, row_probs, sizes, row_slot, slot_row) = permuted(bundle, x, ids, counts, capacity)
    wanted = sorted_by_expert(ids, counts, capacity)
    assert torch.equal(row_slot, wanted[0])
    assert torch.equal(slot_row, wanted[1])
    assert torch.equal(sizes, counts.clamp(max=capacity) if capacity else counts)
    own, slots = row_slot >= 0, row_slot.clamp(min=0).long()
    assert torch.equal(rows, torch.where(own[:, None], x[slots // choices], 0.0))
    assert torch.equal(row_probs, torch.where(own, probs.flatten()[slots], 0.0))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_rows_add_up_in_their_order(bundle: ModuleType, problem: tuple[int, int, int]) -> None:
    tokens, choices, _ = problem
    ids, counts = routed(*problem, seed=4)
    row_slot, slot_row = sorted_by_expert(ids, counts)
    y = support.randn((tokens * choices, HIDDEN), torch.bfloat16, 2)
    total = torch.zeros(tokens, HIDDEN, device=support.DEVICE)
    for rows in slot_row.long().unbind(1):
        total += torch.where((rows >= 0)[:, None], y[rows.clamp(min=0)].float(), 0.0)
    got = module(bundle, "combine").combine(y, row_slot, slot_row)
    assert torch.equal(got, total.bfloat16())


@pytest.mark.parametrize("columns", (8, 2048, 7168, 7176))
def test_rows_of_any_length(bundle: ModuleType, columns: int) -> None:
    ids, counts = routed(513, 8, 32, seed=5)
    row_slot, slot_row = sorted_by_expert(ids, counts, 50)
    x = support.randn((513, columns), torch.bfloat16, 1)
    rows = module(bundle, "gather").gather(x, row_slot, slot_row)
    own = row_slot >= 0
    assert torch.equal(rows[own], x[row_slot[own].long() // 8]) and not rows[~own].any()


def replayed(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = support.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


@pytest.mark.parametrize("recipe", REPLAYS)
def test_graphs_replay_any_routing(bundle: ModuleType, recipe: str) -> None:
    """Of the layer and its gradients, with the bits of eager calls."""
    tokens, choices, experts = 777, 4, 16
    layer = module(bundle, "moe_layer", recipe).MoELayer(
        num_experts=experts, hidden=128, intermediate=64, device=support.DEVICE
    )
    x = support.randn((tokens, 128), torch.bfloat16, 1).requires_grad_()
    dy = support.randn((tokens, 128), torch.bfloat16, 2)
    probs = torch.rand(tokens, choices, device=support.DEVICE).requires_grad_()
    ids, counts = routed(tokens, choices, experts, seed=0)
    leaves = (x, probs, *layer.parameters())

    def step() -> tuple[Tensor, ...]:
        y = layer(x, probs, ids, counts)
        return (y, *torch.autograd.grad(y, leaves, dy))

    graph, results = replayed(step)
    for seed in range(REPLAYS[recipe]):
        new = routed(tokens, choices, experts, seed, ROUTES[seed % len(ROUTES)])
        for tensor, values in zip((ids, counts), new, strict=True):
            tensor.copy_(values)
        graph.replay()
        for got, wanted in zip(results, step(), strict=True):
            assert torch.equal(got, wanted), seed


def test_graphs_replay_what_a_router_chooses(bundle: ModuleType) -> None:
    """Of a layer with a router, its losses and gradients; a bias sends tokens where it likes."""
    tokens, experts = 777, 24
    layer = module(bundle, "routed_moe_layer").RoutedMoELayer(
        num_experts=experts,
        hidden=128,
        intermediate=64,
        device=support.DEVICE,
        router_aux_coefficient=0.5,
        router_z_coefficient=0.25,
    )
    x = support.randn((tokens, 128), torch.bfloat16, 1).requires_grad_()
    bias = torch.zeros(experts, device=support.DEVICE)
    dy, one = support.randn((tokens, 128), torch.bfloat16, 2), torch.ones((), device=x.device)
    leaves = (x, *layer.parameters())

    def step() -> tuple[Tensor, ...]:
        y, aux_loss, z_loss, counts = layer(x, bias)
        gradients = torch.autograd.grad((y, aux_loss, z_loss), leaves, (dy, one, one))
        return (y, aux_loss, z_loss, counts, *gradients)

    graph, results = replayed(step)
    for seed in range(ROUTED_REPLAYS):
        x.detach().copy_(support.randn((tokens, 128), torch.bfloat16, 3 + seed))
        drawn = torch.zeros(experts)
        if seed % 3 == 1:  # all tokens choose the same
            drawn[torch.randperm(experts, generator=torch.Generator().manual_seed(seed))[:8]] = 9.0
        elif seed % 3 == 2:
            drawn = torch.randn(experts, generator=torch.Generator().manual_seed(seed))
        bias.copy_(drawn)
        graph.replay()
        for got, wanted in zip(results, step(), strict=True):
            assert torch.equal(got, wanted), seed
        if seed % 3 == 1:
            assert torch.equal(results[3], tokens * (bias > 0))


@pytest.mark.parametrize("draw", ("skewed", "one"))
@pytest.mark.parametrize("problem", support.LAYERS, ids=str)
@pytest.mark.parametrize("recipe", ("bf16", "fp8_block", "fp8_delayed"))
def test_a_layer_gives_what_its_parts_give(
    bundle: ModuleType, recipe: str, problem: tuple[int, int, int, int, int], draw: str
) -> None:
    """Whether rows are gathered in loaders or written, and activations quantised behind products
    or by kernels of their own: outputs, gradients and states, twice."""
    *routing, hidden, intermediate = problem
    tokens, choices, experts = routing
    ids, counts = routed(tokens, choices, experts, seed=6, draw=draw)
    sizes = {"hidden": hidden, "intermediate": intermediate, "device": support.DEVICE}
    layer = module(bundle, "moe_layer", recipe).MoELayer(experts, **sizes)
    mlp = module(bundle, "grouped_mlp", recipe).GroupedMLP(experts, **sizes)
    mlp.load_state_dict(layer.state_dict())
    x = support.randn((tokens, hidden), torch.bfloat16, 1).requires_grad_()
    dy = support.randn((tokens, hidden), torch.bfloat16, 2)
    probs = torch.rand(tokens, choices, device=support.DEVICE).requires_grad_()

    permute = module(bundle, "moe_permute").moe_permute
    combine = module(bundle, "combine").combine
    for _ in range(2):  # the second time by scales of the first
        rows, row_probs, split_sizes, row_slot, slot_row = permute(x, probs, ids, counts)
        wanted = combine(mlp(rows, split_sizes, row_probs), row_slot, slot_row)
        got = layer(x, probs, ids, counts)
        assert torch.equal(got, wanted)
        gradients = torch.autograd.grad(got, (x, probs, *layer.parameters()), dy)
        others = torch.autograd.grad(wanted, (x, probs, *mlp.parameters()), dy)
        for one, other in zip(gradients, others, strict=True):
            assert torch.equal(one, other)
    states = layer.state_dict()
    for name, tensor in mlp.state_dict().items():
        assert torch.equal(states[name], tensor), name
