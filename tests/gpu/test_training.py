"""Training under CUDA graphs, of the expert MLP under every recipe: the bits of eager training.

Whole steps with their optimizer, `torch.cuda.make_graphed_callables`, graphs that share a pool, and
weights that change between replays; group sizes change all the time.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import bundles
import gpu_support as support
import pytest
import torch
from torch import Tensor, nn

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 8, 136, 200, 300
STEPS = 20
REPLAYS = {
    "grouped_mlp__bf16": 10_000,
    "grouped_mlp__fp8_delayed": 10_000,
    "grouped_mlp__nvfp4": 10_000,
}
"""Without state, with scales from a history, with random numbers; other cells take 1,000."""
CELLS = sorted(
    {
        cell
        for folder in bundles.compiled_bundles()
        for cell in bundles.cells_of(folder, "grouped_mlp")
    }
)

Step = Callable[[], dict[str, Tensor]]


def experts(bundle: ModuleType, cell: str) -> nn.Module:
    torch.manual_seed(0)
    make = bundles.load_cell(bundle, cell).GroupedMLP
    module: nn.Module = make(
        EXPERTS, HIDDEN, INTERMEDIATE, bias=True, device="cuda", dtype=torch.bfloat16
    )
    return module


class Batch:
    """What one step reads, where it lies; `draw` puts other numbers there."""

    def __init__(self, tokens: int = TOKENS, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._x = support.randn((tokens, HIDDEN), torch.bfloat16, 1)
        self.x = torch.empty_like(self._x, requires_grad=True)
        self.splits = support.splits_tensor([0] * EXPERTS)
        self.probs = support.randn((tokens,), torch.float32, 2).sigmoid().requires_grad_()
        self.dy = support.randn((tokens, HIDDEN), torch.bfloat16, 3)
        self.draw()

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.splits, self.probs

    def draw(self) -> None:
        """Ragged and empty groups, rows past their sum, and sums past the rows."""
        tokens = len(self.x)
        largest = self._rng.choice((0, 5, 2 * tokens // EXPERTS, tokens))
        sizes = [self._rng.choice((0, self._rng.randint(0, largest))) for _ in range(EXPERTS)]
        self.splits.copy_(torch.tensor(sizes))
        with torch.no_grad():
            self.x.copy_(self._x * self._rng.uniform(0.5, 2.0))


def forward_backward(module: Callable[..., Tensor], leaves: Sequence[Tensor], batch: Batch) -> Step:
    """Result and gradients of the inputs and of `leaves`."""

    def step() -> dict[str, Tensor]:
        y = module(*batch.inputs)
        wanted = [batch.x, batch.probs, *leaves]
        gradients = torch.autograd.grad(y, wanted, batch.dy)
        return {"y": y.detach(), **{f"gradient {i}": each for i, each in enumerate(gradients)}}

    return step


def tensors_of(module: nn.Module, optimizer: Any = None) -> list[Tensor]:
    """All that training changes: parameters, buffers and what an optimizer keeps."""
    kept = [] if optimizer is None else [*optimizer.state.values()]
    return [
        *module.parameters(),
        *module.buffers(),
        *(value for state in kept for value in state.values() if isinstance(value, Tensor)),
    ]


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Whatever happens inside, the tensors have their values afterwards."""
    before = [each.detach().clone() for each in tensors]
    yield
    with torch.no_grad():
        for each, value in zip(tensors, before, strict=True):
            each.copy_(value)


def capture(
    step: Step, changed: Sequence[Tensor], pool: Any = None
) -> tuple[Any, dict[str, Tensor]]:
    """The step as a graph, and what a replay writes; a first call outside of it leaves no trace."""
    with unchanged(changed):
        side = support.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = step()
    return graph, results


def count_differences(got: dict[str, Tensor], expected: dict[str, Tensor]) -> Tensor:
    """On the device: how many of the tensors differ in any bit."""
    assert got.keys() == expected.keys()
    differ = [(support.bytes_of(got[key]) != support.bytes_of(expected[key])).any() for key in got]
    return torch.stack(differ).sum()


