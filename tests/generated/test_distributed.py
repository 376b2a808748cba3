"""Experts in DDP and FSDP2 on two ranks: training equals one process, checkpoints load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .ranks import Place, run_ranks

BUNDLE = Path(__file__).parents[2] / "generated" / "cpu"
COMMON = """
import importlib
module = importlib.import_module(f"bundle.grouped_mlp__{words[0]}")

def make():
    torch.manual_seed(0)
    return module.GroupedMLP(3, 32, 48, device=device)  # two ranks have unequal shards of three

def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 32, generator=generator).bfloat16()
    data = x, torch.tensor([9, 3, 4]), torch.rand(16, generator=generator)
    return [each.to(device) for each in data]

def train(call, parameters, steps):
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    losses = []
    for step in range(steps):
        loss = call(*batch(step)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
"""
SINGLE = (
    COMMON
    + """
layer = make()
losses = train(layer, layer.parameters(), 4)
torch.save({"losses": losses, "state": layer.state_dict()}, f"{folder}/single.pt")
"""
)
# Every rank sees the same rows, so the mean of their gradients is that of one process.
WRAPPED = (
    COMMON
    + """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
layer = make()
ddp = DistributedDataParallel(layer)
found = {"ddp": train(ddp, ddp.parameters(), 4), "state": layer.state_dict()}
mesh = dist.init_device_mesh(device, (ranks,))
sharded = fully_shard(make(), mesh=mesh)
found["fsdp"] = train(sharded, sharded.parameters(), 4)
dcp.save({"model": get_model_state_dict(sharded)}, checkpoint_id=f"{folder}/checkpoint")
other = fully_shard(make(), mesh=mesh)
state = {"model": get_model_state_dict(other)}
dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
set_model_state_dict(other, state["model"])
with torch.no_grad():
    found["loaded"] = other(*batch(9)), sharded(*batch(9))
torch.save(found, f"{folder}/{rank}.pt")
"""
)


@pytest.fixture(scope="module")
def place() -> Place:
    """Where the ranks run; the tests of GPUs have another one."""
    return Place(BUNDLE)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_block", "nvfp4"])
def test_training_equals_one_process(place: Place, recipe: str, tmp_path: Path) -> None:
    run_ranks(SINGLE, tmp_path, place, recipe, ranks=1)
    run_ranks(WRAPPED, tmp_path, place, recipe)
    single = torch.load(tmp_path / "single.pt", map_location="cpu")
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", map_location="cpu")
        assert found["ddp"] == single["losses"]
        assert found["fsdp"] == pytest.approx(single["losses"], rel=1e-3)
        assert found["state"].keys() == single["state"].keys()
        for name, tensor in single["state"].items():
            assert torch.equal(found["state"][name], tensor), name
        assert torch.equal(*found["loaded"])
