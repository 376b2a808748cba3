"""DDP, FSDP1 and FSDP2 around a model: policies, accumulation, options, checkpoints.

Ranks have the same data where a result is compared with one process, so that means over ranks are
what one process has, bit for bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fusegen.ir.naming import Cell

from .loading import load_cells
from .ranks import Place, run_ranks

RECIPES = ("bf16", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
OPTIONS = (
    "add_to_main_grad",
    "cached_weights",
    "delayed_wgrad",
    "quantized_weights",
    "reduced_amax",
)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)

COMMON = """
import contextlib, copy, importlib, re
from functools import partial
import bundle
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP, MixedPrecision, MixedPrecisionPolicy, fully_shard,
)
from torch.nn.parallel import DistributedDataParallel as DDP
recipe, *words = words


class Model(nn.Module):
    def __init__(self, dtype=torch.bfloat16, cell=f"grouped_mlp__{recipe}"):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(32, 32, dtype=dtype)
        self.experts = importlib.import_module(f"bundle.{cell}").GroupedMLP(2, 32, 48, dtype=dtype)

    def forward(self, x, *rest):
        return self.experts(self.before(x), *rest)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 32, generator=generator).bfloat16()
    return x, torch.tensor([9, 7]), torch.rand(16, generator=generator)


def loss_of(call, seed):
    return call(*batch(seed)).float().square().mean()


def whole(parameter):
    found = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return found.detach().clone()


def same(found, expected, words):
    assert len(found) == len(expected) > 0, words
    for one, other in zip(found, expected):
        assert torch.equal(one, other), (words, one, other)


def sharded(model, **more):
    fully_shard(model.experts, **more)
    return fully_shard(model, **more)
"""

ACCUMULATED = """
def train(model, waiting, dtype=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        for micro in range(3):
            cast = torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None)
            with waiting(micro < 2), cast:
                loss = loss_of(model, 10 * step + micro)
            with waiting(micro < 2):
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def always(now):
    return contextlib.nullcontext()


def no_sync(model, now):
    return model.no_sync() if now else contextlib.nullcontext()


@contextlib.contextmanager
def unsynchronised(model, now):
    model.set_requires_gradient_sync(not now)
    yield


# In the parameters' own type.
expected = train(Model(), always)
assert len({loss.item() for loss in expected}) == 9
model = DDP(Model())
same(train(model, partial(no_sync, model)), expected, "ddp")
for original in (False, True):
    model = FSDP(Model(), use_orig_params=original, device_id=torch.device("cpu"))
    same(train(model, partial(no_sync, model)), expected, ("fsdp1", original))
model = sharded(Model())
same(train(model, partial(unsynchronised, model)), expected, "fsdp2")

# State dicts of FSDP1 and DDP have what those of the model have, and load into it.
plain = Model()
train(plain, always)
wanted = plain.state_dict()
for wrap in (partial(FSDP, device_id=torch.device("cpu")), DDP):
    model = wrap(Model())
    train(model, always)
    state = {name.removeprefix("module."): t for name, t in model.state_dict().items()}
    assert state.keys() == wanted.keys()
    same(list(state.values()), list(wanted.values()), "state dict")
    other = Model()
    other.load_state_dict(state)
    same(train(other, always), train(copy.deepcopy(plain), always), "loaded")
    assert isinstance(model, DDP) or not model.load_state_dict(wanted).missing_keys

# fp32 parameters, gathered as bfloat16, as autocast casts them; gradients are reduced in fp32.
expected = train(Model(torch.float32), always, torch.bfloat16)
policy = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)
model = sharded(Model(torch.float32), mp_policy=policy)
same(train(model, partial(unsynchronised, model)), expected, "fsdp2 mixed")

# By default FSDP2 casts what goes into a module, probabilities of the router, too.
rounded = Model(torch.float32)
rounded.register_forward_pre_hook(
    lambda _, given: (*given[:2], given[2].bfloat16().float())
)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = sharded(Model(torch.float32), mp_policy=policy)
found = train(model, partial(unsynchronised, model))
same(found, train(rounded, always, torch.bfloat16), "fsdp2 mixed, inputs cast")
assert found != expected
mixed = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
    cast_forward_inputs=False, cast_root_forward_inputs=False,
)
for original in (False, True):
    model = FSDP(
        Model(torch.float32), use_orig_params=original, mixed_precision=mixed,
        device_id=torch.device("cpu"),
    )
    found = train(model, always)
    plain = train(Model(torch.float32), always, torch.bfloat16)
    same(found, plain, ("fsdp1 mixed", original))
