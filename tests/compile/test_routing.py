"""Kernels of routing on the CPU, bit for bit what the reference does, and that against PyTorch."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from .launches import launches
from .quantize_harness import ROOT, Buffer, Kernels, Long, Pointer, address

DTYPES = (torch.bfloat16, torch.float16)
CHUNK, MOST_PARTS = 2048, 256  # slots of a block at a time, and blocks


class _Plan(ctypes.Structure):
    _fields_ = [
        ("ids", Pointer),
        ("counts", Pointer),
        ("slot_row", Pointer),
        ("row_slot", Pointer),
        ("split_sizes", Pointer),
        ("histograms", Pointer),
        ("parts", Long),
        ("capacity", Long),
        ("tokens", Long),
        ("choices", Long),
        ("experts", Long),
    ]


class _Gather(ctypes.Structure):
    _fields_ = [
        ("x", Pointer),
        ("row_slot", Pointer),
        ("slot_row", Pointer),
        ("y", Pointer),
        ("tokens", Long),
        ("choices", Long),
        ("columns", Long),
    ]


class _Combine(ctypes.Structure):
    _fields_ = [
        ("y", Pointer),
        ("slot_row", Pointer),
        ("add", Pointer),
        ("x", Pointer),
        ("tokens", Long),
        ("choices", Long),
        ("columns", Long),
        ("rows", Long),
    ]


class _Take(ctypes.Structure):
    _fields_ = [
        ("from", Pointer),
        ("index", Pointer),
        ("out", Pointer),
        ("elements", Long),
        ("sources", Long),
    ]


def _reference() -> ModuleType:
    """The normative functions, in a package as a bundle has them."""
    folder = ROOT / "templates" / "static" / "reference"
    name = "routing_reference"
    spec = importlib.util.spec_from_file_location(
        name, folder / "_routing.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    sys.modules[name] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{name}._routing")


reference = _reference()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return launches(
        tmp_path_factory.mktemp("routing"),
        "routing",
        routing_plan="RoutingPlanArguments",
        gather_rows="GatherRowsArguments",
        combine_rows="CombineRowsArguments",
        take="TakeArguments",
    )


def parts_of(slots: int) -> int:
    """Blocks that share the slots, as the plan of a module says it."""
    return min(-(-slots // CHUNK), MOST_PARTS)


def plan(
    kernels: Kernels, ids: Tensor, counts: Tensor, capacity: int = 0, parts: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    slots, experts = ids.numel(), len(counts)
    parts = parts_of(slots) if parts is None else parts
    slot_row, row_slot = Buffer(4 * slots, "cpu"), Buffer(4 * slots, "cpu")
    sizes, scratch = Buffer(8 * experts, "cpu"), Buffer(4 * parts * experts, "cpu")
    outputs = map(address, (slot_row, row_slot, sizes, scratch))
    arguments = _Plan(address(ids), address(counts), *outputs, parts, capacity, *ids.shape, experts)
    kernels.call("run_routing_plan", 0, arguments)
    rows = (each.bytes().view(torch.int32) for each in (slot_row, row_slot))
    return next(rows).view_as(ids), next(rows), sizes.bytes().view(torch.int64)


def gather(kernels: Kernels, x: Tensor, row_slot: Tensor, slot_row: Tensor) -> Tensor:
    output = Buffer(2 * len(row_slot) * x.shape[1], "cpu")
    places = (address(each) for each in (x, row_slot, slot_row, output))
    arguments = _Gather(*places, *slot_row.shape, x.shape[1])
    kernels.call("run_gather_rows", int(x.dtype == torch.float16), arguments)
    return output.bytes().view(x.dtype).view(len(row_slot), x.shape[1])


def combine(kernels: Kernels, y: Tensor, slot_row: Tensor, add: Tensor | None = None) -> Tensor:
    output = Buffer(2 * len(slot_row) * y.shape[1], "cpu")
    added = None if add is None else address(add)
    places = (address(y), address(slot_row), added, address(output))
    arguments = _Combine(*places, *slot_row.shape, y.shape[1], len(y))
    kernels.call("run_combine_rows", int(y.dtype == torch.float16), arguments)
    return output.bytes().view(y.dtype).view(len(slot_row), y.shape[1])


def chosen(tokens: int, choices: int, experts: int, seed: int = 0) -> Tensor:
    """Experts of which some are chosen more often than others, and some ids of none."""
    generator = torch.Generator().manual_seed(seed)
    skewed = torch.rand(tokens, choices, generator=generator) ** 2 * (experts + 2)
    return (skewed.long() - 1).to(torch.int32)


def counted(ids: Tensor, experts: int) -> Tensor:
    flat = ids.flatten().long()
    return flat[(flat >= 0) & (flat < experts)].bincount(minlength=experts)


def sorted_by_expert(ids: Tensor, experts: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a plan is, of a stable sort and of lists."""
    flat = ids.flatten().tolist()
    order = torch.argsort(ids.flatten().long(), stable=True).tolist()
    taken = [0] * experts
    rows: list[int] = []
    for slot in order:
        expert = flat[slot]
        if 0 <= expert < experts and not (capacity and taken[expert] == capacity):
            taken[expert] += 1
            rows.append(slot)
    slot_row = torch.full((len(flat),), -1, dtype=torch.int32)
    slot_row[rows] = torch.arange(len(rows), dtype=torch.int32)
    row_slot = torch.full((len(flat),), -1, dtype=torch.int32)
    row_slot[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    return slot_row.view_as(ids), row_slot, torch.tensor(taken)


# Nothing; one slot; less than a warp; a chunk, and one slot more; several parts; 1 to 12 choices.
PROBLEMS = (
    (0, 8, 4),
    (1, 1, 1),
    (7, 3, 5),
    (256, 8, 64),
    (683, 3, 7),
    (900, 12, 1024),
    (2500, 2, 33),
    (5000, 1, 1000),
)


@pytest.mark.parametrize("capacity", (0, 5))
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_plans_are_stable_sorts(
    kernels: Kernels, problem: tuple[int, int, int], capacity: int
) -> None:
    tokens, choices, experts = problem
    ids = chosen(tokens, choices, experts)
    counts = counted(ids, experts)
    wanted = sorted_by_expert(ids, experts, capacity)
    for got in (plan(kernels, ids, counts, capacity), reference.plan(ids, counts, capacity)):
        for one, other in zip(got, wanted, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("parts", (1, 2, 3, 5))
def test_a_part_may_have_several_chunks(kernels: Kernels, parts: int) -> None:
    ids = chosen(4500, 2, 9)
    counts = counted(ids, 9)
    for one, other in zip(
        plan(kernels, ids, counts, parts=parts), sorted_by_expert(ids, 9, 0), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("expert", (0, 3, 7, -1, 8, 2**31 - 1, -(2**31)))
def test_all_tokens_to_one_expert_or_to_none(kernels: Kernels, expert: int) -> None:
    ids = torch.full((700, 4), expert, dtype=torch.int32)
    slot_row, row_slot, sizes = plan(kernels, ids, counted(ids, 8))
    here = 0 <= expert < 8
    every = torch.arange(2800, dtype=torch.int32)
    assert torch.equal(slot_row.flatten(), every if here else torch.full_like(every, -1))
    assert torch.equal(row_slot, every if here else torch.full_like(every, -1))
    assert sizes.tolist() == [2800 * (here and e == expert) for e in range(8)]


@pytest.mark.parametrize(
    "counts",
    (
        [0, 0, 0, 0],
        [9, 9, 9, 9],
        [-3, 5000, 2, -(2**62)],
        [2**62, 2**62, 2**62, 2**62],
        [1, 3000, 0, 4000],
    ),
    ids=str,
)
@pytest.mark.parametrize("capacity", (0, 3, 2**62))
def test_counts_that_are_wrong_leave_maps_that_fit(
    kernels: Kernels, counts: list[int], capacity: int
) -> None:
    """Every element is defined, and each map the inverse of the other."""
    ids = chosen(1600, 3, 4)
    given = torch.tensor(counts)
    slot_row, row_slot, sizes = plan(kernels, ids, given, capacity)
    for one, other in zip(
        (slot_row, row_slot, sizes), reference.plan(ids, given, capacity), strict=True
    ):
        assert torch.equal(one, other)
    assert sizes.sum() <= ids.numel()
    slots = torch.arange(ids.numel(), dtype=torch.int32)
    kept = slot_row.flatten() >= 0
    assert torch.equal(row_slot[slot_row.flatten()[kept].long()], slots[kept])
    assert int((row_slot >= 0).sum()) == int(kept.sum())


def test_more_experts_than_a_block_counts_are_refused(kernels: Kernels) -> None:
    ids = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(AssertionError, match="1024 experts at most"):
        plan(kernels, ids, torch.zeros(1025, dtype=torch.int64))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# Rows of one vector, of fewer than a team, of several teams' lengths, and ragged.
SHAPES = ((1, 1, 8), (5, 3, 40), (33, 8, 136), (6, 12, 2048), (3, 2, 7176), (0, 4, 64))


@pytest.mark.parametrize("capacity", (0, 2))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_bits_of_the_reference(
    kernels: Kernels, shape: tuple[int, int, int], dtype: torch.dtype, capacity: int
) -> None:
    tokens, choices, columns = shape
    ids = chosen(tokens, choices, 4)
    slot_row, row_slot, _ = reference.plan(ids, counted(ids, 4), capacity)
    x, add = random(tokens, columns, dtype=dtype), random(tokens, columns, dtype=dtype, seed=1)
    rows = gather(kernels, x, row_slot, slot_row)
    assert torch.equal(rows, reference.gather_rows(x, row_slot, slot_row))
    own = row_slot >= 0
    assert torch.equal(rows[own], x[row_slot[own].long() // choices]) and not rows[~own].any()
    y = random(tokens * choices, columns, dtype=dtype, seed=2)
    for extra in (None, add):
        got = combine(kernels, y, slot_row, extra)
        assert torch.equal(got, reference.combine_rows(y, slot_row, extra))
        total = torch.zeros(tokens, columns)
        for k in range(choices):
            there = slot_row[:, k] >= 0
            total[there] += y[slot_row[there, k].long()].float()
        total += 0.0 if extra is None else extra.float()
        assert torch.equal(got, total.to(dtype))


def test_some_tokens_have_rows_among_those_of_all(kernels: Kernels) -> None:
    """As one rank at a time is sent what is its own."""
    slot_row = torch.arange(63, -1, -1, dtype=torch.int32).view(32, 2)
    y = random(64, 16, dtype=torch.bfloat16)
    whole = combine(kernels, y, slot_row)
    parts = (combine(kernels, y, part) for part in slot_row.chunk(2))
    assert torch.equal(torch.cat([*parts]), whole) and whole[:16].any()


@pytest.mark.parametrize("value", (torch.nan, torch.inf))
def test_rows_that_no_slot_has_are_not_read(kernels: Kernels, value: float) -> None:
    ids = torch.tensor([[0, 1], [1, 5], [1, 0]], dtype=torch.int32)
    slot_row, row_slot, _ = reference.plan(ids, counted(ids, 2), 2)
    y = torch.full((6, 16), value, dtype=torch.bfloat16)
    y[row_slot >= 0] = 1.0
    assert combine(kernels, y, slot_row)[:, 0].tolist() == [2.0, 1.0, 1.0]


@pytest.mark.parametrize("shape", ((7, 3), (300, 8), (0, 2)), ids=str)
def test_numbers_go_to_rows_and_back(kernels: Kernels, shape: tuple[int, int]) -> None:
    ids = chosen(*shape, 6)
    slot_row, row_slot, _ = reference.plan(ids, counted(ids, 6), 3)
    probs = random(*shape, dtype=torch.float32)

    def take(a: Tensor, index: Tensor) -> Tensor:
        output = Buffer(4 * index.numel(), "cpu")
        places = (address(each) for each in (a, index, output))
        kernels.call("run_take", 0, _Take(*places, index.numel(), a.numel()))
        return output.floats().view_as(index)

    rows = take(probs, row_slot)
    assert torch.equal(rows, reference.take(probs, row_slot))
    back = take(rows, slot_row)
    assert torch.equal(back, reference.take(rows, slot_row))
    assert torch.equal(back, torch.where(slot_row >= 0, probs, 0.0))


def test_places_outside_of_a_tensor_are_none(kernels: Kernels) -> None:
    y = torch.ones(4, 8, dtype=torch.bfloat16)
    slot_row = torch.tensor([[4, 0], [-(2**31), 2**31 - 1]], dtype=torch.int32)
    assert combine(kernels, y, slot_row)[:, 0].tolist() == [1.0, 0.0]
    assert reference.combine_rows(y, slot_row)[:, 0].tolist() == [1.0, 0.0]
