"""Delayed scaling over several ranks: every rank's scales follow the largest amax of all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusegen import api

from .loading import LOAD
from .ranks import run_ranks

CELL = "linear__fp8_delayed__reduced_amax"
# One rank: trains on its own rows, and leaves its state and gradients in a file.
RANK = """
import importlib
module = importlib.import_module("bundle.CELL")
torch.manual_seed(0)
layer = module.Linear(32, 16)
call = layer
if words == ["compiled"]:
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
for step in range(3):
    x = (torch.randn(8, 32) * (1 + rank) * (step + 1)).bfloat16().requires_grad_()
    call(x).sum().mul(1 + 3 * rank).backward()
state = {name: tensor for name, tensor in layer.state_dict().items() if name != "weight"}
torch.save({"state": state, "gradient": layer.weight.grad}, f"{folder}/{rank}.pt")
""".replace("CELL", CELL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reduced")
    request = api.Request(
        out=path / "out",
        archs=("cpu",),
        modules=("linear",),
        recipes=("fp8_delayed",),
        options=("reduced_amax",),
        namespace="reduced",
    )
    api.generate(request)
    return path


def train(folder: Path, mode: str) -> list[dict[str, dict[str, torch.Tensor]]]:
    run_ranks(RANK, folder, folder / "out" / "cpu", mode)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_ranks_share_their_scales(folder: Path, mode: str) -> None:
    first, second = (each["state"] for each in train(folder, mode))
    assert first.keys() == second.keys() and len(first) == 6
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    newest = first["input_amax_history"][-1].item()
    torch.manual_seed(0)
    torch.empty(16, 32, dtype=torch.bfloat16).uniform_()  # the weight's draw
    largest = max(
        (torch.randn(8, 32) * 2 * (step + 1)).bfloat16().abs().max().item() for step in range(3)
    )
    assert first["input_amax_history"].max().item() == newest == largest
    assert first["input_scale"].item() == torch.tensor(448.0).div(largest).item()
    assert first["grad_output_amax_history"].max().item() == 4.0


def test_without_ranks_the_first_step_says_what_is_missing(folder: Path) -> None:
    code = LOAD + (
        "import torch\n"
        f"layer = load('b', {str(folder / 'out' / 'cpu')!r}).{CELL}.Linear(16, 8)\n"
        "x = torch.ones(2, 16, dtype=torch.bfloat16)\n"
        "with torch.no_grad():\n"
        "    print(layer(x).shape)\n"
        "layer(x)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "torch.Size([2, 8])\n")
    assert "init_process_group" in done.stderr.splitlines()[-1]


def test_a_recipe_without_history_offers_nothing_to_reduce() -> None:
    rows = api.plan(api.Query(archs=("cpu",), modules=("linear",), options=("reduced_amax",)))
    made = {row.recipe: row for row in rows}
    assert {recipe for recipe, row in made.items() if row.status == "native"} == {"fp8_delayed"}
    assert made["mxfp8"].reason == "recipe 'mxfp8' keeps no amaxes that ranks could share"
