"""Expert parallel layers: every rank of a group has some of the experts, and tokens of its own.

Without a capacity a rank gathers the tokens of all ranks and what their routers chose, runs its own
experts on the rows that are theirs, and the results are added up while every rank gets back its own
tokens.  So a rank receives each token once, however many of its experts want it, sizes follow from
shapes alone, and nothing can overflow.

With a capacity a rank sends each other one the tokens that want its experts, at most so many, in
one exchange of all with all, and gets back what these gave.  That sends less where there are more
ranks than experts of a token, in buffers of one size, whatever was chosen.

Collectives are PyTorch's functional ones, which compilers trace and CUDA graphs capture.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import _collectives

_OF_EXPERTS = ("fc1.", "fc2.")


class ExpertParallel(nn.Module):
    """A `MoELayer` of all ranks' experts, of which each rank has its own.

    Rank r has experts `r * n` to `(r + 1) * n`, where n is the `num_experts` of its layer.  All
    ranks call it alike, with as many tokens; a rank that has fewer adds some whose ids are -1.
    NCCL does not notice ranks that differ there; TORCH_DISTRIBUTED_DEBUG=DETAIL does.

    Gradients of weights are sums over the tokens of all ranks.  Where losses are averaged over
    ranks, as DDP and FSDP do for parameters that all ranks have, divide these by the number of
    ranks.

    Args:
        layer: of this rank's experts, with weights for the choices of tokens and nothing else.
        group: the ranks; None for all.  There has to be one when the module is made.
        capacity: how many of its tokens a rank sends to each rank at most; those behind them are
            not sent, and what that rank's experts would have added to them is missing.  None to
            gather all tokens.

    Attributes:
        layer: as given.
        own: number of its experts.
        ranks: how many there are.
        first: number of this rank's first expert among those of all.
        capacity: as given.
        unsent: buffer int64 [1], how many tokens were not sent in the last call, counted for each
            rank that they were for; on the device, and 0 where tokens are gathered.

    Raises:
        RuntimeError: there are no ranks; the message says how to form a group.
        TypeError: the layer has parameters that are of no expert.
        ValueError: other ranks have another layer or capacity; the message says who has what.  Or a
            capacity of no token.
    """

    unsent: Tensor

    def __init__(
        self, layer: nn.Module, group: ProcessGroup | None = None, capacity: int | None = None
    ) -> None:
        super().__init__()
        if capacity is not None and capacity < 1:
            raise ValueError(f"ExpertParallel: capacity: expected 1 token or more, got {capacity}")
        if not torch.distributed.is_initialized():
            raise RuntimeError(
                "ExpertParallel: no process group; "
                "call torch.distributed.init_process_group() first"
            )
        others = [n for n, _ in layer.named_parameters() if not n.startswith(_OF_EXPERTS)]
        if others or not hasattr(layer, "num_experts"):
            raise TypeError(
                f"ExpertParallel: {type(layer).__name__} has {', '.join(others) or 'no experts'}: "
                f"expected a layer of experts alone, such as MoELayer; run the rest beside it"
            )
        experts: Any = layer
        self.layer = layer
        self.own = int(experts.num_experts)
        self.group = group  # None stays None, so that copies of the module need none of a group
        self.ranks = torch.distributed.get_world_size(group)
        self.first = torch.distributed.get_rank(group) * self.own
        self.capacity = capacity
        device = next(layer.parameters()).device
        unsent = torch.zeros(1, dtype=torch.int64, device=device)
        self.register_buffer("unsent", unsent, persistent=False)
        sizes = {name: str((*p.shape, str(p.dtype))) for name, p in layer.named_parameters()}
        plan = hashlib.sha256(experts.describe().encode()).hexdigest()[:12]
        name = type(layer).__module__.rpartition(".")[2]
        same = {"layer": name, **sizes, "plan": plan, "capacity": str(capacity)}
        _collectives.compare("ExpertParallel", "group", group, **same)

    def forward(self, x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
        """What the experts of all ranks give for this rank's tokens.

        Args:
            x: [T, H], this rank's tokens; without a capacity T is the same on all ranks.
            probs: [T, K], weights of the experts that were chosen; gradients come back for them.
            ids: int32 [T, K], those experts, counted over all ranks; others are nobody's.

        Returns:
            y: [T, H], sums over ranks: rounded to the type of x at each addition where tokens are
            gathered, once where they are sent.
        """
        if self.capacity is not None:
            return self._sent(x, probs, ids, self.capacity)
        chosen = _gathered(ids, "ids", self.group) - self.first
        weights = _Gather.apply(probs.float(), "probs", self.group)
        tokens = _Gather.apply(x, "x", self.group)
        y = self.layer(tokens, weights, chosen, _counted(chosen, self.own))
        return _AddUp.apply(y, "y", self.group)

    def _sent(self, x: Tensor, probs: Tensor, ids: Tensor, capacity: int) -> Tensor:
        """`forward` where each rank gets the tokens that are for its experts."""
        ranks = torch.arange(self.ranks, device=ids.device)
        known = (ids >= 0) & (ids < self.own * self.ranks)
        rank = torch.where(known, ids // self.own, self.ranks)
        places = _places(rank, ranks, capacity)
        self.unsent.copy_(places.unsent)
        local = ids[places.token].view(self.ranks, capacity, -1) - ranks.view(-1, 1, 1) * self.own
        used = places.used.view(self.ranks, capacity, 1)
        local = torch.where(used & (local >= 0) & (local < self.own), local, -1)
        chosen = _exchanged(local.flatten(0, 1).int(), "ids", self.group)
        where = (places.token, places.used, places.slots)
        weights = _Send.apply(probs.float(), *where, "probs", self.group)
        tokens = _Send.apply(x, *where, "x", self.group)
        y = self.layer(tokens, weights, chosen, _counted(chosen, self.own))
        return _Return.apply(y, *where, "y", self.group)

    def extra_repr(self) -> str:
        return f"ranks={self.ranks}, first={self.first}, capacity={self.capacity}"


class _Places(NamedTuple):
    """Where tokens lie in what is sent: so many slots for each rank, one rank's after the other's.

    Attributes:
        token: int64 [ranks * capacity], whose token is in a slot; any where it is empty.
        used: bool [ranks * capacity], whether there is one.
        slots: int64 [T, min(K, ranks)], slots of a token, in order; the number of all slots where
            there are no more.
        unsent: int64 [1], tokens for which there was no slot.
    """

    token: Tensor
    used: Tensor
    slots: Tensor
    unsent: Tensor


def _places(rank: Tensor, ranks: Tensor, capacity: int) -> _Places:
    """Slots for tokens, of each rank in the order of tokens.

    Args:
        rank: int [T, K], where each choice of a token is; the number of ranks where nowhere.
        ranks: all of them.
        capacity: slots for each.
    """
    tokens, choices = rank.shape
    count = ranks.shape[0]
    nowhere = count * capacity
    wanted = (rank == ranks.view(-1, 1, 1)).any(-1)  # [ranks, T]
    position = wanted.cumsum(1) - 1
    fits = wanted & (position < capacity)
    slot = torch.where(fits, ranks.view(-1, 1) * capacity + position, nowhere)
    token = torch.arange(tokens, device=rank.device).expand(count, -1)
    every = torch.zeros(nowhere + 1, dtype=torch.int64, device=rank.device)
    every = every.scatter(0, slot.flatten(), token.flatten())[:nowhere]
    filled = fits.sum(1, keepdim=True)
    used = (torch.arange(capacity, device=rank.device) < filled).flatten()
    slots = slot.sort(0).values[: min(choices, count)].T.contiguous()
    return _Places(every, used, slots, (wanted & ~fits).sum().view(1))


def _gathered(rows: Tensor, name: str, group: ProcessGroup | None) -> Tensor:
    """The rows of all ranks, one rank's after the other's."""
    place = _collectives.Place("ExpertParallel", f"all_gather of {name}", "group", group)
    every: Tensor = _collectives.wait(_collectives.start_all_gather(place, (rows,)))[0]
    return every


def _added_up(rows: Tensor, name: str, group: ProcessGroup | None) -> Tensor:
    """This rank's part of the sum over ranks of rows, of which there are as many for each rank."""
    place = _collectives.Place("ExpertParallel", f"reduce_scatter of {name}", "group", group)
    own: Tensor = _collectives.wait(_collectives.start_reduce_scatter(place, (rows,)))[0]
    return own


