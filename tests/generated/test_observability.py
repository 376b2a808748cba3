"""What a module tells of itself: ranges around its steps, statistics of its quantised copies."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusegen import api
from fusegen.ir.naming import Cell

from .loading import load_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CLASSES = {"linear": "Linear", "grouped_linear": "GroupedLinear", "grouped_mlp": "GroupedMLP"}
T, E, K, N = 24, 3, 32, 48
PROGRAMS = ("delayed_wgrad", "cached_weights")


def make(bundle: str, cell: Cell, **keywords: Any) -> Any:
    torch.manual_seed(0)
    sizes = (K, N) if cell.module == "linear" else (E, K, N)
    made = getattr(importlib.import_module(f"{bundle}.{cell}"), CLASSES[cell.module])
    return made(*sizes, bias=True, **keywords)


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
    """Names of the steps that the text of a plan has for these directions, in its order."""
    found: dict[str, list[str]] = {}
    cell, current = plan.split()[0], ""
    for line in plan.splitlines():
        if header := re.match(r"(\w+) \(", line):
            current = header[1]
        elif row := re.match(r"  (\d+\. \w+( \w+)?): ", line):
            found.setdefault(current, []).append(f"{cell} {current} {row[1]}")
    ops = [op for program in programs for op in found if op.partition("_")[0] == program]
    return [name for op in ops for name in found[op]]


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
    weight = ("1. snapshot", "backward 3. quantize")  # what only dgrad asks for
    ran = [name for name in steps if "dgrad" not in name and not name.endswith(weight)]
    assert seen == ran != steps


def test_a_module_of_one_expression_has_ranges(tmp_path: Path) -> None:
    cell = Cell("swiglu", "bf16", ("nvtx_ranges",))
    bundle = load_cells("ranges_alone", tmp_path, [cell])
    layer = importlib.import_module(f"{bundle}.{cell}").SwiGLU()
    x = torch.randn(T, 2 * K).bfloat16().requires_grad_()
    seen = names_seen(cell, lambda: layer(x).sum().backward())
    assert seen == steps_of(layer.describe(), "forward", "backward") != []


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


# Statistics

RECIPES = ("fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
COMBINED = (
    ("grouped_mlp", "fp8_block", ("cached_weights",)),
    ("grouped_mlp", "fp8_delayed", ("cached_weights",)),
    ("grouped_mlp", "mxfp8", ("delayed_wgrad",)),
    ("grouped_mlp", "nvfp4", ("add_to_main_grad",)),
    ("grouped_mlp", "fp8_delayed", ("recompute_activations",)),
    ("grouped_mlp", "fp8_block", ("add_to_main_grad", *PROGRAMS, "recompute_activations")),
)
ORIENTATIONS = ("rowwise", "columnwise")
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def debugged(module: str, recipe: str, options: tuple[str, ...] = ()) -> Cell:
    return Cell(module, recipe, (*options, "debug"))


@pytest.fixture(scope="module")
def debug(tmp_path_factory: pytest.TempPathFactory) -> str:
    cells = [Cell(module, recipe) for module in ("quantize", "grouped_mlp") for recipe in RECIPES]
    cells += [debugged(module, recipe) for module in CLASSES for recipe in RECIPES]
    cells += [debugged(*each) for each in COMBINED]
    return load_cells("debug", tmp_path_factory.mktemp("debug"), cells)


def transformed(values: Tensor) -> Tensor:
    """Every 16 rows times signs and the Hadamard matrix, as nvfp4's columnwise copies are."""
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.0])
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    blocks = values.view(-1, 16, values.shape[1]) * signs.unsqueeze(1)
    return (matrix @ blocks / 4).flatten(0, 1)


def matches(found: Any, source: Tensor, decoded: Tensor, *, exact: bool = True) -> None:
    """The definitions once more, in float64; a transform that is undone in between is not exact."""
    there = source != 0
    error = (decoded.double() - source.double()).norm() / source.double().norm()
    assert found.relative_error == pytest.approx(error.item(), rel=1e-6 if exact else 1e-4)
    assert found.amax == source.abs().max() and found.nonzero == there.sum()
    assert found.underflow == (there & (decoded == 0)).sum() or not exact


