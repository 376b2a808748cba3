"""Gradients of weights that wait for ``backward_dw``: the bits of the others, and none is lost."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusegen.ir.naming import Cell

from .loading import load_cells
from .ranks import Place, run_ranks

pytestmark = pytest.mark.usefixtures("fresh_compiler")

RECIPES = (
    "bf16", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"
)  # fmt: skip
CLASSES = {
    "linear": "Linear",
    "grouped_linear": "GroupedLinear",
    "grouped_mlp": "GroupedMLP",
    "grouped_mlp_srelu": "GroupedMLPSReLU",
}
MAIN_GRADS = ("add_to_main_grad", "write_main_grad")
DELAYED = "delayed_wgrad"
T, E, K, N = 24, 3, 32, 48
SPLITS = ([9, 0, 13], [0, 0, 0], [24, 0, 0], [1, 1, 1], [8, 8, 8])
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_module = pytest.mark.parametrize("module", CLASSES)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a package with immediate and delayed cells next to each other."""
    folder = tmp_path_factory.mktemp("delay")
    choices: list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
        ((*CLASSES,), RECIPES, ()),
        *(((*CLASSES,), RECIPES, (word,)) for word in MAIN_GRADS),
        (("grouped_mlp",), ("fp8_block", "mxfp8"), ("cached_weights",)),
        (("grouped_mlp",), ("fp8_block", "mxfp8"), ("add_to_main_grad", "cached_weights")),
        (("grouped_mlp",), RECIPES, ("recompute_activations",)),
        (("grouped_mlp",), ("fp8_delayed",), ("reduced_amax",)),
        (("grouped_mlp",), ("nvfp4",), ("high_precision_backward",)),
    ]
    cells = (
        Cell.parse(name(module, recipe, *options, delayed=delayed))
        for modules, recipes, options in choices
        for module in modules
        for recipe in recipes
        for delayed in (False, True)
    )
    return load_cells("delayed_wgrad", folder, cells)


def name(module: str, recipe: str, *options: str, delayed: bool = True) -> str:
    """Of a cell; options stand in the order of the module's spec."""
    first = [word for word in options if word in MAIN_GRADS]
    rest = [word for word in options if word not in MAIN_GRADS]
    return "__".join((module, recipe, *first, *([DELAYED] if delayed else []), *rest))


def cell(bundle: str, module: str, recipe: str, *options: str, delayed: bool = True) -> ModuleType:
    return importlib.import_module(f"{bundle}.{name(module, recipe, *options, delayed=delayed)}")


def make(
    bundle: str, module: str, recipe: str, *options: str, delayed: bool = True, **more: Any
) -> Any:
    torch.manual_seed(0)
    sizes = (K, N) if module == "linear" else (E, K, N)
    found = getattr(cell(bundle, module, recipe, *options, delayed=delayed), CLASSES[module])
    layer = found(*sizes, bias=True, **more)
    if any(word in MAIN_GRADS for word in options):
        for parameter in layer.parameters():
            parameter.main_grad = torch.full(parameter.shape, 0.5)
    return layer


def inputs(
    module: str, seed: int = 1, splits: list[int] = SPLITS[0], rows: int = T
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, K, generator=generator).bfloat16()
    probs = torch.rand(rows, generator=generator)
    more = min([*CLASSES].index(module), 2)
    return [x.requires_grad_(), torch.tensor(splits), probs][: 1 + more]


def backward(call: Any, data: list[Tensor]) -> Tensor:
    """One micro-batch; the gradient of its input."""
    y = call(*data)
    (y.float().square().sum() + y.float().sum()).backward()
    assert data[0].grad is not None
    return data[0].grad


def drain(layer: Any) -> None:
    while layer.wgrad_queue.pending:
        layer.backward_dw()


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
        if hasattr(parameter, "main_grad"):
            found[f"{name}.main_grad"] = parameter.main_grad
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def of_weights(layer: nn.Module) -> dict[str, Tensor]:
    """Without those of biases, which no backward delays."""
    return {name: grad for name, grad in gradients(layer).items() if "weight" in name}


