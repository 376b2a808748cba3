"""Function transforms and forward-mode AD: right, or refused by the module's name."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

from fusegen.ir.naming import Cell

from .loading import load_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
SIZES = {
    "linear": (32, 48),
    "grouped_linear": (3, 32, 48),
    "grouped_mlp": (3, 32, 48),
    "quantize": (),
    "silu": (),
    "scaled_swiglu": (),
}
GEMMS = ("linear", "grouped_linear", "grouped_mlp")
CELLS = [Cell(module, recipe) for module in (*GEMMS, "quantize") for recipe in RECIPES]
CELLS += [Cell("silu", "bf16"), Cell("scaled_swiglu", "bf16")]
OPTIONS = ("cached_weights", "quantized_weights", "recompute_activations", "scaled_bias")
REFUSING = ("add_to_main_grad", "delayed_wgrad", "reduced_amax")
every_cell = pytest.mark.parametrize("cell", CELLS, ids=str)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    more = (Cell("grouped_mlp", "fp8_delayed", (option,)) for option in (*OPTIONS, *REFUSING))
    return load_cells("transforms", tmp_path_factory.mktemp("transforms"), [*CELLS, *more])


def make(bundle: str, cell: Cell) -> Any:
    torch.manual_seed(0)
    loaded = importlib.import_module(f"{bundle}.{cell}")
    name = next(n for n, c in vars(loaded).items() if inspect.isclass(c) and hasattr(c, "describe"))
    layer = getattr(loaded, name)(*SIZES[cell.module])
    return layer


def inputs(module: str, seed: int = 1) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 32, generator=generator).bfloat16()
    rest = (torch.tensor([9, 0, 13]), torch.rand(24, generator=generator))
    if module == "scaled_swiglu":
        return x, rest[1]
    return x, *rest[: GEMMS.index(module) if module in GEMMS else 0]


def loss(call: Callable[..., Tensor], *data: Tensor) -> Tensor:
    return call(*data).float().square().sum()


def called_with(layer: nn.Module, cell: Cell) -> Callable[[Tensor], Tensor]:
    """The module as a function of x, starting from the same state each time."""
    _, *rest = inputs(cell.module)

    def call(x: Tensor) -> Tensor:
        y: Tensor = copy.deepcopy(layer)(x, *rest)
        return y

    return call


def expected_gradients(layer: nn.Module, cell: Cell) -> dict[str, Tensor]:
    other = copy.deepcopy(layer)
    x, *rest = inputs(cell.module)
    leaf = x.clone().requires_grad_()
    loss(other, leaf, *rest).backward()
    found = {name: p.grad for name, p in other.named_parameters() if p.grad is not None}
    assert leaf.grad is not None
    return {"x": leaf.grad, **found}


# Forward mode


FORWARD_MODE: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](torch.ones_like(x)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).float().sum())(x),
    "jvp of grad": lambda f, x: torch.func.jvp(
        torch.func.grad(lambda x: f(x).float().sum()), (x,), (torch.ones_like(x),)
    ),
    "jvp of vmap": lambda f, x: torch.func.jvp(
        torch.func.vmap(f), (x[None],), (torch.ones_like(x)[None],)
    ),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@every_cell
def test_forward_mode_is_refused_by_name(bundle: str, cell: Cell, frozen: bool) -> None:
    layer = make(bundle, cell).requires_grad_(not frozen)
    x, *rest = inputs(cell.module)

    def call(x: Tensor) -> Tensor:
        y: Tensor = layer(x, *rest)
        return y

    for differentiate in FORWARD_MODE.values():
        with pytest.raises(RuntimeError, match=f"^{cell}: forward-mode AD .*use reverse mode"):
            differentiate(call, x)
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match=f"^{cell}: forward-mode AD"),
    ):
        call(forward_ad.make_dual(x, torch.ones_like(x)))
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(RuntimeError, match="forward-mo"):
        call(forward_ad.make_dual(x, torch.ones_like(x)))


@every_cell
def test_what_has_no_tangent_passes(bundle: str, cell: Cell) -> None:
    """Forward mode over something else: the module is a constant in it."""
    layer = make(bundle, cell)
    call, x = called_with(layer, cell), inputs(cell.module)[0]
    expected = call(x)
    y, dy = torch.func.jvp(lambda t: call(x) * t, (torch.ones(()),), (torch.ones(()),))
    assert torch.equal(y, expected * torch.ones(())) and torch.equal(dy.float(), expected.float())
    with forward_ad.dual_level():
        assert torch.equal(call(x), expected)


def test_tangents_of_weights_are_refused(bundle: str) -> None:
    cell = Cell("grouped_mlp", "fp8_block")
    layer = make(bundle, cell)
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def call(weights: dict[str, Tensor]) -> Tensor:
        y: Tensor = functional_call(layer, weights, inputs(cell.module))
        return y

    with pytest.raises(RuntimeError, match=f"^{cell}: forward-mode AD"):
        torch.func.jvp(call, (weights,), (weights,))


@pytest.mark.parametrize("recipe", RECIPES)
def test_functions_that_quantise_refuse_tangents(bundle: str, recipe: str) -> None:
    x = inputs("linear")[0]
    module = importlib.import_module(f"{bundle}.quantize__{recipe}")

    def codes(x: Tensor) -> Tensor:
        data: Tensor = module.quantize(x).rowwise_data
        return data.view(torch.uint8)

    with pytest.raises(RuntimeError, match=f"^quantize__{recipe}: forward-mode AD"):
        torch.func.jvp(codes, (x,), (x,))
    for row, given in zip(torch.func.vmap(codes)(torch.stack([x, 2 * x])), (x, 2 * x), strict=True):
        assert torch.equal(row, codes(given))


# Reverse mode


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@every_cell
def test_reverse_mode_gives_the_same_bits(bundle: str, cell: Cell, frozen: bool) -> None:
    layer = make(bundle, cell)
    expected = expected_gradients(layer, cell)
    layer.requires_grad_(not frozen)
    call, x = called_with(layer, cell), inputs(cell.module)[0]
    dx = torch.func.grad(partial(loss, call))(x)
    assert torch.equal(dx, expected["x"])
    y, pull = torch.func.vjp(call, x)
    assert torch.equal(y, call(x))
    assert torch.equal(pull((2 * y.float()).to(y.dtype))[0], expected["x"])
    jacobian = torch.func.jacrev(lambda x: torch.stack([loss(call, x), 2 * loss(call, x)]))(x)
    assert torch.equal(jacobian[0], expected["x"]) and bool(jacobian[1].any())


@every_cell
def test_gradients_of_parameters(bundle: str, cell: Cell) -> None:
    layer = make(bundle, cell)
    expected = expected_gradients(layer, cell)
    other = copy.deepcopy(layer)
    weights = {name: p.detach() for name, p in other.named_parameters()}

    def call(weights: dict[str, Tensor]) -> Tensor:
        return loss(lambda *data: functional_call(other, weights, data), *inputs(cell.module))

    found = torch.func.grad(call)(weights) if weights else {}
    assert {"x", *found} == {*expected}
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_second_derivative_is_refused(bundle: str, recipe: str) -> None:
    cell = Cell("grouped_mlp", recipe)
    call, x = called_with(make(bundle, cell), cell), inputs(cell.module)[0]
    once = torch.func.grad(partial(loss, call))
    for twice in (torch.func.jacrev(once), torch.func.grad(lambda x: once(x).float().sum())):
        with pytest.raises(RuntimeError, match=f"^{cell}: double backward is not supported"):
            twice(x)


# vmap


@every_cell
def test_vmap_is_a_loop(bundle: str, cell: Cell) -> None:
    """All forwards, then all backwards: over x, over its gradient, and the other way round."""
    layer = make(bundle, cell)
    _, *rest = inputs(cell.module)
    batch = torch.stack([(x := inputs(cell.module)[0]), 2 * x, -x], dim=1)
    for frozen in (False, True):
        layer.requires_grad_(not frozen)
        one, other = copy.deepcopy(layer), copy.deepcopy(layer)
        ys = torch.func.vmap(lambda x: one(x, *rest), in_dims=1)(batch)  # noqa: B023
        for y, x in zip(ys, batch.unbind(1), strict=True):
            assert torch.equal(y, other(x, *rest))
    leaves = [x.clone().requires_grad_() for x in batch.unbind(1)]

    def each_loss(one: nn.Module, data: list[Tensor]) -> list[Tensor]:
        return [loss(one, x, *rest) for x in data]

    def inner(one: nn.Module) -> Any:
        gradient = torch.func.grad(lambda x: loss(one, x, *rest))
        return torch.func.vmap(gradient, in_dims=1)(batch)

    def outer(one: nn.Module) -> Any:
        total = torch.func.vmap(lambda x: loss(one, x, *rest), in_dims=1)
        return torch.func.grad(lambda b: total(b).sum())(batch).unbind(1)

    def one_by_one(one: nn.Module) -> Any:
        losses = each_loss(one, leaves)
        return [torch.autograd.grad(*pair)[0] for pair in zip(losses, leaves, strict=True)]

    def at_once(one: nn.Module) -> Any:  # PyTorch runs the last one's backward first
        return torch.autograd.grad(torch.stack(each_loss(one, leaves)).sum(), leaves)

    for found, expected in ((inner, one_by_one), (outer, at_once)):
        one, other = copy.deepcopy(layer), copy.deepcopy(layer)
        for got, want in zip(found(one), expected(other), strict=True):
            assert torch.equal(got, want)
        for state, want in zip(one.buffers(), other.buffers(), strict=True):
            assert torch.equal(state, want)


@pytest.mark.parametrize("recipe", RECIPES)
def test_vmap_over_models(bundle: str, recipe: str) -> None:
    """Parameters and state stacked, as of an ensemble."""
    cell = Cell("grouped_mlp", recipe)
    layers = [make(bundle, cell) for _ in range(2)]
    with torch.no_grad():
        layers[1].fc1.weight.mul_(2.0)
    weights, states = torch.func.stack_module_state(layers)
    data = inputs(cell.module)

    def call(weights: Any, states: Any) -> Tensor:
        return loss(lambda *data: functional_call(layers[0], (weights, states), data), *data)

    weights = {name: weight.detach() for name, weight in weights.items()}
    gradients = torch.func.vmap(torch.func.grad(call))(weights, states)
    for index, layer in enumerate(layers):
        loss(layer, *data).backward()
        for name, parameter in layer.named_parameters():
            assert torch.equal(gradients[name][index], parameter.grad), name
        for name, buffer in layer.named_buffers():
            assert torch.equal(states[name][index], buffer), name


# Options, compiled code


@pytest.mark.parametrize("option", OPTIONS)
def test_options(bundle: str, option: str) -> None:
    cell = Cell("grouped_mlp", "fp8_delayed", (option,))
    layer = make(bundle, cell)
    call, x = called_with(layer, cell), inputs(cell.module)[0]
    assert torch.equal(
        torch.func.grad(partial(loss, call))(x), expected_gradients(layer, cell)["x"]
    )
    with pytest.raises(RuntimeError, match=f"^{cell}: forward-mode AD"):
        torch.func.jvp(call, (x,), (x,))


@pytest.mark.parametrize("option", REFUSING)
def test_what_a_transform_would_do_twice_is_refused(bundle: str, option: str) -> None:
    cell = Cell("grouped_mlp", "fp8_delayed", (option,))
    layer = make(bundle, cell)
    for weight in layer.parameters():
        weight.main_grad = torch.zeros(weight.shape)
    x, *rest = inputs(cell.module)
    for transform in (torch.func.grad, torch.func.vmap):
        given = x if transform is torch.func.grad else x[None]
        with pytest.raises(RuntimeError, match=f"^{cell}: function transforms"):
            transform(lambda x: loss(layer, x, *rest))(given)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_compiled(bundle: str, recipe: str, frozen: bool) -> None:
    cell = Cell("grouped_mlp", recipe)
    layer = make(bundle, cell)
    expected = expected_gradients(layer, cell)["x"]
    layer.requires_grad_(not frozen)
    x, *rest = inputs(cell.module)

    def call(x: Tensor) -> Tensor:
        y: Tensor = layer(x, *rest)
        return y

    with pytest.raises(RuntimeError, match="forward-mode AD"):
        torch.compile(lambda x: torch.func.jvp(call, (x,), (x,)), backend="aot_eager")(x)
    gradient = torch.compile(torch.func.grad(partial(loss, call)), backend="aot_eager")
    assert torch.equal(gradient(x), expected)
    whole = torch.compile(torch.func.grad(call), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="run in eager mode"):
        whole(x)
