"""Modules on DTensors over two ranks: every placement gives what one process computes.

Results are the same bit for bit, but where they were summed over ranks (Partial): these have been
rounded once per rank, and lie within the recipe's tolerance for GEMMs.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fusegen.checks.load import load
from fusegen.publish.paths import builtin_specs

from .loading import LOAD
from .ranks import Place, run_ranks

BUNDLE = Path(__file__).parents[2] / "generated" / "cpu"
QUANTISED = ("fp8_current", "fp8_rowwise", "fp8_block", "mxfp8")
SPLIT = ("bf16", "fp8_block", "mxfp8")  # no scale spans a dimension of a matrix
COMMON = """
import copy, importlib
from torch import nn
from torch.distributed.tensor import (
    DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor)
cell = lambda name: importlib.import_module(f"bundle.{name}")
if device == "cuda":
    torch.set_default_device(device)
mesh = dist.init_device_mesh(device, (2, 2) if ranks == 4 else (ranks,))
WHOLE = [Replicate()] * mesh.ndim

def place(layer, placements):
    "Parameters and buffers as DTensors, whole but for those named."
    def own(name, module, mesh):
        for key, tensor in list(module.named_parameters(recurse=False)):
            path = f"{name}.{key}" if name else key
            shards = distribute_tensor(tensor.data, mesh, placements.get(path, WHOLE))
            module.register_parameter(key, nn.Parameter(shards))
    return distribute_module(layer, mesh, own)

def step(layer, x, others, dy):
    "One training step of a plain or a distributed layer: results, and how they lie."
    if any(isinstance(p, DTensor) for p in layer.parameters()):
        others = [distribute_tensor(each, mesh, WHOLE) for each in others]
    x = x.detach().requires_grad_()
    y = layer(x, *others)
    whole = y.full_tensor() if isinstance(y, DTensor) else y
    whole.backward(dy)
    found = {"y": y.detach(), "dx": x.grad}
    found |= {f"d{name}": p.grad for name, p in layer.named_parameters()}
    whole = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in found.items()}
    return whole, {k: t.placements for k, t in found.items() if isinstance(t, DTensor)}

def finish(found):
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
"""
PLACEMENTS = (
    COMMON
    + """
from bundle.sharding import register_shardings
found = {}

def check(found, kind, layer, x, others, width, weight_dims):
    torch.manual_seed(1)
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    dy = torch.randn(len(x), width).bfloat16()
    single, _ = step(copy.deepcopy(layer), x, others, dy)
    for dim in (None, *weight_dims):
        for lies in (Replicate(), Shard(0), Shard(1)):
            given = {n: [Shard(dim)] for n, _ in layer.named_parameters()
                     if n.endswith("weight") and dim is not None}
            split = place(copy.deepcopy(layer), given)
            got, placements = step(split, distribute_tensor(x, mesh, [lies]), others, dy)
            found.append((kind, dim, lies, placements, got, single))

for case in words:
    recipe, size = case.split("-")
    size, found[case] = int(size), []
    register_shardings(*(f"{m}__{recipe}" for m in ("linear", "grouped_linear", "grouped_mlp")))
    torch.manual_seed(0)
    x = torch.randn(256, size).bfloat16()
    sizes = torch.tensor([100, 0, 60, 90])
    linear = cell(f"linear__{recipe}").Linear(size, 2 * size, bias=True)
    check(found[case], "linear", linear, x, [], 2 * size, (0, 1))
    grouped = cell(f"grouped_linear__{recipe}").GroupedLinear(4, size, 2 * size, bias=True)
    check(found[case], "grouped_linear", grouped, x, [sizes], 2 * size, (0, 1, 2))
    mlp = cell(f"grouped_mlp__{recipe}").GroupedMLP(4, size, size, bias=True)
    check(found[case], "grouped_mlp", mlp, x, [sizes, torch.rand(256)], size, (0, 1, 2))
