"""A mixture-of-experts language model as torchtitan trains it, over many ranks.

Tensor, sequence and expert parallel layers of a mesh, the rest under FSDP2:

    alias add="fusegen generate --arch cpu --recipe bf16 --out split"
    add --module linear --option column_sequence_parallel
    add --module linear --option row_sequence_parallel
    add --module moe_layer --option tensor_sequence_parallel
    add --module router
    torchrun --nproc-per-node 4 examples/parallel.py split/cpu --tensor 2

With `--arch sm_90a` and `split/sm_90a` the same runs on GPUs over NCCL.  Ranks form a mesh of data
by tensor.  Those of a row have the same sequences, of which each has a slice of the positions, and
parts of the weights of attention and experts; those of a column have sequences and experts of their
own.

    attention   weights split over tensor, FSDP2 over data
    experts     spread over data, each split over tensor
    the rest    FSDP2 over all ranks

However many there are, ranks see the same batches and begin with the same weights, so the losses
are the same but for rounding and for the routers' own losses.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo import use_one_thread
from moe_layer import device_for, load_bundle
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

VOCABULARY, HIDDEN, HEADS, INNER, EXPERTS, LAYERS = 64, 64, 4, 128, 8, 2
BATCH, LENGTH, STEPS = 8, 32, 60


class Attention(nn.Module):
    """Causal attention of this rank's heads, between a product by columns and one by rows."""

    def __init__(self, cells: dict[str, Any], mesh: DeviceMesh, device: str) -> None:
        super().__init__()
        tensor = mesh["tensor"].get_group()
        own = HIDDEN // mesh["tensor"].size()
        self.inputs = cells["column"].Linear(HIDDEN, 3 * own, device=device, tensor_group=tensor)
        self.outputs = cells["row"].Linear(own, HIDDEN, device=device, tensor_group=tensor)

    def forward(self, x: Tensor) -> Tensor:
        """x [positions of the rank, sequences, hidden] -> the same."""
        every = self.inputs(x)  # of all positions
        heads = every.unflatten(-1, (-1, 3, HIDDEN // HEADS)).permute(3, 1, 2, 0, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.outputs(mixed.permute(2, 0, 1, 3).flatten(2).contiguous())


class Block(nn.Module):
    """Attention, then experts; each behind a norm and added to its input."""

    def __init__(self, cells: dict[str, Any], mesh: DeviceMesh, device: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.router = cells["router"].Router(HIDDEN, EXPERTS, aux_coefficient=1e-2)
        with torch.random.fork_rng():  # what they draw depends on how many ranks there are
            self.attention = Attention(cells, mesh, device)
            own = cells["moe_layer"].MoELayer(
                EXPERTS // mesh["data"].size(),
                HIDDEN,
                INNER // mesh["tensor"].size(),
                device=device,
                tensor_group=mesh["tensor"].get_group(),
            )
        self.experts = cells["expert_parallel"].ExpertParallel(own, mesh["data"].get_group())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [positions, sequences, hidden] -> the same, and the loss of an uneven load."""
        x = x + self.attention(self.norms[0](x).bfloat16())
        rows = self.norms[1](x).flatten(0, 1).bfloat16()
        probs, aux_loss, _, ids, _ = self.router(rows)
        return x + self.experts(rows, probs, ids).view_as(x), aux_loss


class Model(nn.Module):
    """Tokens to logits of the next ones."""

    def __init__(self, cells: dict[str, Any], mesh: DeviceMesh, device: str) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block(cells, mesh, device) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, following: Tensor, places: Tensor) -> Tensor:
        """tokens, following [positions, sequences], places [positions] -> the mean loss."""
        x, extra = self.tokens(tokens) + self.positions(places)[:, None], []
        for block in self.blocks:
            x, aux_loss = block(x)
            extra.append(aux_loss)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), following.flatten())
        return loss + torch.stack(extra).sum()


def batch(step: int) -> Tensor:
    """The sequences of a step: each token follows from the one before it, most of the time."""
    draws = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=draws)
    noise = torch.rand(tokens.shape, generator=draws) < 0.05
    for place in range(1, LENGTH + 1):
        following = (5 * tokens[:, place - 1] + 1) % VOCABULARY
        tokens[:, place] = torch.where(noise[:, place], tokens[:, place], following)
    return tokens


CELLS = {
    "column": "linear__bf16__column_sequence_parallel",
    "row": "linear__bf16__row_sequence_parallel",
    "moe_layer": "moe_layer__bf16__tensor_sequence_parallel",
    "router": "router__bf16",
}
"""What the model is made of."""


def load(bundle: Path, cells: dict[str, str] = CELLS) -> dict[str, Any]:
    """The modules of a bundle that the model has, and what the ranks do with them."""
    name = load_bundle(bundle).__name__
    integrations = ("expert_parallel", "tensor_parallel")
    names = {**cells, **{each: f"integrations.{each}" for each in integrations}}
    return {key: importlib.import_module(f"{name}.{module}") for key, module in names.items()}


def join(arch: str, tensor: int) -> tuple[DeviceMesh, str]:
    """The ranks that torchrun started, data by tensor, or the only one; and the kind of device.

    Args:
        arch: of the bundle.
        tensor: how many ranks share a layer's weights.
    """
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    kind = device_for(arch, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if kind == "cpu":
        use_one_thread()
    dist.init_process_group("gloo" if kind == "cpu" else "nccl", **alone)
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    shape = (dist.get_world_size() // tensor, tensor)
    return init_device_mesh(kind, shape, mesh_dim_names=("data", "tensor")), kind


def leave(mesh: DeviceMesh, losses: list[float]) -> None:
    """Say what was learnt, and end together."""
    if dist.get_rank() == 0:
        data, tensor = mesh.shape
        print(f"data {data}, tensor {tensor}, experts {EXPERTS}")
        print(f"loss {losses[0]:.4f}, after {len(losses)} steps {losses[-1]:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def draw(layer: nn.Module, cells: dict[str, Any], first: int, experts: int) -> None:
    """Give a layer its part of weights that do not depend on how many ranks there are.

    Args:
        layer: tensor parallel.
        cells: of the bundle.
        first: number of its first expert; 0 of a layer without.
        experts: how many there are on all ranks; 0 of a layer without.
    """
    whole = {}
    for path, value in cells["tensor_parallel"].write(layer).items():
        shape = (experts, *value.shape[1:]) if experts else value.shape
        every = torch.randn(shape) * shape[-1] ** -0.5
        whole[path] = (every[first : first + len(value)] if experts else every).to(value)
    layer.load_state_dict(cells["tensor_parallel"].read(layer, whole))


def drawn(cells: dict[str, Any], mesh: DeviceMesh, device: str) -> Model:
    """The model of this rank, whose weights are parts of the same, however many ranks there are."""
    torch.manual_seed(0)
    model = Model(cells, mesh, device).to(device)
    for block in model.blocks:
        for layer in (block.attention.inputs, block.attention.outputs):
            draw(layer, cells, 0, 0)
        draw(block.experts.layer, cells, block.experts.first, EXPERTS)
    return model


def compile_layers(model: Model) -> None:
    """Compile what communicates: each layer into one graph, collectives or their ops included."""
    for block in model.blocks:
        attention = block.attention
        attention.inputs = torch.compile(attention.inputs, fullgraph=True)
        attention.outputs = torch.compile(attention.outputs, fullgraph=True)
        block.experts.compile(fullgraph=True)


def make(
    cells: dict[str, Any], mesh: DeviceMesh, device: str, *, compiles: bool
) -> tuple[nn.Module, dict[nn.Parameter, int]]:
    """The model of this rank, and weights whose gradients are sums: of how many ranks' means."""
    sums: dict[nn.Parameter, int] = {}
    model = drawn(cells, mesh, device)
    if compiles:  # before FSDP, whose hooks are no part of a graph
        compile_layers(model)
    for block in model.blocks:
        for layer in (block.attention.inputs, block.attention.outputs):
            fully_shard(layer, mesh=mesh["data"])
        sums |= dict.fromkeys(block.experts.parameters(), mesh.size())
    every = mesh._flatten("every")
    attention = {p for block in model.blocks for p in block.attention.parameters()}
    for block in model.blocks:  # of another type than the rest
        fully_shard(block.router, mesh=every)
    fully_shard(model, mesh=every, ignored_params={*sums, *attention})
    sums |= dict.fromkeys(attention, mesh["tensor"].size())
    return model, sums


def train(
    model: nn.Module, sums: dict[nn.Parameter, int], mesh: DeviceMesh, device: str, steps: int
) -> list[float]:
    """The losses of all steps, of all ranks."""
    data, tensor = mesh["data"], mesh["tensor"]
    own = slice(data.get_local_rank(), None, data.size())
    places = torch.arange(LENGTH, device=device).chunk(tensor.size())[tensor.get_local_rank()]
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():  # an optimiser has parameters of one mesh
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimisers = [torch.optim.AdamW(each, lr=5e-3) for each in groups.values()]
    losses = []
    for step in range(steps):
        tokens = batch(step)[own].T.to(device)
        loss = model(tokens[places], tokens[places + 1], places)
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss.backward()
        for weight, ranks in sums.items():
            if weight.grad is not None:
                weight.grad /= ranks
        for optimiser in optimisers:
            optimiser.step()
        mean = loss.detach() / mesh.size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main() -> None:
    """One rank of those that torchrun starts, or the only one."""
    words = argparse.ArgumentParser(description="Train over many ranks.")
    words.add_argument("bundle", type=Path, help="folder of the bundle, such as split/cpu")
    words.add_argument("--tensor", type=int, default=1, help="ranks that share a layer's weights")
    words.add_argument("--steps", type=int, default=STEPS, help="of the optimiser")
    words.add_argument("--overlap", action="store_true", help="their copies go on beside products")
    words.add_argument("--compile", action="store_true", help="layers that communicate")
    given = words.parse_args()
    bundle = given.bundle.resolve()
    mesh, kind = join(bundle.name, given.tensor)
    cells = load(bundle)
    if given.overlap:  # on GPUs that reach each other's memory
        cells["tensor_parallel"].overlap(mesh["tensor"].get_group())
    made = make(cells, mesh, kind, compiles=given.compile)
    leave(mesh, train(*made, mesh, kind, given.steps))


if __name__ == "__main__":
    main()
