"""What a module tells of itself: ranges around its steps, statistics of its quantised copies."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen.naming import Cell

from .loading import load_cells

CLASSES = {"linear": "Linear", "grouped_linear": "GroupedLinear", "grouped_mlp": "GroupedMLP"}
T, E, K, N = 24, 3, 32, 48
PROGRAMS = ("delayed_wgrad", "cached_weights")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(bundle: str, cell: Cell) -> Any:
    torch.manual_seed(0)
    sizes = (K, N) if cell.module == "linear" else (E, K, N)
    made = getattr(importlib.import_module(f"{bundle}.{cell}"), CLASSES[cell.module])
    return made(*sizes, bias=True)


def inputs(module: str, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator).bfloat16()
    probs = torch.rand(T, generator=generator)
    return [x, torch.tensor([9, 0, 13]), probs][: 1 + list(CLASSES).index(module)]


def step(call: Callable[..., Tensor], layer: Any, data: list[Tensor]) -> dict[str, Tensor]:
    """Result and gradients of one micro-batch, delayed ones included."""
    leaf = data[0].clone().requires_grad_()
    layer.zero_grad()
    y = call(leaf, *data[1:])
    y.float().square().sum().backward()
    if hasattr(layer, "backward_dw"):
        layer.backward_dw()
    found = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    assert leaf.grad is not None and found
    return {"y": y.detach(), "dx": leaf.grad, **found}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# Ranges

RANGES = (
    Cell("linear", "fp8_delayed"),
    Cell("grouped_linear", "bf16"),
    Cell("grouped_mlp", "nvfp4"),
    Cell("grouped_mlp", "fp8_block", PROGRAMS),
)
every_cell = pytest.mark.parametrize("cell", RANGES, ids=str)


def with_ranges(cell: Cell) -> Cell:
    return Cell(cell.module, cell.recipe, (*cell.options, "nvtx_ranges"))


@pytest.fixture(scope="module")
def ranges(tmp_path_factory: pytest.TempPathFactory) -> str:
    cells = [each for cell in RANGES for each in (cell, with_ranges(cell))]
    return load_cells("ranges", tmp_path_factory.mktemp("ranges"), cells)


def steps_of(plan: str, *programs: str) -> list[str]:
    """Names of the steps that the text of a plan has for these programs, in its order."""
    found: dict[str, list[str]] = {}
    cell, current = plan.split()[0], ""
    for line in plan.splitlines():
        if header := re.match(r"(\w+) \(.*\) -> ", line):
            current = header[1]
        elif row := re.match(r"  (\d+\. \w+( \w+)?): ", line):
            found.setdefault(current, []).append(f"{cell} {current} {row[1]}")
    return [name for program in programs for name in found[program]]


def names_seen(cell: Cell, run: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith(f"{cell} ")]


@every_cell
def test_profilers_see_the_steps_of_the_plan(ranges: str, cell: Cell) -> None:
    own = with_ranges(cell)
    layer = make(ranges, own)
    programs = ["forward", "backward", *(["wgrad"] if cell.options else [])]
    seen = names_seen(own, lambda: step(layer, layer, inputs(cell.module)))
    assert seen == steps_of(layer.describe(), *programs)
    if cell.options:
        seen = names_seen(own, layer.refresh_weights)
        assert seen == steps_of(layer.describe(), "refresh")


def test_a_step_that_does_not_run_has_no_range(ranges: str) -> None:
    cell = with_ranges(RANGES[0])
    layer = make(ranges, cell)
    seen = names_seen(cell, lambda: layer(*inputs("linear")).sum().backward())
    steps = steps_of(layer.describe(), "forward", "backward")
    assert seen == [name for name in steps if "dgrad" not in name] != steps


@every_cell
def test_ranges_change_no_bit(ranges: str, cell: Cell) -> None:
    plain, other = make(ranges, cell), make(ranges, with_ranges(cell))
    if cell.recipe == "nvfp4":
        other.load_state_dict(plain.state_dict())
    data = inputs(cell.module)
    same(step(plain, plain, data), step(other, other, data))


@pytest.mark.parametrize("cell", RANGES[:3], ids=str)
def test_ranges_compile_whole(ranges: str, cell: Cell) -> None:
    eager, other = (make(ranges, with_ranges(cell)) for _ in range(2))
    call = torch.compile(other, fullgraph=True, backend="aot_eager")
    data = inputs(cell.module)
    same(step(eager, eager, data), step(call, other, data))