class _Gather(torch.autograd.Function):
    """`_gathered`: the gradient of a row is the sum of those that ranks have for it."""

    @staticmethod
    def forward(rows: Tensor, name: str, group: ProcessGroup | None) -> Tensor:
        return _gathered(rows, name, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.name_, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _added_up(grad_outputs[0], f"the gradient of {ctx.name_}", ctx.group), None, None


class _AddUp(torch.autograd.Function):
    """`_added_up`: every rank has a part in each sum, and gets its gradient."""

    @staticmethod
    def forward(rows: Tensor, name: str, group: ProcessGroup | None) -> Tensor:
        return _added_up(rows, name, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.name_, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grad_outputs[0], f"the gradient of {ctx.name_}", ctx.group), None, None


def _exchanged(rows: Tensor, name: str, group: ProcessGroup | None) -> Tensor:
    """What all ranks have for this one, where it has as many rows for each of them."""
    place = _collectives.Place("ExpertParallel", f"all_to_all of {name}", "group", group)
    own: Tensor = _collectives.wait(_collectives.start_all_to_all(place, (rows,)))[0]
    return own


def _spread(rows: Tensor, token: Tensor, used: Tensor) -> Tensor:
    """A row for each slot, 0 where that is empty."""
    return torch.where(used.view(-1, 1), rows.index_select(0, token), 0)


def _collected(rows: Tensor, slots: Tensor) -> Tensor:
    """For each token the sum of its slots in their order, in fp32, rounded once."""
    total = None
    for slot in slots.unbind(1):
        there = (slot < rows.shape[0]).view(-1, 1)
        part = rows.index_select(0, slot.clamp(max=rows.shape[0] - 1)).float()
        part = torch.where(there, part, 0)
        total = part if total is None else total + part
    assert total is not None
    return total.to(rows.dtype)


class _Send(torch.autograd.Function):
    """Rows of tokens to the ranks that want them; their gradients come back, and are added up."""

    @staticmethod
    def forward(
        rows: Tensor,
        token: Tensor,
        used: Tensor,
        slots: Tensor,
        name: str,
        group: ProcessGroup | None,
    ) -> Tensor:
        return _exchanged(_spread(rows, token, used), name, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, _, slots, ctx.name_, ctx.group = inputs
        ctx.save_for_backward(slots)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grads = _exchanged(grad_outputs[0], f"the gradient of {ctx.name_}", ctx.group)
        return _collected(grads, *ctx.saved_tensors), *(None,) * 5


class _Return(torch.autograd.Function):
    """Results back to the ranks whose tokens they are of, where they are added up."""

    @staticmethod
    def forward(
        rows: Tensor,
        token: Tensor,
        used: Tensor,
        slots: Tensor,
        name: str,
        group: ProcessGroup | None,
    ) -> Tensor:
        return _collected(_exchanged(rows, name, group), slots)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, token, used, _, ctx.name_, ctx.group = inputs
        ctx.save_for_backward(token, used)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grads = _spread(grad_outputs[0], *ctx.saved_tensors)
        return _exchanged(grads, f"the gradient of {ctx.name_}", ctx.group), *(None,) * 5


def _counted(ids: Tensor, experts: int) -> Tensor:
    """How often each expert is among ids [T, K], int64 [experts]; no other id counts.

    Each token counts by itself first, since additions to few numbers wait for each other.
    """
    known = torch.where((ids >= 0) & (ids < experts), ids, experts).long()
    counts = torch.zeros(len(ids), experts + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add(1, known, torch.ones_like(known, dtype=torch.int32)).sum(0)[:experts]
