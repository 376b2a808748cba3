"""Rows that are other ranks': whatever memory holds there, no result has it.

One GPU is one of four ranks, and is given what it would gather.  Memory that nobody has written is
NaN, as deterministic PyTorch fills it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bundles import BUILD, DEVICE, load_bundle, load_cell
from torch import Tensor

from fusegen.ir.naming import Cell

from ..generated.loading import write_cells
from .places import built

RANKS, RANK = 4, 1
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, CHOICES = 203, 256, 384, 5, 3
"""Of all ranks, but for the experts, which are those of one."""

MANY = 2003  # tokens, so that groups have whole tiles of one rank's
HERE = (411, 1203)  # of those

RECIPES = ("bf16", "fp8_block", "fp8_delayed")
ROUTES = ("some", "none", "all")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> ModuleType:
    cells = [
        Cell("moe_layer", recipe, options)
        for recipe in RECIPES
        for options in ((), ("expert_parallel",))
    ]
    made = built(write_cells("fusegen", folder.name, BUILD / "rows_of_ranks", cells))
    return load_bundle(made, f"rows_of_ranks_{folder.name}")


@pytest.fixture(autouse=True)
def memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(8, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def collectives(ranks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a rank is given in the place of what it would get from others."""
    module = load_cell(ranks, "_collectives")

    def given(place: Any, sources: tuple[Tensor], **_: Any) -> Any:
        return module.Pending(place, None, here=sources)

    def numbers(place: Any, sources: tuple[Tensor], *, own: int, **_: Any) -> Any:
        return given(place, (sources[0] - RANK * own,))

    def scattered(place: Any, sources: tuple[Tensor], **_: Any) -> Any:
        (source,) = sources
        is_counts = source.dtype is torch.int64
        return given(place, (source.chunk(RANKS)[RANK],) if is_counts else sources)

    def product(place: Any, sources: tuple[Tensor], made: Any, **_: Any) -> Tensor:
        result: Tensor = made(sources[0])
        return result

    monkeypatch.setattr(module, "start_all_gather", given)
    monkeypatch.setattr(module, "start_gather_numbers", numbers)
    monkeypatch.setattr(module, "start_reduce_scatter", scattered)
    monkeypatch.setattr(module, "scattered_product", product)
    return module


def layer_of(ranks: ModuleType, recipe: str, *options: str) -> torch.nn.Module:
    module = load_cell(ranks, "__".join(("moe_layer", recipe, *options)))
    torch.manual_seed(0)
    layer: torch.nn.Module = module.MoELayer(
        EXPERTS, HIDDEN, INTERMEDIATE, bias=recipe == "bf16", device=DEVICE
    )
    return layer