@pytest.mark.parametrize("sizes", [None, [16, 0, 64]], ids=["dense", "groups"])
@every_recipe
def test_statistics_of_every_copy(debug: str, recipe: str, sizes: list[int] | None) -> None:
    """Against the bundle's own quantize and dequantize; past the groups rows are NaN."""
    module = "linear" if sizes is None else "grouped_linear"
    layer = make(debug, debugged(module, recipe))
    quantize = importlib.import_module(f"{debug}.quantize__{recipe}")
    state = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    rows = 96 if sizes is None else sum(sizes)
    torch.manual_seed(2)
    x, dy = (torch.randn(96, n).mul(torch.randn(96, 1).exp()).bfloat16() for n in (K, N))
    x[rows:], dy[rows:] = torch.nan, torch.nan
    splits = None if sizes is None else torch.tensor(sizes)
    layer(x.requires_grad_(), *([] if splits is None else [splits])).backward(dy)
    found = layer.statistics()
    tensors = {"x": (x, "input"), "weight": (layer.weight, "weight"), "dy": (dy, "grad_output")}
    *before, last = (f"{name}_{each}" for name in ("x", "weight") for each in ORIENTATIONS)
    assert [*found] == [*before, *(f"dy_{each}" for each in ORIENTATIONS), last]  # the backward's
    for name, (tensor, role) in tensors.items():
        own, split = (slice(rows), splits) if role != "weight" else (slice(None), None)
        source = tensor.detach()
        rng_state = state.get("rng_state")
        q = quantize.quantize(source, role=role, split_sizes=split, rng_state=rng_state)
        for orientation in ORIENTATIONS:
            rowwise = orientation == "rowwise"
            pair = source[own].float(), quantize.dequantize(q, rowwise=rowwise)[own]
            exact = recipe != "nvfp4" or rowwise or role == "weight"
            if not exact:
                pair = transformed(pair[0]).bfloat16().float(), transformed(pair[1])
            matches(found[f"{name}_{orientation}"], *pair, exact=exact)
            assert found[f"{name}_{orientation}"].saturation == 0


@every_recipe
def test_rows_past_the_groups_count_for_nothing(debug: str, recipe: str) -> None:
    """The last group ends in the middle of every block."""
    found = []
    for past in (0.0, torch.nan):
        layer = make(debug, debugged("grouped_linear", recipe))
        if recipe == "nvfp4":
            layer.rng_state.copy_(torch.tensor([3, 0]))
        x, splits = inputs("grouped_linear")
        dy = torch.randn(T, N, generator=torch.Generator().manual_seed(3)).bfloat16()
        x[22:], dy[22:] = past, past
        layer(x.requires_grad_(), splits).backward(dy)
        found.append(layer.statistics())
    assert found[0] == found[1]
    assert all(each.amax > 0 and each.relative_error > 0 for each in found[0].values())
    assert found[0]["x_rowwise"].nonzero == 22 * K


def test_a_scale_of_the_past_saturates_and_loses(debug: str) -> None:
    """Before the first step it is 1: E4M3 goes to 448 in steps of 32, and down to 2^-9."""
    layer = make(debug, debugged("linear", "fp8_delayed"))
    x = torch.ones(8, K)
    x[0, :7] = torch.tensor([448.0, -464.0, 466.0, -3072.0, 2.0**-10, 2.0**-11, 0.0])
    layer(x.bfloat16()).backward(torch.full((8, N), 1e5).bfloat16())
    for orientation in ORIENTATIONS:
        found = layer.statistics()[f"x_{orientation}"]
        assert found[:4] == (3072.0, 8 * K - 1, 2.0, 2.0), orientation
        assert found.relative_error == pytest.approx(2624 / x.norm().item(), rel=1e-3)
    assert layer.statistics()["dy_columnwise"].saturation == 8 * N  # E5M2 goes to 57344
    layer(x.bfloat16())  # by the amax of this step
    assert layer.statistics()["x_rowwise"].saturation == 0


def test_a_small_block_saturates_next_to_a_large_one(debug: str) -> None:
    """Under NVFP4, where its scale is rounded down to the smallest that there is."""
    layer = make(debug, debugged("linear", "nvfp4"))
    x = torch.zeros(16, K)
    x[0, 0], x[0, 16:] = 1e5, 0.632  # a scale of 1.45 * 2^-9 becomes 2^-9
    layer(x.bfloat16())
    found = layer.statistics()["x_rowwise"]
    assert (found.saturation, found.underflow, found.nonzero) == (16, 0, 17)


def test_non_finite_elements_show(debug: str) -> None:
    layer = make(debug, debugged("linear", "fp8_block"))
    x = torch.ones(8, K)
    x[0, 0] = torch.nan
    layer(x.bfloat16())
    found = layer.statistics()["x_rowwise"]
    assert found.amax == 1.0 and found.relative_error != found.relative_error


