"""Gradients that nothing is computed of: the tensor that comes in, or one for several arguments.

As of PyTorch's own sum, the operands' gradients are one tensor until autograd accumulates them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fusegen import api
from fusegen.ir.naming import Cell
from fusegen.tuning.variants import publish_cells

from .loading import load_bundle, load_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

ROWS, WIDTH = (2, 16), 32
CLASSES = {
    "add_extra_input": "AddExtraInput",
    "bias": "Bias",
    "linear_residual": "LinearResidual",
    "residual_rms_norm": "ResidualRmsNorm",
    "residual_layer_norm": "ResidualLayerNorm",
}
SIZES: dict[str, tuple[int, ...]] = {"add_extra_input": (), "linear_residual": (WIDTH, WIDTH)}
CELLS = [Cell(module, "bf16") for module in CLASSES]
CELLS += [Cell("linear_residual", recipe) for recipe in ("fp8_delayed", "fp8_block")]
OPTIONS = ("add_to_main_grad", "write_main_grad", "delayed_wgrad", "cached_weights")
every_cell = pytest.mark.parametrize("cell", CELLS, ids=str)

Call = Callable[..., Any]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    more = (Cell("linear_residual", "fp8_block", (option,)) for option in OPTIONS)
    return load_cells("passed_on", tmp_path_factory.mktemp("passed_on"), [*CELLS, *more])


def make(bundle: str, cell: Cell) -> nn.Module:
    torch.manual_seed(0)
    made = importlib.import_module(f"{bundle}.{cell}")
    words = {"bias": True} if cell.module == "linear_residual" else {}
    layer: nn.Module = getattr(made, CLASSES[cell.module])(
        *SIZES.get(cell.module, (WIDTH,)), **words
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def inputs(cell: Cell) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = 1 if cell.module == "bias" else 2
    return [torch.randn(*ROWS, WIDTH, generator=generator).bfloat16() for _ in range(count)]


def outputs(call: Call, data: list[Tensor]) -> tuple[Tensor, ...]:
    found = call(*data)
    return found if isinstance(found, tuple) else (found,)


def incoming(results: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(y.shape, generator=generator).bfloat16() for y in results]


def leaves_of(layer: nn.Module, data: list[Tensor]) -> Tensors:
    named = {f"input {index}": each for index, each in enumerate(data)}
    return named | dict(layer.named_parameters())


def step(layer: nn.Module, data: list[Tensor], call: Call | None = None) -> Tensors:
    """Gradients that autograd accumulated, of a step that these tensors ask for."""
    results = outputs(layer if call is None else call, data)
    torch.autograd.backward(results, incoming(results))
    return {n: each.grad for n, each in leaves_of(layer, data).items() if each.grad is not None}


def subsets(names: list[str]) -> Iterator[set[str]]:
    """Which of the leaves are asked for: each alone, each but one, and all."""
    alone = ({name} for name in names)
    yield from (*alone, *({*names} - {name} for name in names if len(names) > 2), {*names})


class Ops(TorchDispatchMode):
    """Names of the ops of bundles that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "__" in func.name():
            self.names.append(func.name().rpartition("_")[2])
        return func(*args, **(kwargs or {}))


def expected(cell: Cell, layer: nn.Module, data: list[Tensor]) -> Tensors:
    """All gradients, of ops of PyTorch that make none of the shortcuts."""
    x, *extra = [each.detach().double().requires_grad_() for each in data]
    p = {n: each.detach().double().requires_grad_() for n, each in layer.named_parameters()}
    if cell.module == "linear_residual":
        results = (nn.functional.linear(x, p["fc.weight"], p["fc.bias"]) + extra[0],)
    elif cell.module == "bias":
        results = (x + p["bias"],)
    elif cell.module == "add_extra_input":
        results = (x + extra[0],)
    else:
        h = x + extra[0]
        norm = nn.functional.rms_norm if "rms" in cell.module else nn.functional.layer_norm
        results = (norm(h, (WIDTH,), *(p[n] for n in p), eps=1e-5), h)
    torch.autograd.backward(results, [dy.double() for dy in incoming(results)])
    named = {f"input {index}": each for index, each in enumerate((x, *extra))} | p
    return {name: each.grad for name, each in named.items() if each.grad is not None}