def drawn(route: str, tokens: int = TOKENS, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Experts of all ranks that tokens chose, and how many chose each."""
    every = RANKS * EXPERTS
    own = torch.arange(RANK * EXPERTS, (RANK + 1) * EXPERTS)
    among = {"some": torch.arange(every), "none": torch.arange(EXPERTS), "all": own}[route]
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, len(among), generator=draw).topk(CHOICES).indices
    ids = among[chosen].int()
    counts = torch.stack([(ids == expert).sum() for expert in range(every)])
    return ids.to(DEVICE), counts.to(DEVICE)


def step(layer: torch.nn.Module, ids: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """The results of a forward and a backward by name."""
    seed = torch.Generator().manual_seed(2)
    tokens = len(ids)
    x, dy = (torch.randn(tokens, HIDDEN, generator=seed).bfloat16().to(DEVICE) for _ in range(2))
    probs = torch.rand(tokens, CHOICES, generator=seed).to(DEVICE)
    x.requires_grad_(), probs.requires_grad_()
    layer.zero_grad()
    y = layer(x, probs=probs, ids=ids, counts=counts)
    y.backward(dy)
    assert x.grad is not None and probs.grad is not None
    weights = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, "probs": probs.grad, **weights}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_of_four_ranks(
    ranks: ModuleType, collectives: ModuleType, recipe: str, route: str
) -> None:
    """The bits of a layer of the same experts alone, which writes all rows; states move alike."""
    alone, one_of = layer_of(ranks, recipe), layer_of(ranks, recipe, "expert_parallel")
    one_of.load_state_dict(alone.state_dict())
    ids, counts = drawn(route)
    own = slice(RANK * EXPERTS, (RANK + 1) * EXPERTS)
    for _ in range(2):
        wanted = step(alone, ids - RANK * EXPERTS, counts[own])
        found = step(one_of, ids, counts)
        assert wanted.keys() == found.keys() and len(found) >= 5
        for name, value in wanted.items():
            assert value.isfinite().all(), name
            assert torch.equal(found[name], value), name
        assert bool(wanted["y"].any()) is (route != "none")


@dataclass
class Arrivals:
    """Whether tokens of other ranks arrive while ops run, and how often they did."""

    late: bool = True
    count: int = 0


@pytest.fixture
def arrivals(ranks: ModuleType, collectives: Any, monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    overlap, stream, told = load_cell(ranks, "_overlap"), torch.cuda.Stream(), Arrivals()

    class Late(overlap.Gathering):  # type: ignore[misc, name-defined]
        def __init__(self, rows: Tensor) -> None:
            self.rows = rows

        def __call__(self) -> Tensor:
            return self.rows

        def arriving(self, op: Any) -> Any:
            every, (first, end) = torch.full_like(self.rows, torch.nan), HERE
            every[first:end].copy_(self.rows[first:end])
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
                every[:first].copy_(self.rows[:first])
                every[end:].copy_(self.rows[end:])
                there = stream.record_event()
            made = op(every, first, end, stream.cuda_stream)
            torch.cuda.current_stream().wait_event(there)
            told.count += 1
            return every, made

    def given(place: Any, sources: tuple[Tensor], **_: Any) -> Any:
        arriving = Late(sources[0]) if told.late else None
        return collectives.Pending(place, None, here=sources, arriving=arriving)

    monkeypatch.setattr(collectives, "start_all_gather", given)
    return told


@pytest.mark.parametrize("route", ROUTES)
def test_ops_begin_with_rows_that_are_there(
    ranks: ModuleType, arrivals: Arrivals, route: str
) -> None:
    """Forwards with x and backwards with dy: the bits of ops that find all rows there."""
    layer = layer_of(ranks, "bf16", "expert_parallel")
    ids, counts = drawn(route, MANY)
    found = step(layer, ids, counts)
    assert arrivals.count == 2
    arrivals.late = False
    wanted = step(layer, ids, counts)
    assert arrivals.count == 2 and bool(wanted["y"].any()) is (route != "none")
    for name, value in wanted.items():
        assert value.isfinite().all() and torch.equal(found[name], value), name


def test_replays_begin_with_rows_that_are_there(ranks: ModuleType, arrivals: Arrivals) -> None:
    """A graph waits in the middle of an op, whatever tokens choose when it is replayed."""
    layer = layer_of(ranks, "bf16", "expert_parallel")
    ids, counts = drawn("some", MANY)
    x = torch.randn(MANY, HIDDEN, device=DEVICE).bfloat16()
    probs = torch.rand(MANY, CHOICES, device=DEVICE)
    with torch.no_grad():
        layer(x, probs=probs, ids=ids, counts=counts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x, probs=probs, ids=ids, counts=counts)
        arrivals.late = False
        for seed in range(60):
            for each, value in zip((ids, counts), drawn(ROUTES[seed % 3], MANY, seed), strict=True):
                each.copy_(value)
            x.normal_()
            graph.replay()
            assert torch.equal(y, layer(x, probs=probs, ids=ids, counts=counts)), seed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("terms", [1, 2, 3, 7])
def test_rows_that_ranks_send_are_added_up_in_order(
    ranks: ModuleType, terms: int, dtype: torch.dtype
) -> None:
    """Rounded once, from buffers that are further apart than their rows; of any number."""
    add_rows = load_cell(ranks, "_add_rows").add_rows
    for shape in ((0, 8), (3, 8), (257, 264), (5, 7), (4096, 520)):
        count = torch.Size(shape).numel()
        buffers = torch.randn(terms, count + 4096, device=DEVICE).to(dtype)
        others, own = buffers[:, :count].view(terms, *shape), torch.randn(shape, device=DEVICE)
        own = own.to(dtype)
        total = others[0].float()
        for each in (*others[1:], own):
            total = total + each.float()
        found = torch.empty_like(own)
        add_rows(others, own, found)
        assert torch.equal(found, total.to(dtype)), shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("choices", [1, 2, 8])
def test_slots_are_filled_and_added_up_as_on_the_cpu(
    ranks: ModuleType, choices: int, dtype: torch.dtype
) -> None:
    """Signs of zeros are those of the rows; some tokens have fewer slots, or none."""
    slots = load_cell(ranks, "integrations._slots")
    for tokens, capacity, width in ((0, 4, 8), (5, 3, 8), (700, 300, 1032), (257, 400, 7)):
        rank = torch.randint(5, (tokens, choices), device=DEVICE)
        where = slots.places(rank, torch.arange(4, device=DEVICE), capacity)
        other = slots.places(rank.cpu(), torch.arange(4), capacity)
        for one, two in zip(where, other, strict=True):
            assert torch.equal(one.cpu(), two)
        x, y = (torch.randn(n, width, device=DEVICE).to(dtype) for n in (tokens, 4 * capacity))
        x, y = x * (x > 0.5), -y * (y > 0.5)
        for made, rows in ((slots.dealt, (x, *where[:2])), (slots.collected, (y, where[1]))):
            expected = made(*(each.cpu() for each in rows)).view(torch.uint8)
            assert torch.equal(made(*rows).cpu().view(torch.uint8), expected), (tokens, made)
