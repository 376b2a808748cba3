"""Activations that are made again: the bits of saved ones, from fewer bytes."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from plans import SPECS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusegen.ir.buffers import size_in_bytes
from fusegen.ir.naming import Cell, need, parameter_argument
from fusegen.ir.plan import ModulePlan
from fusegen.ir.shapes import evaluate
from fusegen.passes.pipeline import resolve_module

from .loading import load_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CLASSES = {
    "grouped_mlp": "GroupedMLP",
    "grouped_mlp_clamped_qgeglu": "GroupedMLPClampedQGEGLU",
    "grouped_mlp_situglu": "GroupedMLPSiTUGLU",
    "grouped_mlp_srelu": "GroupedMLPSReLU",
    "grouped_mlp_tanh_srelu": "GroupedMLPTanhSReLU",
}
AGAIN = "recompute_activations"
SIZES = {"T": 24, "E": 3, "H": 32, "F": 48}
T = SIZES["T"]
SPLITS = {
    "ragged, empty, rows past them": [9, 0, 13],
    "one group": [0, 24, 0],
    "no rows in any": [0, 0, 0],
}
INPUTS = ("x", "probs")
every_module = pytest.mark.parametrize("module", CLASSES)
every_recipe = pytest.mark.parametrize("recipe", SPECS.recipes)
Found = dict[str, Tensor]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a package with cells that save and cells that recompute next to each other."""
    cells = (
        Cell(module, recipe, options)
        for module in CLASSES
        for recipe in SPECS.recipes
        for options in ((), (AGAIN,))
    )
    return load_cells("recompute", tmp_path_factory.mktemp("recompute"), cells)


def name_of(module: str, recipe: str, *, again: bool) -> str:
    return str(Cell(module, recipe, (AGAIN,) if again else ()))


def plan_of(module: str, recipe: str, *, again: bool = True) -> ModulePlan:
    return resolve_module(SPECS, Cell(module, recipe, (AGAIN,) if again else ()), "cpu")


def make(bundle: str, module: str, recipe: str, *, again: bool) -> Any:
    """The same weights and random state for both policies."""
    torch.manual_seed(0)
    cell: ModuleType = importlib.import_module(f"{bundle}.{name_of(module, recipe, again=again)}")
    return getattr(cell, CLASSES[module])(SIZES["E"], SIZES["H"], SIZES["F"], bias=True)


def both(bundle: str, module: str, recipe: str) -> list[Any]:
    return [make(bundle, module, recipe, again=again) for again in (False, True)]


def inputs(splits: list[int], seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, SIZES["H"], generator=generator).bfloat16()
    return [x, torch.tensor(splits), torch.rand(T, generator=generator)]


def leaves_of(layer: nn.Module) -> tuple[str, ...]:
    return (*INPUTS, *(name for name, _ in layer.named_parameters()))


def forward(
    call: Callable[..., Tensor], layer: nn.Module, data: list[Tensor], wanted: tuple[str, ...]
) -> tuple[Tensor, Found]:
    """The result, and the leaves whose gradients were asked for."""
    x, splits, probs = data
    given = {"x": x.clone(), "probs": probs.clone(), **dict(layer.named_parameters())}
    for name, leaf in given.items():
        leaf.requires_grad_(name in wanted)
        leaf.grad = None
    y = call(given["x"], splits, given["probs"])
    return y, {name: given[name] for name in wanted}