@every_cell
def test_gradients_are_those_of_pytorch_whoever_asks(bundle: str, cell: Cell) -> None:
    names = [*leaves_of(make(bundle, cell), inputs(cell))]
    for asked in subsets(names):
        layer, data = make(bundle, cell), inputs(cell)
        for name, leaf in leaves_of(layer, data).items():
            leaf.requires_grad_(name in asked)
        found = step(layer, data)
        assert {*found} == asked
        for name, want in expected(cell, layer, data).items():
            if name in asked:
                error = (found[name].double() - want).norm() / want.norm()
                assert error < (0.1 if "fp8" in cell.recipe else 0.02), (asked, name)


@every_cell
def test_nothing_shares_memory(bundle: str, cell: Cell) -> None:
    """What is added to one leaf's gradient reaches neither another's nor what came in."""
    layer, data = make(bundle, cell), inputs(cell)
    for each in data:
        each.requires_grad_()
    results = outputs(layer, data)
    given = incoming(results)
    before = [dy.clone() for dy in given]
    torch.autograd.backward(results, given)
    leaves = leaves_of(layer, data)
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert {*grads} == {*leaves}
    places = [each.untyped_storage().data_ptr() for each in (*grads.values(), *given)]
    assert len({*places}) == len(places)
    once = {name: grad.clone() for name, grad in grads.items()}
    for name, leaf in leaves.items():
        leaf.grad.zero_()  # type: ignore[union-attr]
        for other, grad in grads.items():
            assert torch.equal(grad, torch.zeros_like(grad) if other == name else once[other])
        leaf.grad.copy_(once[name])  # type: ignore[union-attr]
    assert all(map(torch.equal, given, before))


@every_cell
def test_steps_accumulate(bundle: str, cell: Cell) -> None:
    layer, data = make(bundle, cell), inputs(cell)
    for each in data:
        each.requires_grad_()
    once = {name: grad.clone() for name, grad in step(layer, data).items()}
    fresh = make(bundle, cell)
    fresh.load_state_dict(layer.state_dict())
    again = step(fresh, [each.detach().requires_grad_() for each in data])
    for name, grad in step(layer, data).items():
        assert torch.equal(grad, once[name] + again[name]), name


@pytest.mark.parametrize("module", ["add_extra_input", "linear_residual", "bias"])
def test_gradients_that_are_laid_out_otherwise(bundle: str, module: str) -> None:
    """Expanded, as of a sum, and transposed: `.grad` has memory of its own, as its leaf has."""
    cell = Cell(module, "bf16")
    wide = torch.randn(WIDTH, *ROWS).bfloat16().permute(1, 2, 0)
    for dy in (torch.ones(()).bfloat16().expand(*ROWS, WIDTH), wide):
        layer, data = make(bundle, cell), inputs(cell)
        for each in data:
            each.requires_grad_()
        layer(*data).backward(dy)
        last = data[-1].grad
        assert last is not None and torch.equal(last, dy) and last.is_contiguous()
        last.add_(1)
        assert torch.equal(last, dy + 1)


def test_one_tensor_for_both(bundle: str) -> None:
    """One leaf in the place of both operands has both gradients."""
    for module, count in (("add_extra_input", 1), ("residual_rms_norm", 2)):
        cell = Cell(module, "bf16")
        layer, x = make(bundle, cell), inputs(cell)[0].requires_grad_()
        results = outputs(layer, [x, x])
        assert len(results) == count
        given = incoming(results)
        (twice,) = torch.autograd.grad(results, x, given, retain_graph=True)
        one, other = x.detach().requires_grad_(), x.detach().requires_grad_()
        parts = torch.autograd.grad(outputs(layer, [one, other]), (one, other), given)
        assert torch.equal(twice, parts[0] + parts[1])


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_block"])
def test_a_residual_alone_costs_nothing(bundle: str, recipe: str) -> None:
    """Nothing is kept, nothing runs, and no state moves on."""
    cell = Cell("linear_residual", recipe)
    layer, (x, residual) = make(bundle, cell), inputs(cell)
    layer.requires_grad_(False)
    residual.requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x, residual)
    assert not kept
    before = {name: state.clone() for name, state in layer.state_dict().items()}
    (dy,) = incoming((y,))
    with Ops() as ops:
        (found,) = torch.autograd.grad(y, residual, dy)
    assert not ops.names and torch.equal(found, dy)
    assert all(torch.equal(state, before[name]) for name, state in layer.state_dict().items())


