"""Tokens in slots for the ranks that they go to, and what comes back in these."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

from ._fused import fused, runs_alone

_ELEMENTS, _ALIGNED = 1024, 8  # of a block; a thread has vectors of as many
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)
_add: Any = None

if has_triton_package():
    triton: Any = importlib.import_module("triton")  # which need not be there for type checkers
    tl: Any = importlib.import_module("triton.language")

    @triton.jit
    def _term(rows, place, count, column, width):  # type: ignore[no-untyped-def]
        inside = (column < width) & (place < count)
        return tl.load(rows + place * width + column, mask=inside, other=0).to(tl.float32)

    # PyTorch would write each of the rows in fp32 before it adds them.  One kernel for all sizes,
    # as in `_add_rows.py`.
    @triton.jit(do_not_specialize=["count", "vectors"])
    def _add(  # type: ignore[no-untyped-def]
        rows,
        places,
        total,
        count,
        vectors,
        PLACES: tl.constexpr,
        ELEMENTS: tl.constexpr,
        ALIGNED: tl.constexpr,
    ):
        """One block of a sum."""
        own = tl.program_id(0).to(tl.int64)
        width = vectors.to(tl.int64) * ALIGNED
        column = tl.program_id(1).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
        found = _term(rows, tl.load(places + own * PLACES), count, column, width)
        for each in tl.static_range(1, PLACES):
            found += _term(rows, tl.load(places + own * PLACES + each), count, column, width)
        tl.store(total + own * width + column, found, mask=column < width)


@fused
def places(rank: Tensor, ranks: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots for tokens, of each rank in the order of tokens.

    Args:
        rank: int [T, K], where each choice of a token is; the number of ranks where nowhere.
        ranks: all of them.
        capacity: slots for each.

    Returns:
        token: int64 [ranks * capacity], whose token is in a slot, one rank's after the other's; T
            where it is empty.
        slots: int64 [T, min(K, ranks)], slots of a token, in order; the number of all slots where
            there are no more.
        unsent: int64 [1], tokens for which there was no slot.
    """
    tokens, choices = rank.shape
    count = ranks.shape[0]
    nowhere = count * capacity
    wanted = (rank == ranks.view(-1, 1, 1)).any(-1)  # [ranks, T]
    position = wanted.cumsum(1) - 1
    fits = wanted & (position < capacity)
    slot = torch.where(fits, ranks.view(-1, 1) * capacity + position, nowhere)
    token = torch.arange(tokens, device=rank.device).expand(count, -1)
    every = torch.full((nowhere + 1,), tokens, dtype=torch.int64, device=rank.device)
    every = every.scatter(0, slot.flatten(), token.flatten())[:nowhere]
    slots = slot.sort(0).values[: min(choices, count)].T.contiguous()
    return every, slots, (wanted & ~fits).sum().view(1)


def dealt(rows: Tensor, token: Tensor, _: Tensor, *, empty: int = 0) -> Tensor:
    """Rows of tokens in their slots.

    Args:
        rows: [T, C], of tokens.
        token: of each slot, as `places` gives it; so is what is not looked at.
        empty: what is in the row of an empty slot.
    """
    found = _added(rows, token.view(-1, 1))
    return torch.where((token < rows.shape[0]).view(-1, 1), found, empty) if empty else found


def collected(rows: Tensor, slots: Tensor) -> Tensor:
    """For each token the sum of its slots in their order, in fp32, rounded once.

    Args:
        rows: [S, C], of slots.
        slots: of each token, as `places` gives them.
    """
    return _added(rows, slots)


def _added(rows: Tensor, at: Tensor) -> Tensor:
    """Sums of rows [R, C] at places [N, P], of which those past the last have none: [N, C]."""
    count, width = rows.shape
    if count == 0:  # of which none can be selected
        return rows.new_zeros(at.shape[0], width)
    if runs_alone(rows) and rows.dtype in _SUMMED and width % _ALIGNED == 0:
        return _added_at_once(rows.contiguous(), at)
    terms = [_rows_at(rows, each) for each in at.unbind(1)]
    if len(terms) == 1:
        return terms[0]
    first, *others = (each.float() for each in terms)
    return sum(others, first).to(rows.dtype)


def _rows_at(rows: Tensor, at: Tensor) -> Tensor:
    """[R, C] -> [N, C], zeros where there is none."""
    last = rows.shape[0] - 1
    return torch.where((at <= last).view(-1, 1), rows.index_select(0, at.clamp(max=last)), 0)


def _added_at_once(rows: Tensor, at: Tensor) -> Tensor:
    count, width = rows.shape
    total = rows.new_empty(at.shape[0], width)
    grid = (at.shape[0], -(-width // _ELEMENTS))
    if total.numel():
        with torch.cuda.device(rows.device):
            _add[grid](
                rows,
                at,
                total,
                count,
                width // _ALIGNED,
                PLACES=at.shape[1],
                ELEMENTS=_ELEMENTS,
                ALIGNED=_ALIGNED,
            )
    return total