finish(found)
"""
)
WHOLE_BLOCKS = [(recipe, 256) for recipe in ("bf16", *QUANTISED)]
CUT_BLOCKS = [("fp8_block", 192), ("mxfp8", 48)]


@cache
def tolerance(recipe: str) -> float:
    return load([builtin_specs()]).recipes[recipe].tolerance.gemm


@pytest.fixture(scope="module")
def place() -> Place:
    """Where the ranks run; the tests of GPUs have another one."""
    return Place(BUNDLE)


def run(script: str, folder: Path, place: Place, *words: str, ranks: int = 2) -> Any:
    """What rank 0 saved after all ranks ran the script."""
    run_ranks(script, folder, place, *words, ranks=ranks)
    return torch.load(folder / "found.pt", map_location="cpu", weights_only=False)


def check_equal(
    recipe: str,
    got: dict[str, torch.Tensor],
    single: dict[str, torch.Tensor],
    placements: dict[str, Any],
) -> None:
    for name, tensor in got.items():
        if any(each.is_partial() for each in placements[name]):
            error = (tensor.double() - single[name].double()).norm() / single[name].double().norm()
            assert error <= tolerance(recipe), (name, error)
        else:
            assert torch.equal(tensor, single[name]), name


@pytest.fixture(scope="module")
def steps(place: Place, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of every recipe and size: one step for each way to place the tensors."""
    cases = [f"{recipe}-{size}" for recipe, size in WHOLE_BLOCKS + CUT_BLOCKS]
    found: dict[str, Any] = run(PLACEMENTS, tmp_path_factory.mktemp("steps"), place, *cases)
    return found


@pytest.mark.parametrize(("recipe", "size"), WHOLE_BLOCKS)
def test_every_placement_equals_one_process(steps: dict[str, Any], recipe: str, size: int) -> None:
    """Placements that a recipe cannot be split along are redistributed."""
    for kind, dim, lies, placements, got, single in steps[f"{recipe}-{size}"]:
        check_equal(recipe, got, single, placements)
        split = {str(each) for lie in placements.values() for each in lie} - {"R"}
        if recipe not in SPLIT or kind == "grouped_mlp":
            assert not split, (kind, dim, lies)
        elif kind == "linear" and (dim, lies.is_replicate()) == (0, True):
            assert str(placements["y"]) == "(Shard(dim=1),)"
            assert str(placements["dweight"]) == "(Shard(dim=0),)"
            assert placements["dx"][0].is_partial()
        elif kind == "grouped_linear" and dim == 2 and lies.is_shard(1):
            assert placements["y"][0].is_partial()
            assert str(placements["dx"]) == "(Shard(dim=1),)"
            assert str(placements["dweight"]) == "(Shard(dim=2),)"
        elif kind == "linear" and dim is None and lies.is_shard(0):
            assert str(placements["y"]) == str(placements["dx"]) == "(Shard(dim=0),)"
            assert placements["dweight"][0].is_partial()


@pytest.mark.parametrize(("recipe", "size"), CUT_BLOCKS)
def test_no_shard_cuts_a_block(steps: dict[str, Any], recipe: str, size: int) -> None:
    """Along K half a block would be on each rank, so K stays whole; N and T are split as before."""
    for kind, dim, _, placements, got, single in steps[f"{recipe}-{size}"]:
        check_equal(recipe, got, single, placements)
        if kind != "grouped_mlp" and dim == (1 if kind == "linear" else 2):
            assert not placements["y"][0].is_partial()
            assert not placements["dx"][0].is_shard(1)


PASSED_ON = (
    COMMON
    + """
from itertools import product
from bundle.sharding import register_shardings
found, size = [], 64
sizes = {"linear_residual": (size, size), "residual_rms_norm": (size,), "add_extra_input": ()}
register_shardings(*(f"{name}__bf16" for name in sizes))
torch.manual_seed(0)
data = [torch.randn(32, size).bfloat16() for _ in range(4)]

def step(layer, inputs, asked):
    leaves = [x.detach().requires_grad_(needed) for x, needed in zip(inputs, asked)]
    results = layer(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward([y.full_tensor() if isinstance(y, DTensor) else y for y in results],
                            data[2:2 + len(results)])
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in (x.grad for x in leaves)]

for name, given in sizes.items():
    layer = getattr(cell(f"{name}__bf16"), name.title().replace("_", ""))(*given)
    for asked in ((True, True), (False, True)):
        single = step(layer.requires_grad_(all(asked)), data, asked)
        for lies in product((Replicate(), Shard(0), Shard(1)), repeat=2):
            split = place(copy.deepcopy(layer), {}).requires_grad_(all(asked))
            inputs = [distribute_tensor(x, mesh, [each]) for x, each in zip(data, lies)]
            found.append((name, asked, lies, step(split, inputs, asked), single))
finish(found)
"""
)


def test_a_gradient_that_is_passed_on_equals_one_process(place: Place, tmp_path: Path) -> None:
    """The residual's is a DTensor that came in, or that of x, wherever the residual lies."""
    for name, asked, lies, got, single in run(PASSED_ON, tmp_path, place):
        assert [each is not None for each in got] == [*asked], (name, asked)
        for one, other in zip(got, single, strict=True):
            assert one is None or (one - other).norm() <= 1e-2 * other.norm(), (name, asked, lies)