def pair(bundle: str, module: str, recipe: str, *options: str, **more: Any) -> tuple[Any, Any]:
    plain = make(bundle, module, recipe, *options, delayed=False)
    return plain, make(bundle, module, recipe, *options, **more)


@every_module
@every_recipe
@pytest.mark.parametrize("option", ["", *MAIN_GRADS])
def test_same_bits_with_micro_batches_in_flight(
    bundle: str, module: str, recipe: str, option: str
) -> None:
    """Ragged and empty groups; all backwards first, then as many calls, oldest first."""
    plain, delayed = pair(bundle, module, recipe, *filter(None, [option]))
    for seed, splits in enumerate(SPLITS):
        one, other = (backward(layer, inputs(module, seed, splits)) for layer in (plain, delayed))
        assert torch.equal(one, other)
        assert delayed.wgrad_queue.pending == seed + 1
    for name, parameter in delayed.named_parameters():
        assert (parameter.grad is None) == name.endswith("weight"), name
        if name.endswith("weight") and option:
            assert (parameter.main_grad == 0.5).all()
    for left in reversed(range(len(SPLITS))):
        delayed.backward_dw()
        assert delayed.wgrad_queue.pending == left
    same(gradients(plain), gradients(delayed))
    same(plain.state_dict(), delayed.state_dict())


@every_module
@every_recipe
def test_frozen_parts(bundle: str, module: str, recipe: str) -> None:
    """Only what needs a gradient is kept, and only that gets one."""
    for frozen in (["weight"], ["bias"], ["fc1"], ["fc2"], ["x"], ["weight", "bias"]):
        layers = pair(bundle, module, recipe)
        for layer in layers:
            data = inputs(module)
            data[0].requires_grad_("x" not in frozen)
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(not any(word in name for word in frozen))
            y = layer(*data)
            y.float().square().sum().backward()
            drain(layer) if layer is layers[1] else None
        same(*map(gradients, layers))
        if "weight" in frozen:
            assert not [name for name in gradients(layers[1]) if "weight" in name]


def test_nothing_is_kept_that_no_gradient_needs(bundle: str) -> None:
    layer = make(bundle, "grouped_mlp", "bf16")
    with torch.no_grad():
        layer(*inputs("grouped_mlp"))
    assert layer.wgrad_queue.pending == 0
    for parameter in (layer.fc1.weight, layer.fc2.weight):
        parameter.requires_grad_(False)
    backward(layer, inputs("grouped_mlp"))
    assert layer.wgrad_queue.pending == 0
    layer.fc1.weight.requires_grad_(True)
    backward(layer, inputs("grouped_mlp"))
    operands, needs = layer.wgrad_queue.oldest("", (layer.fc1.weight, layer.fc2.weight))
    names = ("dy", "x", "split_sizes", "a", "dh")
    kept = dict(zip(names, operands, strict=True))
    assert needs == (True, False) and kept["a"] is None
    assert kept["dy"].untyped_storage().nbytes() < 8, "its sizes alone"
    assert not any(each.requires_grad for each in operands if each is not None)


@every_recipe
def test_checkpoint(bundle: str, recipe: str) -> None:
    plain, delayed = pair(bundle, "grouped_mlp", recipe)
    found = [
        backward(functools.partial(checkpoint, layer, use_reentrant=False), inputs("grouped_mlp"))
        for layer in (plain, delayed)
    ]
    assert torch.equal(*found)
    assert delayed.wgrad_queue.pending == 1
    drain(delayed)
    same(gradients(plain), gradients(delayed))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((recipe, ("cached_weights",)) for recipe in ("fp8_block", "mxfp8")),
        *((recipe, (MAIN_GRADS[0], "cached_weights")) for recipe in ("fp8_block", "mxfp8")),
        *((recipe, ("recompute_activations",)) for recipe in RECIPES),
        ("nvfp4", ("high_precision_backward",)),
    ],
)  # fmt: skip
def test_together_with_other_choices(bundle: str, recipe: str, options: tuple[str, ...]) -> None:
    plain, delayed = pair(bundle, "grouped_mlp", recipe, *options)
    for seed in range(2):
        for layer in (plain, delayed):
            backward(layer, inputs("grouped_mlp", seed))
    if "cached_weights" in options:  # the gradients of weights read no weight
        delayed.refresh_weights()
    drain(delayed)
    same(gradients(plain), gradients(delayed))