"""

AROUND = """
from torch.utils.checkpoint import (
    CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts,
)


class Checkpointed(Model):
    def forward(self, x, *rest):
        def keep(_, op, *args, **kwargs):
            kept = f"grouped_mlp__{recipe}_forward" in str(op)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        context = partial(create_selective_checkpoint_contexts, keep)
        return checkpoint(super().forward, x, *rest, use_reentrant=False, context_fn=context)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*map(whole, model.parameters()), *(b.clone() for b in model.buffers())]


expected = train(Model())
same(train(sharded(Checkpointed())), expected, "checkpointed")
model = Model()
model.experts.compile(backend="aot_eager", fullgraph=True)
same(train(sharded(model)), expected, "compiled experts")
model = sharded(Model())
model.compile(backend="aot_eager")
same(train(model), expected, "compiled model")

# Other data on each rank: parameters stay equal, and are those of both ranks' gradients.
model, plain = DDP(Model()), [Model() for _ in range(ranks)]
loss_of(model, rank).backward()
for seed, each in enumerate(plain):
    loss_of(each, seed).backward()
grads = [
    sum(parameter.grad / ranks for parameter in each)
    for each in zip(*(each.parameters() for each in plain))
]
same([parameter.grad for parameter in model.parameters()], grads, "ddp, other data")
found = sharded(Model())
loss_of(found, rank).backward()
for parameter, grad in zip(found.parameters(), grads):
    torch.testing.assert_close(parameter.grad.full_tensor(), grad, rtol=1e-2, atol=1e-5)

# States are each rank's own then; the planner is told that a checkpoint has the first one's.
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
first = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
dcp.save({"model": get_model_state_dict(found)}, checkpoint_id=f"{folder}/first", planner=first)
other = sharded(Model())
state = get_model_state_dict(other)
dcp.load({"model": state}, checkpoint_id=f"{folder}/first")
set_model_state_dict(other, state)
for buffer, loaded in zip(found.buffers(), other.buffers()):
    own = buffer.clone()
    dist.broadcast(buffer, 0)
    counted = recipe == "nvfp4"  # calls, of which each rank has as many; amaxes are its own
    assert torch.equal(buffer, loaded) and (rank == 0 or counted) == torch.equal(buffer, own)
"""

OPTION = """
def parameters(model):
    for parameter in model.experts.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    return model


wrappers = {
    "ddp": DDP,
    "ddp unused": partial(DDP, find_unused_parameters=True),
    "ddp static": partial(DDP, static_graph=True),
    "fsdp1": partial(FSDP, device_id=torch.device("cpu")),
    "fsdp1 original": partial(FSDP, device_id=torch.device("cpu"), use_orig_params=True),
    "fsdp2": sharded,
}
own = "the weights are not those of the forward|expected (a|the) (float32|parameter|weight)"
unshared = "single memory|out of bounds|non-contiguous"
refused = {("cached_weights", kind): own for kind in wrappers if "fsdp" in kind}
for kind in wrappers:
    refused["add_to_main_grad", kind] = refused["delayed_wgrad", kind] = own
    refused["quantized_weights", kind] = unshared
for option in words:
    for kind, wrap in wrappers.items():
        model = parameters(Model(cell=f"grouped_mlp__fp8_delayed__{option}"))
        try:
            wrapped = wrap(model)
            for seed in range(2):
                loss_of(wrapped, 2 * seed + rank).backward()
                if option == "delayed_wgrad":
                    model.experts.backward_dw()
                if option == "cached_weights":
                    model.experts.refresh_weights()
        except (RuntimeError, NotImplementedError) as error:
            assert re.search(refused[option, kind], str(error)), (option, kind, error)
        else:
            assert (option, kind) not in refused, (option, kind)
            for parameter in model.experts.parameters() if "ddp" in kind else ():
                grads = [torch.empty_like(parameter.grad) for _ in range(ranks)]
                dist.all_gather(grads, parameter.grad)
                assert torch.equal(*grads), (option, kind)