OTHERS = (
    COMMON
    + """
from torch.distributed.tensor.experimental import local_map
from bundle.sharding import register_shardings
register_shardings()
found = {}

# Without gradients only the forward's copies count, before and after calls with gradients.
layer = cell("linear__fp8_rowwise").Linear(64, 128)
split = place(copy.deepcopy(layer), {"weight": [Shard(0)]})
x = torch.randn(32, 64).bfloat16()
given = distribute_tensor(x, mesh, WHOLE)
with torch.no_grad():
    before = split(given)
trained = split(given)
with torch.no_grad():
    after = split(given)
found["inference"] = [(y.placements, torch.equal(y.full_tensor(), layer(x)))
                      for y in (before, trained, after)]

# State is whole on every rank and moves on alike.
found["state"] = {}
for recipe in ("fp8_delayed", "nvfp4"):
    layer = cell(f"linear__{recipe}").Linear(64, 64)
    split = place(copy.deepcopy(layer), {"weight": [Shard(0)]})
    layer.load_state_dict({k: t.full_tensor() for k, t in split.state_dict().items()})
    same = []
    for _ in range(3):
        x, dy = torch.randn(2, 64, 64).bfloat16()
        dist.broadcast(x, 0), dist.broadcast(dy, 0)
        single, _ = step(layer, x, [], dy)
        got, _ = step(split, distribute_tensor(x, mesh, [Shard(0)]), [], dy)
        same += [torch.equal(got[name], single[name]) for name in single]
    states = zip(split.buffers(), layer.buffers(), strict=True)
    same += [torch.equal(a.full_tensor(), b) for a, b in states]
    found["state"][recipe] = same

# Pointwise modules: any dimension where elements are independent.
x = distribute_tensor(torch.randn(4, 6, 16).bfloat16(), mesh, WHOLE)
found["pointwise"] = []
for name, dims in (("silu", (0, 1, 2)), ("swiglu", (0,))):
    function = getattr(cell(f"{name}__bf16"), name)
    for dim in dims:
        given = x.redistribute(mesh, [Shard(dim)]).detach().requires_grad_()
        y = function(given)
        y.sum().backward()
        plain = x.full_tensor().requires_grad_()
        function(plain).sum().backward()
        found["pointwise"].append((
            dim, y.placements, given.grad.placements,
            torch.equal(y.full_tensor(), function(plain)),
            torch.equal(given.grad.full_tensor(), plain.grad)))

# Stacks of weights are quantised expert by expert.
module = cell("quantize__fp8_current")
w = torch.randn(4, 32, 64, generator=torch.Generator(device).manual_seed(0)).bfloat16()
plain = module.quantize(w, role="weight")
split = module.quantize(distribute_tensor(w, mesh, [Shard(0)]), role="weight")
found["experts"] = [
    (a.placements, torch.equal(a.to_local().view(torch.uint8),
                               b.chunk(ranks)[rank].view(torch.uint8)))
    for a, b in zip(split[:6], plain[:6], strict=True)]

# Tokens of experts are the ranks' own: local_map.
module = cell("grouped_linear__mxfp8")
layer = place(module.GroupedLinear(3, 64, 32), {})
tokens = torch.randn(ranks, 40, 64, generator=torch.Generator(device).manual_seed(1)).bfloat16()
sizes = torch.tensor([[10, 0, 25], [5, 30, 5]])
experts = local_map(
    module.grouped_linear, out_placements=[Shard(0)],
    in_placements=([Shard(0)], [Replicate()], [Shard(0)]),
    in_grad_placements=([Shard(0)], [Partial()], [Shard(0)]), device_mesh=mesh)
x = DTensor.from_local(tokens[rank], mesh, [Shard(0)]).requires_grad_()
y = experts(x, layer.weight, DTensor.from_local(sizes[rank], mesh, [Shard(0)]))
y.sum().backward()
weight = layer.weight.full_tensor().detach().requires_grad_()
plain = tokens.clone().requires_grad_()
whole = [module.grouped_linear(plain[r], weight, sizes[r]) for r in range(ranks)]
torch.cat(whole).sum().backward()
dweight = layer.weight.grad
found["local_map"] = {
    "y": torch.equal(y.full_tensor(), torch.cat(whole)),
    "dx": torch.equal(x.grad.full_tensor(), plain.grad.flatten(0, 1)),
    "dweight": (dweight.placements, (dweight.full_tensor() - weight.grad).norm().item()
                / weight.grad.norm().item())}

# One graph, as without DTensors.
layer = place(cell("linear__mxfp8").Linear(64, 64), {"weight": [Shard(0)]})
x = distribute_tensor(torch.randn(64, 64).bfloat16(), mesh, WHOLE).requires_grad_()
y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
y.sum().backward()
found["compiled"] = y.placements, torch.equal(y.full_tensor(), layer(x).full_tensor())

# What is refused.
def message(make, given):
    try:
        make()(given)
    except Exception as error:
        return str(error)

def with_split_state():
    layer = place(cell("linear__fp8_delayed").Linear(8, 8), {})
    for name, tensor in list(layer.named_buffers()):
        setattr(layer, name, tensor.redistribute(mesh, [Shard(0)]))
    return layer

plain = torch.randn(4, 8).bfloat16()
found["plain"] = message(lambda: place(cell("linear__bf16").Linear(8, 8), {}), plain)
found["split_state"] = message(with_split_state, distribute_tensor(plain, mesh, WHOLE))
finish(found)
"""
)


