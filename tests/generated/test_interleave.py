"""Gate and up that alternate: the bits of whole halves, for every gated activation and recipe."""

from __future__ import annotations

import importlib
import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from plans import SPECS
from torch import Tensor

from fusegen.ir.naming import Cell
from fusegen.spec.offers import modules_with

from .loading import load_cells

INTERLEAVED, BLOCK = "interleaved_32", 32
OFFERING = modules_with(INTERLEAVED, SPECS)
ALONE = [name for name in OFFERING if not SPECS.modules[name].chain]
CHAINS = [name for name in OFFERING if SPECS.modules[name].chain]
SPLITS = torch.tensor([9, 0, 40])
SIZES = {"E": 3, "H": 64, "F": 96, "K": 64, "D": 96, "S": 96}
"""Of constructors, by the symbols of the built-in chains."""
HALVED = {"weight": -2, "bias": -1}
"""Parameters of linears, and their axis of which a gated activation reads halves."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a package with whole and alternating halves next to each other."""
    cells = [
        Cell(module, recipe, options)
        for module in OFFERING
        for recipe in (SPECS.recipes if module in CHAINS else ("bf16",))
        for options in ((), (INTERLEAVED,))
    ]
    return load_cells("interleave", tmp_path_factory.mktemp("interleave"), cells)


def _named(bundle: str, name: str, module: str, recipe: str, *options: str) -> Any:
    """A function or class of a cell."""
    cell = str(Cell(module, recipe, options))
    return getattr(importlib.import_module(f"{bundle}.{cell}"), name)


def _function(bundle: str, module: str, *options: str) -> Any:
    return _named(bundle, module, module, "bf16", *options)


def _layer(bundle: str, module: str, recipe: str, *options: str) -> Any:
    torch.manual_seed(0)
    spec = SPECS.modules[module]
    made = _named(bundle, spec.class_, module, recipe, *options)
    sizes = {**SIZES, "E": 16} if "router" in spec.ops else SIZES  # each token has 8
    known = inspect.signature(made).parameters
    named = {name: sizes[s] for s, name in spec.dims.items() if s in sizes and name in known}
    return made(**named, bias=True)


def interleave(x: Tensor, dim: int) -> Tensor:
    """The same columns or rows, of gate and up by turns in blocks."""
    blocks = x.unflatten(dim, (2, -1, BLOCK))
    first = dim % x.dim()
    return blocks.transpose(first, first + 1).flatten(first, first + 2)


def _normal(*shape: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng).bfloat16().requires_grad_()


def test_what_alternates() -> None:
    order = interleave(torch.arange(128), 0).tolist()
    assert order == [*range(32), *range(64, 96), *range(32, 64), *range(96, 128)]


@pytest.mark.parametrize("module", ALONE)
def test_activations(bundle: str, module: str) -> None:
    x, dy = _normal(49, 192, seed=1), _normal(49, 96, seed=2).detach()
    scales = torch.rand(49, requires_grad=True) if module.startswith("scaled") else None
    given = [] if scales is None else [scales]
    found = []
    for options, place in (((), lambda t: t), ((INTERLEAVED,), lambda t: interleave(t, -1))):
        leaf = place(x.detach()).clone().requires_grad_()
        y = _function(bundle, module, *options)(leaf, *given)
        grads = torch.autograd.grad(y, [leaf, *given], dy)
        found.append((y, grads))
    (y, (dx, *rest)), (other, (dother, *others)) = found
    assert torch.equal(y, other)
    assert torch.equal(interleave(dx, -1), dother)
    assert all(torch.equal(a, b) for a, b in zip(rest, others, strict=True))


def _further(module: str) -> tuple[Tensor, ...]:
    """What a chain takes beside x: of experts how many rows each has, or which a token chose."""
    inputs = SPECS.modules[module].inputs
    if "split_sizes" in inputs:
        return SPLITS, torch.rand(64)
    if "ids" in inputs:
        ids = torch.rand(64, SIZES["E"]).argsort(-1)[:, :2].int()
        return torch.rand(64, 2), ids, ids.flatten().bincount(minlength=SIZES["E"])
    return ()


def _halves(op: str) -> bool:
    return any(tensor.halves for tensor in SPECS.ops[op].tensors.values())


@pytest.mark.parametrize("recipe", SPECS.recipes)
@pytest.mark.parametrize("module", CHAINS)
def test_chains(bundle: str, module: str, recipe: str) -> None:
    """Rows of weights before gated activations, and of their biases, change places: the same, up to
    the order of sums.
    """
    chain = SPECS.modules[module].chain
    firsts = [one.as_ for one, other in pairwise(chain) if "linear" in one.op and _halves(other.op)]
    further = _further(module)
    x = _normal(64, 64, seed=1)
    found = []
    for options, place in (((), lambda t, _: t), ((INTERLEAVED,), interleave)):
        layer = _layer(bundle, module, recipe, *options)
        named = {f"{first}.{name}": dim for first in firsts for name, dim in HALVED.items()}
        with torch.no_grad():
            for name, dim in named.items():
                parameter = layer.get_parameter(name)
                value = _normal(*parameter.shape, seed=2 - dim).detach()
                parameter.copy_(place(value, dim))
        result = layer(x, *further)
        y = result[0] if isinstance(result, tuple) else result
        leaves = {**dict(layer.named_parameters()), "x": x}
        dy = _normal(*y.shape, seed=9).detach()
        gradients = torch.autograd.grad(y, list(leaves.values()), dy)
        found.append({"y": y.detach(), **dict(zip(leaves, gradients, strict=True))})
    whole, alternating = found
    for name, other in alternating.items():
        one = interleave(whole[name], named[name]) if name in named else whole[name]
        if recipe == "bf16":
            torch.testing.assert_close(other, one)
        error = (one.double() - other.double()).norm() / one.double().norm()
        assert error <= SPECS.recipes[recipe].tolerance.end_to_end


def test_other_widths_are_refused(bundle: str) -> None:
    swiglu = _function(bundle, "swiglu", INTERLEAVED)
    message = r"D \(width\): expected a multiple of 32 on cpu, got 48"
    with pytest.raises((ValueError, RuntimeError), match=message):
        swiglu(torch.zeros(4, 96, dtype=torch.bfloat16))