def test_a_refresh_before_the_backward_is_still_refused(bundle: str) -> None:
    layer = make(bundle, "grouped_mlp", "fp8_block", "cached_weights")
    y = layer(*inputs("grouped_mlp"))
    layer.refresh_weights()
    with pytest.raises(RuntimeError, match="refreshed between a forward and its backward"):
        y.sum().backward()
    assert layer.wgrad_queue.pending == 0


SHARED = """
import importlib
found = {}
for kind in ("reduced_amax", "delayed_wgrad__reduced_amax"):
    torch.manual_seed(0)
    module = importlib.import_module(f"bundle.grouped_mlp__fp8_delayed__{kind}")
    layer = module.GroupedMLP(3, 32, 48, bias=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(24, 32, generator=generator).bfloat16().requires_grad_()
        y = layer(x, torch.tensor([9, 0, 13]), torch.rand(24, generator=generator))
        y.float().square().sum().backward()
    while kind.startswith("delayed") and layer.wgrad_queue.pending:
        layer.backward_dw()
    found[kind] = {"x": x.grad, **layer.state_dict()}
    found[kind] |= {f"{name}.grad": p.grad for name, p in layer.named_parameters()}
torch.save(found, f"{folder}/found.pt")
"""


def test_shared_amaxes(bundle: str, tmp_path: Path) -> None:
    folder = Path(str(sys.modules[bundle].__file__)).parent
    run_ranks(SHARED, tmp_path, Place(folder), ranks=1)
    plain, delayed = torch.load(tmp_path / "found.pt").values()
    assert plain["fc1.weight.grad"].any() and any("amax_history" in name for name in plain)
    same(plain, delayed)


def test_autocast(bundle: str) -> None:
    """Gradients of fp32 parameters are cast as autograd does it."""
    found = []
    for delayed in (False, True):
        layer = make(bundle, "grouped_mlp", "fp8_block", delayed=delayed).float()
        for seed in range(2):
            data = inputs("grouped_mlp", seed)
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(*data)
            y.float().square().sum().backward()
        if delayed:
            drain(layer)
        found.append(gradients(layer))
        assert {tensor.dtype for tensor in found[-1].values()} == {torch.float32}
    same(*found)


def test_accumulates_as_autograd_does(bundle: str) -> None:
    """Hooks of the parameter and after it run, and a gradient that is there is added to."""
    layer = make(bundle, "linear", "bf16")
    seen = []
    layer.weight.register_hook(lambda gradient: seen.append(gradient is not None))
    layer.weight.grad = torch.ones_like(layer.weight)
    backward(layer, inputs("linear"))
    assert seen == [False] and (layer.weight.grad == 1).all()
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append("after"))
    layer.backward_dw()
    assert seen[-2:] == [True, "after"]
    (expected, _) = pair(bundle, "linear", "bf16")
    expected.weight.grad = torch.ones_like(expected.weight)
    backward(expected, inputs("linear"))
    assert torch.equal(layer.weight.grad, expected.weight.grad)


