"""A language model of mixture-of-experts layers whose experts are spread over ranks.

    torchrun --nproc-per-node 2 examples/expert_parallel.py                  # the CPU bundle, gloo
    torchrun --nproc-per-node 2 examples/expert_parallel.py PATH/TO/sm_90a   # two GPUs, NCCL
    python examples/expert_parallel.py                                       # one rank

Each rank has its part of every batch, all of the router, norms and embeddings, which FSDP2 shards,
and its own experts, which it leaves alone.  One rank and several see the same batches and begin
with the same weights, so their losses are the same but for rounding, and for the routers' losses,
which are each rank's own.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo import use_one_thread
from moe_layer import device_for, load_bundle
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

VOCABULARY, HIDDEN, INNER, EXPERTS, LAYERS = 64, 64, 64, 16, 2
BATCH, LENGTH, STEPS = 8, 32, 60


class Block(nn.Module):
    """Mixing of neighbours, then experts; each behind a norm and added to its input."""

    def __init__(self, cells: dict[str, Any], device: str) -> None:
        super().__init__()
        ranks = dist.get_world_size()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.mix = nn.Linear(2 * HIDDEN, HIDDEN)
        self.router = cells["router"].Router(HIDDEN, EXPERTS, aux_coefficient=1e-2)
        with torch.random.fork_rng():  # what it draws depends on how many experts are its own
            own = cells["moe_layer"].MoELayer(EXPERTS // ranks, HIDDEN, INNER, device=device)
        self.experts = cells["expert_parallel"].ExpertParallel(own)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [sequences, length, hidden] -> the same, and the loss of an uneven load."""
        now = self.norms[0](x)
        x = x + self.mix(torch.cat([now, functional.pad(now, (0, 0, 1, -1))], dim=-1))
        rows = self.norms[1](x).flatten(0, 1).bfloat16()
        probs, aux_loss, _, ids, _ = self.router(rows)
        return x + self.experts(rows, probs, ids).view_as(x), aux_loss


class Model(nn.Module):
    """Tokens to logits of the next ones."""

    def __init__(self, cells: dict[str, Any], device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(cells, device) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [sequences, length + 1] -> the mean loss."""
        x, extra = self.embedding(tokens[:, :-1]), []
        for block in self.blocks:
            x, aux_loss = block(x)
            extra.append(aux_loss)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        return loss + torch.stack(extra).sum()


def batch(step: int) -> Tensor:
    """The sequences of a step: each token follows from the two before it, most of the time."""
    draws = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=draws)
    noise = torch.rand(tokens.shape, generator=draws) < 0.05
    for place in range(2, LENGTH + 1):
        following = (3 * tokens[:, place - 1] + 5 * tokens[:, place - 2] + 1) % VOCABULARY
        tokens[:, place] = torch.where(noise[:, place], tokens[:, place], following)
    return tokens


def make(bundle: Path, device: str) -> tuple[nn.Module, list[nn.Parameter]]:
    """The model of this rank, and the weights of its experts, which are drawn as one rank does."""
    name = load_bundle(bundle).__name__
    cells: dict[str, Any] = {
        cell: importlib.import_module(f"{name}.{cell}__bf16") for cell in ("router", "moe_layer")
    }
    cells["expert_parallel"] = importlib.import_module(f"{name}.integrations.expert_parallel")
    torch.manual_seed(0)
    model = Model(cells, device).to(device)
    experts = []
    for block in model.blocks:
        first, own = block.experts.first, block.experts.layer.num_experts
        for weight in block.experts.parameters():
            every = torch.randn(EXPERTS, *weight.shape[1:]) * weight.shape[-1] ** -0.5
            weight.data.copy_(every[first : first + own])
            experts.append(weight)
    for block in model.blocks:  # of another type than the rest
        fully_shard(block.router)
    fully_shard(model, ignored_params={*experts})
    return model, experts


def train(model: nn.Module, experts: list[nn.Parameter], device: str) -> list[float]:
    """The losses of all steps, of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimisers = [
        torch.optim.AdamW([p for p in model.parameters() if p not in {*experts}], lr=1e-2),
        torch.optim.AdamW(experts, lr=3e-3),
    ]
    losses = []
    for step in range(STEPS):
        loss = model(batch(step)[rank::ranks].to(device))
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss.backward()
        for weight in experts:  # sums over ranks, where FSDP has means
            assert weight.grad is not None
            weight.grad /= ranks
        for optimiser in optimisers:
            optimiser.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main() -> None:
    """One rank of those that torchrun starts, or the only one."""
    default = Path(__file__).resolve().parents[1] / "generated" / "cpu"
    bundle = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else default
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    kind = device_for(bundle.name, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if kind == "cpu":
        use_one_thread()
    dist.init_process_group("gloo" if kind == "cpu" else "nccl", **alone)
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    losses = train(*make(bundle, kind), kind)
    if dist.get_rank() == 0:
        print(f"ranks {dist.get_world_size()}, experts {EXPERTS}")
        print(f"loss {losses[0]:.4f}, after {STEPS} steps {losses[-1]:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
