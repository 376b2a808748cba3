"""Buffers of gradients that a framework hands out in the backward, as Megatron's FSDP does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusegen.ir.naming import Cell

from .loading import load_cells
from .ranks import Place, run_ranks

ADD = "add_to_main_grad"
CELLS = [
    Cell("linear", "bf16", (ADD,)),
    Cell("grouped_linear", "fp8_block", (ADD,)),
    Cell("grouped_linear", "mxfp8", (ADD, "delayed_wgrad")),
    Cell("grouped_mlp", "fp8_delayed", (ADD, "recompute_activations")),
    Cell("grouped_mlp", "bf16", ("write_main_grad",)),
    Cell("grouped_mlp", "fp8_block", ("add_to_16_bit_main_grad",)),
]
CLASSES = {"linear": "Linear", "grouped_linear": "GroupedLinear", "grouped_mlp": "GroupedMLP"}
T, E, K, N = 24, 3, 32, 64


RANKS = """
from types import MethodType
from bundle.grouped_mlp__bf16__add_to_main_grad import GroupedMLP


def made():
    torch.manual_seed(0)
    return GroupedMLP(4, 32, 64, bias=False)


def step(layer, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 32, generator=generator).bfloat16().requires_grad_()
    y = layer(x, torch.tensor([9, 0, 8, 5]), torch.rand(24, generator=generator))
    y.float().square().sum().backward()


