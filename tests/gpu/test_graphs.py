"""CUDA graphs and torch.compile: the same bits as eager calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import gpu_support as support
import pytest
import torch
from gpu_support import Case, Operands
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

CASE = Case("graphs", 777, 136, 200, tuple(support.dirichlet(16, 700)))
REPLAYS = 1000

compiler: Any = torch.compiler  # partly without types


def make(name: str) -> tuple[Operands, Tensor]:
    if name == "grouped_mlp":
        operands = support.grouped_mlp_operands(CASE, torch.bfloat16)
        return operands, support.randn((CASE.tokens, CASE.k), torch.bfloat16, 9)
    operands = support.grouped_linear_operands(CASE, torch.bfloat16)
    if name == "linear":
        first = {key: operands[key][0] for key in ("weight", "bias")}
        operands = {"x": operands["x"], **first}
    return operands, support.randn((CASE.tokens, CASE.n), torch.bfloat16, 9)


NAMES = ["grouped_linear", "grouped_mlp"]


def capture(
    call: Callable[[], dict[str, Tensor]],
) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    """The call as a graph, and the tensors that a replay writes."""
    side = support.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def random_splits(rng: random.Random) -> list[int]:
    """Any sizes: ragged, empty, past the tokens, negative."""
    largest = rng.choice((0, 4, 60, 120, 900))
    return [rng.choice((0, rng.randint(0, largest), rng.randint(-5, 70))) for _ in CASE.splits]


@pytest.mark.parametrize("name", NAMES)
def test_replays_follow_new_split_sizes(bundle: ModuleType, name: str) -> None:
    function = support.function_of(bundle, name)
    operands, dy = make(name)
    graph, results = capture(lambda: support.forward_backward(function, operands, dy))
    rng = random.Random(0)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    distinct = set()
    for _ in range(REPLAYS):
        splits = random_splits(rng)
        distinct.add(tuple(splits))
        operands["split_sizes"].copy_(torch.tensor(splits))
        graph.replay()
        replayed = {key: value.clone() for key, value in results.items()}
        eager = support.forward_backward(function, operands, dy)
        for key, value in eager.items():
            got = support.bytes_of(replayed[key])
            differences += (got != support.bytes_of(value)).any()
    assert len(distinct) > REPLAYS // 2
    assert int(differences) == 0


def compiled_call(
    compiled: Callable[..., Tensor], operands: Operands, dy: Tensor
) -> dict[str, Tensor]:
    """A compiled result and gradients, copied out of the memory that the next call reuses."""
    compiler.cudagraph_mark_step_begin()
    results = support.forward_backward(compiled, operands, dy)
    return {key: value.clone() for key, value in results.items()}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", [*NAMES, "linear"])
def test_compiled_whole_equals_eager(bundle: ModuleType, name: str, mode: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    function = support.function_of(bundle, name)
    operands, dy = make(name)
    with inductor.patch({"triton.cudagraph_or_error": mode == "reduce-overhead"}):
        compiled = torch.compile(function, fullgraph=True, mode=mode, dynamic=False)
        for seed in range(4):
            splits = support.dirichlet(len(CASE.splits), CASE.tokens - 50 * seed, 1.0, seed)
            if "split_sizes" in operands:
                operands["split_sizes"].copy_(torch.tensor(splits))
            eager = support.forward_backward(function, operands, dy)
            support.assert_same(compiled_call(compiled, operands, dy), eager)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert not counters["graph_break"]


def test_one_compilation_serves_every_number_of_tokens(bundle: ModuleType) -> None:
    torch._dynamo.reset()
    function = support.function_of(bundle, "grouped_linear")
    counter: Any = CompileCounterWithBackend("inductor")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for tokens in (700, 64, 2, 4097, 333):  # torch itself treats sizes 0 and 1 apart
        operands = support.grouped_linear_operands(
            support.ragged("dynamic", 5, tokens, 72, 136), torch.bfloat16
        )
        dy = support.randn((tokens, 136), torch.bfloat16, 9)
        leaves = {key: operands[key].detach().requires_grad_() for key in ("x", "weight", "bias")}
        torch._dynamo.mark_dynamic(leaves["x"], 0)
        y = compiled(**{**operands, **leaves})
        gradients = torch.autograd.grad(y, list(leaves.values()), dy)
        got = {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}
        support.assert_same(got, support.forward_backward(function, operands, dy))
    assert counter.frame_count == 1


def test_module_trains_under_reduce_overhead(bundle: ModuleType) -> None:
    """Three steps of gradient descent end in the same weights as eager ones."""
    torch._dynamo.reset()
    counters.clear()
    operands, dy = make("grouped_linear")
    weights = []
    for compile_it in (False, True):
        function = support.function_of(bundle, "grouped_linear")
        if compile_it:
            function = torch.compile(function, fullgraph=True, mode="reduce-overhead")
        weight = operands["weight"].clone().requires_grad_()
        for _ in range(3):
            compiler.cudagraph_mark_step_begin()
            y = function(operands["x"], weight, operands["split_sizes"], operands["bias"])
            (gradient,) = torch.autograd.grad(y, weight, dy)
            with torch.no_grad():
                weight -= 0.1 * gradient
        weights.append(weight.detach())
    support.assert_same({"weight": weights[1]}, {"weight": weights[0]})
    assert counters["inductor"]["cudagraph_skips"] == 0
