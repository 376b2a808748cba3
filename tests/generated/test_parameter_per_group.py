"""A parameter for each group: as one for all, whatever wraps, shards, recomputes or replaces it."""

from __future__ import annotations

import importlib
import io
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from fusegen.ir.naming import Cell

from .loading import load_cells
from .ranks import Place, run_ranks

pytestmark = pytest.mark.usefixtures("fresh_compiler")

RECIPES = ("bf16", "fp8_delayed", "fp8_block")
CLASSES = {"grouped_linear": "GroupedLinear", "grouped_mlp": "GroupedMLP"}
SIZES = (3, 32, 48)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_module = pytest.mark.parametrize("module", CLASSES)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a package with both forms of each module."""
    words: tuple[tuple[str, ...], ...] = ((), ("parameter_per_group",))
    cells = [Cell(module, recipe, w) for module in CLASSES for recipe in RECIPES for w in words]
    return load_cells("per_group", tmp_path_factory.mktemp("per_group"), cells)


def make(bundle: str, module: str, recipe: str, *, option: bool = True, **more: Any) -> Any:
    torch.manual_seed(0)
    cell = f"{module}__{recipe}{'__parameter_per_group' if option else ''}"
    return getattr(importlib.import_module(f"{bundle}.{cell}"), CLASSES[module])(*SIZES, **more)


def inputs(module: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 32, generator=generator).bfloat16()
    probs = torch.rand(24, generator=generator)
    return [x, torch.tensor([9, 0, 13]), probs][: 2 if module == "grouped_linear" else 3]


def trained(layer: nn.Module, module: str, call: Callable[..., Any]) -> list[Tensor]:
    """Losses of three steps, and the parameters after them, those of groups as one."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    found = []
    for _ in range(3):
        loss = call(*inputs(module)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *whole(layer.state_dict()).values()]


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with parameters of groups as one, sorted."""
    parts = {name.rstrip("012") for name in state if name[-1].isdigit()}
    stacked = {name: torch.stack([state[f"{name}{group}"] for group in range(3)]) for name in parts}
    others = {name: tensor for name, tensor in state.items() if not name[-1].isdigit()}
    return dict(sorted({**others, **stacked}.items()))


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected)) and len(found) == len(expected)


WRAPPED: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "alone": lambda layer: layer,
    "checkpoint": lambda layer: lambda *given: checkpoint(layer, *given, use_reentrant=False),
    "compiled": lambda layer: torch.compile(layer, fullgraph=True, backend="aot_eager"),
    "functional_call": lambda layer: (
        lambda *given: torch.func.functional_call(
            layer, {name: 1 * p for name, p in layer.named_parameters()}, given
        )
    ),
}


# Delayed scaling moves on with each forward that is run again.
@pytest.mark.parametrize(
    ("recipe", "wrapper"),
    [pair for pair in itertools.product(RECIPES, WRAPPED) if pair != ("fp8_delayed", "checkpoint")],
)
@every_module
def test_it_trains_as_one_parameter(bundle: str, module: str, recipe: str, wrapper: str) -> None:
    """Bit for bit, the recipe's state included."""
    plain, layer = (make(bundle, module, recipe, option=o, bias=True) for o in (False, True))
    expected = trained(plain, module, WRAPPED[wrapper](plain))
    assert same(trained(layer, module, WRAPPED[wrapper](layer)), expected)


