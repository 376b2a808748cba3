"""What a mixture-of-experts layer does around its experts, against a device copy and torch.

The plan of routing is timed by its kernels alone, as the profiler saw them: it is the begin of
`moe_permute`.  Gather and combine are whole calls, whose floor is a copy of as many bytes.

Tokens are quantised in the rows of experts by kernels of a layer, three times in a training step:
x by rows in the forward, dy both ways and x by columns in the backward.  Those kernels alone count.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import bandwidth
import common
import profiled
import shapes
import torch
from bandwidth import Call
from common import OURS, Case, Row
from shapes import Expert
from torch import Tensor

SIZES = (*shapes.EXPERTS, *shapes.MORE_EXPERTS)
QUICK_SIZES = (shapes.SMALL,)
LAST_OF_PLAN = "place_slots"
"""A word in the name of the kernel that ends a plan."""
COLUMNS = 8  # of what a plan is timed beside
NO_LIMIT = 0  # of the rows of an expert
LAYER = "moe_layer"
INTERMEDIATE = 128  # of a layer of which only what surrounds experts is timed
GATHERED = "Gather"
"""A word in the names of the kernels that quantise tokens in rows of experts."""
SCALES = {"fp8_delayed": 0.0, "fp8_block": 4 / 128}
"""Bytes of scales for each code, by recipe."""


def chosen(expert: Expert, draw: str = "dirichlet") -> tuple[Tensor, Tensor]:
    """ids int32 [T, K] in any order, as many of each expert as are drawn; and how many."""
    sizes = shapes.splits(expert.groups, expert.tokens, draw).cpu().long()
    ids = torch.arange(expert.groups).repeat_interleave(sizes)
    order = torch.randperm(expert.tokens, generator=torch.Generator().manual_seed(1))
    ids = ids[order].view(-1, expert.top_k).to(common.DEVICE, torch.int32)
    return ids, sizes.to(common.DEVICE)


def torch_plan(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """slot_row, row_slot, split_sizes, where every id is an expert."""
    flat = ids.flatten().long()
    row_slot = torch.argsort(flat, stable=True)
    slots = torch.arange(len(flat), device=ids.device)
    slot_row = torch.empty_like(row_slot).scatter_(0, row_slot, slots)
    return slot_row.view_as(ids).int(), row_slot.int(), flat.bincount(minlength=experts)


def torch_gather(x: Tensor, row_slot: Tensor, choices: int) -> Tensor:
    return x[row_slot.long() // choices]


def torch_combine(y: Tensor, slot_row: Tensor) -> Tensor:
    return y[slot_row.long()].float().sum(1).to(y.dtype)


def _plan(package: Any, expert: Expert) -> Iterator[Row]:
    permute = common.op(package, "moe_permute__bf16_forward")
    ids, counts = chosen(expert)
    x = common.normal(len(ids), COLUMNS)
    probs = torch.rand(ids.shape, device=common.DEVICE)
    _, _, sizes, row_slot, slot_row = permute(x, probs, ids, counts, NO_LIMIT)
    case = f"plan {expert.name}"
    expected = torch_plan(ids, expert.groups)
    for got, wanted in zip((slot_row, row_slot, sizes), expected, strict=True):
        common.require_close(case, got.double(), wanted.double(), 0.0)
    torch.compiler.reset()
    compiled = torch.compile(torch_plan, dynamic=False)
    moved = 12 * ids.numel() + 16 * expert.groups
    copy = bandwidth.copy(moved)
    parts = {
        OURS: profiled.Part(lambda _: permute(x, probs, ids, counts, NO_LIMIT), LAST_OF_PLAN),
        "torch compiled": profiled.Part(lambda _: compiled(ids, expert.groups)),
        bandwidth.COPY: profiled.Part(lambda _: copy()),
    }
    yield from bandwidth.rows(case, profiled.compare(parts), moved)


def _rows(package: Any, expert: Expert) -> Iterator[Row]:
    gather = common.op(package, "gather__bf16_forward")
    combine = common.op(package, "combine__bf16_forward")
    ids, _ = chosen(expert)
    slot_row, row_slot, _ = torch_plan(ids, expert.groups)
    x, y = common.normal(len(ids), expert.hidden), common.normal(ids.numel(), expert.hidden)
    moved = 2 * (x.numel() + y.numel())
    torch.compiler.reset()
    gathered = torch.compile(torch_gather, fullgraph=True, dynamic=False)
    combined = torch.compile(torch_combine, fullgraph=True, dynamic=False)
    case = f"gather {expert.name}"
    ours = _first(gather, x, row_slot, slot_row)
    common.require_close(case, ours(), torch_gather(x, row_slot, expert.top_k), 0.0)
    calls: dict[str, Call] = {
        OURS: ours,
        "torch": lambda: torch_gather(x, row_slot, expert.top_k),
        "torch compiled": lambda: gathered(x, row_slot, expert.top_k),
    }
    yield from bandwidth.measure(case, calls, moved)
    case = f"combine {expert.name}"
    ours = _first(combine, y, row_slot, slot_row)
    common.require_close(case, ours(), torch_combine(y, slot_row))
    calls = {
        OURS: ours,
        "torch": lambda: torch_combine(y, slot_row),
        "torch compiled": lambda: combined(y, slot_row),
    }
    yield from bandwidth.measure(case, calls, moved)


def quantized_bytes(expert: Expert, recipe: str) -> int:
    """Bytes that a step's three quantisations read and write: each token once, four copies."""
    tokens = expert.tokens // expert.top_k
    copies = 4 * expert.tokens * expert.hidden
    return 3 * 2 * tokens * expert.hidden + copies + int(copies * SCALES[recipe])


def _quantize(package: Any, recipe: str, case: str, expert: Expert) -> Iterator[Row]:
    ids, counts = chosen(expert)
    x, dy = (common.normal(len(ids), expert.hidden) for _ in range(2))
    probs = torch.rand(ids.shape, device=common.DEVICE)
    module = common.bundles.load_cell(package, f"{LAYER}__{recipe}")
    layer = module.MoELayer(
        expert.groups, hidden=expert.hidden, intermediate=INTERMEDIATE, device=common.DEVICE
    )
    leaves = (x.requires_grad_(), *layer.parameters())

    def step(_: int) -> None:
        torch.autograd.grad(layer(x, probs, ids, counts), leaves, dy)

    step(0)  # delayed scaling has scales of these tensors from the second step on
    moved = quantized_bytes(expert, recipe)
    copy = bandwidth.copy(moved)
    parts = {
        OURS: profiled.Part(step, of=GATHERED),
        bandwidth.COPY: profiled.Part(lambda _: copy()),
    }
    yield from bandwidth.rows(case, profiled.compare(parts), moved)


def _first(op: Call, *arguments: Any) -> Call:
    """A call that gives the first result of an op."""
    return lambda: bandwidth.results(op(*arguments))[0]


def moe_ops(*, quick: bool = False) -> Iterator[Case]:
    """Of the tokens of models' layers."""
    package = common.bundle()
    for expert in QUICK_SIZES if quick else SIZES:
        yield Case(f"plan {expert.name}", partial(_plan, package, expert))
        yield Case(f"rows {expert.name}", partial(_rows, package, expert))
        for recipe in SCALES:
            case = f"gather_quantize {recipe} {expert.name}"
            yield Case(case, partial(_quantize, package, recipe, case, expert))
