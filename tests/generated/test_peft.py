"""Adapters on linear layers, dense and grouped, and on parts of experts, with PEFT itself."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from fusegen.ir.naming import Cell

from .loading import load_cells
from .ranks import Place, run_ranks

pytestmark = pytest.mark.usefixtures("fresh_compiler")

RECIPES = ("bf16", "fp8_delayed", "fp8_block", "nvfp4")
G, K, N, R, T = 3, 32, 48, 8, 24
ALPHA = 12
"""So that adapters are scaled by 1.5."""
OPTIONS = ("cached_weights", "quantized_weights", "delayed_wgrad", "add_to_main_grad")
NAMES = ["proj", "each", "experts.fc1", "experts.fc2"]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    modules = ("linear", "grouped_linear", "grouped_mlp")
    cells = [Cell(module, recipe) for module in modules for recipe in RECIPES]
    cells += [Cell("grouped_linear", "fp8_block", (option,)) for option in OPTIONS]
    cells += [Cell("linear", "fp8_block", ("cached_weights",)), Cell("scaled_swiglu", "bf16")]
    cells += [Cell("mlp_swiglu", "bf16"), Cell("grouped_mlp_srelu", "bf16")]
    cells += [Cell("grouped_mlp", "fp8_block", ("cached_weights",))]
    cells += [Cell("grouped_linear", "bf16", ("parameter_per_group",))]
    cells += [Cell(f"{kind}_clamped_qgeglu", "bf16") for kind in ("scaled", "grouped_mlp")]
    return load_cells("adapters", tmp_path_factory.mktemp("adapters"), cells)


def peft_of(bundle: str) -> Any:
    return importlib.import_module(f"{bundle}.integrations.peft")


def made(bundle: str, cell: str, name: str, *sizes: int, **more: Any) -> Any:
    return getattr(importlib.import_module(f"{bundle}.{cell}"), name)(*sizes, **more)


class Model(nn.Module):
    """A dense layer, a grouped one, experts."""

    def __init__(self, bundle: str, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = made(bundle, f"linear__{recipe}", "Linear", K, K, bias=True)
        self.each = made(bundle, f"grouped_linear__{recipe}", "GroupedLinear", G, K, K)
        self.experts = made(bundle, f"grouped_mlp__{recipe}", "GroupedMLP", G, K, N)

    def forward(self, x: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
        y: Tensor = self.experts(self.each(self.proj(x), sizes), sizes, probs)
        return y


def inputs(seed: int = 1, sizes: tuple[int, ...] = (9, 0, 13)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator).bfloat16()
    return x, torch.tensor(sizes), torch.rand(T, generator=generator)


def with_adapters(bundle: str, model: nn.Module, **more: Any) -> Any:
    config = LoraConfig(r=R, lora_alpha=ALPHA, **{"target_modules": NAMES, **more})
    return get_peft_model(model, peft_of(bundle).prepare(model, config))  # type: ignore[arg-type]


def fill(model: nn.Module) -> dict[str, nn.Parameter]:
    """Adapters that are not zero, by name."""
    torch.manual_seed(3)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.copy_(torch.randn_like(parameter) / 8)
    return adapters


def settle(model: nn.Module) -> None:
    """Let delayed scaling see weights that were merged: scales are of what earlier steps saw."""
    x, *rest = inputs()
    for _ in range(2):
        with torch.enable_grad():
            model(x.clone().requires_grad_(), *rest)


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected).norm() / expected.norm()).detach())


# What adapters compute


class Dense:
    """The model in float64, a loop over groups."""

    def __init__(self, model: nn.Module, bases: dict[str, Tensor]) -> None:
        self.adapters = {
            name: p.detach().double().requires_grad_()
            for name, p in model.named_parameters()
            if "lora_" in name
        }
        self.bases = {name: base.detach().double() for name, base in bases.items()}

    def weight(self, path: str) -> Tensor:
        a, b = (
            next(t for name, t in self.adapters.items() if f"{path}.lora_{side}" in name)
            for side in "AB"
        )
        return self.bases[f"{path}.weight"] + ALPHA / R * (b @ a)

    def __call__(self, x: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
        x = x.double() @ self.weight("proj").T + self.bases["proj.bias"]
        each, fc1, fc2 = map(self.weight, NAMES[1:])
        rows = []
        for g, part in enumerate(x[: int(sizes.sum())].split(sizes.tolist())):
            gate, up = (part @ each[g].T @ fc1[g].T).chunk(2, -1)
            rows.append(nn.functional.silu(gate) * up)
        a = torch.cat(rows) * probs[: int(sizes.sum()), None].double()
        y = [part @ fc2[g].T for g, part in enumerate(a.split(sizes.tolist()))]
        return torch.cat([*y, x.new_zeros(len(x) - int(sizes.sum()), K)])


@pytest.mark.parametrize("autocast_adapter_dtype", [True, False])
def test_gradients_equal_float64(bundle: str, autocast_adapter_dtype: bool) -> None:
    """Of every adapter, fp32 as PEFT has them by default or in bf16."""
    model = Model(bundle, "bf16")
    bases = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = LoraConfig(r=R, lora_alpha=ALPHA, target_modules=NAMES)
    wrapped = get_peft_model(
        model,  # type: ignore[arg-type]
        peft_of(bundle).prepare(model, config),
        autocast_adapter_dtype=autocast_adapter_dtype,
    )
    adapters = fill(wrapped)
    expected_type = torch.float32 if autocast_adapter_dtype else torch.bfloat16
    assert {p.dtype for p in adapters.values()} == {expected_type} and len(adapters) == 8
    dense, data = Dense(wrapped, bases), inputs()
    y, expected = wrapped(*data), dense(*data)
    assert relative(y, expected) < 0.02 and not y[22:].any()
    for each in (y.float(), expected):
        each.square().sum().backward()
    for name, parameter in adapters.items():
        reference = dense.adapters[name].grad
        assert parameter.grad is not None and reference is not None
        assert relative(parameter.grad, reference) < 0.03, name
    assert all(p.grad is None for name, p in wrapped.named_parameters() if "lora_" not in name)


@every_recipe
def test_the_base_runs_as_without(bundle: str, recipe: str) -> None:
    """Fresh adapters change no bit of a layer, and what they add is not quantised."""
    layer = made(bundle, f"grouped_linear__{recipe}", "GroupedLinear", G, K, N)
    model, plain = nn.Sequential(layer), copy.deepcopy(layer)
    wrapped = with_adapters(bundle, model, target_modules=["0"])
    adapted = wrapped.base_model.model[0]
    x, sizes, _ = inputs()
    with torch.no_grad():
        assert torch.equal(adapted(x, sizes), plain(x, sizes))
        fill(wrapped)
        a, b = (each["default"].weight.bfloat16() for each in (adapted.lora_A, adapted.lora_B))
        exact = importlib.import_module(f"{bundle}.grouped_linear__bf16").grouped_linear
        added = adapted.scaling["default"] * exact(exact(x, a, sizes), b, sizes)
        if recipe != "nvfp4":  # which rounds stochastically
            assert torch.equal(adapted(x, sizes.int()), plain(x, sizes) + added)
        with wrapped.disable_adapter():
            assert relative(adapted(x, sizes), plain(x, sizes).double()) < 0.2


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "nvfp4"])
def test_experts_are_the_sum_of_their_parts(bundle: str, recipe: str) -> None:
    """Bit for bit, whatever scalars the activation has; nvfp4 draws other numbers."""
    plain = made(bundle, f"grouped_mlp__{recipe}", "GroupedMLP", G, K, N, bias=True)
    experts = [plain]
    if recipe == "bf16":
        name, scalars = "GroupedMLPClampedQGEGLU", {"act_limit": 0.2, "act_alpha": 1.1}
        experts.append(made(bundle, "grouped_mlp_clamped_qgeglu__bf16", name, G, K, N, **scalars))
    for layer in experts:
        model = nn.Sequential(copy.deepcopy(layer))
        wrapped = with_adapters(bundle, model, target_modules=["fc1"])
        x, *rest = inputs()
        results = []
        for each in (layer, wrapped.base_model.model[0]):
            leaf = x.clone().requires_grad_()
            y = each(leaf, *rest)
            y.float().square().sum().backward()
            results.append((y, leaf.grad))
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_rows_past_the_groups_reach_nothing(bundle: str) -> None:
    wrapped = with_adapters(bundle, Model(bundle, "bf16"), lora_dropout=0.5)
    adapters = fill(wrapped)
    wrapped.eval()
    x, sizes, probs = inputs()
    wrapped(x, sizes, probs).float().square().sum().backward()
    expected = {name: p.grad.clone() for name, p in adapters.items() if p.grad is not None}
    x[22:], probs[22:] = float("nan"), float("nan")
    wrapped.zero_grad()
    leaf = x.requires_grad_()
    y = wrapped(leaf, sizes, probs)
    y.float().square().sum().backward()
    assert not y[22:].any()
    for name, grad in expected.items():
        if ".proj." not in name:  # a dense layer has no groups
            found = adapters[name].grad
            assert found is not None and torch.equal(found, grad), name


@every_recipe
def test_compiled(bundle: str, recipe: str) -> None:
    wrapped = with_adapters(bundle, Model(bundle, recipe))
    fill(wrapped)
    other = copy.deepcopy(wrapped)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    results = [call(*inputs()) for call in (wrapped, compiled)]
    for y in results:
        y.float().square().sum().backward()
    if recipe != "nvfp4":
        assert torch.equal(*results)
    pairs = zip(wrapped.parameters(), other.parameters(), strict=True)
    grads = [(p.grad, q.grad) for p, q in pairs if p.requires_grad]
    assert len(grads) == 8 and all(p is not None and q is not None for p, q in grads)
    if recipe != "nvfp4":
        assert all(torch.equal(p, q) for p, q in grads)


# Merging, saving


@every_recipe
def test_train_merge_save_load(bundle: str, recipe: str, tmp_path: Path) -> None:
    model = Model(bundle, recipe)
    fresh, names = copy.deepcopy(model), [*model.state_dict()]
    wrapped = with_adapters(bundle, model)
    adapters = fill(wrapped)
    optimizer = torch.optim.AdamW(adapters.values(), lr=0.01)
    losses = []
    for _ in range(8):
        x, sizes, probs = inputs()
        loss = (wrapped(x, sizes, probs) - x).float()[:22].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    wrapped.eval()
    with torch.no_grad():
        y = wrapped(*inputs())
        wrapped.save_pretrained(tmp_path)
        config = peft_of(bundle).prepare(fresh, LoraConfig.from_pretrained(str(tmp_path)))
        low = {"low_cpu_mem_usage": recipe == "bf16"}  # made on meta, and loaded
        loaded = PeftModel.from_pretrained(fresh, str(tmp_path), config=config, **low)
        found = dict(loaded.named_parameters())
        for name, parameter in adapters.items():
            if low["low_cpu_mem_usage"]:  # PEFT rounds them to the type of the layer
                assert torch.allclose(found[name], parameter, rtol=2**-8, atol=0), name
            else:
                assert torch.equal(found[name], parameter), name
        before = wrapped.base_model.model.each.base_layer.weight.clone()
        wrapped.merge_adapter()
        settle(wrapped)
        assert relative(wrapped(*inputs()), y.double()) < (0.02 if recipe == "bf16" else 0.3)
        wrapped.unmerge_adapter()
        after = wrapped.base_model.model.each.base_layer.weight
        assert relative(after, before.double()) < 0.01
        merged = peft_of(bundle).fuse(wrapped.merge_and_unload())
        settle(merged)
        assert isinstance(merged, Model) and type(merged.experts).__name__ == "GroupedMLP"
        assert sorted(merged.state_dict()) == sorted(names)
        assert relative(merged(*inputs()), y.double()) < (0.02 if recipe == "bf16" else 0.3)


def test_two_adapters(bundle: str) -> None:
    """Added, switched, and deleted by PEFT's own calls."""
    wrapped = with_adapters(bundle, Model(bundle, "bf16"))
    fill(wrapped)
    first = wrapped(*inputs())
    other = LoraConfig(r=16, target_modules=["each"], init_lora_weights="gaussian")
    wrapped.add_adapter("other", peft_of(bundle).prepare(wrapped, other))
    wrapped.set_adapter("other")
    fill(wrapped)
    second = wrapped(*inputs())
    wrapped.set_adapter("default")
    assert torch.equal(wrapped(*inputs()), first) and not torch.equal(first, second)
    assert wrapped.base_model.model.each.lora_A["other"].weight.shape == (G, 16, K)
    wrapped.delete_adapter("other")
    assert torch.equal(wrapped(*inputs()), first)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_states_go_with_experts(bundle: str, recipe: str) -> None:
    """To their parts, moved on there, and back; nothing but what is quantised changes them."""
    model, twin = Model(bundle, recipe), Model(bundle, recipe)
    for each in (model, twin):
        each(*inputs()).sum().backward()
    wrapped = with_adapters(bundle, model)
    unfused = wrapped.base_model.model.experts
    for seed in (2, 3):
        for each in (twin, wrapped):  # fresh adapters add nothing
            x, *rest = inputs(seed)
            each(x.requires_grad_(), *rest).sum().backward()
    back = peft_of(bundle).fuse(wrapped.unload())
    assert type(unfused).__name__ == "UnfusedExperts"
    for name, tensor in twin.state_dict().items():
        if "rng_state" not in name and "grad_output" not in name:
            assert torch.equal(back.state_dict()[name], tensor), name
    if recipe == "fp8_delayed":
        state = back.experts.forward_state.clone()
        settle(back)
        assert not torch.equal(back.experts.forward_state, state)


