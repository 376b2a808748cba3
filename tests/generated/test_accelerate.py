"""Training by Accelerator on the CPU, alone and on two ranks: as without it, saved and loaded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import torch
from torch import nn

from fusegen.ir.naming import Cell

from .loading import load_bundle, load_cells
from .ranks import Place, run_ranks

RECIPES = ("bf16", "fp8_delayed", "fp8_block", "nvfp4")

# Ranks of `run_ranks` have a process group already; accelerate asks the environment whether.
SCRIPT = """
import importlib, os
if ranks > 1:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
import bundle
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset
recipe, precision = words


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        dtype = torch.float32 if precision == "bf16" else torch.bfloat16
        module = lambda name: importlib.import_module(f"bundle.{name}__{recipe}")
        self.before = module("linear").Linear(32, 32, dtype=dtype)
        self.experts = module("grouped_mlp").GroupedMLP(2, 32, 48, dtype=dtype)

    def forward(self, x, sizes, probs):
        return self.experts(self.before(x), sizes, probs)


class Data(Dataset):
    def __len__(self):
        return 8 * ranks

    def __getitem__(self, index):
        # Ranks take items by turns; here two that follow each other are the same.
        generator = torch.Generator().manual_seed(index // ranks)
        x = torch.randn(16, 32, generator=generator)
        x = x if precision == "bf16" else x.bfloat16()
        return x, torch.tensor([9, 7]), torch.rand(16, generator=generator)


def loss_of(model, batch):
    return model(*batch).float().square().mean()


def made(model):
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(model, optimizer, batches):
    losses = []
    for index, batch in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(model, batch)
        (loss / 2).backward()
        if index % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def accelerated(accelerator, model, optimizer, batches):
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


batches = [Data()[index] for index in range(0, 8 * ranks, ranks)]
one, own = made(Model())
expected = plain(one, own, [*batches, *batches])
assert len({loss.item() for loss in expected}) == 16

accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
assert accelerator.num_processes == ranks
loader = DataLoader(Data(), batch_size=1, collate_fn=lambda items: items[0])
model, optimizer, loader = accelerator.prepare(*made(Model()), loader)
found = accelerated(accelerator, model, optimizer, loader)
assert found == expected[:8], (found, expected)

for safe in (True, False):
    place = f"{folder}/{recipe}-{precision}-{safe}"
    accelerator.save_state(place, safe_serialization=safe)
    accelerator.wait_for_everyone()
    wanted = {n: t.clone() for n, t in accelerator.unwrap_model(model).state_dict().items()}
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    accelerator.wait_for_everyone()
    accelerator.load_state(place)
    state = accelerator.unwrap_model(model).state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), (safe, name)
assert accelerated(accelerator, model, optimizer, loader) == expected[8:]

# A model that is written by itself has its states, too, also in safetensors.
accelerator.save_model(model, f"{folder}/model", safe_serialization=True)
accelerator.wait_for_everyone()
from accelerate import load_checkpoint_in_model
other = Model()
load_checkpoint_in_model(other, f"{folder}/model", strict=True)
for name, tensor in accelerator.unwrap_model(model).state_dict().items():
    assert torch.equal(other.state_dict()[name], tensor), name
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    modules = ("linear", "grouped_mlp")
    cells = [Cell(module, recipe) for module in modules for recipe in RECIPES]
    name = load_cells("accelerated", tmp_path_factory.mktemp("accelerated"), cells)
    return Place(Path(str(sys.modules[name].__file__)).parent)


@pytest.mark.parametrize(("ranks", "precision"), [(1, "no"), (2, "bf16")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_that_of_a_plain_loop(
    place: Place, recipe: str, ranks: int, precision: str, tmp_path: Path
) -> None:
    """Parameters of 16 bits, or of 32 under autocast; two micro-batches to a step; restarted."""
    run_ranks(SCRIPT, tmp_path, place, recipe, precision, ranks=ranks)


OFFLOAD: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "cpu": lambda model, _: accelerate.cpu_offload(model, torch.device("cpu")),
    "disk": lambda model, folder: accelerate.disk_offload(model, folder, torch.device("cpu")),
    "both": lambda model, folder: accelerate.dispatch_model(
        model, {"0": "cpu", "1": "disk"}, main_device="cpu", offload_dir=folder
    ),
}


@pytest.mark.parametrize("where", OFFLOAD)
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "fp8_delayed"])
def test_offloaded_weights(place: Place, recipe: str, where: str, tmp_path: Path) -> None:
    """Parts of experts get theirs before a call, and give them back; a tensor of states cannot."""
    package = f"offloaded_{recipe}_{where}"
    loaded = load_bundle(package, place.bundle)
    torch.manual_seed(0)
    linear = importlib.import_module(f"{loaded}.linear__{recipe}").Linear(32, 32)
    experts = importlib.import_module(f"{loaded}.grouped_mlp__{recipe}").GroupedMLP(2, 32, 48)
    x, sizes, probs = torch.randn(16, 32).bfloat16(), torch.tensor([9, 7]), torch.rand(16)
    with torch.no_grad():
        expected = experts(linear(x), sizes, probs)
        model = OFFLOAD[where](nn.Sequential(linear, experts), str(tmp_path))
        assert any(parameter.is_meta for parameter in model.parameters())
        assert torch.equal(experts(linear(x), sizes, probs), expected)
