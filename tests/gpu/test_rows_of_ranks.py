"""Rows that are other ranks': whatever memory holds there, no result has it.

One GPU is one of four ranks, and is given what it would gather.  Memory that nobody has written is
NaN, as deterministic PyTorch fills it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from ..generated.test_overlap import COLUMN, QUANTISED, ROW
from .places import built, products_by_rows

RANKS, RANK = 4, 1
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, CHOICES = 203, 256, 384, 5, 3
"""Of all ranks, but for the experts, which are those of one."""

MANY = 2003  # tokens, so that groups have whole tiles of one rank's
HERE = (411, 1203)  # of those

RECIPES = ("bf16", "fp8_block", "fp8_delayed")
ROUTES = ("some", "none", "all")

DECODED = {"sm_90a": ("mxfp8", "nvfp4"), "sm_100a": (), "sm_120a": ()}
"""Recipes whose codes are decoded before they are multiplied, as no kernel reads them; elsewhere,
all of them.
"""


@pytest.fixture(scope="module")
def ranks(folder: Path) -> ModuleType:
    cells = [
        Cell("moe_layer", recipe, options)
        for recipe in RECIPES
        for options in ((), ("expert_parallel",))
    ]
    made = built(write_cells("fusegen", folder.name, BUILD / "rows_of_ranks", cells))
    return load_bundle(made, f"rows_of_ranks_{folder.name}")


@pytest.fixture(scope="module")
def products(folder: Path) -> ModuleType:
    made, _ = products_by_rows(folder)
    return load_bundle(made, f"products_{folder.name}")


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

    def product(place: Any, sources: tuple[Tensor, ...], made: Any, **_: Any) -> Tensor:
        result: Tensor = made(*sources)
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


@pytest.fixture
def parted(products: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows a rank had, whose product was compared with its part of that of all."""
    module, seen = load_cell(products, "_collectives"), list[int]()

    def given(place: Any, sources: tuple[Tensor], **_: Any) -> Any:
        return module.Pending(place, None, here=sources)

    def compare(product: Any, sources: Sequence[Tensor], lies: Any) -> tuple[Tensor, ...]:
        whole = product(*sources)
        parts = (module._parts(each, RANKS, *how) for each, how in zip(sources, lies, strict=True))
        made = [product(*part) for part in zip(*parts, strict=True)]
        for one, parts_of_one in zip(whole, zip(*made, strict=True), strict=True):
            assert one.isfinite().all() and torch.equal(torch.cat(parts_of_one), one)
            seen.append(len(parts_of_one[0]))
        return whole

    def scattered(
        place: Any, sources: Any, product: Any, *, lies: Any = ((0, 0),), unit: int = 1, **_: Any
    ) -> Tensor:
        tokens = sources[0].shape[:-1].numel()
        if tokens % (unit * RANKS):
            seen.append(0)
            return product(*sources)  # type: ignore[no-any-return]
        return compare(lambda *rows: (product(*rows),), sources, lies)[0]

    def gathered(
        place: Any,
        sources: Any,
        product: Any,
        *,
        widths: Any,
        like: Any = None,
        lies: Any = ((0, 0),),
        **_: Any,
    ) -> tuple[Tensor, ...]:
        rows = sources if like is None else (like, *sources)
        lies = lies if like is None else ((0, 0), *lies)
        return compare(lambda *rows: module._products(rows, product, widths), rows, lies)

    for name in ("placeholder", "share", "gather_copy", "all_gather", "reduce_scatter"):
        monkeypatch.setattr(module, f"start_{name}", given)
    monkeypatch.setattr(module, "require_same", lambda *_: None, raising=False)
    monkeypatch.setattr(module, "start_all_reduce", lambda *args, op: given(*args))
    monkeypatch.setattr(module, "scattered_product", scattered)
    monkeypatch.setattr(module, "product_of_gathered", gathered)
    return seen


@pytest.mark.skipif(DEVICE == "cpu", reason="BLAS adds up few rows in an order of its own")
@pytest.mark.parametrize("shape", [(512,), (2048,), (16, 128), (4096,), (12,), (4, 7)], ids=str)
@pytest.mark.parametrize("cell", [COLUMN, ROW, *QUANTISED], ids=str)
def test_products_by_rows_have_the_bits_of_one(
    folder: Path,
    products: ModuleType,
    parted: list[int],
    monkeypatch: pytest.MonkeyPatch,
    cell: Cell,
    shape: tuple[int, ...],
) -> None:
    """Whatever tile each of them takes, and wherever scales of a rank's rows lie."""
    if not (Path(products.__path__[0]) / f"{cell}.py").is_file():
        pytest.skip("this architecture has no such module")
    module, codes = load_cell(products, str(cell)), "quantized_input" in cell.options
    if codes and torch.Size(shape).numel() % 128:
        pytest.skip("scales would be of tokens of two ranks")
    if cell.recipe == "nvfp4":  # PyTorch fills no memory of elements of 4 bits
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.manual_seed(0)
    mlp = cell.module != "linear"
    sizes = (HIDDEN, INTERMEDIATE) if mlp else (HIDDEN, 640)
    kinds = (getattr(module, name, None) for name in ("Linear", "MLP", "SwiGLUMLP"))
    kind = next(filter(None, kinds))
    layer = kind(*sizes, bias=True, device=DEVICE)
    x = torch.randn(*shape, HIDDEN, device=DEVICE).bfloat16().requires_grad_()
    for _ in range(2):  # delayed scales are another one then
        y = layer(x)
        y.sum().backward()
    text = Path(module.__file__).read_text()
    by_rows = text.count("scattered_product(") + text.count("product_of_gathered(")
    assert len(parted) >= 2 * by_rows
    assert by_rows or cell.recipe in DECODED.get(folder.name, cell.recipe)


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
