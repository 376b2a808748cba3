"""Modules whose weights are quantised copies alone: the bits of cached ones, without the memory."""

from __future__ import annotations

import copy
import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fusegen import api
from fusegen.ir.naming import Cell
from fusegen.options import OPTIONS

from .loading import load_cells
from .ranks import Place, run_ranks

pytestmark = pytest.mark.usefixtures("fresh_compiler")

RECIPES = ("fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
CLASSES = {"linear": "Linear", "grouped_linear": "GroupedLinear", "grouped_mlp": "GroupedMLP"}
ALONE, CACHED = "quantized_weights", "cached_weights"
MAIN_GRADS = ("add_to_main_grad", "write_main_grad")
FURTHER = (
    ("add_to_main_grad",),
    ("write_main_grad",),
    ("delayed_wgrad",),
    ("add_to_main_grad", "delayed_wgrad"),
    ("recompute_activations",),
)
LOOKED_AT = ("fp8_delayed", "mxfp8", "nvfp4")
T, E, K, N = 24, 3, 32, 48
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_module = pytest.mark.parametrize("module", CLASSES)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a package with cells of both kinds, and plain ones to exchange states with."""
    cells = [
        Cell.parse(name(module, recipe, word))
        for module in CLASSES
        for recipe in RECIPES
        for word in (ALONE, CACHED)
    ]
    cells += [
        Cell.parse(name("grouped_mlp", recipe, *words, word))
        for recipe in ("fp8_block", "mxfp8")
        for words in FURTHER
        for word in (ALONE, CACHED)
    ]
    cells += [Cell("grouped_mlp", recipe) for recipe in ("bf16", *RECIPES)]
    cells += [Cell.parse(name("grouped_mlp", recipe, ALONE, "debug")) for recipe in LOOKED_AT]
    return load_cells("quantized_weights", tmp_path_factory.mktemp("quantized"), cells)


ORDER = {word: place for place, option in enumerate(OPTIONS) for word in option.words}
"""Place of each word in the names of cells."""


def name(module: str, recipe: str, *options: str) -> str:
    return "__".join((module, recipe, *sorted(options, key=ORDER.__getitem__)))


def cell(bundle: str, module: str, recipe: str, *options: str) -> ModuleType:
    return importlib.import_module(f"{bundle}.{name(module, recipe, *options)}")


def make(bundle: str, module: str, recipe: str, *options: str, seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    sizes = (K, N) if module == "linear" else (E, K, N)
    layer = getattr(cell(bundle, module, recipe, *options), CLASSES[module])(
        *sizes, bias=True, **more
    )
    if {*options} & {*MAIN_GRADS}:
        for parameter in layer.parameters():
            parameter.main_grad = torch.full(parameter.shape, 0.5)
    return layer


def inputs(module: str, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator).bfloat16()
    probs = torch.rand(T, generator=generator)
    return [x, torch.tensor([9, 0, 13]), probs][: 1 + list(CLASSES).index(module)]


def masters(layer: nn.Module, seed: int = 5, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Weights from outside, as ``refresh_weights`` takes them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        path.replace(".", "_"): torch.randn(p.shape, generator=generator).mul(0.2).to(dtype)
        for path, p in layer.named_parameters()
        if path.endswith("weight")
    }


def refresh_cached(layer: Any, weights: dict[str, Tensor]) -> None:
    """The same weights for a module that has them next to their copies."""
    with torch.no_grad():
        for path, parameter in layer.named_parameters():
            if path.replace(".", "_") in weights:
                parameter.copy_(weights[path.replace(".", "_")])
    layer.refresh_weights()


def step(call: Callable[..., Tensor], layer: Any, data: list[Tensor]) -> dict[str, Tensor]:
    """Result and gradients of one micro-batch, wherever they go, and the state after it."""
    leaf = data[0].clone().requires_grad_()
    y = call(leaf, *data[1:])
    y.float().square().sum().backward()
    if hasattr(layer, "backward_dw"):
        layer.backward_dw()
    assert leaf.grad is not None
    found = {"y": y.detach(), "dx": leaf.grad}
    for path, parameter in layer.named_parameters():
        main = getattr(parameter, "main_grad", None) if path.endswith("weight") else None
        gradient = parameter.grad if main is None else main
        if gradient is not None:
            found[f"d{path}"] = gradient.clone()
            assert main is not None or gradient.dtype == parameter.dtype
    found |= {path: buffer.clone() for path, buffer in layer.named_buffers()}
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def state(layer: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def without_memory(layer: nn.Module) -> bool:
    """Whether every weight is one NaN, and everything else has memory of its own."""
    for path, parameter in layer.named_parameters():
        bytes_held = parameter.untyped_storage().nbytes()
        if path.endswith("weight"):
            assert bytes_held == parameter.element_size() and parameter.isnan().all(), path
            assert isinstance(parameter, nn.Parameter) and parameter.is_leaf
        else:
            assert bytes_held == parameter.nbytes, path
    return True


@every_module
@every_recipe
def test_trains_as_with_cached_weights(bundle: str, module: str, recipe: str) -> None:
    """Drawn alike, and refreshed with the same masters: same results, gradients and copies."""
    alone, cached = (make(bundle, module, recipe, word) for word in (ALONE, CACHED))
    for seed in range(3):
        for layer in (alone, cached):
            layer.zero_grad()
        same(*(step(layer, layer, inputs(module, seed)) for layer in (alone, cached)))
        weights = masters(alone, seed)
        alone.refresh_weights(**weights)
        refresh_cached(cached, weights)
    assert without_memory(alone)


@pytest.mark.parametrize("further", FURTHER, ids="-".join)
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_further_options(bundle: str, recipe: str, further: tuple[str, ...]) -> None:
    alone, cached = (
        make(bundle, "grouped_mlp", recipe, *further, word) for word in (ALONE, CACHED)
    )
    for seed in range(2):
        same(*(step(each, each, inputs("grouped_mlp", seed)) for each in (alone, cached)))
    assert without_memory(alone)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "options", [(), ("add_to_main_grad",), ("recompute_activations",)], ids="-".join
)
def test_compiles_whole(bundle: str, options: tuple[str, ...], backend: str) -> None:
    """Refreshed from fp32 masters in the graph of the forward."""
    eager, other = (make(bundle, "grouped_mlp", "mxfp8", *options, ALONE) for _ in range(2))
    weights = masters(eager)

    def run(*data: Tensor) -> Tensor:
        other.refresh_weights(**weights)
        result: Tensor = other(*data)
        return result

    call = torch.compile(run, fullgraph=True, backend=backend)
    for seed in range(2):
        eager.refresh_weights(**weights)
        data = inputs("grouped_mlp", seed)
        same(step(eager, eager, data), step(call, other, data))
        for weight in weights.values():
            weight.mul_(-1.5)
    assert without_memory(other)


def test_checkpoint(bundle: str) -> None:
    plain, other = (make(bundle, "grouped_mlp", "fp8_block", ALONE) for _ in range(2))

    def run(*data: Tensor) -> Tensor:
        result: Tensor = checkpoint(other, *data, use_reentrant=False)
        return result

    data = inputs("grouped_mlp")
    same(step(plain, plain, data), step(run, other, data))


@every_recipe
def test_autocast(bundle: str, recipe: str) -> None:
    """With parameters in fp32: gradients are, too, and nothing is allocated for the weights."""
    low, high = (make(bundle, "grouped_mlp", recipe, ALONE) for _ in range(2))
    high.float()
    assert without_memory(high)
    x, splits, probs = inputs("grouped_mlp")
    weights = masters(low)

    def run(*data: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            high.refresh_weights(**weights)
            result: Tensor = high(*data)
            return result

    call = torch.compile(run, fullgraph=True, backend="aot_eager") if recipe == "mxfp8" else run
    got = step(call, high, [x.float(), splits, probs])
    low.refresh_weights(**weights)
    for key, tensor in step(low, low, [x, splits, probs]).items():
        assert torch.equal(got[key], tensor.to(got[key].dtype)), key
    with pytest.raises(RuntimeError, match="expected dtype bfloat16 or float16, got float32"):
        high.refresh_weights(**weights)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_moves_and_copies_take_no_memory(bundle: str, recipe: str) -> None:
    layer = make(bundle, "grouped_mlp", recipe, ALONE)
    layer.refresh_weights(**masters(layer))
    data = inputs("grouped_mlp")
    expected = step(copy.deepcopy(layer), copy.deepcopy(layer), data)["y"]
    before = state(layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    frozen = copy.deepcopy(layer)
    frozen.fc1.weight.requires_grad_(False)
    again = copy.deepcopy(frozen)
    assert not again.fc1.weight.requires_grad and again.fc2.weight.requires_grad
    outer = copy.deepcopy(nn.ModuleList([layer, layer]))
    assert outer[0] is outer[1] and outer[0].fc1.weight is not layer.fc1.weight
    moved = copy.deepcopy(layer).half().double().to("cpu").bfloat16()
    for other in (again, outer[0], moved, torch.load(file, weights_only=False)):
        assert without_memory(other)
        same(state(other), before)
        assert torch.equal(other.requires_grad_(False)(*data), expected)
    bare = copy.deepcopy(layer).to("meta")
    assert bare.fc1.weight.is_meta and bare.fc1.weight_rowwise.is_meta
    assert without_memory(bare.to_empty(device="cpu"))


@every_recipe
def test_reset_after_meta(bundle: str, recipe: str) -> None:
    torch.manual_seed(0)
    bare = make(bundle, "grouped_mlp", recipe, ALONE, device="meta")
    bare.to_empty(device="cpu")
    torch.manual_seed(0)
    bare.reset_parameters()
    same(state(bare), state(make(bundle, "grouped_mlp", recipe, ALONE)))
    assert without_memory(bare)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_rounded_to_the_type_of_the_module(bundle: str, dtype: torch.dtype) -> None:
    layer, other = (make(bundle, "linear", "fp8_block", ALONE, dtype=dtype) for _ in range(2))
    layer.refresh_weights(**masters(layer, dtype=torch.float32))
    other.refresh_weights(**masters(other, dtype=dtype))
    same(state(layer), state(other))
    assert layer(inputs("linear")[0].to(dtype)).dtype == dtype


def test_hooks_of_the_parameter_run(bundle: str) -> None:
    layer = make(bundle, "grouped_mlp", "mxfp8", ALONE)
    seen: list[Tensor] = []
    layer.fc1.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    layer.fc2.weight.requires_grad_(False)
    layer(*inputs("grouped_mlp")).float().square().sum().backward()
    assert len(seen) == 1 and seen[0] is layer.fc1.weight.grad and bool(seen[0].any())
    assert layer.fc2.weight.grad is None


def test_export(bundle: str) -> None:
    layer = make(bundle, "grouped_mlp", "mxfp8", ALONE).requires_grad_(False)
    exported = torch.export.export(layer, tuple(inputs("grouped_mlp"))).module()
    data = inputs("grouped_mlp", seed=2)
    assert torch.equal(exported(*data), layer(*data))


# Ranks begin with other copies; DDP gives all those of the first before a forward.
PARALLEL = """
import importlib
from torch import nn
module = importlib.import_module("bundle.grouped_mlp__fp8_block__quantized_weights")
torch.manual_seed(rank)
layer = module.GroupedMLP(3, 32, 48)
parallel = nn.parallel.DistributedDataParallel(layer, init_sync=False)
generator = torch.Generator().manual_seed(1)
x = torch.randn(24, 32, generator=generator).bfloat16()
y = parallel(x, torch.tensor([9, 0, 13]), torch.rand(24, generator=generator))
y.sum().mul(1 + rank).backward()
found = {"gradient": layer.fc1.weight.grad, **dict(layer.named_buffers())}
torch.save(found, f"{folder}/{rank}.pt")
"""


def test_ranks_reduce_gradients(bundle: str, tmp_path: Path) -> None:
    run_ranks(PARALLEL, tmp_path, Place(Path(str(sys.modules[bundle].__file__)).parent))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    same(first, second)
    assert first["gradient"].any()


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_says_so(bundle: str, fused: bool) -> None:
    """A fused one would write past the one element that there is."""
    layer = make(bundle, "linear", "fp8_block", ALONE)
    layer(inputs("linear")[0]).sum().backward()
    assert layer.weight.grad.is_contiguous() and layer.weight.grad.shape == (N, K)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=fused)
    with pytest.raises(RuntimeError, match=r"AdamW: a parameter \[48, 32\] has no memory"):
        optimizer.step()
    layer.weight.grad = None
    before = layer.bias.clone()
    optimizer.step()
    assert not torch.equal(layer.bias, before) and without_memory(layer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:, :-1], r"fc1_weight: expected shape \[3, 96, 32\], got \[3, 95, 32\]"),
        (
            lambda w: w.int(),
            "fc1_weight: expected dtype bfloat16, float16 or float32, got int32",
        ),
        (
            lambda w: w.to("meta"),
            "fc1_weight: expected device cpu, as its copies, got meta; move it there",
        ),
    ],
)
def test_masters_that_do_not_fit(bundle: str, change: Any, message: str) -> None:
    layer = make(bundle, "grouped_mlp", "mxfp8", ALONE)
    weights = masters(layer)
    with pytest.raises(RuntimeError, match=message):
        layer.refresh_weights(**weights | {"fc1_weight": change(weights["fc1_weight"])})
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'fc2_weight'"):
        layer.refresh_weights(fc1_weight=weights["fc1_weight"])


@every_recipe
def test_a_state_of_its_own(bundle: str, recipe: str) -> None:
    """Plain tensors, no weight among them; loaded anywhere they are the same module."""
    layer = make(bundle, "grouped_mlp", recipe, ALONE)
    layer.refresh_weights(**masters(layer))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert "fc1.weight" not in saved and "fc1.weight_columnwise_scale" in saved
    assert {"fc1.bias", "fc2.bias"} < saved.keys()
    others = [make(bundle, "grouped_mlp", recipe, ALONE, seed=1) for _ in range(2)]
    others[0].load_state_dict(saved)
    outer = nn.ModuleDict({"experts": others[1]})
    outer.load_state_dict({f"experts.{key}": tensor for key, tensor in saved.items()})
    assert outer.state_dict().keys() == {f"experts.{key}" for key in saved}
    bare = make(bundle, "grouped_mlp", recipe, ALONE, device="meta")
    bare.fc1.weight.grad_added_to_main_grad = False
    bare.load_state_dict(saved, assign=True)
    assert bare.fc1.weight.grad_added_to_main_grad is False
    data = inputs("grouped_mlp")
    expected = step(layer, layer, data)
    for other in (*others, bare):
        assert without_memory(other)
        same(step(other, other, data), expected)


@pytest.mark.parametrize("source", ["bf16", *RECIPES])
@every_recipe
def test_a_state_with_weights(bundle: str, source: str, recipe: str) -> None:
    """Of any recipe: quantised as a cached module would, by a scale that fits these weights."""
    plain = make(bundle, "grouped_mlp", source, seed=1)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(50.0)  # a scale of other weights would clip them
    layer, meta = (
        make(bundle, "grouped_mlp", recipe, ALONE, device=device) for device in ("cpu", "meta")
    )
    assert str(layer.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    expected = make(bundle, "grouped_mlp", recipe, CACHED)
    expected.load_state_dict(plain.state_dict(), strict=False)
    if recipe == "fp8_delayed":
        for item in (expected.fc1, expected.fc2):
            own = source == recipe
            item.weight_amax_history.mul_(own)
            item.weight_scale.copy_(item.weight_scale if own else torch.ones(E))
        if source != recipe:
            expected.refresh_weights()
        expected.refresh_weights(update_state=False)
    for path, buffer in expected.named_buffers():
        if "weight_" in path:
            assert torch.equal(layer.get_buffer(path), buffer), path
    states = layer.state_dict()
    for path, tensor in expected.state_dict().items():
        if "weight_amax_history" in path or "weight_scale" in path:
            assert torch.equal(states[path], tensor), path
    assert torch.equal(layer.fc2.bias, plain.fc2.bias)
    assert without_memory(layer)
    if recipe not in ("fp8_delayed", "nvfp4"):  # what they keep between steps is on meta
        meta.load_state_dict(plain.state_dict(), assign=True)
        assert without_memory(meta)
        same(state(meta), state(layer))


def test_keys_that_do_not_match(bundle: str) -> None:
    layer = make(bundle, "grouped_mlp", "mxfp8", ALONE)
    before = state(layer)
    own = layer.state_dict()
    plain = make(bundle, "grouped_mlp", "bf16").state_dict()

    def error(found: dict[str, Any]) -> str:
        with pytest.raises(RuntimeError) as caught:
            layer.load_state_dict(found)
        return str(caught.value)

    del own["fc2.weight_rowwise"]
    assert 'Missing key(s) in state_dict: "fc2.weight_rowwise". ' in error(own)
    assert 'Unexpected key(s) in state_dict: "fc1.wait". ' in error(
        layer.state_dict() | {"fc1.wait": before["fc1.bias"]}
    )
    both = error(layer.state_dict() | {"fc1.weight": plain["fc1.weight"]})
    assert "fc1.weight: expected a weight or its copies, got both; leave one of them out" in both
    wide = error(plain | {"fc1.weight": plain["fc1.weight"][:, :8]})
    assert "fc1.weight: expected shape [3, 96, 32], got [3, 8, 32]" in wide
    assert "Missing" not in both + wide
    half = {key: tensor for key, tensor in plain.items() if key != "fc2.weight"}
    copies = [key for key in before if key.startswith("fc2.weight_")]
    missing = ", ".join(f'"{key}"' for key in copies)
    assert len(copies) == 4
    assert f"Missing key(s) in state_dict: {missing}. \n" in error(half) + "\n"
    layer = make(bundle, "grouped_mlp", "mxfp8", ALONE)
    layer.load_state_dict(half, strict=False)
    after = state(layer)
    assert torch.equal(before["fc2.weight_rowwise"], after["fc2.weight_rowwise"])
    bare = make(bundle, "grouped_mlp", "mxfp8", ALONE, device="meta")
    bare.load_state_dict(half, strict=False, assign=True)
    assert bare.fc2.weight_rowwise.is_meta and bare.fc2.weight.is_meta
    assert torch.equal(bare.fc1.weight_rowwise, layer.fc1.weight_rowwise)


@every_recipe
def test_from_recipe_to_recipe(bundle: str, recipe: str) -> None:
    """One line; values are those of the codes, so quantising them again changes little."""
    layer = make(bundle, "grouped_mlp", recipe, ALONE)
    weights = masters(layer)
    layer.refresh_weights(**weights)
    layer.refresh_weights(**weights)  # the second time by the scale that follows from the first
    found = layer.dequantized_state_dict()
    assert list(found) == [name for name, _ in layer.named_parameters()]
    tolerance = 0.2 if recipe == "nvfp4" else 0.05
    for path in ("fc1.weight", "fc2.weight"):
        master = weights[path.replace(".", "_")]
        assert found[path].dtype == torch.float32 and found[path].shape == master.shape
        assert (found[path] - master).norm() < tolerance * master.norm()
    assert layer.dequantized_state_dict(torch.bfloat16)["fc1.weight"].dtype == torch.bfloat16
    for other in RECIPES:
        target = make(bundle, "grouped_mlp", other, ALONE, seed=1)
        target.load_state_dict(found)
        again = target.dequantized_state_dict()
        tolerance = 0.2 if other == "nvfp4" else 0.05
        for path in ("fc1.weight", "fc2.weight"):
            assert (found[path] - again[path]).norm() < tolerance * found[path].norm(), other
    plain = make(bundle, "grouped_mlp", "bf16")
    plain.load_state_dict(found)
    assert torch.equal(plain.fc1.weight, found["fc1.weight"].bfloat16())


def test_a_refresh_between_forward_and_backward_is_refused(bundle: str) -> None:
    layer = make(bundle, "grouped_mlp", "fp8_block", ALONE)
    for change in (
        lambda: layer.refresh_weights(**masters(layer)),
        lambda: layer.load_state_dict(layer.state_dict()),
    ):
        y = layer(*inputs("grouped_mlp"))
        change()
        with pytest.raises(RuntimeError, match="refreshed between a forward and its backward"):
            y.sum().backward()


class Watch(TorchDispatchMode):
    """Ops that give a tensor with memory for all elements of a shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor) and each.shape == self.shape and each.is_contiguous():
                self.ops.append(str(func))
        return found


