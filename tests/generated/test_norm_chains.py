"""Norms in front of linear layers and MLPs: against ``torch.nn`` in float64, and as generated."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fusegen.ir.naming import Cell
from fusegen.options.save import RECOMPUTE

from .loading import load_cells, run_generated_tests, write_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ROWS, HIDDEN, WIDE = (3, 32), 64, 96
BOUNDS = {"bf16": 0.012, "fp8_current": 0.16, "fp8_block": 0.16}
"""Relative errors of results and gradients, about twice what is found."""


class SwiGLU(nn.Module):
    """silu of the first half of a row times the second."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up


class SquaredReLU(nn.Module):
    """relu(x) squared."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x).square()


class Residual(nn.Module):
    """x and what layers make of it."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for name, layer in layers.items():
            self.layers.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def _mlp(norm: type[nn.Module], activation: nn.Module, *, gated: bool = False) -> nn.Module:
    return Residual(
        {
            "norm": norm(HIDDEN, eps=1e-5),
            "fc1": nn.Linear(HIDDEN, WIDE * (1 + gated)),
            "act": activation,
            "fc2": nn.Linear(WIDE, HIDDEN),
        }
    )


def _linear(norm: type[nn.Module]) -> nn.Module:
    layers = nn.Sequential()
    layers.add_module("norm", norm(HIDDEN, eps=1e-5))
    layers.add_module("fc", nn.Linear(HIDDEN, WIDE))
    return layers


TORCH: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "rms_norm_linear": ("RmsNormLinear", lambda: _linear(nn.RMSNorm)),
    "layer_norm_linear": ("LayerNormLinear", lambda: _linear(nn.LayerNorm)),
    "norm_mlp": ("NormMLP", lambda: _mlp(nn.RMSNorm, nn.GELU(approximate="tanh"))),
    "norm_mlp_swiglu": ("SwiGLUNormMLP", lambda: _mlp(nn.RMSNorm, SwiGLU(), gated=True)),
    "norm_mlp_srelu": ("SReLUNormMLP", lambda: _mlp(nn.RMSNorm, SquaredReLU())),
    "layer_norm_mlp": ("LayerNormMLP", lambda: _mlp(nn.LayerNorm, nn.GELU(approximate="tanh"))),
}
"""The class of each module, and the same layers of PyTorch."""
GENERATED = (
    Cell("norm_mlp", "bf16"),
    Cell("layer_norm_linear", "bf16"),
    Cell("layer_norm_mlp", "fp8_delayed", (RECOMPUTE,)),
    Cell("norm_mlp_swiglu", "nvfp4", (RECOMPUTE,)),
    Cell("norm_mlp_srelu", "mxfp8", ("delayed_wgrad",)),
    Cell("rms_norm_linear", "fp8_delayed", ("add_to_main_grad", RECOMPUTE)),
)
"""Cells of no committed bundle."""


def test_generated_tests_pass(tmp_path: Path) -> None:
    run_generated_tests(write_cells("norm_chains_alone", "cpu", tmp_path, GENERATED))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    cells = [
        Cell(module, recipe, options)
        for module in TORCH
        for recipe in BOUNDS
        for options in ((), (RECOMPUTE,))
    ]
    return load_cells("norm_chains", tmp_path_factory.mktemp("norm_chains"), cells)


def layer_of(package: str, module: str, recipe: str, *options: str) -> nn.Module:
    """A module of the bundle, in bfloat16 and with the same weights whatever its recipe is."""
    loaded = importlib.import_module(f"{package}.{'__'.join((module, recipe, *options))}")
    torch.manual_seed(1)
    layer: nn.Module = getattr(loaded, TORCH[module][0])(HIDDEN, WIDE, bias=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.bfloat16()


def exact_of(module: str, layer: nn.Module) -> nn.Module:
    """PyTorch's layers in float64 with the weights of a module."""
    exact = TORCH[module][1]().double()
    weights = {name: each.detach().double() for name, each in layer.named_parameters()}
    inner = exact.layers if isinstance(exact, Residual) else exact
    assert isinstance(inner, nn.Module)
    inner.load_state_dict(weights)
    return exact


def run(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The result and every gradient, by name."""
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    assert leaf.grad is not None
    found = {"y": y.detach(), "dx": leaf.grad}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        found[name.removeprefix("layers.")] = parameter.grad
    return found


def tensors(module: str) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(*ROWS, HIDDEN, generator=rng).bfloat16()
    width = WIDE if module.endswith("linear") else HIDDEN
    return x, torch.randn(*ROWS, width, generator=rng).bfloat16()


@pytest.mark.parametrize("recipe", BOUNDS)
@pytest.mark.parametrize("module", TORCH)
def test_matches_torch_in_float64(package: str, module: str, recipe: str) -> None:
    layer = layer_of(package, module, recipe)
    x, dy = tensors(module)
    found = run(layer, x, dy)
    wanted = run(exact_of(module, layer), x.double(), dy.double())
    assert found.keys() == wanted.keys()
    for name, exact in wanted.items():
        error = float((found[name].double() - exact).norm() / exact.norm())
        assert error < BOUNDS[recipe], name


@pytest.mark.parametrize("recipe", BOUNDS)
@pytest.mark.parametrize("module", TORCH)
def test_what_is_made_again_has_the_same_bits(package: str, module: str, recipe: str) -> None:
    """And less is saved: neither the norm's result nor a copy of it."""
    x, dy = tensors(module)
    kept: list[int] = []
    found = []
    for options in ((), (RECOMPUTE,)):
        layer, held = layer_of(package, module, recipe, *options), [0]
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, held=held: held.append(t.nbytes) or t, lambda t: t
        ):
            found.append(run(layer, x, dy))
        kept.append(sum(held))
    assert found[0].keys() == found[1].keys()
    for name, one in found[0].items():
        assert torch.equal(one, found[1][name]), name
    copies = x.numel() * (2 if recipe == "bf16" else 1)
    assert kept[0] - kept[1] >= copies