@every_recipe
def test_debug_changes_no_bit_and_compiles_whole(debug: str, recipe: str) -> None:
    cells = Cell("grouped_mlp", recipe), debugged("grouped_mlp", recipe)
    plain, eager, compiled = (make(debug, cells[i]) for i in (0, 1, 1))
    for layer in (eager, compiled):
        layer.load_state_dict(plain.state_dict())
        assert layer.statistics() == dict.fromkeys(layer.statistics(), (0.0,) * 5)
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        data = inputs("grouped_mlp", seed)
        wanted = step(plain, plain, data)
        same(step(eager, eager, data), wanted)
        same(step(call, compiled, data), wanted)
        assert eager.statistics() == compiled.statistics()
    assert len(eager.statistics()) == 12
    assert all(each.amax > 0 for each in eager.statistics().values())


def test_inductor_compiles_the_recipe_with_scales_it_cannot_change(debug: str) -> None:
    eager, other = (make(debug, debugged("linear", "mxfp8")) for _ in range(2))
    call = torch.compile(other, fullgraph=True, backend="inductor")
    data = inputs("linear")
    same(step(eager, eager, data), step(call, other, data))
    assert eager.statistics() == other.statistics()


def test_a_call_without_grad_makes_rowwise_copies_alone(debug: str) -> None:
    layer = make(debug, debugged("grouped_mlp", "mxfp8"))
    with torch.no_grad():
        torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs("grouped_mlp"))
    made = {name for name, each in layer.statistics().items() if each.amax > 0}
    assert made == {f"{name}_rowwise" for name in ("x", "a", "fc1_weight", "fc2_weight")}
    layer.reset_statistics()
    assert not any(each.amax for each in layer.statistics().values())


@pytest.mark.parametrize("case", COMBINED, ids=lambda case: str(debugged(*case)))
def test_statistics_with_other_choices(debug: str, case: tuple[str, str, tuple[str, ...]]) -> None:
    """They say the same wherever a copy is made; of cached weights, as they were refreshed."""
    module, recipe, options = case
    plain, other = make(debug, debugged(module, recipe)), make(debug, debugged(*case))
    for layer in (plain, other):
        if recipe == "nvfp4":
            layer.rng_state.copy_(torch.tensor([3, 0]))
        for name in ("fc1", "fc2"):
            weight = getattr(layer, name).weight
            weight.main_grad = torch.zeros(weight.shape)
    data = inputs(module)
    for layer in (plain, other):
        x, *rest = data
        layer(x.clone().requires_grad_(), *rest).float().square().sum().backward()
    found = plain.statistics(), other.statistics()
    assert found[0].keys() == found[1].keys()
    weights = {name for name in found[0] if "weight" in name}
    assert {n: v for n, v in found[0].items() if n not in weights} == {
        n: v for n, v in found[1].items() if n not in weights
    }
    if "cached_weights" not in options:
        assert found[0] == found[1]
        return
    with torch.no_grad():
        other.fc1.weight.mul_(2.0)
    other(*data)
    assert other.statistics()["fc1_weight_rowwise"] == found[1]["fc1_weight_rowwise"]
    other.refresh_weights()
    assert other.statistics()["fc1_weight_rowwise"].amax == 2 * found[0]["fc1_weight_rowwise"].amax


@pytest.mark.parametrize("options", [(), ("cached_weights",)])
def test_statistics_are_no_state_of_a_model(debug: str, options: tuple[str, ...]) -> None:
    """In no state dict; a cast spares them, a copy has its own, and loading places them anew."""
    cell = debugged("grouped_mlp", "fp8_block", options)
    layer = make(debug, cell)
    saved = layer.state_dict()
    assert not [name for name in saved if "statistics" in name]
    layer(*inputs("grouped_mlp"))
    other = copy.deepcopy(layer)
    assert other.statistics() == layer.statistics()
    other.half()
    other.refresh_weights() if options else None
    x, *rest = inputs("grouped_mlp", seed=2)
    other(x.half(), *rest)
    assert other.statistics()["x_rowwise"] != layer.statistics()["x_rowwise"]
    bare = make(debug, cell, device="meta")
    bare.load_state_dict(saved, assign=True)
    assert bare.statistics()["x_rowwise"].amax == 0
    assert torch.equal(bare(*inputs("grouped_mlp")), layer(*inputs("grouped_mlp")))
    assert bare.statistics() == layer.statistics()


def test_a_recipe_that_quantises_nothing_says_so() -> None:
    for arch in ("cpu", "sm_90a"):
        query = api.Query(archs=(arch,), modules=("grouped_mlp", "linear"), options=("debug",))
        lacking = {row.recipe: row.reason for row in api.plan(query) if row.status == "unsupported"}
        assert lacking == {"bf16": "recipe 'bf16' quantises nothing to take statistics of"}