# What is left: gradients that their owner averages.
model = parameters(Model(cell="grouped_mlp__fp8_delayed__add_to_main_grad"))
ignored = [f"experts.{name}" for name, _ in model.experts.named_parameters()]
DDP._set_params_and_buffers_to_ignore_for_model(model, ignored)
loss_of(DDP(model), rank).backward()
assert model.before.weight.grad.any() and model.experts.fc1.weight.main_grad.any()
model = DDP(parameters(Model(cell="grouped_mlp__fp8_delayed__add_to_main_grad")))
with model.no_sync():
    loss_of(model, rank).backward()
assert model.module.experts.fc1.weight.main_grad.any()

# A state that is cast by a policy of FSDP1.
model = FSDP(
    Model(cell="grouped_mlp__fp8_delayed"), device_id=torch.device("cpu"),
    mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
)
try:
    loss_of(model, 0)
except RuntimeError as error:
    assert re.search("forward_state: expected dtype float32, got bfloat16", str(error)), error
else:
    raise AssertionError("cast states")
"""

CHECKPOINT = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

saved, loaded, last = words


def made():
    model = Model() if ranks == 1 else sharded(Model())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def everything(model):
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


model, optimizer = made()
if loaded:
    kept = get_state_dict(model, optimizer)
    found = {"model": kept[0], "optimizer": kept[1]}
    dcp.load(found, checkpoint_id=f"{folder}/{loaded}")
    set_state_dict(
        model, optimizer,
        model_state_dict=found["model"], optim_state_dict=found["optimizer"],
    )
    expected = torch.load(f"{folder}/{loaded}.pt")
    state = everything(model)
    assert state.keys() == expected.keys() and len(state) > 3
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
first = int(last) - 3
losses = train(model, optimizer, range(first, int(last)))
if saved:
    kept = get_state_dict(model, optimizer)
    dcp.save({"model": kept[0], "optimizer": kept[1]}, checkpoint_id=f"{folder}/{saved}")
state = everything(model)
if rank == 0:
    torch.save(state, f"{folder}/{saved or 'end'}.pt")
    torch.save(losses, f"{folder}/losses{last}.pt")
"""
UNINTERRUPTED = """
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for step in range(9):
    loss = loss_of(model, step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
found = [loss for last in (3, 6, 9) for loss in torch.load(f"{folder}/losses{last}.pt")]
assert found == losses, (found, losses)
state = torch.load(f"{folder}/end.pt")
for name, tensor in model.state_dict().items():
    assert torch.equal(state[name], tensor), name
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    cells = [Cell("grouped_mlp", recipe) for recipe in RECIPES]
    cells += [Cell("grouped_mlp", "fp8_delayed", (option,)) for option in OPTIONS]
    name = load_cells("sharded", tmp_path_factory.mktemp("sharded"), cells)
    return Place(Path(str(sys.modules[name].__file__)).parent)


@every_recipe
def test_accumulation_and_policies(place: Place, recipe: str, tmp_path: Path) -> None:
    """Gradients of three micro-batches are reduced once; fp32 parameters, products in bfloat16."""
    run_ranks(COMMON + ACCUMULATED, tmp_path, place, recipe)


@every_recipe
def test_checkpointing_compilation_and_other_data(
    place: Place, recipe: str, tmp_path: Path
) -> None:
    run_ranks(COMMON + AROUND, tmp_path, place, recipe)


def test_options_work_or_say_why_not(place: Place, tmp_path: Path) -> None:
    """Under every wrapper; none leaves ranks with gradients of their own."""
    run_ranks(COMMON + OPTION, tmp_path, place, "fp8_delayed", *OPTIONS)


@every_recipe
def test_checkpoints_go_to_other_numbers_of_ranks(
    place: Place, recipe: str, tmp_path: Path
) -> None:
    """Two ranks, one, and two again, with optimiser and states: as if nothing had happened."""
    run_ranks(COMMON + CHECKPOINT, tmp_path, place, recipe, "one", "", "3", ranks=2)
    run_ranks(COMMON + CHECKPOINT, tmp_path, place, recipe, "two", "one", "6", ranks=1)
    run_ranks(COMMON + CHECKPOINT, tmp_path, place, recipe, "", "two", "9", ranks=2)
    run_ranks(COMMON + UNINTERRUPTED, tmp_path, place, recipe, ranks=1)