@every_recipe
def test_a_state_dict_has_a_tensor_for_each(bundle: str, recipe: str, tmp_path: Path) -> None:
    layer = make(bundle, "grouped_mlp", recipe, bias=True)
    state = layer.state_dict()
    assert {"fc1.weight0", "fc1.weight2", "fc2.bias1"} <= state.keys()
    assert state["fc1.weight1"].shape == (96, 32)
    assert "fc1.weight" not in state and not any("whole" in name for name in state)
    expected = make(bundle, "grouped_mlp", recipe, option=False, bias=True).state_dict()
    assert all(map(torch.equal, whole(state).values(), dict(sorted(expected.items())).values()))
    save_file(state, tmp_path / "layer.safetensors")
    other = make(bundle, "grouped_mlp", recipe, bias=True, device="meta").to_empty(device="cpu")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"), strict=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())
    del state["fc2.bias1"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"fc2\.bias1"'):
        other.load_state_dict(state)


def test_a_saved_module_takes_its_memory_once(bundle: str) -> None:
    layer = make(bundle, "grouped_linear", "bf16")
    file = io.BytesIO()
    torch.save(layer, file)
    assert layer.weight0.nbytes * 3 <= len(file.getvalue()) < layer.weight0.nbytes * 3 + 10_000
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert again.weight1.data_ptr() - again.weight0.data_ptr() == again.weight0.nbytes


@every_recipe
@pytest.mark.parametrize("compile_it", [False, True])
def test_frozen_and_parametrised_groups(bundle: str, recipe: str, compile_it: bool) -> None:
    """A group that takes no gradient, and one that a wrapper makes."""
    plain = make(bundle, "grouped_linear", recipe, option=False)
    layer = make(bundle, "grouped_linear", recipe)
    layer.weight0.requires_grad_(False)
    parametrize.register_parametrization(layer, "weight2", Tripled())
    with torch.no_grad():
        plain.weight[2].mul_(3)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compile_it else layer
    assert torch.equal(call(*inputs("grouped_linear")), plain(*inputs("grouped_linear")))
    for each in (plain, call):
        each(*inputs("grouped_linear")).float().square().sum().backward()
    assert layer.weight0.grad is None
    assert torch.equal(layer.weight1.grad, plain.weight.grad[1])
    assert torch.equal(layer.parametrizations.weight2.original.grad, 3 * plain.weight.grad[2])


class Tripled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight


def test_transforms_differentiate_each(bundle: str) -> None:
    layer = make(bundle, "grouped_mlp", "bf16")
    given = inputs("grouped_mlp")

    def loss(own: dict[str, Tensor]) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, own, tuple(given))
        return y.float().square().sum()

    found = torch.func.grad(loss)(dict(layer.named_parameters()))
    layer(*given).float().square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


def test_exported_code_stands_alone(bundle: str) -> None:
    layer = make(bundle, "grouped_linear", "bf16").requires_grad_(False)
    given = tuple(inputs("grouped_linear"))
    program = torch.export.export(layer, given)
    assert {*program.state_dict} == {"weight0", "weight1", "weight2"} and not program.constants
    assert torch.equal(program.module()(*given), layer(*given))


def test_groups_are_at_least_one(bundle: str) -> None:
    cell = importlib.import_module(f"{bundle}.grouped_linear__bf16__parameter_per_group")
    with pytest.raises(ValueError, match="GroupedLinear: expected at least one group, got 0"):
        cell.GroupedLinear(0, 32, 48)


SHARDED = """
import importlib
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
import bundle

(cell,) = words
loaded = importlib.import_module(f"bundle.{cell}").GroupedMLP


def make(device="cpu"):
    torch.manual_seed(0)
    return loaded(3, 32, 48, device=device)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(24, 32, generator=generator).bfloat16()
        data = [x, torch.tensor([9, 0, 13]), torch.rand(24, generator=generator)]
        loss = model(*data).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


expected = train(make())
assert train(DistributedDataParallel(make())) == expected
parts = make()
fully_shard(parts.fc1)
for model in (fully_shard(make()), fully_shard(parts)):
    weight = model.fc1.weight1
    assert isinstance(weight, DTensor) and weight.to_local().shape == (48, 32)
    assert not model.fc1._whole, "what is sharded would keep its memory"
    assert train(model) == expected
late = fully_shard(make("meta"))
late.to_empty(device="cpu")
torch.manual_seed(0)
late.reset_parameters()
assert all(bool(p.full_tensor().isfinite().all()) for p in late.parameters())
assert all(x == x for x in train(late))
"""


@every_recipe
def test_ddp_and_fsdp_train_as_one_process(bundle: str, tmp_path: Path, recipe: str) -> None:
    folder = Path(str(sys.modules[bundle].__file__)).parent
    cell = f"grouped_mlp__{recipe}__parameter_per_group"
    run_ranks(SHARDED, tmp_path, Place(folder), cell)
