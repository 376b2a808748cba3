"""A mixture-of-experts language model as Megatron-LM trains it, over many ranks.

    python examples/megatron_style.py             # one rank, on the CPU
    python examples/megatron_style.py sm_90a      # generates and builds for the GPU
    torchrun --nproc-per-node 4 examples/megatron_style.py --tensor 2

The model is that of parallel.py: attention is split over tensor, experts over data and tensor, and
positions over tensor.  There is no FSDP: every rank keeps its parameters, and an fp32 buffer of
their gradients, to which GEMMs add those of micro-batches themselves.  A distributed optimiser
scatters the sums of a buffer over the ranks that have the same parameters, each of which has
master weights and moments of its share, and gathers what they become.  Experts are quantised once
for each step of it, not for each micro-batch.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel import LENGTH, STEPS, Model, batch, drawn, join, leave, load
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fusegen import api

MICRO_BATCHES = 2
CELLS = {
    "column": "linear__bf16__add_to_main_grad__column_sequence_parallel",
    "row": "linear__bf16__add_to_main_grad__row_sequence_parallel",
    "moe_layer": "moe_layer__fp8_block__add_to_main_grad__cached_weights__tensor_sequence_parallel",
    "router": "router__bf16",
}


def generate(arch: str, folder: str) -> None:
    """A bundle of the cells, built where it has kernels; one rank does so for all."""
    if dist.get_rank() == 0:
        for cell in CELLS.values():
            module, recipe, *options = cell.split("__")
            api.generate(
                api.Request(
                    out=Path(folder),
                    archs=(arch,),
                    modules=(module,),
                    recipes=(recipe,),
                    options=tuple(options),
                    namespace="megatron_style",
                )
            )
        if arch != "cpu":
            api.build(Path(folder, arch))
    dist.barrier()


class Share:
    """Parameters that the ranks of a group have alike, of whose masters each rank has a share.

    Args:
        parameters: of any types.
        group: those ranks.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: Any, learning_rate: float
    ) -> None:
        self.parameters, self.group = [*parameters], group
        values = [parameter.detach().float().flatten() for parameter in self.parameters]
        ranks = dist.get_world_size(group)
        missing = -sum(map(len, values)) % ranks
        whole = torch.cat([*values, values[0].new_zeros(missing)])
        self.master = whole.chunk(ranks)[dist.get_rank(group)].clone()
        self.gradients = torch.zeros_like(whole)
        for parameter, gradient in zip(self.parameters, self._views(self.gradients), strict=True):
            parameter.main_grad = gradient
            parameter.grad_added_to_main_grad = False
            parameter.register_post_accumulate_grad_hook(add_to_main_grad)
        self.optimiser = torch.optim.AdamW([self.master], lr=learning_rate)

    def _views(self, whole: Tensor) -> Iterator[Tensor]:
        """What a flat tensor has of each parameter."""
        begin = 0
        for parameter in self.parameters:
            yield whole[begin : begin + parameter.numel()].view(parameter.shape)
            begin += parameter.numel()

    @torch.no_grad()
    def step(self, losses: int) -> None:
        """Masters follow the mean of so many losses' gradients, and parameters the masters."""
        own, whole = torch.empty_like(self.master), torch.empty_like(self.gradients)
        parts = [*self.gradients.split(len(own))]
        dist.reduce_scatter(own, parts, group=self.group)
        self.master.grad = own / losses
        self.optimiser.step()
        dist.all_gather([*whole.split(len(own))], self.master, group=self.group)
        for parameter, value in zip(self.parameters, self._views(whole), strict=True):
            parameter.copy_(value)
        self.gradients.zero_()


def add_to_main_grad(parameter: nn.Parameter) -> None:
    """Add a gradient, unless a GEMM has done so."""
    if not parameter.grad_added_to_main_grad:
        parameter.main_grad += parameter.grad
    parameter.grad, parameter.grad_added_to_main_grad = None, False


def shares(model: Model, mesh: DeviceMesh, learning_rate: float) -> list[Share]:
    """All parameters, by the ranks that have the same."""
    experts = [p for block in model.blocks for p in block.experts.parameters()]
    attention = [p for block in model.blocks for p in block.attention.parameters()]
    others = {*model.parameters()}.difference(experts, attention)
    alone, _ = dist.new_subgroups(1)
    groups = (
        (experts, alone),  # over data and tensor
        (attention, mesh["data"].get_group()),
        ([p for p in model.parameters() if p in others], mesh._flatten("every").get_group()),
    )
    return [Share(parameters, group, learning_rate) for parameters, group in groups]


def train(model: Model, mesh: DeviceMesh, device: str, steps: int) -> list[float]:
    """The losses of all steps, of all ranks."""
    data, tensor = mesh["data"], mesh["tensor"]
    own = slice(data.get_local_rank(), None, data.size())
    places = torch.arange(LENGTH, device=device).chunk(tensor.size())[tensor.get_local_rank()]
    every = shares(model, mesh, learning_rate=5e-3)
    losses = []
    for step in range(steps):
        total = torch.zeros((), device=device)
        for sequences in batch(step)[own].to(device).chunk(MICRO_BATCHES):
            tokens = sequences.T
            loss = model(tokens[places], tokens[places + 1], places)
            loss.backward()
            total += loss.detach() / (MICRO_BATCHES * mesh.size())
        for share in every:
            share.step(MICRO_BATCHES * mesh.size())
        for block in model.blocks:
            block.experts.layer.refresh_weights()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def main() -> None:
    """Generate, train, print; one rank of those that torchrun starts, or the only one."""
    words = argparse.ArgumentParser(description="Train as Megatron-LM does.")
    words.add_argument("arch", nargs="?", default="cpu", help="of the bundle, such as sm_90a")
    words.add_argument("--tensor", type=int, default=1, help="ranks that share a layer's weights")
    words.add_argument("--steps", type=int, default=STEPS, help="of the optimiser")
    given = words.parse_args()
    mesh, kind = join(given.arch, given.tensor)
    with tempfile.TemporaryDirectory() as scratch:
        folder = [scratch]
        dist.broadcast_object_list(folder)  # the first rank's
        generate(given.arch, folder[0])
        model = drawn(load(Path(folder[0], given.arch), CELLS), mesh, kind)
        losses = train(model, mesh, kind, given.steps)
        dist.barrier()
    leave(mesh, losses)


if __name__ == "__main__":
    main()
