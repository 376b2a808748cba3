"""What wraps a module, a part of one, or a parameter has its effect on the fused op, or raises."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusegen.ir.naming import Cell

from .loading import load_cells
from .ranks import Place, run_ranks

pytestmark = pytest.mark.usefixtures("fresh_compiler")

RECIPES = ("bf16", "fp8_delayed", "fp8_block")
SIZES = {
    "quantize": (),
    "linear": (32, 48),
    "grouped_linear": (3, 32, 48),
    "grouped_mlp": (3, 32, 48),
}
CLASSES = {"linear": "Linear", "grouped_linear": "GroupedLinear", "grouped_mlp": "GroupedMLP"}
PATHS = {
    "linear": ("weight",),
    "grouped_linear": ("weight",),
    "grouped_mlp": ("fc1.weight", "fc2.weight"),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_module = pytest.mark.parametrize("module", CLASSES)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a package with plain cells and those whose options look at parameters."""
    plain = [Cell(module, recipe) for module in CLASSES for recipe in RECIPES]
    options = ("add_to_main_grad", "cached_weights", "delayed_wgrad", "quantized_weights")
    others = [Cell("grouped_mlp", "fp8_delayed", (option,)) for option in options]
    others.append(Cell("quantize", "fp8_delayed"))
    return load_cells("wrappers", tmp_path_factory.mktemp("wrappers"), [*plain, *others])


def make(bundle: str, module: str = "grouped_mlp", recipe: str = "bf16", option: str = "") -> Any:
    torch.manual_seed(0)
    cell = "__".join(filter(None, (module, recipe, option)))
    loaded = importlib.import_module(f"{bundle}.{cell}")
    return getattr(loaded, CLASSES.get(module, "Quantize"))(*SIZES[module])


def inputs(module: str = "grouped_mlp") -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 32, generator=generator).bfloat16()
    probs = torch.rand(24, generator=generator)
    counts = {"quantize": 1, "linear": 1, "grouped_linear": 2, "grouped_mlp": 3}
    return [x, torch.tensor([9, 0, 13]), probs][: counts[module]]


class Model(nn.Module):
    """Experts after a layer of PyTorch's own."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.before = nn.Linear(32, 32, dtype=torch.bfloat16)
        self.experts = experts

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        y: Tensor = self.experts(self.before(x), *rest)
        return y


def gradients(call: Callable[..., Tensor], module: str = "grouped_mlp") -> tuple[Tensor, Tensor]:
    """Result and gradient of x."""
    x, *rest = inputs(module)
    leaf = x.clone().requires_grad_()
    y = call(leaf, *rest)
    y.float().square().sum().backward()
    assert leaf.grad is not None
    return y.detach(), leaf.grad


# PEFT


def lora(model: nn.Module, paths: tuple[str, ...], **more: Any) -> Any:
    config = LoraConfig(r=2, target_modules=[], target_parameters=list(paths), **more)
    return get_peft_model(model, config)  # type: ignore[arg-type]


@every_recipe
@every_module
def test_peft_trains_parameters(bundle: str, module: str, recipe: str) -> None:
    """As the same experts whose weights are base + delta; merged, as those of the sum."""
    model = Model(make(bundle, module, recipe))
    plain = copy.deepcopy(model)
    wrapped = lora(model, tuple(f"experts.{path}" for path in PATHS[module]))
    assert torch.equal(gradients(wrapped, module)[0], gradients(plain, module)[0])
    trained = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    fresh = {name: p.grad.clone() for name, p in trained.items()}  # A has none while B is zero
    assert all(bool(grad.any()) for name, grad in fresh.items() if "lora_B" in name)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.copy_(torch.randn_like(parameter) / 8)
            parameter.grad = None
    y, _ = gradients(wrapped, module)
    assert all(bool(p.grad.any()) for p in trained.values())
    with wrapped.disable_adapter():
        without = wrapped(*inputs(module))
    assert not torch.equal(y, without)
    again = copy.deepcopy(wrapped)
    merged = wrapped.merge_and_unload()
    assert {*merged.state_dict()} == {*plain.state_dict()}
    if recipe == "bf16":  # other recipes rescale what they see
        assert torch.allclose(merged(*inputs(module)).float(), y.float(), rtol=0.05, atol=0.05)
        assert torch.equal(again(*inputs(module)), y)


def test_peft_on_the_module_itself(bundle: str) -> None:
    """Where experts are the whole model; one of two parts wrapped."""
    experts = make(bundle)
    wrapped = lora(experts, ("fc2.weight",))
    gradients(wrapped)
    for name, parameter in wrapped.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name


# FSDP

SHARDED = """
import importlib
from functools import partial
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
import bundle

(cell,) = words
loaded = importlib.import_module(f"bundle.{cell}").GroupedMLP


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before = torch.nn.Linear(32, 32, dtype=torch.bfloat16)
        self.experts = loaded(3, 32, 48)

    def forward(self, x, *rest):
        return self.experts(self.before(x), *rest)


