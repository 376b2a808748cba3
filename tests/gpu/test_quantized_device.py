"""Quantised recipes on the device: which kernels run, graphs with changing splits, compilation."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import bundles
import gpu_support as support
import pytest
import selection
import torch
from gpu_support import Case
from programs import Programs
from test_graphs import capture, random_splits
from test_kernels import kernels_of
from test_quantized import same_bits
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

FOLDERS = bundles.quantized_bundles()
CELLS, DENSE_CELLS = (
    sorted({cell for folder in FOLDERS for cell in bundles.quantized_cells(folder, module)})
    for module in ("grouped_linear", "linear")
)
CASE = Case("graphs", 777, 136, 200, tuple(support.dirichlet(16, 700)))
REPLAYS = 100

compiler: Any = torch.compiler  # partly without types


def step(function: Any, tensors: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    """Result and gradients; state changes in place."""
    leaves = {name: tensors[name].detach().requires_grad_() for name in ("x", "weight", "bias")}
    y = function(**{**tensors, **leaves})
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("cell", CELLS)
def test_replays_follow_new_split_sizes(bundle: ModuleType, cell: str) -> None:
    """Results and state of every replay equal an eager step from the same state."""
    programs = Programs(bundle, cell)
    function = programs.module.grouped_linear
    tensors, dy = programs.step(CASE, torch.bfloat16)
    graph, results = capture(lambda: step(function, tensors, dy))
    rng = random.Random(0)
    for _ in range(REPLAYS):
        tensors["split_sizes"].copy_(torch.tensor(random_splits(rng)))
        before = programs.states(tensors)
        eager_tensors = {**tensors, **before}
        graph.replay()
        eager = step(function, eager_tensors, dy)
        for name, value in eager.items():
            same_bits(f"{cell}: {name}", results[name], value)
        for name, state in before.items():
            same_bits(f"{cell}: {name}", tensors[name], state)


def dense_step(programs: Programs) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of a dense GEMM, and dy."""
    sizes = {"T": CASE.tokens, "K": CASE.k, "N": CASE.n}
    tensors = programs.inputs(torch.bfloat16, None, sizes)
    return tensors, support.randn((*tensors["x"].shape[:-1], CASE.n), torch.bfloat16, 9)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("cell", [*CELLS, *DENSE_CELLS])
def test_compiled_whole_equals_eager(bundle: ModuleType, cell: str, mode: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    programs = Programs(bundle, cell)
    function = getattr(programs.module, cell.partition("__")[0])
    dense = cell in DENSE_CELLS
    tensors, dy = dense_step(programs) if dense else programs.step(CASE, torch.bfloat16)
    other = {**tensors, **programs.states(tensors)}
    for name in programs.tests.STATES:  # as buffers of modules are
        torch._dynamo.mark_static_address(tensors[name])
    with inductor.patch({"triton.cudagraph_or_error": mode == "reduce-overhead"}):
        compiled = torch.compile(function, fullgraph=True, mode=mode, dynamic=False)
        for _ in range(4):
            compiler.cudagraph_mark_step_begin()
            got = {name: value.clone() for name, value in step(compiled, tensors, dy).items()}
            for name, value in step(function, other, dy).items():
                same_bits(f"{cell}: {name}", got[name], value)
    for name in programs.tests.STATES:
        same_bits(f"{cell}: {name}", tensors[name], other[name])
    assert not counters["graph_break"]


@pytest.mark.parametrize("kind", selection.KINDS)
@pytest.mark.parametrize("cell", CELLS)
def test_the_chosen_kernel_runs(bundle: ModuleType, cell: str, kind: str) -> None:
    programs = Programs(bundle, cell)
    rules = selection.gemm_rules(programs.module.GroupedLinear.describe(), kind)
    gradient = {"fprop": set(), "dgrad": {"x"}, "wgrad": {"weight"}}[kind]
    for point, sizes in selection.reach_every_point(kind, rules).items():
        named = {"T": sizes.tokens, "E": sizes.groups, "K": sizes.k, "N": sizes.n}
        splits = [sizes.tokens // sizes.groups] * sizes.groups
        tensors = programs.inputs(torch.bfloat16, splits, named)
        direction = "forward" if kind == "fprop" else "backward"
        if direction == "backward":
            dy = support.randn((sizes.tokens, sizes.n), torch.bfloat16, 3)
            tensors = programs.backward_tensors(tensors, dy)
        names = kernels_of(programs.call(direction, tensors, gradient))
        assert not [name for name in names if "fusegen::" not in name and "Memcpy" not in name]
        found = [launch for name in names if (launch := selection.launch_of(name))]
        assert found == [selection.Launch(kind, "bfloat16", point)], sizes