class Bucket:
    # One buffer for all gradients, as Megatron's FSDP has it: made when the first weight asks,
    # summed and split over ranks behind the last one, and gone until the next backward.
    def __init__(self, layer):
        self.weights = [*layer.parameters()]
        self.memory, self.missing, self.shards, self.order = None, set(), [], []
        for index, weight in enumerate(self.weights):
            weight.get_main_grad = MethodType(lambda _, index=index: self.give(index), weight)
            weight.grad_added_to_main_grad = False
            weight.register_post_accumulate_grad_hook(lambda _, index=index: self.has(index))

    def give(self, index):
        if self.memory is None:
            self.memory = torch.zeros(sum(w.numel() for w in self.weights), dtype=torch.float32)
            self.missing = {*range(len(self.weights))}
        begin = sum(w.numel() for w in self.weights[:index])
        weight = self.weights[index]
        self.order.append(index)
        return self.memory[begin : begin + weight.numel()].view(weight.shape)

    def has(self, index):
        assert self.weights[index].grad_added_to_main_grad
        self.weights[index].grad_added_to_main_grad = False
        self.missing.remove(index)
        if self.missing:
            return
        shard = torch.empty(self.memory.numel() // ranks)
        dist.reduce_scatter_tensor(shard, self.memory)
        self.shards.append(shard)
        self.memory = None


layer, whole = made(), made()
bucket = Bucket(layer)
for micro in range(3):
    step(layer, 10 * micro + rank)
    # One process that adds what all ranks have, a rank after the other.
    for weight in whole.parameters():
        weight.main_grad = torch.zeros(weight.shape)
    for other in range(ranks):
        step(whole, 10 * micro + other)
    wanted = torch.cat([weight.main_grad.flatten() for weight in whole.parameters()])
    share = len(wanted) // ranks
    assert torch.equal(bucket.shards[micro], wanted[rank * share : (rank + 1) * share]), micro
    assert bucket.shards[micro].any() and bucket.memory is None
assert sorted(bucket.order) == [0] * 3 + [1] * 3
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    return load_cells("get_main_grad", tmp_path_factory.mktemp("get_main_grad"), CELLS)


class Owner:
    """What has the buffers of a module's parameters: one for each backward, made when it asks."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.given: dict[str, list[Tensor]] = {name: [] for name, _ in layer.named_parameters()}
        for name, parameter in layer.named_parameters():
            give: Any = lambda weight, name=name: self.give(name, weight)  # noqa: E731
            parameter.get_main_grad = MethodType(give, parameter)  # type: ignore[attr-defined]

    def give(self, name: str, weight: Tensor) -> Tensor:
        self.given[name].append(torch.zeros(weight.shape, dtype=self.dtype))
        return self.given[name][-1]


def make(bundle: str, cell: Cell) -> Any:
    torch.manual_seed(0)
    sizes = (K, N) if cell.module == "linear" else (E, K, N)
    slots = {"max_in_flight": 1, "max_tokens": T} if "delayed_wgrad" in cell.options else {}
    loaded = importlib.import_module(f"{bundle}.{cell}")
    return getattr(loaded, CLASSES[cell.module])(*sizes, bias=False, **slots)


def inputs(cell: Cell, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator).bfloat16().requires_grad_()
    return [x, torch.tensor([9, 0, 13]), torch.rand(T, generator=generator)][
        : 1 + [*CLASSES].index(cell.module)
    ]


def train(layer: Any, cell: Cell, seed: int) -> None:
    y = layer(*inputs(cell, seed))
    y.float().square().sum().backward()
    if "delayed_wgrad" in cell.options:
        layer.backward_dw()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_backward_asks_for_a_buffer_once(bundle: str, cell: Cell) -> None:
    own, other = make(bundle, cell), make(bundle, cell)
    narrow = any("16_bit" in word for word in cell.options)
    dtype = torch.bfloat16 if narrow else torch.float32
    owner = Owner(own, dtype)
    for seed in range(2):
        for parameter in other.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, dtype=dtype)
        train(own, cell, seed)
        train(other, cell, seed)
        for name, parameter in other.named_parameters():
            assert len(owner.given[name]) == seed + 1, name
            assert owner.given[name][seed].any()
            assert torch.equal(owner.given[name][seed], parameter.main_grad), name
    assert all(parameter.grad is None for parameter in own.parameters())


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_forward_and_a_frozen_weight_ask_for_none(bundle: str, cell: Cell) -> None:
    layer = make(bundle, cell)
    owner = Owner(layer)
    y = layer(*inputs(cell, 0))
    assert not any(owner.given.values())
    del y
    with torch.no_grad():
        layer(*inputs(cell, 0))
    layer = make(bundle, cell).requires_grad_(False)
    owner = Owner(layer)
    layer(*inputs(cell, 0)).float().sum().backward()
    assert not any(owner.given.values())


def test_ranks_sum_and_split_one_buffer_behind_the_last_weight(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cell = Cell("grouped_mlp", "bf16", (ADD,))
    name = load_cells("bucket_of_ranks", tmp_path_factory.mktemp("bucket_of_ranks"), [cell])
    run_ranks(RANKS, tmp_path, Place(Path(str(sys.modules[name].__file__)).parent))


def test_hooks_run_when_the_buffer_is_complete(bundle: str) -> None:
    cell = CELLS[1]
    layer = make(bundle, cell)
    owner = Owner(layer)
    seen = []
    layer.weight.grad_added_to_main_grad = False
    layer.weight.register_post_accumulate_grad_hook(
        lambda weight: seen.append(
            (weight.grad_added_to_main_grad, owner.given["weight"][-1].any())
        )
    )
    train(layer, cell, 0)
    assert seen == [(True, True)]


def test_a_graph_that_is_kept_asks_each_time(bundle: str) -> None:
    layer = make(bundle, CELLS[0])
    owner = Owner(layer)
    loss = layer(*inputs(CELLS[0], 0)).float().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    first, second = owner.given["weight"]
    assert first is not second and torch.equal(first, second) and first.any()


def test_compilers_are_told(bundle: str) -> None:
    layer = make(bundle, CELLS[0])
    Owner(layer)
    with pytest.raises(Exception, match=r"get_main_grad: gives a buffer in the backward"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(*inputs(CELLS[0], 0))
    plain = torch.compiler.disable(layer)
    train(plain, CELLS[0], 0)


def test_a_buffer_of_another_type_is_refused(bundle: str) -> None:
    layer = make(bundle, CELLS[0])
    layer.weight.get_main_grad = lambda: torch.zeros(layer.weight.shape, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="weight_main_grad: expected"):
        train(layer, CELLS[0], 0)
