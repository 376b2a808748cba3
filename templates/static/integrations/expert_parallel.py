"""Expert parallel layers: every rank of a group has some of the experts, and tokens of its own.

Without a capacity a rank gathers the tokens of all ranks and what their routers chose, runs its own
experts on the rows that are theirs, and the results are added up while every rank gets back its own
tokens.  So a rank receives each token once, however many of its experts want it, sizes follow from
shapes alone, and nothing can overflow.

With a capacity a rank sends each other one the tokens that want its experts, at most so many, in
one exchange of all with all, and gets back what these gave.  That sends less where there are more
ranks than experts of a token, in buffers of one size, whatever was chosen.  A layer with the option
`expert_parallel_all_to_all` exchanges them itself, beside what it computes.

With a `payload` tokens travel as codes, and so do gradients of their sums.

Collectives are PyTorch's functional ones, which compilers trace and CUDA graphs capture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import _alike, _collectives
from .._alike import check
from .._asked import overlap, watch
from . import _layouts, _payload, _slots
from ._fused import fused
from ._parameters import PARAMETERS, cell_of

__all__ = ["ExpertParallel", "check", "overlap", "watch"]
_OF_EXPERTS = ("fc1.", "fc2.")


class ExpertParallel(nn.Module):
    """A `MoELayer` of all ranks' experts, of which each rank has its own.

    Rank r has experts `r * n` to `(r + 1) * n`, where n is the `num_experts` of its layer.  All
    ranks call it alike, with as many tokens; a rank that has fewer adds some whose ids are -1.
    Nothing notices ranks that differ there but `check`, which every rank calls first.

    Gradients of weights are sums over the tokens of all ranks.  Where losses are averaged over
    ranks, as DDP and FSDP do for parameters that all ranks have, divide these by the number of
    ranks.

    Args:
        layer: of this rank's experts, with weights for the choices of tokens and nothing else;
            without an option for ranks, or with `expert_parallel_all_to_all` and a capacity.
        group: the ranks; None for all, or for those of the layer.  There has to be one when the
            module is made.
        capacity: how many of its tokens a rank sends to each rank at most; those behind them are
            not sent, and what that rank's experts would have added to them is missing.  None to
            gather all tokens.
        payload: `torch.float8_e4m3fn` to send x, and in the backward the gradient of y, as codes
            with a power of two for each 128 elements; sums come back in their own type.  None for
            the type of x, which is all that a layer with the option sends.

    Attributes:
        layer: as given.
        own: number of its experts.
        ranks: how many there are.
        first: number of this rank's first expert among those of all.
        capacity, payload: as given.
        unsent: buffer int64 [1], how many tokens were not sent in the last call, counted for each
            rank that they were for; on the device, and 0 where tokens are gathered.

    Raises:
        RuntimeError: there are no ranks; the message says how to form a group.
        TypeError: the layer has parameters that are of no expert, or gathers tokens by itself.
        ValueError: other ranks have another layer, capacity or payload; the message says who has
            what.  Or a capacity of no token, or a payload that is none of these; or a layer with
            the option without a capacity, with a payload, or of another group.
    """

    unsent: Tensor

    def __init__(
        self,
        layer: nn.Module,
        group: ProcessGroup | None = None,
        capacity: int | None = None,
        payload: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if capacity is not None and capacity < 1:
            raise ValueError(f"ExpertParallel: capacity: expected 1 token or more, got {capacity}")
        if payload is not None and payload not in _payload.FORMATS:
            formats = ", ".join(map(str, _payload.FORMATS))
            raise ValueError(f"ExpertParallel: payload: expected {formats} or None, got {payload}")
        if not torch.distributed.is_initialized():
            raise RuntimeError(
                "ExpertParallel: no process group; "
                "call torch.distributed.init_process_group() first"
            )
        name = cell_of(layer)
        self._exchanges = bool(name) and PARAMETERS[name].slots
        if self._exchanges:
            group = _group_of(layer, group, capacity, payload)
        elif hasattr(layer, "expert_group"):
            raise TypeError(
                f"ExpertParallel: {type(layer).__name__} communicates by itself: expected a layer "
                f"without the option expert_parallel; call this one as it is"
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
        self.payload = payload
        device = next(layer.parameters()).device
        unsent = torch.zeros(1, dtype=torch.int64, device=device)
        self.register_buffer("unsent", unsent, persistent=False)
        sizes = {name: str((*p.shape, str(p.dtype))) for name, p in layer.named_parameters()}
        plan = hashlib.sha256(experts.describe().encode()).hexdigest()[:12]
        way = {"capacity": str(capacity), "payload": str(payload)}
        same = {"layer": name or type(layer).__name__, **sizes, "plan": plan, **way}
        _alike.compare(self, "ExpertParallel", "group", **same)

    def forward(self, x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
        """What the experts of all ranks give for this rank's tokens.

        Args:
            x: [T, H], this rank's tokens; without a capacity T is the same on all ranks.
            probs: [T, K], weights of the experts that were chosen; gradients come back for them.
            ids: int32 [T, K], those experts, counted over all ranks; others are nobody's.

        Returns:
            y: [T, H], sums over ranks: rounded to the type of x at each addition where tokens are
            gathered, once where they are sent.

        Raises:
            RuntimeError: not all of these are of as many tokens; or as the layer's own call.
        """
        tokens = [each.shape[0] for each in (x, probs, ids)]
        if tokens[1] != tokens[0] or tokens[2] != tokens[0]:  # sizes that vary have no hash
            raise RuntimeError(
                f"ExpertParallel: expected as many tokens in x, probs and ids, got {tokens}"
            )
        where = self._where(ids)
        if self._exchanges:
            return self._in_slots(x, probs.float(), ids, *where)
        way = (self.group, self.payload, *(where or (None, None)))
        tokens, weights, chosen, counts = _ToExperts.apply(
            x, probs.float(), ids, self.first, self.own, *way
        )
        return _FromExperts.apply(self.layer(tokens, weights, chosen, counts), *way)

    def _in_slots(self, x: Tensor, probs: Tensor, ids: Tensor, *where: Tensor) -> Tensor:
        """The same by a layer that takes tokens in slots for each rank, and gives results so."""
        chosen = _slots.dealt(ids, *where, empty=-1)
        counts = _counted(chosen, self.ranks, self.own)
        y = self.layer(_Dealt.apply(x, *where), _Dealt.apply(probs, *where), chosen, counts)
        return _Collected.apply(y, *where)

    def _where(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Where tokens lie in what is sent; nothing where all are gathered."""
        if self.capacity is None:
            return ()
        ranks = torch.arange(self.ranks, device=ids.device)
        known = (ids >= 0) & (ids < self.own * self.ranks)
        rank = torch.where(known, ids // self.own, self.ranks)
        token, slots, unsent = _slots.places(rank, ranks, self.capacity)
        self.unsent.copy_(unsent)
        return token, slots

    def sharded(
        self, tensors: Mapping[str, Tensor] | None = None, prefix: str = ""
    ) -> dict[str, Tensor]:
        """The layer's parameters as `torch.distributed.checkpoint` has to know them.

        Its state dict has this rank's experts by the names of all: a distributed checkpoint would
        take one rank's for those of all.  Here they are DTensors over the group, in the memory that
        they have, so that loading them fills the layer, whatever number of ranks saved them; gate
        and up are a dimension of their own, [E, 2, F, ...].

        Args:
            tensors: like the layer's parameters, by their paths there, such as the moments of an
                optimiser; None for the parameters.  Of a layer whose features ranks share, too,
                what `tensor_parallel.write` gives.
            prefix: of the keys, with its last dot.

        Raises:
            TypeError: something has sharded them already, such as FSDP; or ranks share features.
        """
        if tensors is None:
            cell = cell_of(self.layer)
            if cell and any(axis for _, axis, _ in PARAMETERS[cell].split):
                raise TypeError(
                    f"ExpertParallel: ranks share features of {cell}, too: give what "
                    "`tensor_parallel.write(layer)` gives, which `tensor_parallel.read` takes back"
                )
            tensors = dict(self.layer.named_parameters())
        layout = _layouts.layout_of_experts(self.layer, self.group)
        return _layouts.sharded(layout, tensors, prefix)

    def extra_repr(self) -> str:
        way = f"capacity={self.capacity}, payload={self.payload}"
        return f"ranks={self.ranks}, first={self.first}, {way}"


def _group_of(
    layer: Any, group: ProcessGroup | None, capacity: int | None, payload: torch.dtype | None
) -> ProcessGroup | None:
    """The ranks of a layer that exchanges slots by itself.

    Raises:
        ValueError: something that such a layer does not do is asked for.
    """
    name = f"ExpertParallel: {type(layer).__name__} exchanges slots of tokens by itself: "
    if capacity is None:
        raise ValueError(f"{name}expected a capacity, the number of slots for each rank")
    if payload is not None:
        raise ValueError(f"{name}expected no payload; a layer without the option may have one")
    if group not in (None, layer.expert_group):
        raise ValueError(f"{name}expected no group but its own; make it with expert_group=")
    return layer.expert_group  # type: ignore[no-any-return]


def _started(
    collective: str, rows: Tensor, name: str, group: ProcessGroup | None
) -> Callable[[], Tensor]:
    """A collective of rows under way; what gives what it does."""
    place = _collectives.Place("ExpertParallel", f"{collective} of {name}", "group", group)
    pending = getattr(_collectives, f"start_{collective}")(place, (rows,))

    def arrive() -> Tensor:
        (given,) = _collectives.wait(pending)
        return given  # type: ignore[no-any-return]

    return arrive


def _send(
    rows: Tensor, name: str, group: ProcessGroup | None, *where: Tensor, empty: int = 0
) -> Callable[[], Tensor]:
    """Rows of tokens on their way to ranks with experts: of all to all, or to slots of each.

    Args:
        rows: [T, ...].
        name: what they are, for messages.
        group: the ranks.
        where: tokens of slots, and slots of tokens; nothing where all tokens go to all ranks.
        empty: what is in the row of an empty slot.
    """
    if not where:
        return _started("all_gather", rows, name, group)
    return _started("all_to_all", _slots.dealt(rows, *where, empty=empty), name, group)


def _send_as(
    payload: torch.dtype | None,
    rows: Tensor,
    name: str,
    group: ProcessGroup | None,
    *where: Tensor,
) -> Callable[[], Tensor]:
    """The same as codes, where there is a payload."""
    if payload is None:
        return _send(rows, name, group, *where)
    codes, exponents = (
        _send(each, name, group, *where) for each in _payload.encode(rows.contiguous())
    )
    return lambda: _payload.decode(codes(), exponents(), rows.dtype)


def _send_back(
    rows: Tensor, name: str, group: ProcessGroup | None, *where: Tensor
) -> Callable[[], Tensor]:
    """What ranks have for tokens on its way to these, where it is added up.

    Args:
        rows: one of each row that came.
        name, group, where: as of `_send`.
    """
    if not where:
        return _started("reduce_scatter", rows, name, group)
    _, slots = where
    arrive = _started("all_to_all", rows, name, group)
    return lambda: _slots.collected(arrive(), slots)


def _there(*where: Tensor | None) -> tuple[Tensor, ...]:
    """Where tokens lie in what is sent, or nothing.  PyTorch's compiler takes no function whose
    arguments are any number, where nothing has a gradient.
    """
    return tuple(each for each in where if each is not None)


class _ToExperts(torch.autograd.Function):
    """Tokens, their weights and choices to the ranks of experts; gradients come back added up.

    While tokens travel, behind what is small, choices become those of this rank's experts, and are
    counted.
    """

    @staticmethod
    def forward(
        x: Tensor,
        probs: Tensor,
        ids: Tensor,
        first: int,
        own: int,
        group: ProcessGroup | None,
        payload: torch.dtype | None,
        token: Tensor | None,
        slots: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        where = _there(token, slots)
        choices = _send(ids, "ids", group, *where, empty=-1)
        weights = _send(probs, "probs", group, *where)
        tokens = _send_as(payload, x, "x", group, *where)
        chosen = choices() - first
        counts = _counted(chosen, 1, own)
        arrived = weights()
        return tokens(), arrived, chosen, counts

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, _, _, _, _, ctx.group, _, *where = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*where)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = zip(grad_outputs, ("x", "probs"), strict=False)
        where = _there(*ctx.saved_tensors)
        sent = [
            None if grad is None else _send_back(grad, f"the gradient of {name}", ctx.group, *where)
            for grad, name in pairs
        ]
        grads = (None if arrive is None else arrive() for arrive in sent)
        return *grads, *(None,) * 7


class _FromExperts(torch.autograd.Function):
    """Results back to the tokens' ranks, added up; each rank has a part, and gets the gradient."""

    @staticmethod
    def forward(
        rows: Tensor,
        group: ProcessGroup | None,
        payload: torch.dtype | None,
        token: Tensor | None,
        slots: Tensor | None,
    ) -> Tensor:
        return _send_back(rows, "y", group, *_there(token, slots))()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.group, ctx.payload, *where = inputs
        ctx.save_for_backward(*where)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        words = ("the gradient of y", ctx.group, *_there(*ctx.saved_tensors))
        grads = _send_as(ctx.payload, grad_outputs[0], *words)
        return grads(), *(None,) * 4


class _Dealt(torch.autograd.Function):
    """Rows of tokens in their slots; gradients of a token's slots are added up."""

    @staticmethod
    def forward(rows: Tensor, token: Tensor, slots: Tensor) -> Tensor:
        return _slots.dealt(rows, token, slots)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[-1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return _slots.collected(grad_outputs[0], slots), None, None


class _Collected(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(rows: Tensor, token: Tensor, slots: Tensor) -> Tensor:
        return _slots.collected(rows, slots)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _slots.dealt(grad_outputs[0], *ctx.saved_tensors), None, None


@fused
def _counted(ids: Tensor, ranks: int, experts: int) -> Tensor:
    """How often each expert is among its rank's share of ids, int64 [ranks * experts].

    Args:
        ids: int32 [T, K], equal shares of which are for one rank each; no other id counts.
        ranks: how many.
        experts: of each.
    """
    each = torch.arange(ranks * experts, device=ids.device, dtype=ids.dtype)
    chosen = ids.reshape(ranks, 1, -1) == each.view(ranks, experts, 1)
    return chosen.sum(2).flatten()
