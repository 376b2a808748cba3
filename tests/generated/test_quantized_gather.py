"""Under FSDP2 ranks gather codes and scales of weights, not the weights: bit for bit one process.

Ranks have the same data where a result is compared with one process, so that means over ranks are
what one process has.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fusegen.ir.naming import Cell

from .loading import load_cells
from .ranks import Place, run_ranks

RECIPES = ("fp8_block", "fp8_current", "fp8_delayed", "fp8_rowwise", "mxfp8", "nvfp4")
CACHED = ("cached_weights",)

COMMON = """
import contextlib, importlib, re
import bundle
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from bundle.integrations import fsdp

torch.set_default_device(device)


def experts(recipe, groups=4, dtype=torch.bfloat16):
    torch.manual_seed(0)
    cell = importlib.import_module(f"bundle.grouped_mlp__{recipe}__cached_weights")
    return cell.GroupedMLP(groups, 32, 48, bias=True, dtype=dtype)


class Model(nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.experts = experts(recipe)
        self.before = nn.Linear(32, 32, dtype=torch.bfloat16)

    def refresh_weights(self):
        self.experts.refresh_weights()

    def forward(self, x, *rest):
        return self.experts(self.before(x), *rest)


def batch(seed, width=32):
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(24, width, generator=generator).bfloat16()
    return x, torch.tensor([9, 0, 8, 7]), torch.rand(24, generator=generator)


def loss_of(model, seed):
    return model(*batch(seed)).float().square().mean()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(model, loss_of=loss_of, optimizer=torch.optim.SGD):
    optimizer = optimizer(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        for micro in range(2):
            loss = loss_of(model, 10 * step + micro)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        model.refresh_weights()
    assert len({*losses}) == 6
    return losses, {name: whole(tensor) for name, tensor in model.state_dict().items()}


def same(found, expected, words):
    assert found[0] == expected[0], (words, found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        assert torch.equal(found[1][name], tensor), (words, name)


def refused(call, *words):
    try:
        call()
    except (RuntimeError, TypeError) as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(words)
"""

TRAINED = """
class Asked(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        asked.append(str(func))
        return func(*args, **(kwargs or {}))


for recipe in words:
    expected = train(experts(recipe))
    for again in (True, False):
        layer = fsdp.gather_quantized(fully_shard(experts(recipe), reshard_after_forward=again))
        same(train(layer), expected, (recipe, again))
    asked = []
    with Asked():
        loss_of(layer, 0)
    assert [each for each in asked if "forward" in each and recipe in each]
    assert not [each for each in asked if "refresh" in each or "quantize" in each]
    # What is sent of a weight, against its bytes in 16 bits, and no memory is left behind.
    layer.reshard()
    for part in (layer.fc1, layer.fc2):
        sent, _ = part.weight._local_tensor.fsdp_pre_all_gather(None, None, None, None, None)
        share = sum(t.numel() * t.itemsize for t in sent) / (2 * part.weight.to_local().numel())
        assert share < {"nvfp4": 0.6, "mxfp8": 1.1, "fp8_rowwise": 1.25}.get(recipe, 0.55), share
    layer = fsdp.gather_quantized(fully_shard(experts(recipe)))
    loss_of(layer, 0).backward()
    for name, buffer in layer.named_buffers():
        assert "_rowwise" not in name and "_columnwise" not in name or buffer.numel() == 1 or (
            buffer.untyped_storage().nbytes() == buffer.itemsize
        ), name
"""

AROUND = """
from functools import partial
from torch.utils.checkpoint import (
    CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts,
)
recipe, = words


class Checkpointed(Model):
    def forward(self, x, *rest):
        def keep(_, op, *args, **kwargs):
            kept = f"grouped_mlp__{recipe}__cached_weights_forward" in str(op)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        context = partial(create_selective_checkpoint_contexts, keep)
        return checkpoint(super().forward, x, *rest, use_reentrant=False, context_fn=context)


def sharded(model, *inner, **more):
    for module in inner:
        fully_shard(module, **more)
    fully_shard(model, **more)
    fsdp.gather_quantized(model.experts)
    return model


expected = train(Model(recipe))
model = Model(recipe)
same(train(sharded(model)), expected, "a module around it")
model = Model(recipe)
same(train(sharded(model, model.experts)), expected, "itself")
model = Model(recipe)
same(train(sharded(model, model.experts.fc1, model.experts.fc2)), expected, "its parts")
model = Checkpointed(recipe)
same(train(sharded(model, model.experts)), expected, "checkpointed")
model = Model(recipe)
model.experts.compile(backend="aot_eager")
same(train(sharded(model, model.experts)), expected, "compiled experts")
model = sharded(Model(recipe))
model.compile(backend="aot_eager")
same(train(model), expected, "compiled model")


# Gradients of micro-batches are reduced once.
def unsynchronised(model, seed):
    model.set_requires_gradient_sync(seed % 2 == 1)
    return loss_of(model, seed)


same(train(sharded(Model(recipe)), unsynchronised), expected, "unsynchronised")

# Masters in float32, products in bfloat16.
policy = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)
plain = Model(recipe)
own = [*plain.parameters()]
masters = [parameter.detach().float() for parameter in own]
optimizer = torch.optim.SGD(masters, lr=0.5)
losses = []
for step in range(3):
    for micro in range(2):
        loss = loss_of(plain, 10 * step + micro)
        losses.append(loss.item())
        for master, grad in zip(masters, torch.autograd.grad(loss, own)):
            master.grad = grad.float() if master.grad is None else master.grad + grad.float()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, master in zip(own, masters):
            parameter.copy_(master)
    plain.refresh_weights()
found = train(sharded(Model(recipe).float(), mp_policy=policy))
assert found[0] == losses
for (name, _), master in zip(plain.named_parameters(), masters):
    assert torch.equal(found[1][name], master), name
half = sharded(Model(recipe).float(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
refused(lambda: loss_of(half, 0), "fc1.weight", "dtype=torch.float16")

# A state dict fills shards and quantises them; what two ranks saved, one process goes on with.
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, set_model_state_dict,
)
model = sharded(Model(recipe))
train(model)
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
dist.broadcast_object_list(shared := [state], 0)
other, one = sharded(Model(recipe)), Model(recipe)
torch.nn.init.zeros_(one.experts.fc1.weight)
set_model_state_dict(
    other, {**shared[0]}, options=StateDictOptions(full_state_dict=True)
)
one.load_state_dict(shared[0])
expected = train(one)
same(train(other), expected, "loaded")
with torch.device("meta"):
    model = Model(recipe)
fully_shard(model)
refused(lambda: fsdp.gather_quantized(model.experts), "fc1.weight", "meta", "to_empty")
model.to_empty(device=device)
fsdp.gather_quantized(model.experts)
set_model_state_dict(
    model, {**shared[0]}, options=StateDictOptions(full_state_dict=True)
)
same(train(model), expected, "made on meta")
"""

SINGLE = """
for recipe in words:
    cell = importlib.import_module(f"bundle.linear__{recipe}__cached_weights")

    def made(rows=256):
        torch.manual_seed(0)
        return cell.Linear(160, rows)

    def loss_of_rows(model, seed):
        return model(batch(seed, 160)[0]).float().square().mean()

    if recipe in ("fp8_block", "mxfp8"):
        layer = fsdp.gather_quantized(fully_shard(made()))
        adam = torch.optim.AdamW
        same(train(layer, loss_of_rows, adam), train(made(), loss_of_rows, adam), recipe)
        unit = {"fp8_block": 256, "mxfp8": 64}[recipe]
        layer = fully_shard(made(unit // 2))
        refused(lambda: fsdp.gather_quantized(layer), "weight", f"multiple of {unit}", "2 ranks")
    else:
        refused(lambda: fsdp.gather_quantized(fully_shard(made())), "weight", "a scale spans rows")
"""

LAYERS = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict


def layer(recipe, seed=0):
    torch.manual_seed(seed)
    cell = importlib.import_module(f"bundle.moe_layer__{recipe}__cached_weights")
    return cell.MoELayer(4, 32, 48, bias=True)


def loss_of_tokens(model, seed):
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(24, 32, generator=generator).bfloat16()
    probs, ids = torch.rand(24, 4, generator=generator).topk(2)
    ids = ids.int()
    return model(x, probs, ids, ids.flatten().bincount(minlength=4)).float().square().mean()


def loaded(model):
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=f"{folder}/{recipe}")
    set_model_state_dict(model, state)
    return model


for recipe in words:
    split = fsdp.gather_quantized(fully_shard(layer(recipe)))
    same(train(split, loss_of_tokens), train(layer(recipe), loss_of_tokens), recipe)
    # What two ranks saved in shards they go on with, and so does one process.
    dcp.save(get_model_state_dict(split), checkpoint_id=f"{folder}/{recipe}")
    expected = train(split, loss_of_tokens)
    again = loaded(fsdp.gather_quantized(fully_shard(layer(recipe, seed=1))))
    same(train(again, loss_of_tokens), expected, (recipe, "shards"))
    same(train(loaded(layer(recipe, seed=2)), loss_of_tokens), expected, (recipe, "whole"))
"""

REFUSED = """
def sharded(**more):
    return fsdp.gather_quantized(fully_shard(experts("fp8_block"), **more))


layer = sharded()
loss = loss_of(layer, 0)
layer.refresh_weights()
refused(loss.backward, "refreshed between a forward and its backward")
layer = fully_shard(experts("fp8_block"))
refused(lambda: loss_of(layer, 0), "fc1.weight", "FSDP")
layer = sharded()
layer.fc1.weight._local_tensor = layer.fc1.weight._local_tensor.clone()
refused(lambda: loss_of(layer, 0), "fc1.weight", "got its values", "move and load the layer first")
refused(lambda: fsdp.gather_quantized(layer), "gathered quantised already")
refused(lambda: fsdp.gather_quantized(experts("fp8_block")), "fc1.weight", "fully_shard first")
refused(lambda: fsdp.gather_quantized(nn.Linear(3, 3)), "Linear", "cached_weights")
layer = fully_shard(experts("fp8_block", groups=3))
refused(lambda: fsdp.gather_quantized(layer), "fc1.weight", "multiple of 2", "(3, 96, 32)")
high = importlib.import_module(
    "bundle.grouped_mlp__fp8_block__cached_weights__high_precision_backward"
)
layer = fully_shard(high.GroupedMLP(4, 32, 48))
refused(lambda: fsdp.gather_quantized(layer), "high_precision_backward")

layer = fully_shard(importlib.import_module("bundle.mlp__fp8_block__cached_weights").MLP(256, 512))
refused(lambda: fsdp.gather_quantized(layer), "fc1.weight", "stacks of weights", "fc2.weight")

# Whoever reads the weight while it is gathered is refused, and the layer works again behind that.
layer = sharded()
spied = []
layer.fc1.register_forward_pre_hook(lambda part, _: None if not spied else part.weight.float())
expected = loss_of(layer, 0)
spied.append(True)
refused(lambda: loss_of(layer, 0), "no values to read", "full_tensor")
spied.clear()
assert torch.equal(loss_of(layer, 0), expected)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    cells = [Cell("grouped_mlp", recipe, CACHED) for recipe in RECIPES]
    cells += [Cell("linear", recipe, CACHED) for recipe in RECIPES]
    cells += [Cell("mlp", "fp8_block", CACHED)]
    cells += [Cell("moe_layer", recipe, CACHED) for recipe in RECIPES]
    cells += [Cell("grouped_mlp", "fp8_block", (*CACHED, "high_precision_backward"))]
    name = load_cells("gathered", tmp_path_factory.mktemp("gathered"), cells)
    return Place(Path(str(sys.modules[name].__file__)).parent)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_recipe_trains_as_one_process(place: Place, ranks: int, tmp_path: Path) -> None:
    """Stacks are split by groups, whose scales are their own; nothing is quantised in a forward."""
    run_ranks(COMMON + TRAINED, tmp_path, place, *RECIPES, ranks=ranks)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp8"])
def test_wrappers_policies_and_states(place: Place, recipe: str, tmp_path: Path) -> None:
    run_ranks(COMMON + AROUND, tmp_path, place, recipe)


def test_experts_of_layers_and_checkpoints_of_shards(place: Place, tmp_path: Path) -> None:
    """Each rank writes its part; what another split needs is read."""
    run_ranks(COMMON + LAYERS, tmp_path, place, *RECIPES)


def test_single_weights_are_split_between_blocks(place: Place, tmp_path: Path) -> None:
    """Elsewhere ranks would have to know each other's rows."""
    run_ranks(COMMON + SINGLE, tmp_path, place, *RECIPES)


def test_what_cannot_be_gathered_says_why(place: Place, tmp_path: Path) -> None:
    run_ranks(COMMON + REFUSED, tmp_path, place)
