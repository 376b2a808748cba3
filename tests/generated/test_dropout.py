"""Dropout of the CPU bundle: what is zeroed, how often, and when it is drawn."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusegen import api
from fusegen.ir.naming import Cell

from .loading import load_bundle, load_cells, run_generated_tests, write_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

DTYPES = (torch.bfloat16, torch.float16)
STATE = torch.tensor([2**62 + 12345, 2**40 + 7])


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("dropout")
    return importlib.import_module(
        f"{load_cells('dropout', folder, [Cell('dropout', 'bf16')])}.dropout__bf16"
    )


def kept(module: Any, p: float, *shape: int, state: Tensor = STATE) -> Tensor:
    """[*shape] float64, 1 where an element is kept."""
    return (module.dropout(torch.ones(shape, dtype=torch.float16), state, p=p) != 0).double()


def test_generated_tests_pass(tmp_path: Path) -> None:
    run_generated_tests(write_cells("dropout_alone", "cpu", tmp_path, [Cell("dropout", "bf16")]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
@pytest.mark.parametrize("shape", [(40,), (3, 5, 13), (2, 8), (0, 16), (3, 0)])
def test_the_gradient_has_the_mask_of_the_result(
    module: Any, shape: tuple[int, ...], p: float, dtype: torch.dtype
) -> None:
    """Of any width: the last byte of a row may have fewer than 8 elements."""
    rng = torch.Generator().manual_seed(1)
    x = (1.0 + torch.rand(shape, generator=rng)).to(dtype).requires_grad_()
    dy = (1.0 + torch.rand(shape, generator=rng)).to(dtype)
    y = module.dropout(x, STATE, p=p)
    (dx,) = torch.autograd.grad(y, x, dy)
    scale = 1 / (1 - torch.tensor(p))
    zeroed = y == 0
    assert torch.equal(y, (x.detach().float() * scale).to(dtype).masked_fill(zeroed, 0))
    assert torch.equal(dx, (dy.float() * scale).to(dtype).masked_fill(zeroed, 0))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_zeroed_as_were_asked_for(module: Any, p: float) -> None:
    """Mean, variance and neighbours are those of independent draws, within five deviations."""
    rows, columns = 512, 1024
    bits = kept(module, p, rows, columns)
    count, variance = bits.numel(), p * (1 - p)
    assert (bits.mean() - (1 - p)).abs() <= 5 * (variance / count) ** 0.5
    of_columns, of_rows = bits.mean(0), bits.mean(1)
    for means, draws in ((of_columns, rows), (of_rows, columns)):
        ratio = means.var() * draws / variance
        assert (ratio - 1).abs() <= 5 * (2 / len(means)) ** 0.5
    less = bits - (1 - p)
    for shift in ((1, 0), (0, 1), (0, 2), (0, 4), (0, 8), (1, 1)):
        together = (less * less.roll(shift, (0, 1))).mean() / variance
        assert together.abs() <= 5 / count**0.5, shift


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_and_everything(module: Any, dtype: torch.dtype) -> None:
    x = torch.full((4, 24), torch.inf, dtype=dtype).requires_grad_()
    for p, wanted in ((0.0, x.detach()), (1.0, torch.zeros_like(x))):
        y = module.dropout(x, STATE, p=p)
        (dx,) = torch.autograd.grad(y, x, x.detach())
        assert torch.equal(y, wanted) and torch.equal(dx, wanted)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_a_probability_that_is_none_is_refused(module: Any, p: float) -> None:
    message = "dropout__bf16: p: expected a number from 0 to 1, got"
    with pytest.raises(RuntimeError, match=message):
        module.Dropout(p)(torch.ones(2, 8, dtype=torch.bfloat16))


def test_a_state_gives_the_same_mask_and_another_one_another(module: Any) -> None:
    first = kept(module, 0.5, 64, 64)
    assert torch.equal(first, kept(module, 0.5, 64, 64))
    for change in (torch.tensor([1, 0]), torch.tensor([0, 1])):
        other = kept(module, 0.5, 64, 64, state=STATE + change)
        assert ((first - other).abs().mean() - 0.5).abs() <= 0.05


def test_a_module_draws_from_the_generator_of_pytorch(module: Any) -> None:
    layer, x = module.Dropout(0.5), torch.ones(8, 64, dtype=torch.bfloat16)
    torch.manual_seed(0)
    first, second = layer(x), layer(x)
    torch.manual_seed(0)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)
    assert torch.equal(layer(x, STATE), module.dropout(x, STATE, p=0.5))
    assert not layer.state_dict() and not [*layer.buffers()]


def test_evaluation_gives_the_input_itself_and_draws_nothing(module: Any) -> None:
    layer, x = module.Dropout(0.5).eval(), torch.ones(8, 64, dtype=torch.bfloat16)
    before = torch.get_rng_state()
    assert layer(x) is x
    assert torch.equal(torch.get_rng_state(), before)


class Block(nn.Module):
    """Two layers with dropout between and behind them."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        make = {"bias": False, "dtype": torch.bfloat16}
        self.layers = nn.Sequential(
            nn.Linear(32, 64, **make),
            module.Dropout(0.3),
            nn.Linear(64, 32, **make),
            module.Dropout(0.3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_computes_the_same_mask_again(module: Any, reentrant: bool) -> None:
    torch.manual_seed(0)
    block, x = Block(module), torch.randn(16, 32).bfloat16().requires_grad_()
    leaves = (x, *block.parameters())

    def gradients(run: Any) -> list[Tensor]:
        torch.manual_seed(1)
        y = run(x)
        y.float().square().sum().backward()
        found = [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        for leaf in leaves:
            leaf.grad = None
        return found

    plain = gradients(block)
    again = gradients(lambda x: checkpoint(block, x, use_reentrant=reentrant))
    assert len(plain) == len(again) == 1 + len(leaves)
    assert all(map(torch.equal, plain, again))


def test_a_compiled_module_draws_in_every_call(module: Any) -> None:
    """As one graph; the op is the same, and what it is given is drawn in the graph."""
    layer, x = module.Dropout(0.5), torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    for y in (first, second):
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, y)
    assert torch.equal(compiled(x, STATE), layer(x, STATE))


def test_an_exported_program_has_the_op_and_the_draw(module: Any) -> None:
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    program = torch.export.export(module.Dropout(0.5), (x,))
    names = [str(node.target) for node in program.graph.nodes]
    assert any("dropout__bf16_forward" in name for name in names)
    assert any("randint" in name for name in names)
    run = program.module()
    assert not torch.equal(run(x), run(x))
    stated = torch.export.export(module.Dropout(0.5), (x, STATE)).module()
    assert torch.equal(stated(x, STATE), module.dropout(x, STATE, p=0.5))


def test_function_transforms(module: Any) -> None:
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    layer = module.Dropout(0.5)
    found = torch.func.grad(lambda x: module.dropout(x, STATE, p=0.5).float().sum())(x)
    assert torch.equal(found, module.dropout(x, STATE, p=0.5))
    called = torch.func.functional_call(layer, {}, (x, STATE))
    assert torch.equal(called, layer(x, STATE))


def test_one_bit_of_an_element_is_kept_for_the_gradient(module: Any) -> None:
    x = torch.ones(4, 61, dtype=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module.dropout(x, STATE)
    assert [(tuple(each.shape), each.dtype) for each in saved] == [((4, 8), torch.uint8)]
    assert not (saved[0][:, -1] >> 5).any()  # bits of no element


CHAIN = """\
edition: 2
module: linear_dropout
class: LinearDropout
summary: A linear layer and dropout behind it
dims: {T: tokens, K: in_features, N: out_features}
inputs:
  x: {shape: [T..., K], role: input}
  random: {shape: [2], dtype: int64, drawn: true}
chain:
  - {op: linear, as: fc}
  - {op: dropout, as: drop, dims: {D: N}, attributes: {p: 0.25}}
"""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a chain, with two recipes."""
    folder = tmp_path_factory.mktemp("dropout_chain")
    (folder / "specs" / "modules").mkdir(parents=True)
    (folder / "specs" / "modules" / "linear_dropout.yaml").write_text(CHAIN, encoding="utf-8")
    request = api.Request(
        out=folder,
        archs=("cpu",),
        modules=("linear_dropout",),
        recipes=("bf16", "fp8_current"),
        namespace="dropout_chain",
        folders=api.Folders(specs=(folder / "specs",)),
    )
    assert len(api.generate(request).bundles[0].selection.cells) == 2
    return folder / "cpu"


def test_generated_tests_of_a_chain_pass(chain: Path) -> None:
    run_generated_tests(chain)


def test_a_chain_drops_nothing_in_evaluation(chain: Path) -> None:
    name = load_bundle("dropout_chain_bundle", chain)
    cell = importlib.import_module(f"{name}.linear_dropout__bf16")
    layer, x = cell.LinearDropout(64, 128), torch.randn(16, 64).bfloat16()
    assert layer.drop_p == 0.25
    wanted = nn.functional.linear(x, layer.fc.weight)
    y = layer(x)
    kept = y != 0
    assert 0 < kept.float().mean() < 1
    assert torch.equal(y[kept], (wanted.float() * (1 / 0.75)).bfloat16()[kept])
    before = torch.get_rng_state()
    assert torch.equal(layer.eval()(x), wanted)
    assert torch.equal(torch.get_rng_state(), before)