@pytest.fixture(scope="module")
def others(place: Place, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one run of a script leaves for the tests below."""
    found: dict[str, Any] = run(OTHERS, tmp_path_factory.mktemp("others"), place)
    return found


def test_flags_are_not_mixed_up_in_the_cache_of_decisions(others: dict[str, Any]) -> None:
    """Scales of rows allow N to be split without gradients only, whatever earlier calls were."""
    found = others["inference"]
    assert [str(placements) for placements, _ in found] == [
        "(Shard(dim=1),)",
        "(Replicate(),)",
        "(Shard(dim=1),)",
    ]
    assert all(same for _, same in found)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_state_moves_on_alike(others: dict[str, Any], recipe: str) -> None:
    assert len(others["state"][recipe]) > 9 and all(others["state"][recipe])


def test_pointwise_modules_keep_their_placement(others: dict[str, Any]) -> None:
    for dim, *placements, same, same_gradient in others["pointwise"]:
        assert [str(each) for each in placements] == [f"(Shard(dim={dim}),)"] * 2
        assert same and same_gradient


def test_experts_are_quantised_where_they_are(others: dict[str, Any]) -> None:
    assert len(others["experts"]) == 6
    for placements, same in others["experts"]:
        assert str(placements) == "(Shard(dim=0),)" and same


def test_tokens_of_experts_go_through_local_map(others: dict[str, Any]) -> None:
    found = others["local_map"]
    assert found["y"] and found["dx"]
    placements, error = found["dweight"]
    assert placements[0].is_partial() and error <= tolerance("mxfp8")


def test_compiles_into_one_graph(others: dict[str, Any]) -> None:
    placements, same = others["compiled"]
    assert str(placements) == "(Shard(dim=1),)" and same


def test_errors_name_the_tensor_and_the_remedy(others: dict[str, Any]) -> None:
    assert others["plain"].startswith("linear__bf16_forward: x: expected a DTensor")
    assert "local_map" in others["plain"]
    expected = "linear__fp8_delayed_forward: forward_state: expected Replicate()"
    assert others["split_state"].startswith(expected)


MESH = (
    COMMON
    + """
from bundle.sharding import register_shardings
register_shardings("linear__mxfp8")
layer = cell("linear__mxfp8").Linear(256, 256, bias=True)
torch.manual_seed(0)
nn.init.normal_(layer.bias)
nn.init.normal_(layer.weight)
x, dy = torch.randn(2, 256, 256).bfloat16()
single, _ = step(copy.deepcopy(layer), x, [], dy)
found = []
for weight in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(0)]):
    for lies in (WHOLE, [Shard(0), Replicate()], [Shard(1), Shard(0)]):
        split = place(copy.deepcopy(layer), {"weight": weight})
        found.append((*step(split, distribute_tensor(x, mesh, lies), [], dy), single))
finish(found)
"""
)


@pytest.mark.slow
def test_two_dimensions_of_a_mesh(place: Place, tmp_path: Path) -> None:
    found = run(MESH, tmp_path, place, ranks=4)
    for got, placements, single in found:
        check_equal("mxfp8", got, single, placements)
    _, both, _ = found[7]  # tokens along the first dimension of the mesh, N along the second
    assert str(both["y"]) == "(Shard(dim=0), Shard(dim=1))"


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    script = LOAD + f"load('bundle', {str(BUNDLE)!r}).linear__fp8_block\n"
    script += "print(sorted(n for n in sys.modules if n.startswith('torch.distributed.tensor')))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