def test_the_functions(bundle: str) -> None:
    module = cell(bundle, "linear", "fp8_block", "add_to_main_grad")
    layer = make(bundle, "linear", "fp8_block", "add_to_main_grad")
    backward(layer, inputs("linear"))
    layer.backward_dw()
    queue, buffer = module.WgradQueue(), torch.full((N, K), 0.5)
    data = inputs("linear")
    backward(lambda x: module.linear(x, layer.weight, layer.bias, wgrad_queue=queue), data)
    with pytest.raises(
        RuntimeError, match=r"weight_main_grad: expected \[N, K\] float32, got None"
    ):
        module.backward_dw(layer.weight, wgrad_queue=queue, weight_main_grad=None)
    module.backward_dw(layer.weight, wgrad_queue=queue, weight_main_grad=buffer)
    assert torch.equal(buffer, layer.weight.main_grad) and queue.pending == 0


def test_grad_added_to_main_grad_once_it_is(bundle: str) -> None:
    """Megatron's hooks reduce a buffer as soon as they run, so they run last."""
    layer = make(bundle, "grouped_mlp", "fp8_block", "add_to_main_grad")
    seen = []

    def reduce(weight: Any) -> None:
        if weight.grad is not None:
            seen.append((weight.grad_added_to_main_grad, bool((weight.main_grad != 0.5).any())))

    for weight in (layer.fc1.weight, layer.fc2.weight):
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(reduce)
    backward(layer, inputs("grouped_mlp"))
    assert seen == []
    with torch.no_grad():
        layer.backward_dw()
    assert seen == [(True, True), (True, True)]


SLOTS = {"max_in_flight": 2, "max_tokens": T}


class Fails(torch.autograd.Function):
    """Its backward raises while it is told to."""

    on = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        if Fails.on:
            raise ValueError("out of luck")
        return dy


