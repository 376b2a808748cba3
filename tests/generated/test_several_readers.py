"""Chains that read tensors several times and return several: against PyTorch, and as generated."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from drawn_chains import SPECS, draw_chain
from torch import Tensor
from torch.nn import functional

from fusegen import api
from fusegen.ir.naming import Cell
from fusegen.tuning.variants import publish_cells

from .loading import load_bundle, run_generated_tests

pytestmark = pytest.mark.usefixtures("fresh_compiler")

FOLDERS = api.Folders(specs=(SPECS,))
MODULES = tuple(sorted(path.stem for path in (SPECS / "modules").iterdir()))
QUANTIZED = (
    *("residual_mlp", "three_readers", "with_hidden", "forked_linear", "residual_experts"),
    "joined_heads",
)
OPTIONS = (
    Cell("with_hidden", "bf16", ("delayed_wgrad",)),
    Cell("residual_experts", "bf16", ("scaled_bias",)),
    Cell("residual_experts", "fp8_delayed", ("delayed_wgrad",)),
    Cell("with_hidden", "fp8_delayed", ("reduced_amax",)),
    Cell("with_hidden", "fp8_block", ("recompute_activations",)),
    Cell("residual_mlp", "fp8_current", ("debug",)),
)
SEEDS = (3, 11, 12, 34, 52)


def run(folder: Path, cells: tuple[Cell, ...], name: str, folders: api.Folders = FOLDERS) -> None:
    lacking = publish_cells(api.load_specs(folders), "cpu", cells, name, folder)
    assert not lacking, lacking[0]
    run_generated_tests(folder)


@pytest.mark.parametrize(
    ("modules", "recipe"), [(MODULES, "bf16"), (QUANTIZED, "fp8_current")], ids=["bf16", "fp8"]
)
def test_generated_tests_pass(modules: tuple[str, ...], recipe: str, tmp_path: Path) -> None:
    run(tmp_path, tuple(Cell(module, recipe) for module in modules), f"several_{recipe}")


def test_generated_tests_pass_with_options(tmp_path: Path) -> None:
    run(tmp_path, OPTIONS, "several_options")


def test_generated_tests_of_drawn_chains_pass(tmp_path: Path) -> None:
    (tmp_path / "specs" / "modules").mkdir(parents=True)
    names = [f"drawn_{seed}" for seed in SEEDS]
    for seed, name in zip(SEEDS, names, strict=True):
        path = tmp_path / "specs" / "modules" / f"{name}.yaml"
        path.write_text(
            draw_chain(name, Random(seed)).replace("class: Drawn", f"class: Drawn{seed}")
        )
    folders = api.Folders(specs=(SPECS, tmp_path / "specs"))
    cells = tuple(Cell(name, "bf16") for name in names)
    run(tmp_path / "cpu", cells, "several_drawn", folders)


# ---- against PyTorch, written down once more


def residual_mlp(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    h = p["x"] @ p["fc1_weight"].T + p["fc1_bias"]
    a = functional.gelu(h, approximate="tanh")
    return (p["x"] + a @ p["fc2_weight"].T + p["fc2_bias"],)


def three_readers(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    h = p["x"] @ p["fc_weight"].T + p["fc_bias"]
    return (functional.gelu(h, approximate="tanh") + functional.silu(h) + h,)


def with_hidden(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    h = p["x"] @ p["fc1_weight"].T + p["fc1_bias"]
    a = functional.gelu(h, approximate="tanh")
    return a @ p["fc2_weight"].T + p["fc2_bias"], h


def forked_linear(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    h = p["x"] @ p["fc1_weight"].T + p["fc1_bias"]
    scaled = h * p["gate_scale"]
    return scaled, h * torch.sigmoid(scaled) @ p["fc2_weight"].T + p["fc2_bias"]


def aliases(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    h = p["x"] @ p["fc1_weight"].T + p["fc1_bias"]
    a = functional.gelu(h, approximate="tanh")
    return p["x"] + a @ p["fc2_weight"].T + p["fc2_bias"], p["x"], h


def heads(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    h = p["x"] @ p["fc1_weight"].T + p["fc1_bias"]
    a = functional.silu(h.unflatten(-1, (4, -1)) * p["scale_scale"] + p["scale_shift"])
    return a.flatten(-2) @ p["fc2_weight"].T + p["fc2_bias"], a


def joined_heads(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return ((p["x"].flatten(-2) @ p["fc_weight"].T + p["fc_bias"]).unflatten(-1, (2, -1)),)


def signed_linear(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    h = p["x"] @ p["fc_weight"].T + p["fc_bias"]
    return (2.0 * h * torch.rsqrt(h * h + 0.125),)


def linear_around(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return (p["x"] @ p["fc_weight"].T + p["fc_bias"] + p["x"],)


def split_linear(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return p["x"] @ p["fc_weight"].T + p["fc_bias"], p["x"].clone()


def residual_experts(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    rows, start = [], 0
    for group, size in enumerate(p["split_sizes"].tolist()):
        x = p["x"][start : start + size]
        h = x @ p["fc1_weight"][group].T + p["fc1_bias"][group]
        gate, up = h.chunk(2, dim=1)
        a = functional.silu(gate) * up * p["probs"][start : start + size, None]
        rows.append((x + a @ p["fc2_weight"][group].T + p["fc2_bias"][group], a))
        start += size
    return tuple(map(torch.cat, zip(*rows, strict=True)))


EXACT: dict[str, Callable[[dict[str, Tensor]], tuple[Tensor, ...]]] = {
    each.__name__: each
    for each in (
        aliases,
        heads,
        joined_heads,
        residual_mlp,
        three_readers,
        with_hidden,
        forked_linear,
        signed_linear,
        linear_around,
        split_linear,
        residual_experts,
    )
}
BOUNDS = {"bf16": 0.008, "fp8_current": 0.23}
"""Relative errors of results and gradients, twice what is found."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("readers") / "cpu"
    cells = [Cell(module, recipe) for module in EXACT for recipe in BOUNDS]
    lacking = publish_cells(api.load_specs(FOLDERS), "cpu", cells, "readers", folder)
    assert not lacking, lacking[0]
    return load_bundle("readers_bundle", folder)


