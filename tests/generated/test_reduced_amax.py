"""Delayed scaling over several ranks: every rank's scales follow the largest amax of all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusegen import api

from .loading import LOAD
from .ranks import Place, run_ranks


def cell_of(module: str) -> str:
    """The cell of a module that shares its amaxes."""
    return f"{module}__fp8_delayed__reduced_amax"


CELL = cell_of("linear")
# One rank: trains on its own rows, and leaves its state and gradients in a file.
RANK = """
import importlib
module = importlib.import_module("bundle.CELL")
layer = module.Linear(32, 16, device=device)
generator = torch.Generator().manual_seed(0)
call = layer
if words != ["eager"]:
    from bundle import _asked
    _asked.watch(on=words == ["one_op"])
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
for step in range(3):
    x = torch.randn(8, 32, generator=generator) * (1 + rank) * (step + 1)
    x = x.bfloat16().to(device).requires_grad_()
    call(x).sum().mul(1 + 3 * rank).backward()
state = {name: tensor for name, tensor in layer.state_dict().items() if name != "weight"}
torch.save({"state": state, "gradient": layer.weight.grad}, f"{folder}/{rank}.pt")
""".replace("CELL", CELL)


def generate(arch: str, out: Path, module: str = "linear") -> Path:
    """A bundle that has the cell of a module, below a folder."""
    request = api.Request(
        out=out,
        archs=(arch,),
        modules=(module,),
        recipes=("fp8_delayed",),
        options=("reduced_amax",),
        namespace="reduced",
    )
    api.generate(request, api.Policy.WRITE)
    return out / arch


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where the ranks run; the tests of GPUs have another one."""
    return Place(generate("cpu", tmp_path_factory.mktemp("reduced")))


@pytest.mark.parametrize("mode", ["eager", "compiled", "one_op"])
def test_ranks_share_their_scales(reduced: Place, mode: str, tmp_path: Path) -> None:
    run_ranks(RANK, tmp_path, reduced, mode)
    first, second = (
        torch.load(tmp_path / f"{rank}.pt", map_location="cpu")["state"] for rank in range(2)
    )
    assert first.keys() == second.keys() and len(first) == 6
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    newest = first["input_amax_history"][-1].item()
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(8, 32, generator=generator) * 2 * (step + 1) for step in range(3)]
    largest = max(draw.bfloat16().abs().max().item() for draw in draws)
    assert first["input_amax_history"].max().item() == newest == largest
    assert first["input_scale"].item() == torch.tensor(448.0).div(largest).item()
    assert first["grad_output_amax_history"].max().item() == 4.0


def test_without_ranks_the_first_step_says_what_is_missing(reduced: Place) -> None:
    code = LOAD + (
        "import torch\n"
        f"layer = load('b', {str(reduced.bundle)!r}).{CELL}.Linear(16, 8)\n"
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