@every_cell
def test_the_backward_is_one_op_or_none(bundle: str, cell: Cell) -> None:
    layer, data = make(bundle, cell), inputs(cell)
    for each in data:
        each.requires_grad_()
    with Ops() as ops:
        step(layer, data)
    assert ops.names == ["forward", "backward"][: 1 if cell.module == "add_extra_input" else 2]


@every_cell
def test_a_second_derivative_is_refused(bundle: str, cell: Cell) -> None:
    for index in range(len(inputs(cell))):
        layer, data = make(bundle, cell), inputs(cell)
        layer.requires_grad_(False)
        data[index].requires_grad_()
        results = outputs(layer, data)
        with pytest.raises(RuntimeError, match=f"^{cell}: double backward is not supported"):
            torch.autograd.grad(results, data[index], incoming(results), create_graph=True)


@every_cell
def test_transforms_give_the_same_bits(bundle: str, cell: Cell) -> None:
    """With respect to all inputs and to each: the function's twin returns what came in, too."""
    layer, data = make(bundle, cell), inputs(cell)
    for each in data:
        each.requires_grad_()
    want = step(layer, data)
    fresh, plain = make(bundle, cell), inputs(cell)
    results, pull = torch.func.vjp(fresh, *plain)
    given = incoming(results if isinstance(results, tuple) else (results,))
    found = pull(tuple(given) if isinstance(results, tuple) else given[0])
    for index, gradient in enumerate(found):
        assert torch.equal(gradient, want[f"input {index}"]), index

    def loss(*data: Tensor) -> Tensor:
        pairs = zip(outputs(layer, [*data]), given, strict=True)
        return sum((y.float() * dy.float()).sum() for y, dy in pairs)  # type: ignore[return-value]

    layer = make(bundle, cell)
    layer.requires_grad_(False)
    every = torch.func.grad(loss, argnums=tuple(range(len(plain))))(*plain)
    alone = [torch.func.grad(loss, argnums=index)(*plain) for index in range(len(plain))]
    for index, (one, other) in enumerate(zip(every, alone, strict=True)):
        assert one.shape == other.shape == plain[index].shape
        if cell.recipe != "fp8_delayed":  # whose scales move on
            assert torch.equal(one, want[f"input {index}"]) and torch.equal(one, other)
    batch = [torch.stack((each, -each)) for each in plain]
    rows = torch.func.vmap(torch.func.grad(loss, argnums=len(plain) - 1))(*batch)
    if cell.recipe != "fp8_delayed":
        for index, sign in enumerate((1, -1)):
            one = torch.func.grad(loss, argnums=len(plain) - 1)(*(sign * e for e in plain))
            assert torch.equal(rows[index], one)


@every_cell
def test_transforms_refuse_a_second_derivative(bundle: str, cell: Cell) -> None:
    """Of whichever input: that of one whose gradient is what came in would be silently zero."""
    layer, data = make(bundle, cell), inputs(cell)
    layer.requires_grad_(False)

    def squared(*data: Tensor) -> Any:
        return sum(y.float().square().sum() for y in outputs(layer, [*data]))

    for index in range(len(data)):
        once = torch.func.grad(squared, argnums=index)
        for twice in (torch.func.grad(lambda *d: once(*d).float().sum()), torch.func.jacrev(once)):  # noqa: B023
            with pytest.raises(RuntimeError, match=f"^{cell}: double backward is not supported"):
                twice(*data)


@every_cell
def test_compiled_whole(bundle: str, cell: Cell) -> None:
    names = [*leaves_of(make(bundle, cell), inputs(cell))]
    for asked in subsets(names):
        torch._dynamo.reset()
        found = []
        for compiled in (False, True):
            layer, data = make(bundle, cell), inputs(cell)
            for name, leaf in leaves_of(layer, data).items():
                leaf.requires_grad_(name in asked)
            call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
            found.append(step(layer, data, call))
        eager, whole = found
        assert {*eager} == {*whole} == asked
        assert all(torch.equal(eager[name], whole[name]) for name in asked), asked
        places = [each.untyped_storage().data_ptr() for each in whole.values()]
        assert len({*places}) == len(places)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.recipe != "fp8_delayed"], ids=str)
