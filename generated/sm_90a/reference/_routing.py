"""Rows of experts: where choices of tokens lie among them, and back, in plain PyTorch.

T tokens have K choices each: R = T K slots, slot t K + k for choice k of token t, and as many rows.
``row_slot`` int32 [R] has the slot of each row, ``slot_row`` int32 [T, K] the row of each slot.
What is outside of 0 to R - 1 in either, such as -1, is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _steps as steps


def plan(ids: Tensor, counts: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in the order of experts, those of one in the order of slots.

    Args:
        ids: int32 [T, K], the expert of each slot; outside of 0 to E - 1 it is nobody's here.
        counts: int64 [E], how many slots each expert has.  Where these are more than there are,
            the rest of an expert's rows are empty, where fewer the last of its slots have none;
            they count from 0, and all rows end at R.
        capacity: rows that an expert has at most; 0 is no limit.

    Returns:
        slot_row int32 [T, K]; row_slot int32 [R]; and int64 [E], rows of each expert.
    """
    slots, experts = ids.numel(), counts.numel()
    sizes = counts.clamp(0, capacity if capacity > 0 else slots)
    ends = sizes.clamp(max=slots).cumsum(0).clamp(max=slots)
    begins = torch.cat((ends.new_zeros(1), ends))[:-1]
    own = ids.flatten().long()
    here = (own >= 0) & (own < experts)
    own = torch.where(here, own, experts)
    order = torch.argsort(own, stable=True)
    sorted_own = own[order]
    first = torch.searchsorted(sorted_own, sorted_own)
    place = torch.arange(slots, device=ids.device)
    rank = torch.empty_like(own).scatter_(0, order, place - first)
    of_expert = own.clamp(max=max(experts - 1, 0))
    kept = here & (rank < (ends - begins)[of_expert])
    row = torch.where(kept, begins[of_expert] + rank, slots)  # one more row, for those without
    row_slot = torch.full((slots + 1,), -1, dtype=torch.int32, device=ids.device)
    row_slot.scatter_(0, row, torch.where(kept, place, -1).to(torch.int32))
    slot_row = torch.where(kept, row, -1).to(torch.int32).view_as(ids)
    return slot_row, row_slot[:slots].clone(), ends - begins


def _taken(a: Tensor, index: Tensor) -> Tensor:
    """Rows of a at the places of a map, of any shape; zeros for those that are none."""
    index = index.long()
    there = (index >= 0) & (index < len(a))
    if not len(a):
        return a.new_zeros(*index.shape, *a.shape[1:])
    there = there.view(*index.shape, *(1,) * (a.dim() - 1))
    return torch.where(there, a[index.clamp(0, len(a) - 1)], 0.0)


def gather_rows(a: Tensor, row_slot: Tensor, slot_row: Tensor) -> Tensor:
    """a [T, H] -> [R, H]: the row of the token that each row is of, zeros where it is of none."""
    slot = row_slot.long()
    there = (slot >= 0) & (slot < slot_row.numel())
    return _taken(a, torch.where(there, slot // max(slot_row.shape[-1], 1), -1))


def combine_rows(a: Tensor, slot_row: Tensor, add: Tensor | None = None) -> Tensor:
    """a [R, H] -> [T, H]: the rows of each token's slots, added up in their order.

    Sums are in fp32, begin with 0, end with the row of `add` [T, H], and are rounded once.
    """
    total = steps.wide(a.new_zeros(len(slot_row), a.shape[-1]))
    for rows in slot_row.unbind(-1):
        total = total + steps.wide(_taken(a, rows))
    if add is not None:
        total = total + steps.wide(add)
    return total.to(a.dtype)


def take(a: Tensor, index: Tensor) -> Tensor:
    """Numbers of a, in whatever shape, at the places of a map, 0 for those that are none."""
    return _taken(a.flatten(), index)