@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_allocates_no_weight(bundle: str, autocast: bool) -> None:
    """Of its shape there is the gradient alone, and its cast under autocast."""
    layer = make(bundle, "linear", "fp8_block", ALONE)
    layer, (x,) = layer.float() if autocast else layer, inputs("linear")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Watch((N, K)) as watch:
        y = layer(x)
        assert watch.ops == []
        y.sum().backward()
    backward = "quantized_weights_cpu.linear__fp8_block__quantized_weights_backward.default"
    made = [op for op in watch.ops if op != "aten.detach.default"]
    assert made == [backward, *(["aten._to_copy.default"] if autocast else [])]


@pytest.mark.parametrize(
    ("options", "recipe", "reason"),
    [
        ((), "bf16", "recipe 'bf16' quantises no weight whose copies could be kept"),
        (
            ("high_precision_backward",),
            "mxfp8",
            "the backward reads weights in high precision, and quantized_weights keeps the recipe's"
            " format alone; take cached_weights",
        ),
        (
            ("reduced_amax",),
            "fp8_delayed",
            "amaxes of quantised weights are not shared between ranks",
        ),
    ],
)
def test_what_cannot_be_says_why(options: tuple[str, ...], recipe: str, reason: str) -> None:
    query = api.Query(
        archs=("cpu", "sm_90a"), modules=("linear",), recipes=(recipe,), options=(ALONE, *options)
    )
    assert [row.reason for row in api.plan(query)] == [reason, reason]


@pytest.mark.parametrize("recipe", LOOKED_AT)
def test_with_statistics(bundle: str, recipe: str) -> None:
    """They are of the copies, and no state has them, whatever it is loaded from."""
    plain = make(bundle, "grouped_mlp", recipe, ALONE)
    layer = make(bundle, "grouped_mlp", recipe, ALONE, "debug")
    given = state(plain)
    assert layer.statistics()["fc1_weight_rowwise"].amax > 0
    layer.load_state_dict(given)
    assert not any(each.amax for each in layer.statistics().values())
    assert layer.state_dict().keys() == given.keys()
    data = inputs("grouped_mlp")
    seen = step(layer, layer, data)
    same(step(plain, plain, data), {n: t for n, t in seen.items() if not n.endswith("statistics")})
    found = layer.half().statistics()
    assert found["x_rowwise"].amax > 0 and found["dy_columnwise"].nonzero > 0
    weights = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
    for other in (plain, layer):
        other.bfloat16().load_state_dict(weights)
    same(state(plain), state(layer))