def test_checkpoints(bundle: str, cell: Cell, reentrant: bool) -> None:
    """Of recipes without state, which a forward that runs twice would move on twice."""
    found = []
    for again in (False, True):
        layer, data = make(bundle, cell), inputs(cell)
        for each in data:
            each.requires_grad_()

        def call(*data: Tensor) -> Any:
            return checkpoint(layer, *data, use_reentrant=reentrant)  # noqa: B023

        found.append(step(layer, data, call if again else None))
    plain, again_ = found
    assert {*plain} == {*again_}
    assert all(torch.equal(plain[name], again_[name]) for name in plain)


@pytest.mark.parametrize("option", OPTIONS)
def test_options(bundle: str, option: str) -> None:
    """The gradients of a module without the option, for whichever input alone, and for both."""
    plain, chosen = (Cell("linear_residual", "fp8_block", words) for words in ((), (option,)))
    for trained in (False, True):
        for asked in ({"input 0"}, {"input 1"}, {"input 0", "input 1"}):
            found = []
            for cell in (plain, chosen):
                layer, data = make(bundle, cell), inputs(cell)
                layer.requires_grad_(trained)
                for parameter in layer.parameters():
                    parameter.main_grad = torch.full(parameter.shape, 8.0)  # type: ignore[attr-defined]
                if hasattr(layer, "refresh_weights"):
                    layer.refresh_weights()
                for index, leaf in enumerate(data):
                    leaf.requires_grad_(f"input {index}" in asked)
                found.append(step(layer, data))
            want, got = ({n: g for n, g in grads.items() if n in asked} for grads in found)
            assert {*want} == {*got} == asked
            assert all(torch.equal(want[name], got[name]) for name in asked)
            if "main_grad" in option:  # that of a frozen weight stays as it is
                (weight,) = (p for n, p in layer.named_parameters() if n == "fc.weight")
                same = (weight.main_grad == 8).all()  # type: ignore[attr-defined]
                assert bool(same) == (not trained)


GROUPED = """\
edition: 2
module: grouped_residual
class: GroupedResidual
summary: A grouped linear layer and a residual
dims: {T: tokens, H: hidden, E: num_groups}
inputs:
  x: {shape: [T, H], role: input}
  residual: {shape: [T, H]}
  split_sizes: {shape: [E], dtype: int64}
chain:
  - {op: grouped_linear, as: fc, dims: {K: H, N: H}}
  - {op: add_extra_input, as: sum, dims: {D: H}, with: {extra: residual}}
"""


def test_rows_past_the_groups_reach_no_gradient(tmp_path: Path) -> None:
    """Where rows are in groups, a residual's gradient is not what came in: it ends in zeros."""
    (tmp_path / "specs" / "modules").mkdir(parents=True)
    (tmp_path / "specs" / "modules" / "grouped_residual.yaml").write_text(GROUPED)
    specs = api.load_specs(api.Folders(specs=(tmp_path / "specs",)))
    cells = [Cell("grouped_residual", "bf16")]
    assert not publish_cells(specs, "cpu", cells, "passed_on_groups", tmp_path / "cpu")
    package = load_bundle("passed_on_groups_bundle", tmp_path / "cpu")
    made: Any = importlib.import_module(f"{package}.grouped_residual__bf16")
    layer = made.GroupedResidual(num_groups=2, hidden=WIDTH)
    x, residual = (torch.randn(8, WIDTH).bfloat16().requires_grad_() for _ in range(2))
    dy = torch.randn(8, WIDTH).bfloat16()
    dy[6:] = torch.nan
    layer(x, residual, torch.tensor([2, 4])).backward(dy)
    for leaf in (x, residual):
        assert leaf.grad is not None and not leaf.grad[6:].any()
    assert torch.equal(residual.grad[:6], dy[:6])  # type: ignore[index]