def test_initial_values_are_those_of_matrices(bundle: str) -> None:
    """PEFT's bound is by the inputs of a matrix, which a stack of them has, too."""
    wrapped = with_adapters(bundle, Model(bundle, "bf16"))
    each = wrapped.base_model.model.each
    a, dense = each.lora_A["default"].weight, wrapped.base_model.model.proj.lora_A["default"].weight
    bound = 1 / K**0.5
    for weight in (a, dense):
        assert 0.9 * bound < weight.abs().max() <= bound * 1.01
    assert not each.lora_B["default"].weight.any()


# Wrappers of adapters

WRAPPED = """
import importlib
import bundle
from bundle.integrations.peft import prepare
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
(recipe,) = words


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        module = lambda name: importlib.import_module(f"bundle.{name}__{recipe}")
        self.proj = module("linear").Linear(32, 32)
        self.each = module("grouped_linear").GroupedLinear(3, 32, 32)
        self.experts = module("grouped_mlp").GroupedMLP(3, 32, 48)

    def forward(self, x, sizes, probs):
        return self.experts(self.each(self.proj(x), sizes), sizes, probs)


def made():
    model = Model()
    names = ["proj", "each", "fc1", "fc2"]
    config = LoraConfig(r=8, target_modules=names, init_lora_weights=False)
    return get_peft_model(model, prepare(model, config), autocast_adapter_dtype=False)


def train(model):
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=0.5)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(24, 32, generator=generator).bfloat16()
        data = x, torch.tensor([9, 0, 13]), torch.rand(24, generator=generator)
        loss = model(*data).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


expected = train(made())
assert len({*expected}) == 3
assert train(DDP(made())) == expected
model = made()
for each in (model.base_model.model.each, model.base_model.model.experts.fc1):
    fully_shard(each)
assert train(fully_shard(model)) == expected
"""


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
def test_adapters_under_wrappers(bundle: str, recipe: str, tmp_path: Path) -> None:
    """DDP and FSDP2, layers by themselves and the whole model, train as one process does."""
    folder = Path(str(sys.modules[bundle].__file__)).parent
    run_ranks(WRAPPED, tmp_path, Place(folder), recipe)


