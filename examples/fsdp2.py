"""Experts under FSDP2 on two processes: train, save a distributed checkpoint, load it elsewhere.

    python examples/fsdp2.py                  # the CPU bundle of this repository, gloo
    python examples/fsdp2.py PATH/TO/sm_90a   # a compiled bundle on two GPUs, NCCL

Nothing of the generated module knows of this: its parameters are plain ones.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo import use_one_thread
from moe_layer import device_for, load_bundle
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

RANKS = 2
EXPERTS, HIDDEN, INNER, TOKENS, STEPS = 2, 32, 128, 256, 100


def make(bundle: Path, device: str) -> nn.Module:
    """The expert MLP, sharded over all ranks."""
    experts = load_bundle(bundle).grouped_mlp__bf16.GroupedMLP(EXPERTS, HIDDEN, INNER)
    return fully_shard(experts.to(device))


def batch(step: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens sorted by expert, a step's own group sizes, router probabilities."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().to(device)
    chosen = torch.randint(EXPERTS, (TOKENS,), generator=generator)
    sizes = torch.bincount(chosen, minlength=EXPERTS).to(device)
    return x, sizes, torch.rand(TOKENS, generator=generator).to(device)


def train(model: nn.Module, device: str) -> list[float]:
    """Mean squared distance to the input, which the experts learn to repeat."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for step in range(STEPS):
        x, sizes, probs = batch(step, device)
        loss = (model(x, sizes, probs) - x).float().square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def run(rank: int, bundle: Path, folder: str) -> None:
    """One rank."""
    on_gpu = bundle.name != "cpu"
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        use_one_thread()
    store = dist.FileStore(f"{folder}/store", RANKS)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = make(bundle, device)
    losses = train(model, device)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/checkpoint")
    other = make(bundle, device)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    set_model_state_dict(other, state["model"])
    with torch.no_grad():
        equal = torch.equal(other(*batch(99, device)), model(*batch(99, device)))
    if rank == 0:
        print(f"loss {losses[0]:.3f}, after {STEPS} steps {losses[-1]:.3f}")
        print(f"loaded from the checkpoint, the other model gives the same: {equal}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    default = Path(__file__).resolve().parents[1] / "generated" / "cpu"
    bundle = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else default
    device_for(bundle.name, RANKS)
    with tempfile.TemporaryDirectory() as folder:
        # Forked ranks end without Python's own end, which a thread of gloo would abort if it freed
        # a tensor meanwhile.
        start_processes(run, args=(bundle, folder), nprocs=RANKS, start_method="fork")


if __name__ == "__main__":
    main()