@pytest.mark.parametrize("slots", [{}, SLOTS], ids=["references", "slots"])
def test_a_failed_backward_leaves_nothing(
    bundle: str, slots: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the entries before it none is lost, and later gradients are of their own backwards."""
    plain, layer = pair(bundle, "grouped_mlp", "fp8_block", **slots)
    backward(layer, inputs("grouped_mlp", seed=1))
    with pytest.raises(ValueError, match="out of luck") as kept:
        backward(lambda x, *rest: layer(Fails.apply(x), *rest), inputs("grouped_mlp", seed=2))
    assert layer.wgrad_queue.pending == 1 and kept.value is not None
    monkeypatch.setattr(Fails, "on", False)
    backward(lambda x, *rest: layer(Fails.apply(x), *rest), inputs("grouped_mlp", seed=3))
    assert layer.wgrad_queue.pending == 2
    drain(layer)
    for seed in (1, 3):
        backward(plain, inputs("grouped_mlp", seed=seed))
    same(of_weights(layer), of_weights(plain))


@pytest.mark.parametrize("slots", [{}, SLOTS], ids=["references", "slots"])
def test_backward_dw_inside_a_backward(bundle: str, slots: dict[str, int]) -> None:
    """What the backward that still runs has left is there already."""
    plain, layer = pair(bundle, "grouped_mlp", "fp8_block", **slots)
    data = inputs("grouped_mlp")
    data[0].register_hook(lambda _: layer.backward_dw())
    backward(layer, data)
    assert layer.wgrad_queue.pending == 0
    backward(plain, inputs("grouped_mlp"))
    same(gradients(layer), gradients(plain))


@pytest.mark.parametrize(
    ("slots", "compiled"),
    [({}, False), (SLOTS, False), (SLOTS, True)],
    ids=["references", "slots", "compiled"],
)
def test_a_queue_can_be_cleared(bundle: str, slots: dict[str, int], compiled: bool) -> None:
    plain, layer = pair(bundle, "grouped_mlp", "fp8_block", **slots)
    call = torch.compile(layer, backend="aot_eager") if compiled else layer
    for _ in range(2):
        backward(call, inputs("grouped_mlp", seed=2))
    layer.wgrad_queue.clear()
    assert layer.wgrad_queue.pending == 0
    backward(call, inputs("grouped_mlp"))
    drain(layer)
    backward(plain, inputs("grouped_mlp"))
    same(of_weights(layer), of_weights(plain))
    copy.deepcopy(layer)
    torch.save(layer, io.BytesIO())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "mxfp8", "nvfp4"])
@every_module
def test_compiles_whole_over_slots(bundle: str, module: str, recipe: str, backend: str) -> None:
    plain, delayed = pair(bundle, module, recipe, **SLOTS)
    call = torch.compile(delayed, fullgraph=True, backend=backend)
    backward_dw = torch.compile(delayed.backward_dw, fullgraph=True, backend=backend)
    for seed in range(5):  # two in flight from the second on; slots come round
        one, other = (backward(each, inputs(module, seed)) for each in (plain, call))
        assert torch.equal(one, other)
        if seed:
            backward_dw()
    assert delayed.wgrad_queue.pending == 1
    backward_dw()
    same(gradients(plain), gradients(delayed))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "mxfp8", "nvfp4"])
@every_module
def test_slots_have_room_for_fewer_tokens(bundle: str, module: str, recipe: str) -> None:
    """What an earlier, longer entry left in a slot reaches no gradient."""
    plain, delayed = pair(bundle, module, recipe, max_in_flight=1, max_tokens=T + 40)
    for rows, splits in ((T, SPLITS[0]), (8, [0, 5, 1]), (0, [0, 0, 0]), (16, [3, 13, 0])):
        for layer in (plain, delayed):
            layer.zero_grad()
            backward(layer, inputs(module, rows, splits, rows))
        delayed.backward_dw()
        for name, tensor in gradients(plain).items():
            # A dense GEMM over rows of zeros may add the others up in another order.
            torch.testing.assert_close(gradients(delayed)[name], tensor, rtol=1e-2, atol=1e-3)
    short = make(bundle, module, recipe, max_in_flight=1, max_tokens=T - 8)
    with pytest.raises(RuntimeError, match="construct the module with a larger max_tokens"):
        backward(short, inputs(module))


def test_leading_dimensions(bundle: str) -> None:
    for more in ({}, {"max_in_flight": 2, "max_tokens": T}):
        plain, delayed = pair(bundle, "linear", "fp8_block", **more)
        for shape in ((2, 3, 4, K), (K,)):
            for layer in (plain, delayed):
                torch.manual_seed(1)
                layer(torch.randn(shape).bfloat16()).float().square().sum().backward()
            delayed.backward_dw()
        same(gradients(plain), gradients(delayed))


@pytest.mark.parametrize("option", MAIN_GRADS)
def test_slots_and_main_grad(bundle: str, option: str) -> None:
    plain, delayed = pair(bundle, "grouped_mlp", "fp8_delayed", option, **SLOTS)
    call = torch.compile(delayed, fullgraph=True, backend="inductor")
    backward_dw = torch.compile(delayed.backward_dw, fullgraph=True, backend="inductor")
    for seed in range(3):
        for each in (plain, call):
            backward(each, inputs("grouped_mlp", seed))
        backward_dw()
    same(gradients(plain), gradients(delayed))


@pytest.mark.parametrize("frozen", ["fc1", "fc2"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_delayed"])
def test_slots_and_frozen_weights(bundle: str, recipe: str, frozen: str) -> None:
    layers = pair(bundle, "grouped_mlp", recipe, **SLOTS)
    for layer in layers:
        layer.get_submodule(frozen).requires_grad_(False)
        for seed in range(2):
            backward(layer, inputs("grouped_mlp", seed))
    drain(layers[1])
    same(*map(gradients, layers))


def test_no_slot_is_overwritten_and_none_read_twice(bundle: str) -> None:
    layer = make(bundle, "linear", "bf16", **SLOTS)
    for seed in range(2):
        backward(layer, inputs("linear", seed))
    with pytest.raises(RuntimeError, match="all 2 slots for gradients of weights are pending"):
        backward(layer, inputs("linear"))
    drain(layer)
    with pytest.raises(RuntimeError, match="backward_dw: nothing is pending"):
        layer.backward_dw()


@pytest.mark.parametrize(
    "slots", [{"max_in_flight": 2}, {"max_tokens": 8}, {**SLOTS, "max_tokens": 0}]
)
def test_slots_have_two_sizes(bundle: str, slots: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="two positive numbers or neither"):
        make(bundle, "linear", "bf16", **slots)


def test_compiled_code_without_slots_is_refused(bundle: str) -> None:
    layer = make(bundle, "grouped_mlp", "bf16")
    text = "construct the module with max_in_flight and max_tokens"
    with pytest.raises(Exception, match=text):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs("grouped_mlp"))
    backward(layer, inputs("grouped_mlp"))
    with pytest.raises(Exception, match=text):
        torch.compile(layer.backward_dw, fullgraph=True, backend="aot_eager")()
    layer.backward_dw()
    layer.requires_grad_(False)  # there is nothing to keep
    torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs("grouped_mlp"))


def test_an_operand_changed_in_place_is_refused(bundle: str) -> None:
    """As by a pipeline that receives the next micro-batch into the same tensor."""
    layer = make(bundle, "linear", "bf16")
    data = inputs("linear")
    backward(layer, data)
    with torch.no_grad():
        data[0].zero_()
    with pytest.raises(RuntimeError) as caught:
        layer.backward_dw()
    assert str(caught.value) == (
        "linear__bf16__delayed_wgrad: backward_dw: a tensor that it needs was modified in place "
        "after the backward; change inputs and gradients after backward_dw"
    )


@pytest.mark.parametrize("slots", [{}, SLOTS])
def test_what_is_pending_is_neither_copied_nor_moved(bundle: str, slots: dict[str, int]) -> None:
    layer = make(bundle, "grouped_mlp", "fp8_block", **slots)
    backward(layer, inputs("grouped_mlp"))
    attempts = {
        "copy": [lambda: copy.deepcopy(layer), lambda: torch.save(layer, io.BytesIO())],
        "move": [layer.half, lambda: layer.to("meta")],
    }
    for what, calls in attempts.items():
        for call in calls:
            with pytest.raises(RuntimeError, match=f"cannot {what} a module while backwards wait"):
                call()
    state = layer.state_dict()
    assert not [name for name in state if "queue" in name]
    layer.load_state_dict(state)
    assert layer.wgrad_queue.pending == 1
    layer.backward_dw()
    assert layer.fc1.weight.grad is not None


@pytest.mark.parametrize("slots", [{}, SLOTS])
def test_copies_have_queues_of_their_own(bundle: str, slots: dict[str, int]) -> None:
    layer = make(bundle, "grouped_mlp", "fp8_block", **slots)
    backward(layer, inputs("grouped_mlp"))
    layer.backward_dw()
    layer.zero_grad()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    bare = make(bundle, "grouped_mlp", "fp8_block", device="meta", **slots).to_empty(device="cpu")
    bare.load_state_dict(layer.state_dict())
    others = [copy.deepcopy(layer), torch.load(file, weights_only=False), bare]
    backward(layer, inputs("grouped_mlp"))
    layer.backward_dw()
    for other in others:
        assert other.wgrad_queue.pending == 0
        backward(other, inputs("grouped_mlp"))
        other.backward_dw()
        same(gradients(layer), gradients(other))


def test_half_after_construction(bundle: str) -> None:
    """Slots hold bytes, whatever the module computes in."""
    layer = make(bundle, "grouped_linear", "fp8_rowwise", **SLOTS).half()
    plain = make(bundle, "grouped_linear", "fp8_rowwise", delayed=False).half()
    for each in (plain, layer):
        x, splits = inputs("grouped_linear")
        each(x.detach().half(), splits).float().square().sum().backward()
    layer.backward_dw()
    same(gradients(plain), gradients(layer))