# Options of the layer below


@pytest.mark.parametrize("module", ["linear", "grouped_linear"])
def test_cached_copies_follow_a_merge(bundle: str, module: str) -> None:
    name = {"linear": "Linear", "grouped_linear": "GroupedLinear"}[module]
    sizes = (K, N) if module == "linear" else (G, K, N)
    layer = made(bundle, f"{module}__fp8_block__cached_weights", name, *sizes)
    data = inputs()[: 1 if module == "linear" else 2]
    wrapped = with_adapters(bundle, nn.Sequential(layer), target_modules=["0"])
    fill(wrapped)
    adapted = wrapped.base_model.model[0]
    with torch.no_grad():
        y = adapted(*data)
        adapted.merge()
        assert relative(adapted(*data), y.double()) < 0.1
        plain = made(bundle, f"{module}__fp8_block", name, *sizes)
        plain.load_state_dict(adapted.get_base_layer().state_dict())
        assert torch.equal(adapted(*data), plain(*data))
        adapted.unmerge()
        plain.load_state_dict(adapted.get_base_layer().state_dict())
        assert torch.equal(adapted.base_layer(*data), plain(*data))


@pytest.mark.parametrize("option", ["quantized_weights", "delayed_wgrad", "add_to_main_grad"])
def test_frozen_weights_need_nothing_of_the_caller(bundle: str, option: str) -> None:
    layer = made(bundle, f"grouped_linear__fp8_block__{option}", "GroupedLinear", G, K, N)
    wrapped = with_adapters(bundle, nn.Sequential(layer), target_modules=["0"])
    adapters = fill(wrapped)
    adapted = wrapped.base_model.model[0]
    x, sizes, _ = inputs()
    x.requires_grad_()
    adapted(x, sizes).float().square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in adapters.values())
    assert x.grad is not None and bool(x.grad.isfinite().all())
    if option == "quantized_weights":
        with pytest.raises(RuntimeError, match="expected a weight to merge adapters into"):
            adapted.merge()
        with pytest.raises(RuntimeError, match="expected a weight to merge adapters into"):
            wrapped.merge_and_unload()


