"""Backwards of several ops: the bits of one op, and memory that goes while they run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fusegen.ir.naming import Cell
from fusegen.options import OPTIONS

from .loading import load_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ONE = "one_backward_call"
CELLS = (
    ("bf16", ()),
    ("bf16", ("recompute_activations",)),
    ("bf16", ("add_to_main_grad",)),
    ("fp8_current", ()),
    ("fp8_delayed", ()),
    ("fp8_delayed", ("add_to_main_grad",)),
    ("fp8_delayed", ("held_weights", "debug")),
    ("fp8_block", ("cached_weights",)),
    ("fp8_block", ("high_precision_backward",)),
    ("mxfp8", ()),
    ("nvfp4", ()),
)
T, E, H, F = 24, 3, 32, 48
every_cell = pytest.mark.parametrize(("recipe", "options"), CELLS)


def cell(recipe: str, *options: str) -> Cell:
    """With options in the order of names."""
    order = [word for option in OPTIONS for word in option.words]
    return Cell("grouped_mlp", recipe, tuple(sorted(options, key=order.index)))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a package with cells of both choices next to each other."""
    cells = (cell(recipe, *options, *more) for recipe, options in CELLS for more in ((), (ONE,)))
    return load_cells("freeing", tmp_path_factory.mktemp("freeing"), cells)


def module_of(bundle: str, recipe: str, *options: str) -> ModuleType:
    return importlib.import_module(f"{bundle}.{cell(recipe, *options)}")


def make(bundle: str, recipe: str, *options: str) -> Any:
    torch.manual_seed(0)
    layer = module_of(bundle, recipe, *options).GroupedMLP(E, H, F, bias=True)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    return layer


def inputs(seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=generator).bfloat16().requires_grad_()
    probs = torch.rand(T, generator=generator).requires_grad_()
    return [x, torch.tensor([9, 0, 13]), probs]


def leaves(layer: nn.Module, batch: list[Tensor]) -> list[Tensor]:
    return [batch[0], batch[2], *layer.parameters()]


def gradients(layer: nn.Module, batch: list[Tensor], y: Tensor, **more: bool) -> list[Tensor]:
    given = torch.autograd.grad(
        y.float().square().sum(), leaves(layer, batch), allow_unused=True, **more
    )
    own = [parameter.main_grad.clone() for parameter in layer.parameters()]
    return [*(each for each in given if each is not None), *own]


def trained(layer: Any, call: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """Results, gradients and states of two micro-batches in flight, twice."""
    found: list[Tensor] = []
    for step in range(2):
        batches = [inputs(2 * step + each) for each in range(2)]
        results = [(layer if call is None else call)(*batch) for batch in batches]
        for batch, y in zip(batches, results, strict=True):
            found += [y.detach(), *gradients(layer, batch, y)]
        found += [each.clone() for each in layer.state_dict().values()]
    return found


def same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) > 4
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@every_cell
def test_gradients_are_those_of_one_op(bundle: str, recipe: str, options: tuple[str, ...]) -> None:
    several, one = (module_of(bundle, recipe, *options, *more) for more in ((), (ONE,)))
    assert hasattr(several, "_backward_2") and not hasattr(one, "_backward_2")
    layers = [make(bundle, recipe, *options, *more) for more in ((), (ONE,))]
    same(trained(layers[0]), trained(layers[1]))


@pytest.mark.parametrize("leaf", range(6))
def test_each_gradient_may_be_the_only_one(bundle: str, leaf: int) -> None:
    for recipe in ("bf16", "fp8_delayed"):
        found = []
        for more in ((), (ONE,)):
            layer, batch = make(bundle, recipe, *more), inputs()
            asked = leaves(layer, batch)
            for each in asked:
                each.requires_grad_(each is asked[leaf])
            (given,) = torch.autograd.grad(layer(*batch).float().square().sum(), asked[leaf])
            found.append(given)
        assert torch.equal(*found)


def watched(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, *, retained: bool
) -> tuple[int, int]:
    """How many storages of the first op's operands live when the last one begins, and all."""
    ops = sorted(
        name for name in vars(module) if name.startswith("_backward_") and name[-1:].isdigit()
    )
    seen: list[StorageWeakRef] = []
    living: list[int] = []
    first, last = getattr(module, ops[0]), getattr(module, ops[-1])

    def begin(*given: Any) -> Any:
        tensors = [each for each in given if isinstance(each, Tensor) and each.numel() >= T * F]
        seen.extend(StorageWeakRef(each.untyped_storage()) for each in tensors)
        return first(*given)

    def end(*given: Any) -> Any:
        living.append(sum(not each.expired() for each in seen))
        return last(*given)

    monkeypatch.setattr(module, ops[0], begin)
    monkeypatch.setattr(module, ops[-1], end)
    torch.manual_seed(0)
    layer, batch = module.GroupedMLP(E, H, F), inputs()
    y = layer(*batch)
    torch.autograd.grad(y.float().sum(), leaves(layer, batch), retain_graph=retained)
    return living[0], len(seen)


def test_what_was_read_is_gone_before_the_last_op(
    bundle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first op's operands, fc2's input goes, fc2's weight stays."""
    module = module_of(bundle, "bf16")
    living, seen = watched(monkeypatch, module, retained=False)
    assert (living, seen) == (1, 2)
    monkeypatch.undo()
    assert watched(monkeypatch, module, retained=True) == (2, 2)


def test_a_graph_runs_again_where_it_is_retained(bundle: str) -> None:
    layer, batch = make(bundle, "bf16"), inputs()
    y = layer(*batch)
    first, second = (gradients(layer, batch, y, retain_graph=keep) for keep in (True, False))
    same(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(layer, batch, y)


def test_hooks_of_saved_tensors_and_checkpoints_agree(bundle: str) -> None:
    layer, batch = make(bundle, "mxfp8"), inputs()
    expected = gradients(layer, batch, layer(*batch))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda each: each):
        y = layer(*batch)
    same(gradients(layer, batch, y), expected)
    for reentrant in (False, True):
        y = checkpoint(layer, *batch, use_reentrant=reentrant)
        y.float().square().sum().backward()
        found = [each.grad for each in leaves(layer, batch)]
        same([each for each in found if each is not None], expected[: len(found)])
        for each in leaves(layer, batch):
            each.grad = None


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "mxfp8"])
def test_compiles_whole(bundle: str, recipe: str, backend: str) -> None:
    layers = [make(bundle, recipe) for _ in range(2)]
    compiled = torch.compile(layers[1], fullgraph=True, backend=backend)
    same(trained(layers[0]), trained(layers[1], compiled))


def test_function_transforms_give_the_same(bundle: str) -> None:
    layer, batch = make(bundle, "bf16"), inputs()
    expected = gradients(layer, batch, layer(*batch))[2:]
    parameters = {name: each.detach() for name, each in layer.named_parameters()}

    def loss(given: dict[str, Tensor]) -> Tensor:
        data = [each.detach() for each in batch]
        return torch.func.functional_call(layer, given, tuple(data)).float().square().sum()

    found = torch.func.grad(loss)(parameters)
    assert all(
        torch.equal(one, other) for one, other in zip(found.values(), expected, strict=False)
    )
