"""Expert parallel layers: every rank of a group has some of the experts, and tokens of its own.

A rank gathers the tokens of all ranks and what their routers chose, runs its own experts on the
rows that are theirs, and the results are added up while every rank gets back its own tokens.  So a
rank receives each token once, however many of its experts want it, sizes follow from shapes alone,
and nothing can overflow.  That sends no more than an exchange of rows does while there are no more
ranks than experts of a token.

Collectives are PyTorch's functional ones, which compilers trace and CUDA graphs capture.
"""

from __future__ import annotations

import hashlib
from typing import Any

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

    Attributes:
        layer: as given.
        own: number of its experts.
        ranks: how many there are.
        first: number of this rank's first expert among those of all.

    Raises:
        RuntimeError: there are no ranks; the message says how to form a group.
        TypeError: the layer has parameters that are of no expert.
        ValueError: other ranks have another layer; the message says who has what.
    """

    def __init__(self, layer: nn.Module, group: ProcessGroup | None = None) -> None:
        super().__init__()
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
        sizes = {name: str((*p.shape, str(p.dtype))) for name, p in layer.named_parameters()}
        plan = hashlib.sha256(experts.describe().encode()).hexdigest()[:12]
        name = type(layer).__module__.rpartition(".")[2]
        _collectives.compare("ExpertParallel", "group", group, layer=name, **sizes, plan=plan)

    def forward(self, x: Tensor, probs: Tensor, ids: Tensor) -> Tensor:
        """What the experts of all ranks give for this rank's tokens.

        Args:
            x: [T, H], this rank's tokens; T is the same on all ranks.
            probs: [T, K], weights of the experts that were chosen; gradients come back for them.
            ids: int32 [T, K], those experts, counted over all ranks; others are nobody's.

        Returns:
            y: [T, H], sums over ranks, rounded to the type of x at each addition.
        """
        chosen = _gathered(ids, "ids", self.group) - self.first
        weights = _Gather.apply(probs.float(), "probs", self.group)
        tokens = _Gather.apply(x, "x", self.group)
        y = self.layer(tokens, weights, chosen, _counted(chosen, self.own))
        return _AddUp.apply(y, "y", self.group)

    def extra_repr(self) -> str:
        return f"ranks={self.ranks}, first={self.first}"


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


def _counted(ids: Tensor, experts: int) -> Tensor:
    """How often each expert is among ids, int64 [experts]; no other id counts."""
    ids = ids.flatten().long()
    known = torch.where((ids >= 0) & (ids < experts), ids, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add(0, known, torch.ones_like(known))[:experts]
