"""Copies of weights for the backward, made there of the weights or held: the same bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusegen import api
from fusegen.ir.naming import Cell

from .loading import load_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

RECIPES = tuple(name for name, recipe in api.load_specs().recipes.items() if recipe.roles)
HELD = "held_weights"
CELLS = (
    *(("grouped_mlp", recipe, ()) for recipe in RECIPES),
    *(("grouped_mlp", recipe, ("recompute_activations",)) for recipe in ("fp8_delayed", "nvfp4")),
    ("grouped_linear", "fp8_delayed", ("dequantized_backward",)),
    ("linear", "fp8_current", ()),
    ("norm_mlp_swiglu", "fp8_delayed", ()),
)
T, E, K, N = 24, 3, 32, 48
every_cell = pytest.mark.parametrize(("module", "recipe", "options"), CELLS)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a package with cells of both choices next to each other."""
    cells = (
        Cell(module, recipe, (*held, *options))
        for module, recipe, options in CELLS
        for held in ((), (HELD,))
    )
    return load_cells("held_weights", tmp_path_factory.mktemp("held"), cells)


def make(bundle: str, module: str, recipe: str, *options: str) -> Any:
    torch.manual_seed(0)
    loaded = importlib.import_module(f"{bundle}.{'__'.join((module, recipe, *options))}")
    sizes = (E, K, N) if module.startswith("grouped") else (K, N)
    found = next(each for each in vars(loaded).values() if _is_layer(each, loaded.__name__))
    layer = found(*sizes)
    with torch.no_grad():  # delayed scales are those of other steps than this one
        for name, tensor in layer.named_buffers():
            if name.endswith("weight_scale"):
                tensor.fill_(3.0)
    return layer


def _is_layer(each: Any, module: str) -> bool:
    own = isinstance(each, type) and issubclass(each, nn.Module) and each.__module__ == module
    return own and not each.__name__.startswith("_")


def inputs(module: str, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator).bfloat16().requires_grad_()
    probs = torch.rand(T, generator=generator)
    count = 1 + ("grouped_linear", "grouped_mlp").index(module) + 1 if "grouped" in module else 1
    return [x, torch.tensor([9, 0, 13]), probs][:count]


def gradients(layer: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    leaves = (x, *layer.parameters())
    given = torch.autograd.grad(y.float().square().sum(), leaves, allow_unused=True)
    return [each for each in given if each is not None]


def trained(layer: Any, module: str, call: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """Results, gradients and states of two micro-batches in flight, twice."""
    found: list[Tensor] = []
    for step in range(2):
        batches = [inputs(module, seed=2 * step + each) for each in range(2)]
        results = [(layer if call is None else call)(*batch) for batch in batches]
        for batch, y in zip(batches, results, strict=True):
            found += [y.detach(), *gradients(layer, batch[0], y)]
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(1.25)
        found += [each.clone() for each in layer.state_dict().values()]
    return found


def same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) > 2
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def saved(layer: Any, module: str) -> list[Tensor]:
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        layer(*inputs(module))
    return held


def own_bytes(layer: Any, module: str) -> int:
    """Of what a forward keeps besides parameters, which are there anyway."""
    parameters = {each.data_ptr() for each in layer.parameters()}
    return sum(each.nbytes for each in saved(layer, module) if each.data_ptr() not in parameters)


@every_cell
def test_gradients_are_the_same_bits(
    bundle: str, module: str, recipe: str, options: tuple[str, ...]
) -> None:
    fresh, held = (make(bundle, module, recipe, *more, *options) for more in ((), (HELD,)))
    same(trained(fresh, module), trained(held, module))


@every_cell
def test_no_codes_of_weights_are_kept(
    bundle: str, module: str, recipe: str, options: tuple[str, ...]
) -> None:
    """What is kept of a weight is the parameter itself, and a scale where those move on."""
    layers = [make(bundle, module, recipe, *more, *options) for more in ((), (HELD,))]
    weights = {p.data_ptr(): p for p in layers[0].parameters() if p.dim() > 1}
    assert weights.keys() <= {each.data_ptr() for each in saved(layers[0], module)}
    fresh, held = (own_bytes(layer, module) for layer in layers)
    codes = sum(p.numel() for p in weights.values()) // (2 if recipe == "nvfp4" else 1)
    assert held - fresh >= codes - 2 * 4 * E  # the scale that is kept of a delayed one


@every_cell
def test_a_weight_that_changed_in_between_is_refused(
    bundle: str, module: str, recipe: str, options: tuple[str, ...]
) -> None:
    layer = make(bundle, module, recipe, *options)
    y = layer(*inputs(module))
    with torch.no_grad():
        next(p for p in layer.parameters() if p.dim() > 1).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_delayed"])
def test_what_was_held_may_change(bundle: str, recipe: str) -> None:
    """The codes are those of the forward, whatever becomes of the weight."""
    found = []
    for change in (False, True):
        layer = make(bundle, "grouped_mlp", recipe, HELD)
        data = inputs("grouped_mlp")
        y = layer(*data)
        if change:
            with torch.no_grad():
                layer.fc1.weight.mul_(2)
        found.append(gradients(layer, data[0], y))
    same(*found)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole(bundle: str, recipe: str, backend: str) -> None:
    layers = [make(bundle, "grouped_mlp", recipe) for _ in range(2)]
    compiled = torch.compile(layers[1], fullgraph=True, backend=backend)
    same(trained(layers[0], "grouped_mlp"), trained(layers[1], "grouped_mlp", compiled))


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_a_checkpointed_forward_and_a_retained_graph_agree(bundle: str, recipe: str) -> None:
    """Under recipes that keep nothing from call to call."""
    layer, data = make(bundle, "grouped_mlp", recipe), inputs("grouped_mlp")
    leaves = (data[0], *layer.parameters())
    y = layer(*data)
    first, second = (
        torch.autograd.grad(y.float().sum(), leaves, retain_graph=keep) for keep in (True, False)
    )
    again = checkpoint(layer, *data, use_reentrant=False)
    third = torch.autograd.grad(again.float().sum(), leaves)
    same([*first], [*second])
    same([*first], [*third])
