"""Directions of several segments, printed and run: ops, and collectives that ranks wait for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusegen.emit.bundle import render_bundle
from fusegen.emit.polish import polish
from fusegen.emit.render import Renderer
from fusegen.ir.plan import ModulePlan
from fusegen.publish.paths import builtin_templates

from ..segment_plans import CELL, DELAYED, SPECS, delayed, exchanged, overlapped
from .loading import load_bundle
from .ranks import Place, run_ranks

SIZES = {"T": 12, "E": 3, "H": 16, "F": 8}
# One rank: result and gradients of its own rows, as `words` say.
RANK = """
import importlib
module = importlib.import_module("bundle.CELL")
tensors = torch.load(f"{folder}/inputs.{rank}.pt")
leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}
call = module.grouped_mlp
if words == ["compiled"]:
    call = torch.compile(call, fullgraph=True, backend="aot_eager")
with torch.no_grad():
    alone = call(**tensors)
y = call(**leaves)
y.sum().backward()
found = {"alone": alone, "y": y.detach(), **{n: t.grad for n, t in leaves.items()}}
torch.save(found, f"{folder}/{rank}.pt")
""".replace("CELL", CELL)


def written(plan: ModulePlan, folder: Path) -> Path:
    """The bundle of a plan, below a folder."""
    files = render_bundle((plan,), SPECS.archs["cpu"], folder.name, Renderer([builtin_templates()]))
    for path, artifact in polish(files).items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(artifact.data)
    return folder


@pytest.fixture(scope="module", params=[exchanged, overlapped], ids=lambda make: make.__name__)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of each plan."""
    make: Callable[[], ModulePlan] = request.param
    folder = tmp_path_factory.mktemp("bundle") / f"segments_{make.__name__}"
    return written(make(), folder)


def inputs(rank: int) -> dict[str, Tensor]:
    """Arguments of one rank: its own rows, and weights that all have."""
    random = torch.Generator().manual_seed(rank)
    shared = torch.Generator().manual_seed(99)
    tokens, groups, hidden, width = SIZES.values()
    return {
        "x": torch.randn(tokens, hidden, generator=random).bfloat16(),
        "fc1_weight": torch.randn(groups, 2 * width, hidden, generator=shared).bfloat16(),
        "fc2_weight": torch.randn(groups, hidden, width, generator=shared).bfloat16(),
        "split_sizes": torch.tensor([4, 0, 8]),
        "probs": torch.rand(tokens, generator=random),
    }


def expected(bundle: Path) -> list[dict[str, Tensor]]:
    """What both ranks get: their ops in turn, and the maximum in the place of collectives."""
    name = load_bundle(bundle.name, bundle)
    module = importlib.import_module(f"{name}.{CELL}")
    own = bundle.name.endswith("overlapped")
    given = [inputs(rank) for rank in range(2)]
    flags = [True] * 4 + [False]
    h = [module._forward_1(g["x"], g["fc1_weight"], g["split_sizes"], None, *flags) for g in given]
    h_max = torch.maximum(*h)
    read = h if own else [h_max, h_max]
    a = [module._forward_2(g["x"], g["probs"], r) for g, r in zip(given, read, strict=True)]
    a_max = torch.maximum(*a)
    found = []
    for g in given:
        sizes, first, second = g["split_sizes"], g["fc1_weight"], g["fc2_weight"]
        y = module._forward_3(g["x"], second, sizes, None, a_max)
        dy = torch.ones_like(y)
        saved = (g["x"], sizes, g["probs"], first, h_max, a_max, second)
        gradients = module._backward(dy, *saved, *flags, False)
        names = ("x", "fc1_weight", "fc2_weight", "probs")
        found.append({"alone": y, "y": y, **dict(zip(names, gradients, strict=False))})
    return found


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_ranks_run_every_segment(bundle: Path, mode: str, tmp_path: Path) -> None:
    for rank in range(2):
        torch.save(inputs(rank), tmp_path / f"inputs.{rank}.pt")
    run_ranks(RANK, tmp_path, Place(bundle), mode)
    for rank, wanted in enumerate(expected(bundle)):
        got = torch.load(tmp_path / f"{rank}.pt")
        for name, tensor in wanted.items():
            assert torch.equal(got[name], tensor), name


# One rank: the gradient of the weight before and after it is shared.
LATER = """
import importlib
module = importlib.import_module("bundle.CELL")
layer = module.Linear(16, 8, device=device, peers=dist.group.WORLD)
with torch.no_grad():
    layer.weight.fill_(0.5)
x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank)).bfloat16()
layer(x).sum().backward()
assert layer.weight.grad is None
layer.backward_dw()
torch.save({"x": x, "gradient": layer.weight.grad}, f"{folder}/{rank}.pt")
""".replace("CELL", DELAYED)


def test_a_direction_may_end_with_a_collective(tmp_path: Path) -> None:
    """Gradients that wait are shared once they are computed, by the group that the module has."""
    run_ranks(LATER, tmp_path, Place(written(delayed(), tmp_path / "segments_delayed")))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    own = [each["x"].float().sum(0).bfloat16().expand(8, 16) for each in (first, second)]
    for each in (first, second):
        assert torch.equal(each["gradient"], torch.maximum(*own))
