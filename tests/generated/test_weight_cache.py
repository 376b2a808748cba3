"""Modules that keep their weights quantised: the bits of fresh weights, and never stale unasked."""

from __future__ import annotations

import copy
import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusegen import api
from fusegen.ir.naming import Cell

from .loading import load_cells
from .ranks import Place, run_ranks

pytestmark = pytest.mark.usefixtures("fresh_compiler")

RECIPES = ("fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
CLASSES = {"linear": "Linear", "grouped_linear": "GroupedLinear", "grouped_mlp": "GroupedMLP"}
T, E, K, N = 24, 3, 32, 48
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_module = pytest.mark.parametrize("module", CLASSES)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a package with fresh and cached cells next to each other."""
    cells = (
        Cell(module, recipe, options)
        for module in CLASSES
        for recipe in RECIPES
        for options in ((), ("cached_weights",))
    )
    return load_cells("weight_cache", tmp_path_factory.mktemp("cache"), cells)


def cell(bundle: str, module: str, recipe: str, *, cached: bool = True) -> ModuleType:
    return importlib.import_module(f"{bundle}.{module}__{recipe}{'__cached_weights' * cached}")


def make(
    bundle: str, module: str, recipe: str, *, cached: bool = True, device: str | None = None
) -> Any:
    torch.manual_seed(0)
    sizes = (K, N) if module == "linear" else (E, K, N)
    loaded = getattr(cell(bundle, module, recipe, cached=cached), CLASSES[module])
    return loaded(*sizes, bias=True, device=device)


def inputs(module: str, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator).bfloat16()
    probs = torch.rand(T, generator=generator)
    return [x, torch.tensor([9, 0, 13]), probs][: 1 + list(CLASSES).index(module)]


def step(call: Callable[..., Tensor], layer: nn.Module, data: list[Tensor]) -> dict[str, Tensor]:
    """Result and gradients of one micro-batch, and the state after it."""
    leaf = data[0].clone().requires_grad_()
    layer.zero_grad()
    y = call(leaf, *data[1:])
    y.float().square().sum().backward()
    found = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    assert leaf.grad is not None
    return {"y": y.detach(), "dx": leaf.grad, **found}


def state(layer: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def descend(layer: nn.Module) -> None:
    """An optimiser's step that every element feels."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.sign() * 0.02)


def train(
    layer: Any, module: str, *, cached: bool, backend: str | None = None
) -> list[dict[str, Tensor]]:
    call, refresh = layer, getattr(layer, "refresh_weights", None)
    if backend:
        call = torch.compile(layer, fullgraph=True, backend=backend)
        refresh = refresh and torch.compile(refresh, fullgraph=True, backend=backend)
    found = []
    for seed in range(3):
        found.append(step(call, layer, inputs(module, seed)))
        descend(layer)
        if cached:
            refresh()
        found.append(state(layer))
    return found


@every_module
@every_recipe
def test_trains_as_with_fresh_weights(bundle: str, module: str, recipe: str) -> None:
    """Refreshed after each step of the optimiser, results and gradients are the same bits."""
    fresh, cached = (make(bundle, module, recipe, cached=c) for c in (False, True))
    steps = train(fresh, module, cached=False), train(cached, module, cached=True)
    for one, other in zip(*(each[0::2] for each in steps), strict=True):
        same(one, other)
    own = {
        name for name in steps[0][-1] if "weight_" not in name
    }  # the cached amaxes are one ahead
    for one, other in zip(*(each[1::2] for each in steps), strict=True):
        assert one.keys() == other.keys()
        same({name: one[name] for name in own}, {name: other[name] for name in own})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8"])
@every_module
def test_compiles_whole(bundle: str, module: str, recipe: str, backend: str) -> None:
    layers = [make(bundle, module, recipe) for _ in range(2)]
    eager = train(layers[0], module, cached=True)
    compiled = train(layers[1], module, cached=True, backend=backend)
    for one, other in zip(eager, compiled, strict=True):
        same(one, other)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_a_whole_step_is_one_graph(bundle: str, recipe: str) -> None:
    """The refresh in the same graph as the forward that reads it."""
    plain, other = (make(bundle, "grouped_mlp", recipe) for _ in range(2))
    descend(plain), descend(other)
    plain.refresh_weights()

    def run(*data: Tensor) -> Tensor:
        other.refresh_weights()
        result: Tensor = other(*data)
        return result

    call = torch.compile(run, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        data = inputs("grouped_mlp", seed)
        same(step(plain, plain, data), step(call, other, data))


@every_module
@every_recipe
def test_old_weights_until_refreshed(bundle: str, module: str, recipe: str) -> None:
    """Forward and backward are those of the weights before; only the parameters have changed."""
    layer, untouched = (make(bundle, module, recipe) for _ in range(2))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("weight"):
                parameter.normal_()
    for seed in (1, 2):
        one, other = (step(each, each, inputs(module, seed)) for each in (layer, untouched))
        same(one, other)
    layer.refresh_weights()
    assert not torch.equal(layer(*inputs(module)), untouched(*inputs(module)))


@every_recipe
def test_frozen_weights(bundle: str, recipe: str) -> None:
    whole, frozen = (make(bundle, "grouped_mlp", recipe) for _ in range(2))
    frozen.requires_grad_(False)
    expected = step(whole, whole, inputs("grouped_mlp"))
    got = step(frozen, frozen, inputs("grouped_mlp"))
    assert got.keys() == {"y", "dx"}
    same(got, {name: expected[name] for name in got})


@every_recipe
def test_nothing_saved_is_a_buffer(bundle: str, recipe: str) -> None:
    """Hooks that offload activations must not move the weights."""
    layer = make(bundle, "grouped_mlp", recipe)
    places = {buffer.untyped_storage().data_ptr() for buffer in layer.buffers()}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x, *rest = inputs("grouped_mlp")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x.requires_grad_(), *rest)
    assert saved and not places & {each.untyped_storage().data_ptr() for each in saved}


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_delayed"])
def test_micro_batches_in_flight(bundle: str, recipe: str) -> None:
    """Forwards of a pipeline run ahead of their backwards; a refresh among them is refused."""
    layer = make(bundle, "grouped_mlp", recipe)
    results = [layer(*inputs("grouped_mlp", seed)) for seed in (1, 2)]
    for y in results:
        y.sum().backward()
    y = layer(*inputs("grouped_mlp"))
    layer.refresh_weights()
    with pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    assert str(caught.value) == (
        f"grouped_mlp__{recipe}__cached_weights: the weights were refreshed between a forward and "
        "its backward; call refresh_weights() after the backward"
    )


@pytest.mark.parametrize("compile_it", [False, True])
def test_checkpoint(bundle: str, compile_it: bool) -> None:
    plain, other = (make(bundle, "grouped_mlp", "fp8_block") for _ in range(2))

    def run(*data: Tensor) -> Tensor:
        result: Tensor = checkpoint(other, *data, use_reentrant=False)
        return result

    call = torch.compile(run, fullgraph=True, backend="aot_eager") if compile_it else run
    data = inputs("grouped_mlp")
    same(step(plain, plain, data), step(call, other, data))


@every_recipe
def test_export(bundle: str, recipe: str) -> None:
    layer = make(bundle, "grouped_mlp", recipe).requires_grad_(False)
    exported = torch.export.export(layer, tuple(inputs("grouped_mlp"))).module()
    data = inputs("grouped_mlp", seed=2)
    assert torch.equal(exported(*data), layer(*data))


# Ranks begin with other weights and copies; DDP gives all those of the first, and its buffers again
# before each forward.
BROADCAST = """
import importlib
from torch import nn
found = {}
for recipe in words:
    module = importlib.import_module(f"bundle.grouped_mlp__{recipe}__cached_weights")
    torch.manual_seed(rank)
    layer = module.GroupedMLP(3, 32, 48, bias=True)
    parallel = nn.parallel.DistributedDataParallel(layer)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 32, generator=generator).bfloat16()
    data = x, torch.tensor([9, 0, 13]), torch.rand(24, generator=generator)
    y = [parallel(*data) for _ in range(2)]
    y[1].float().square().sum().backward()
    found[recipe] = {"y": y[0].detach(), "gradient": layer.fc1.weight.grad}
    for name, buffer in layer.named_buffers():
        found[recipe][name] = buffer
torch.save(found, f"{folder}/{rank}.pt")
"""


def test_ranks_broadcast_the_copies(bundle: str, tmp_path: Path) -> None:
    folder = Path(str(sys.modules[bundle].__file__)).parent
    run_ranks(BROADCAST, tmp_path, Place(folder), *RECIPES)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for recipe in RECIPES:
        assert first[recipe]["gradient"].any() and len(first[recipe]) > 6
        same(first[recipe], second[recipe])


@every_recipe
def test_autocast(bundle: str, recipe: str) -> None:
    """Parameters in fp32 are quantised as the forward would cast them."""
    low, high = (make(bundle, "grouped_mlp", recipe) for _ in range(2))
    high.load_state_dict(low.state_dict())
    low.load_state_dict(low.state_dict())
    for parameter in high.parameters():
        parameter.data = parameter.data.float()
    x, splits, probs = inputs("grouped_mlp")

    def run(*data: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            high.refresh_weights()
            result: Tensor = high(*data)
            return result

    got = step(run, high, [x.float(), splits, probs])
    low.refresh_weights()
    for name, tensor in step(low, low, [x, splits, probs]).items():
        assert torch.equal(got[name], tensor.to(got[name].dtype)), name
    with pytest.raises(RuntimeError, match="expected dtype bfloat16 or float16, got float32"):
        high.refresh_weights()


@every_recipe
def test_what_is_loaded_is_refreshed(bundle: str, recipe: str) -> None:
    """Alone, inside a model, after meta, copied and pickled; state is left as it was loaded."""
    layer = make(bundle, "grouped_mlp", recipe)
    with torch.no_grad():
        layer.fc1.weight.mul_(3.0)
    layer.refresh_weights()
    saved = state(layer)
    assert not [name for name in saved if "rowwise" in name or "columnwise" in name]
    layer.load_state_dict(saved)
    layer.requires_grad_(False)
    expected = layer(*inputs("grouped_mlp"))
    file = io.BytesIO()
    torch.save(make(bundle, "grouped_mlp", recipe), file)
    file.seek(0)
    bare = make(bundle, "grouped_mlp", recipe, device="meta")
    assert bare.fc1.weight_rowwise.is_meta
    placed = make(bundle, "grouped_mlp", recipe, device="meta").to_empty(device="cpu")
    placed.reset_parameters()
    others = [
        make(bundle, "grouped_mlp", recipe),
        copy.deepcopy(make(bundle, "grouped_mlp", recipe)),
        torch.load(file, weights_only=False),
        placed,
    ]
    for other in others:
        other.load_state_dict(saved)
    bare.load_state_dict(saved, assign=True)
    outer = nn.ModuleDict({"experts": make(bundle, "grouped_mlp", recipe)})
    outer.load_state_dict({f"experts.{name}": tensor for name, tensor in saved.items()})
    for other in (*others, bare, outer["experts"]):
        same(state(other), saved)
        assert torch.equal(other.requires_grad_(False)(*inputs("grouped_mlp")), expected)


def test_the_function_takes_the_copies(bundle: str) -> None:
    module = cell(bundle, "linear", "fp8_block")
    layer = make(bundle, "linear", "fp8_block")
    copies = dict(layer.named_buffers())
    assert list(copies) == [
        "weight_rowwise", "weight_rowwise_scale", "weight_columnwise", "weight_columnwise_scale"
    ]  # fmt: skip
    (x,) = inputs("linear")
    weight = torch.randn(N, K).bfloat16()
    module.refresh_weights(weight, **copies)
    plain = cell(bundle, "linear", "fp8_block", cached=False)
    assert torch.equal(module.linear(x, weight, **copies), plain.linear(x, weight))
    short = {**copies, "weight_rowwise": copies["weight_rowwise"][:-1]}
    with pytest.raises(RuntimeError, match="weight_rowwise: expected N"):
        module.linear(x, weight, **short)


def test_amaxes_roll_once_a_refresh(bundle: str) -> None:
    layer = make(bundle, "linear", "fp8_delayed")
    histories = [layer.weight_amax_history.clone()]
    for _ in range(2):
        layer(inputs("linear")[0]).sum().backward()
    assert torch.equal(layer.weight_amax_history, histories[0])
    assert layer.input_amax_history.count_nonzero() == 2
    assert histories[0].count_nonzero() == 1, "the constructor's"
    layer.refresh_weights()
    assert layer.weight_amax_history.count_nonzero() == 2
    layer.refresh_weights(update_state=False)
    assert layer.weight_amax_history.count_nonzero() == 2


def test_a_recipe_without_quantised_weights_says_so() -> None:
    rows = api.plan(api.Query(archs=("cpu",), modules=("linear",), options=("cached_weights",)))
    made = {row.recipe: row for row in rows}
    assert {recipe for recipe, row in made.items() if row.status == "native"} == {*RECIPES}
    assert made["bf16"].reason == "recipe 'bf16' quantises no weight whose copies could be kept"