def wrap(model, kind):
    experts = model.experts
    if kind.startswith("fsdp1"):
        policy = partial(size_based_auto_wrap_policy, min_num_params=1000)
        whole = FSDP(model, auto_wrap_policy=policy, use_orig_params="original" in kind,
                     device_id=torch.device("cpu"))
        units = [m for m in whole.modules() if isinstance(m, FSDP)]
        assert len(units) == 4, units  # the model, its layer, and both parts
        return whole
    parts = {"parts": [experts.fc1, experts.fc2], "one": [experts.fc2], "whole": [experts]}
    for each in parts[kind]:
        fully_shard(each)
    return fully_shard(model)


def train(model, optimizer):
    losses = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(24, 32, generator=generator).bfloat16()
        data = [x, torch.tensor([9, 0, 13]), torch.rand(24, generator=generator)]
        loss = model(*data).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


expected_model = Model()
expected = train(expected_model, torch.optim.SGD(expected_model.parameters(), lr=0.5))
assert len(set(expected)) == 3
for kind in ("fsdp1", "fsdp1 original", "parts", "one", "whole"):
    model = wrap(Model(), kind)
    found = train(model, torch.optim.SGD(model.parameters(), lr=0.5))
    assert found == expected, (kind, found, expected)
"""


@every_recipe
def test_fsdp_trains_as_one_process(bundle: str, tmp_path: Path, recipe: str) -> None:
    """Every rank has the same data, so averages are what one process has, bit for bit."""
    folder = Path(str(sys.modules[bundle].__file__)).parent
    run_ranks(SHARDED, tmp_path, Place(folder), f"grouped_mlp__{recipe}")


# Hooks, parametrisations, replaced forwards


def test_hooks_of_a_part_run_around_the_whole_op(bundle: str) -> None:
    """They see x and y of the module, since no tensor is in between, and may replace both."""
    layer = make(bundle)
    x, *rest = inputs()
    plain = layer(x, *rest)
    seen: list[tuple[str, Tensor]] = []
    handles = [
        layer.fc2.register_forward_pre_hook(lambda _, args: seen.append(("before", args[0]))),
        layer.fc2.register_forward_hook(lambda _, args, y: seen.append(("after", y))),
    ]
    assert torch.equal(layer(x, *rest), plain)
    assert [name for name, _ in seen] == ["before", "after"]
    assert torch.equal(seen[0][1], x) and torch.equal(seen[1][1], plain)
    handles.append(layer.fc1.register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:])))
    handles.append(layer.fc1.register_forward_hook(lambda _, args, y: y + 1))
    expected = make(bundle)(2 * x, *rest) + 1
    assert torch.equal(layer(x, *rest), expected)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, *rest), expected)
    for handle in handles:
        handle.remove()
    assert torch.equal(layer(x, *rest), plain)


def test_backward_and_global_hooks_run(bundle: str) -> None:
    layer = make(bundle)
    seen: list[Any] = []
    layer.fc1.register_full_backward_hook(lambda module, dx, dy: seen.append((dx[0], dy[0])))
    _, dx = gradients(layer)
    assert len(seen) == 1 and torch.equal(seen[0][0], dx)
    names: list[str] = []
    other = make(bundle)
    with torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: names.append(type(module).__name__)
    ):
        other(*inputs())
    assert names == ["GroupedMLP", "_Fc1Part", "_Fc2Part"]


def test_a_forward_that_was_replaced_runs(bundle: str) -> None:
    """As tools replace it that move parameters before a call, and away after it."""
    layer = make(bundle)
    expected = layer(*inputs())
    old, weight = layer.fc2.forward, layer.fc2.weight.detach()
    layer.fc2.weight = nn.Parameter(torch.zeros_like(weight))

    def forward(*args: Any) -> Any:
        layer.fc2.weight.data.copy_(weight)
        try:
            return old(*args)
        finally:
            layer.fc2.weight.data.zero_()

    layer.fc2.forward = forward
    assert torch.equal(layer(*inputs()), expected)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_hooks_that_make_the_weight(bundle: str) -> None:
    layer = make(bundle)
    expected, _ = gradients(layer)
    nn.utils.weight_norm(layer.fc1)
    with torch.no_grad():
        layer.fc1.weight_g.mul_(3.0)
    found, _ = gradients(layer)
    assert not torch.equal(found, expected)
    assert layer.fc1.weight_g.grad.any() and layer.fc1.weight_v.grad.any()


class Tripled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight


@every_module
def test_parametrised(bundle: str, module: str) -> None:
    layer, plain = make(bundle, module), make(bundle, module)
    for path in PATHS[module]:
        holder, _, name = path.rpartition(".")
        with torch.no_grad():
            plain.get_parameter(path).mul_(3.0)
        parametrize.register_parametrization(layer.get_submodule(holder), name, Tripled())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for call in (layer, compiled):
        found, expected = gradients(call, module), gradients(plain, module)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@every_recipe
def test_a_part_is_plain_to_whoever_looks(bundle: str, recipe: str) -> None:
    layer = make(bundle, recipe=recipe)
    assert {"fc1.weight", "fc2.weight"} <= {*layer.state_dict()}
    layer.requires_grad_(False)  # so that no call changes its state
    expected = layer(*inputs())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer)):
        assert torch.equal(other(*inputs()), expected)
        assert {*other.state_dict()} == {*layer.state_dict()}
    assert "(fc1): _Fc1Part()" in repr(layer)


# Casts


def state(layer: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in layer.named_buffers()}


CASTS: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "to": lambda module: module.to(torch.float16),
    "to device and dtype": lambda module: module.to("cpu", torch.float16),
    "type": lambda module: module.type(torch.float16),
    "apply": lambda module: [each.half() for each in module.children()],
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("module", [*CLASSES, "quantize"])
def test_casts_leave_state_as_it_is(bundle: str, module: str, cast: str) -> None:
    """Of the module, its parent or its parts: fp32 scales stay fp32, bit for bit."""
    layer = make(bundle, module, "fp8_delayed")
    x, *rest = inputs(module)
    layer(x.requires_grad_(), *rest)  # so that the state is not what it was
    before = state(layer)
    assert any(tensor.dtype == torch.float32 for tensor in before.values())
    for outer in (layer, nn.Sequential(layer), *layer.children()):
        CASTS[cast](outer)
        for name, tensor in state(layer).items():
            assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name
    layer.half()
    layer(x.detach().half().requires_grad_(), *rest).sum().backward()
    layer.to("meta")
    assert all(tensor.is_meta for tensor in layer.buffers())
    assert [t.dtype for t in layer.buffers()] == [t.dtype for t in before.values()]


# Options that look at parameters


@pytest.mark.parametrize(
    "option", ["add_to_main_grad", "cached_weights", "delayed_wgrad", "quantized_weights"]
)
def test_options_that_cannot_see_through_a_wrapper_say_so(bundle: str, option: str) -> None:
    """PEFT, parametrisations, and functional_call with other parameters than the module's."""
    names = f"grouped_mlp__fp8_delayed__{option}: fc[12].weight: expected .*parameter"
    wrapped = lora(make(bundle, "grouped_mlp", "fp8_delayed", option), PATHS["grouped_mlp"])
    parametrised = make(bundle, "grouped_mlp", "fp8_delayed", option)
    parametrize.register_parametrization(parametrised.fc2, "weight", Tripled())
    for weight in parametrised.parameters():
        weight.main_grad = torch.zeros(weight.shape)
    for layer in (wrapped, parametrised):
        with pytest.raises(RuntimeError, match=names):
            layer(*inputs())