# What is refused


def test_targets_that_are_no_layers(bundle: str) -> None:
    model = Model(bundle, "bf16")
    with pytest.raises(TypeError, match=r"experts: expected a linear layer .*experts\.fc1"):
        with_adapters(bundle, model, target_modules=["experts"])
    dense = nn.Sequential(made(bundle, "mlp_swiglu__bf16", "SwiGLUMLP", K, N))
    with pytest.raises(TypeError, match=r"0\.fc1: expected a linear layer .*target_parameters"):
        with_adapters(bundle, dense, target_modules=["fc1"])
    with pytest.raises(TypeError, match=r"experts: expected a linear layer"):
        with_adapters(bundle, model, target_modules=["experts", "experts.fc1"])
    assert type(model.experts).__name__ == "GroupedMLP"  # nothing has changed
    cached = made(bundle, "grouped_mlp__fp8_block__cached_weights", "GroupedMLP", G, K, N)
    with pytest.raises(TypeError, match=r"cached_weights; put adapters on its parameters"):
        with_adapters(bundle, nn.Sequential(cached), target_modules=["fc1"])
    many = made(bundle, "grouped_linear__bf16__parameter_per_group", "GroupedLinear", G, K, N)
    with pytest.raises(TypeError, match=r"parameter_per_group; put adapters on its parameters"):
        with_adapters(bundle, nn.Sequential(many), target_modules=["0"])