def step(
    call: Callable[..., Tensor],
    layer: nn.Module,
    data: list[Tensor],
    wanted: tuple[str, ...] = (),
) -> Found:
    """Result and gradients of one micro-batch; by default all of them."""
    y, leaves = forward(call, layer, data, wanted or leaves_of(layer))
    y.float().square().sum().backward()
    found = {"y": y.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        found[name] = leaf.grad.clone()
    return found


def state(layer: nn.Module) -> Found:
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def same(one: Found, other: Found) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def train(layer: Any, splits: list[int], backend: str | None = None) -> Iterator[Found]:
    """Three steps of an optimiser that every element feels; results and state after each."""
    call = torch.compile(layer, fullgraph=True, backend=backend) if backend else layer
    for seed in range(3):
        found = step(call, layer, inputs(splits, seed))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.sub_(parameter.grad.sign() * 0.02)
        yield found
        yield state(layer)


@every_module
@every_recipe
@pytest.mark.parametrize("splits", SPLITS)
def test_trains_to_the_same_bits(bundle: str, module: str, recipe: str, splits: str) -> None:
    """Results, gradients, parameters, amax histories, scales and random state."""
    saving, again = both(bundle, module, recipe)
    for one, other in zip(train(saving, SPLITS[splits]), train(again, SPLITS[splits]), strict=True):
        same(one, other)
    if recipe == "fp8_delayed" and splits.startswith("ragged"):
        history = again.fc2.input_amax_history
        assert history.count_nonzero() == 3 * 2, "one amax for each step and group with rows"


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_block", "nvfp4"])
def test_each_choice_of_gradients(bundle: str, recipe: str) -> None:
    """Bits are the same, and what autograd holds is what the plan says to the byte."""
    saving, again = both(bundle, "grouped_mlp", recipe)
    plan = plan_of("grouped_mlp", recipe)
    names = leaves_of(again)
    for count in range(1, len(names) + 1):
        for wanted in itertools.combinations(names, count):
            data = inputs(SPLITS["ragged, empty, rows past them"])
            one = step(saving, saving, data, wanted)
            held: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(pack(held), lambda tensor: tensor):
                y, leaves = forward(again, again, data, wanted)
            y.float().square().sum().backward()
            same(one, {"y": y.detach(), **{n: leaf.grad for n, leaf in leaves.items()}})
            same(state(saving), state(again))
            assert sum(tensor.nbytes for tensor in held) == saved_bytes(plan, wanted), wanted


def pack(held: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    return keep


def saved_bytes(plan: ModulePlan, wanted: tuple[str, ...] | None = None) -> int:
    """Of everything saved; by default where every gradient is asked for."""
    asked = wanted or (*INPUTS, *(parameter.path for parameter in plan.parameters))
    flags = {need(parameter_argument(name)) for name in asked}
    return sum(
        evaluate(size_in_bytes(plan.buffer(kept.buffer)), SIZES)
        for kept in plan.saved
        if not kept.when or flags & {*kept.when}
    )


@every_module
@every_recipe
def test_fewer_bytes_are_held(bundle: str, module: str, recipe: str) -> None:
    measured = []
    for again, layer in enumerate(both(bundle, module, recipe)):
        held: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(pack(held), lambda tensor: tensor):
            forward(layer, layer, inputs([9, 0, 13]), leaves_of(layer))
        measured.append(sum(tensor.nbytes for tensor in held))
        assert measured[-1] == saved_bytes(plan_of(module, recipe, again=bool(again)))
    assert measured[1] < measured[0]


@every_recipe
def test_micro_batches_in_flight(bundle: str, recipe: str) -> None:
    """Each backward quantises by the scale of its own forward, though later ones moved it on."""
    found = []
    for layer in both(bundle, "grouped_mlp", recipe):
        layer(*inputs([9, 0, 13], seed=7)).sum().backward()  # scales differ from their first ones
        layer.zero_grad()
        batches = [inputs([9, 0, 13], seed) for seed in (1, 2)]
        results = [layer(x * 4**i, *rest) for i, (x, *rest) in enumerate(batches)]
        for y in reversed(results):
            y.float().square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found.append({**gradients, **{f"state {k}": v for k, v in state(layer).items()}})
    same(*found)


@every_recipe
def test_compiles_whole(bundle: str, recipe: str) -> None:
    saving, again = both(bundle, "grouped_mlp", recipe)
    splits = SPLITS["ragged, empty, rows past them"]
    eager, compiled = train(saving, splits), train(again, splits, backend="aot_eager")
    for one, other in zip(eager, compiled, strict=True):
        same(one, other)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_under_a_checkpoint(bundle: str, recipe: str) -> None:
    saving, again = both(bundle, "grouped_mlp", recipe)

    def run(*data: Tensor) -> Tensor:
        result: Tensor = checkpoint(again, *data, use_reentrant=False)
        return result

    data = inputs([9, 0, 13])
    same(step(saving, saving, data), step(run, again, data))


def test_a_forward_without_gradients_takes_no_snapshot(bundle: str) -> None:
    cell = name_of("grouped_mlp", "fp8_delayed", again=True)
    layer = make(bundle, "grouped_mlp", "fp8_delayed", again=True)
    op = getattr(torch.ops.recompute_cpu, f"{cell}_forward")
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    x, splits, probs = inputs([9, 0, 13])
    plan = plan_of("grouped_mlp", "fp8_delayed")
    paths = {p.buffer: p.path for p in (*plan.parameters, *plan.states)}
    given = {"x": x, "split_sizes": splits, "probs": probs}
    arguments = [
        given[a.buffer] if a.buffer in given else tensors[paths.get(a.buffer, a.buffer)]
        for a in plan.forward.arguments
    ]
    results = op(*arguments, *([False] * len(plan.forward.flags)))
    named = dict(zip((r.buffer for r in plan.forward.results), results, strict=True))
    assert named["fc2_input_scale_used"].numel() == 0
    assert named["y"].shape == x.shape