def tensors(loaded: Any) -> dict[str, Tensor]:
    """What the generated tests of a cell give its function; no row lies past the groups."""
    cell = loaded.__name__.rpartition(".")[2]
    tests = importlib.import_module(f"{loaded.__package__}.tests.test_{cell}")
    given: dict[str, Tensor] = tests.make_inputs(torch.bfloat16, "cpu")
    if "split_sizes" in given:
        given["split_sizes"] = torch.tensor([40, 0, 31, 25])
    return given


def random(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


@pytest.mark.parametrize("recipe", BOUNDS)
@pytest.mark.parametrize("module", EXACT)
def test_matches_pytorch_in_float64(bundle: str, module: str, recipe: str) -> None:
    loaded = importlib.import_module(f"{bundle}.{module}__{recipe}")
    given = tensors(loaded)
    leaves = {n: t.requires_grad_() for n, t in given.items() if t.is_floating_point()}
    wide = {n: t.detach().double() if n in leaves else t for n, t in given.items()}
    exact_leaves = [wide[name].requires_grad_() for name in leaves]
    wanted = EXACT[module](wide)
    results = getattr(loaded, module)(**given)
    results = results if isinstance(results, tuple) else (results,)
    dys = [random(y.shape, seed) for seed, y in enumerate(wanted)]
    found = torch.autograd.grad(results, [*leaves.values()], dys)
    exact = torch.autograd.grad(wanted, exact_leaves, [dy.double() for dy in dys])
    names = (*(f"output {index}" for index in range(len(results))), *leaves)
    pairs = zip((*results, *found), (*wanted, *exact), strict=True)
    for name, (got, true) in zip(names, pairs, strict=True):
        assert error(got, true) < BOUNDS[recipe], name


@pytest.mark.parametrize("recipe", BOUNDS)
def test_an_output_that_nobody_uses_counts_as_zeros(bundle: str, recipe: str) -> None:
    loaded = importlib.import_module(f"{bundle}.with_hidden__{recipe}")
    given = tensors(loaded)
    leaves = {n: t.requires_grad_() for n, t in given.items() if t.is_floating_point()}
    for used, unused in ((0, 1), (1, 0)):
        results = loaded.with_hidden(**given)
        alone = torch.autograd.grad(results[used].sum(), [*leaves.values()], allow_unused=True)
        results = loaded.with_hidden(**given)
        both = results[used].sum() + (0.0 * results[unused]).sum()
        for one, other in zip(alone, torch.autograd.grad(both, [*leaves.values()]), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", BOUNDS)
def test_function_transforms(bundle: str, recipe: str) -> None:
    loaded = importlib.import_module(f"{bundle}.with_hidden__{recipe}")
    given = tensors(loaded)
    x = given.pop("x")
    leaf = x.clone().requires_grad_()
    results = loaded.with_hidden(x=leaf, **given)
    dys = tuple(torch.randn_like(y) for y in results)
    (wanted,) = torch.autograd.grad(results, leaf, dys)
    outputs, back = torch.func.vjp(lambda each: loaded.with_hidden(x=each, **given), x)
    assert all(map(torch.equal, outputs, results)) and torch.equal(back(dys)[0], wanted)
    mapped = torch.func.vmap(lambda each: loaded.with_hidden(x=each, **given))(torch.stack((x, x)))
    for many, one in zip(mapped, results, strict=True):
        assert torch.equal(many[0], one) and torch.equal(many[1], one)
    if recipe == "bf16":
        first = torch.func.grad(lambda each: loaded.with_hidden(x=each, **given)[1].sum())(x)
        (true,) = torch.autograd.grad(loaded.with_hidden(x=leaf, **given)[1].sum(), leaf)
        assert torch.equal(first, true)


def test_the_class_compiles_and_exports(bundle: str) -> None:
    loaded = importlib.import_module(f"{bundle}.residual_experts__bf16")
    given = tensors(loaded)
    inputs = tuple(given[name] for name in ("x", "split_sizes", "probs"))
    rows, width = inputs[0].shape
    layer = loaded.ResidualExperts(4, width, 24, bias=True)
    eager = layer(*inputs)
    for other in (
        torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs),
        torch.export.export(layer, inputs).module()(*inputs),
    ):
        assert isinstance(other, tuple) and all(map(torch.equal, other, eager))
    assert eager[0].shape == (rows, width) and eager[1].shape == (rows, 24)