def test_experts_that_cannot_be_taken_apart(bundle: str) -> None:
    experts = made(bundle, "grouped_mlp__bf16", "GroupedMLP", G, K, N)
    with pytest.raises(RuntimeError, match="got the model itself; put them into one"):
        with_adapters(bundle, experts, target_modules=["fc1"])
    experts.fc1.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="expected experts without hooks"):
        with_adapters(bundle, nn.Sequential(experts), target_modules=["fc1"])
    squared = nn.Sequential(made(bundle, "grouped_mlp_srelu__bf16", "GroupedMLPSReLU", G, K, N))
    with pytest.raises(RuntimeError, match=r"and of the activation y = .*fusegen generate"):
        with_adapters(bundle, squared, target_modules=["fc1"])
    wrapped = with_adapters(bundle, Model(bundle, "bf16"))
    with pytest.raises(RuntimeError, match="fc1: expected a layer without adapters"):
        peft_of(bundle).fuse(wrapped)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lora_bias": True}, "expected lora_bias=False"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"use_dora": True}, "variant"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=False"),
    ],
)
def test_what_only_a_matrix_has(bundle: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        with_adapters(bundle, Model(bundle, "bf16"), target_modules=["each"], **more)


def test_adapters_by_row_are_refused(bundle: str) -> None:
    wrapped = with_adapters(bundle, Model(bundle, "bf16"), target_modules=["each"])
    wrapped.eval()
    with pytest.raises(ValueError, match="expected one set of adapters for all rows"):
        wrapped(*inputs(), adapter_names=["default"] * T)
