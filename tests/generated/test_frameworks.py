"""Generated modules inside what a training framework does around them, on the CPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .loading import load_bundle

BUNDLE = Path(__file__).parents[2] / "generated" / "cpu"
RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
E, K, F = 3, 32, 48


def load(cell: str) -> ModuleType:
    """A cell of the committed bundle, loaded by path."""
    name = "framework_bundle"
    if name not in sys.modules:
        load_bundle(name, BUNDLE)
    return importlib.import_module(f"{name}.{cell}")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def experts(recipe: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layer: nn.Module = load(f"grouped_mlp__{recipe}").GroupedMLP(E, K, F)
    return layer


def inputs(tokens: int = 24, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, K, generator=generator).bfloat16()
    each = tokens // E
    return x, torch.tensor([each, 0, tokens - 2 * each]), torch.rand(tokens, generator=generator)


def step(call: Any, layer: nn.Module, data: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """Result, gradients and state of one training step."""
    x, splits, probs = data
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    y = call(leaf, splits, probs)
    y.float().square().sum().backward()
    found = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    state = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    assert leaf.grad is not None
    return {"y": y.detach(), "dx": leaf.grad, **found, **state}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# torch.compile


@every_recipe
def test_train_eval_train(recipe: str) -> None:
    results = []
    for compile_it in (False, True):
        layer = experts(recipe)
        call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compile_it else layer
        found = [step(call, layer, inputs())]
        layer.eval()
        with torch.no_grad():
            found.append({"y": call(*inputs(seed=5))})
        layer.train()
        found.append(step(call, layer, inputs(seed=2)))
        results.append(found)
    for eager, compiled in zip(*results, strict=True):
        same(eager, compiled)


@every_recipe
def test_one_graph_for_every_number_of_tokens(recipe: str) -> None:
    layer, plain = experts(recipe), experts(recipe)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(layer, fullgraph=True, backend=counter)

    def marked(x: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(probs, 0)
        result: Tensor = call(x, splits, probs)
        return result

    for tokens in (24, 6, 130, 2, 57):
        same(step(marked, layer, inputs(tokens)), step(plain, plain, inputs(tokens)))
    assert counter.frame_count == 1


class Model(nn.Module):
    """Experts between layers of PyTorch's own."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.experts = experts(recipe)
        torch.manual_seed(7)
        self.before = nn.Linear(K, K, dtype=torch.bfloat16)
        self.after = nn.Linear(K, 8, dtype=torch.bfloat16)

    def forward(self, x: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        h = nn.functional.gelu(self.before(x))
        result: Tensor = self.after(h + self.experts(h, splits, probs))
        return result


@every_recipe
def test_inside_a_larger_compiled_model(recipe: str) -> None:
    eager, compiled = Model(recipe), Model(recipe)
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        same(step(eager, eager, inputs(seed=seed)), step(call, compiled, inputs(seed=seed)))


@every_recipe
def test_export(recipe: str) -> None:
    layer = experts(recipe)
    dynamic = {"x": {0: torch.export.Dim("T", min=2)}, "split_sizes": None}
    with torch.no_grad():
        shapes = {**dynamic, "probs": dynamic["x"]}
        exported = torch.export.export(layer, inputs(), dynamic_shapes=shapes)
        for tokens in (24, 57):
            assert torch.equal(exported.module()(*inputs(tokens)), layer(*inputs(tokens)))


# Activation checkpointing, offload, modes


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "fp8_delayed"])
@pytest.mark.parametrize("compile_it", [False, True])
def test_checkpoint(recipe: str, compile_it: bool) -> None:
    """Recomputed forwards give the same bits.  Delayed scaling needs the policy below instead."""
    plain, other = experts(recipe), experts(recipe)

    def run(x: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        result: Tensor = checkpoint(other, x, splits, probs, use_reentrant=False)
        return result

    call = torch.compile(run, fullgraph=True, backend="aot_eager") if compile_it else run
    for seed in (1, 2):
        same(step(plain, plain, inputs(seed=seed)), step(call, other, inputs(seed=seed)))


@every_recipe
def test_selective_checkpoint(recipe: str) -> None:
    """The op itself is kept, with the state it moved on; all around it is computed anew."""
    plain, other = Model(recipe), Model(recipe)
    forward = getattr(torch.ops.fusegen_cpu, f"grouped_mlp__{recipe}_forward").default

    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        keep = op is forward
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def run(x: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        result: Tensor = checkpoint(
            other,
            x,
            splits,
            probs,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        return result

    for seed in (1, 2):
        same(step(plain, plain, inputs(seed=seed)), step(run, other, inputs(seed=seed)))


@pytest.mark.parametrize("compile_it", [False, True])
@every_recipe
def test_saved_tensors_pass_through_hooks(recipe: str, compile_it: bool) -> None:
    def run(layer: nn.Module) -> dict[str, Tensor]:
        call: Any = layer
        if compile_it:
            call = torch.compile(layer, fullgraph=True, backend="aot_eager")
        return step(call, layer, inputs())

    expected = run(experts(recipe))
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        same(run(experts(recipe)), expected)
    assert packed
    with torch.autograd.graph.save_on_cpu():
        same(run(experts(recipe)), expected)


@pytest.mark.parametrize("compile_it", [False, True])
@every_recipe
def test_autocast(recipe: str, compile_it: bool) -> None:
    """fp32 parameters and inputs are cast as nn.Linear casts them; gradients come back in fp32."""
    low, high = experts(recipe), experts(recipe)
    high.load_state_dict(low.state_dict())
    for parameter in high.parameters():
        parameter.data = parameter.data.float()
    x, splits, probs = inputs()

    def run(x: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = high(x, splits, probs)
            return result

    call = torch.compile(run, fullgraph=True, backend="aot_eager") if compile_it else run
    got = step(call, high, (x.float(), splits, probs))
    expected = step(low, low, (x, splits, probs))
    assert got["y"].dtype == torch.bfloat16
    assert got["fc1.weight"].dtype == torch.float32
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor.to(got[name].dtype)), name


@every_recipe
def test_without_gradients_nothing_is_kept(recipe: str) -> None:
    layer = experts(recipe)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with torch.inference_mode():
        y = layer(*inputs())
    layer.requires_grad_(False)
    assert torch.equal(layer(*inputs()), y) and y.grad_fn is None
    same(dict(layer.state_dict()), before)


@every_recipe
def test_frozen_weights_and_inputs_without_gradient(recipe: str) -> None:
    """Each gives the gradients that remain, as they are otherwise."""
    whole = experts(recipe)
    expected = step(whole, whole, inputs())
    frozen = experts(recipe)
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    x, splits, probs = inputs()
    leaf = x.clone().requires_grad_()
    frozen(leaf, splits, probs).float().square().sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, expected["dx"])
    weights_only = experts(recipe)
    weights_only(x, splits, probs).float().square().sum().backward()
    for name, parameter in weights_only.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, expected[name]), name


class Doubled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("compiled", [False, True])
def test_parametrised_weights(compiled: bool) -> None:
    """A parametrised weight is no parameter of its module any more, and a property instead."""
    layer, plain = experts("bf16"), experts("bf16")
    with torch.no_grad():
        plain.fc1.weight *= 2
    nn.utils.parametrize.register_parametrization(layer.fc1, "weight", Doubled())
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    x, splits, probs = inputs()
    y = call(x, splits, probs)
    assert torch.equal(y, plain(x, splits, probs))
    y.sum().backward()
    original = layer.fc1.parametrizations.weight.original
    plain(x, splits, probs).sum().backward()
    assert torch.equal(original.grad, 2 * plain.fc1.weight.grad)