def training_step(module: nn.Module, batch: Batch) -> tuple[Step, Any]:
    """Forward, backward and AdamW; the optimizer's state is there already."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True, capturable=True)

    def step() -> dict[str, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        y = module(*batch.inputs)
        loss = (y.float() * batch.dy).sum() + y.float().square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach()}

    changed = tensors_of(module)
    with unchanged(changed):
        step()
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    return step, optimizer


@pytest.mark.parametrize("cell", CELLS)
def test_captured_training_steps_equal_eager_ones(bundle: ModuleType, cell: str) -> None:
    ours = experts(bundle, cell)
    eager = copy.deepcopy(ours)
    batch = Batch()
    step, optimizer = training_step(ours, batch)
    eager_step, eager_optimizer = training_step(eager, batch)
    graph, results = capture(step, tensors_of(ours, optimizer))
    start = [each.detach().clone() for each in ours.parameters()]
    for _ in range(STEPS):
        batch.draw()
        graph.replay()
        expected = eager_step()
        assert torch.equal(results["loss"], expected["loss"])
    pairs = zip(tensors_of(ours, optimizer), tensors_of(eager, eager_optimizer), strict=True)
    for one, other in pairs:
        assert torch.equal(support.bytes_of(one.detach()), support.bytes_of(other.detach()))
    moved = zip(ours.parameters(), start, strict=True)
    assert all(not torch.equal(one, other) for one, other in moved)


@pytest.mark.parametrize("cell", CELLS)
def test_thousands_of_replays_equal_eager_calls(bundle: ModuleType, cell: str) -> None:
    ours = experts(bundle, cell)
    eager = copy.deepcopy(ours)
    batch = Batch(tokens=64)
    graph, results = capture(
        forward_backward(ours, list(ours.parameters()), batch), tensors_of(ours)
    )
    call = forward_backward(eager, list(eager.parameters()), batch)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS.get(cell, 1000)):
        batch.draw()
        graph.replay()
        differences += count_differences(results, call())
    assert int(differences) == 0
    for one, other in zip(tensors_of(ours), tensors_of(eager), strict=True):
        assert torch.equal(support.bytes_of(one.detach()), support.bytes_of(other.detach()))


@pytest.mark.parametrize("cell", CELLS)
def test_make_graphed_callables(bundle: ModuleType, cell: str) -> None:
    ours = experts(bundle, cell)
    eager = copy.deepcopy(ours)
    batch = Batch()
    with unchanged(tensors_of(ours)):
        graphed = support.cuda.make_graphed_callables(ours, batch.inputs)
    step = forward_backward(graphed, list(ours.parameters()), batch)
    call = forward_backward(eager, list(eager.parameters()), batch)
    for _ in range(STEPS):
        batch.draw()
        assert int(count_differences(step(), call())) == 0
    for one, other in zip(tensors_of(ours), tensors_of(eager), strict=True):
        assert torch.equal(support.bytes_of(one.detach()), support.bytes_of(other.detach()))


@pytest.mark.parametrize("cell", CELLS)
def test_graphs_of_many_lengths_share_a_pool(bundle: ModuleType, cell: str) -> None:
    ours = experts(bundle, cell)
    eager = copy.deepcopy(ours)
    pool = torch.cuda.graph_pool_handle()
    kept = []
    for tokens in (1, 64, 200, 777, 1500):
        batch = Batch(tokens, seed=tokens)
        step = forward_backward(ours, list(ours.parameters()), batch)
        kept.append((batch, *capture(step, tensors_of(ours), pool)))
    rng = random.Random(0)
    for _ in range(3 * STEPS):
        batch, graph, results = rng.choice(kept)
        batch.draw()
        graph.replay()
        replayed = {key: value.clone() for key, value in results.items()}
        expected = forward_backward(eager, list(eager.parameters()), batch)()
        assert int(count_differences(replayed, expected)) == 0