@pytest.mark.parametrize("option", ["cached_weights", "quantized_weights"])
def test_copies_are_of_the_parameters_they_stand_for(bundle: str, option: str) -> None:
    layer = make(bundle, "grouped_mlp", "fp8_delayed", option)
    others = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
    with pytest.raises(RuntimeError, match=f"{option}: fc1.weight: expected .*functional_call"):
        torch.func.functional_call(layer, others, tuple(inputs()))
    layer(*inputs())
    layer.fc2.weight = nn.Parameter(others["fc2.weight"])
    with pytest.raises(RuntimeError, match=f"{option}: fc2.weight: expected .*parameter"):
        layer(*inputs())
    if option == "cached_weights":
        layer.refresh_weights()
        for other in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            gradients(other)
        gradients(nn.Sequential(layer).to("cpu")[0])


def test_delayed_gradients_of_other_weights_are_refused(bundle: str) -> None:
    layer = make(bundle, "grouped_mlp", "fp8_delayed", "delayed_wgrad")
    others = {name: torch.randn_like(p).requires_grad_() for name, p in layer.named_parameters()}
    torch.func.functional_call(layer, others, tuple(inputs())).sum().backward()
    with pytest.raises(RuntimeError, match="weights are not those of the forward"):
        layer.backward_dw()
    layer.wgrad_queue.clear()
    gradients(layer)
    layer.backward_dw()
    assert layer.fc1.weight.grad.any()


# Threads


@every_module
def test_threads_lose_no_state(bundle: str, module: str) -> None:
    """Each call moves histories on by one row, from what another one left."""
    x, *rest = inputs(module)
    shared, alone = make(bundle, module, "fp8_delayed"), make(bundle, module, "fp8_delayed")
    calls, threads = 8, 4

    def train(layer: nn.Module) -> None:
        for _ in range(calls):
            layer(x.clone().requires_grad_(), *rest).float().sum().backward()

    running = [threading.Thread(target=train, args=(shared,)) for _ in range(threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for _ in range(threads):
        train(alone)
    for name, tensor in state(alone).items():
        assert torch.equal(state(shared)[name] != 0, tensor != 0), name
