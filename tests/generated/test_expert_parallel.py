"""Experts that are spread over ranks, over gloo: what one process with all of them gives."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusegen import api

from .loading import load_bundle
from .ranks import Place, run_ranks

RECIPES = ("bf16", "fp8_block", "fp8_delayed")
ROUTES = ("any", "one", "few", "dropped", "last_rank")
MODES = ("gathered", "sent")
"""All tokens go to all ranks, or each to those that its experts are on."""
SLOTS = "slots"
"""The latter, by a layer that exchanges them itself."""
UNDER = [*(("bf16", route) for route in ROUTES), *((recipe, "any") for recipe in RECIPES[1:])]
"""Recipes and routes."""
CROWDS = [(4, "any", 192), (4, "any", 40), (2, "dropped", 30), (2, "last_rank", 1)]
"""Ranks, a route, and room for so many tokens of each rank."""
RANKS = 2
Found = dict[str, dict[str, torch.Tensor]]
"""Of a rank: results by name, of its experts with the others, alone, and of all experts."""

# A rank runs its experts with the others, then alone, on the tokens of all, and then all experts.
RANK = """
import importlib
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, CHOICES = 8, 128, 256, 192, 2
cell, route, *modes = words
module = spread_module = importlib.import_module(f"bundle.{cell}")
if "slots" in modes:
    spread_module = importlib.import_module(f"bundle.{cell}__expert_parallel_all_to_all")
from bundle.integrations.expert_parallel import ExpertParallel

seed = torch.Generator().manual_seed(0)
rows = TOKENS * ranks
x, dy = (torch.randn(rows, HIDDEN, generator=seed).bfloat16() for _ in range(2))
probs = torch.rand(rows, CHOICES, generator=seed)
ids = torch.rand(rows, EXPERTS, generator=seed).topk(CHOICES).indices.int()
if route == "one":
    ids[:, 0], ids[:, 1] = 3, -1
elif route == "few":
    ids[:, 0], ids[:, 1] = 0, EXPERTS - 1
elif route == "dropped":
    ids[::3] = -1
    ids[1::3, 1] = EXPERTS + 5
elif route == "last_rank":
    ids[:, 0], ids[:, 1] = EXPERTS - 2, EXPERTS - 1
fc1 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=seed).mul(HIDDEN**-0.5).bfloat16()
fc2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=seed).mul(INTERMEDIATE**-0.5).bfloat16()
x, dy, probs, ids, fc1, fc2 = (each.to(device) for each in (x, dy, probs, ids, fc1, fc2))

def layer_of(experts, module=module):
    first, last = experts
    layer = module.MoELayer(last - first, HIDDEN, INTERMEDIATE, device=device)
    with torch.no_grad():
        layer.fc1.weight.copy_(fc1[first:last])
        layer.fc2.weight.copy_(fc2[first:last])
    return layer

def run(layer, call, x, dy, probs, ids, *counts):
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y = call(x, probs, ids, *counts)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}
    found |= {"dfc1": layer.fc1.weight.grad, "dfc2": layer.fc2.weight.grad}
    return {name: value.cpu() for name, value in found.items()}

def alone(first, last):
    layer, own = layer_of((first, last)), ids - first
    counts = torch.stack([(own == expert).sum() for expert in range(last - first)])
    return run(layer, layer, x, dy, probs, own, counts)

own = EXPERTS // ranks
inner = layer_of((rank * own, rank * own + own), spread_module)
layer = ExpertParallel(inner, capacity=None if "gathered" in modes else TOKENS)
call = layer
if "watched" in modes:  # a direction of the layer is one op to a compiler
    from bundle.integrations.expert_parallel import watch
    watch()
if "compiled" in modes:
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
here = slice(rank * TOKENS, (rank + 1) * TOKENS)
found = {
    "spread": run(inner, call, x[here], dy[here], probs[here], ids[here]),
    "part": alone(rank * own, rank * own + own),
    "whole": alone(0, EXPERTS),
}
import copy
assert copy.deepcopy(layer)(x[here], probs[here], ids[here]).shape == x[here].shape
assert layer.unsent.tolist() == [0]
if "compiled" in modes:  # another number of tokens, and no gradients
    few = slice(here.start, here.start + 40)
    few = x[few], probs[few], ids[few]
    assert torch.equal(call(*few), layer(*few))
torch.save(found, f"{folder}/{rank}-{'-'.join(words)}.pt")
"""

# Several cases, one after the other, in the same processes.
EACH = f"""
for case in words:
    words = case.split()
    exec({RANK!r})
"""

# Tokens as codes: what those give that the codes stand for, and gradients of such sums; each
# direction by itself, since a gradient is of the values that were there.
ENCODED = (
    RANK.partition("inner = layer_of")[0]
    + """
from bundle.reference import _quantize
one = _quantize.Quantization("e4m3", (1, 128), "e8m0", "max_over_amax", "pow2_down")

def stood_for(rows):
    return _quantize.dequantize(_quantize.quantize(rows.cpu(), one).rowwise).to(rows)

x[:8], dy[8:16] = x[:8] * 1e-30, 0  # scales of their own, and none
here = slice(rank * TOKENS, (rank + 1) * TOKENS)
x, dy, probs, ids = x[here], dy[here], probs[here], ids[here]

def step(x, dy, **way):  # of a new layer: delayed scales are those of the step before
    inner = layer_of((rank * own, rank * own + own))
    layer = ExpertParallel(inner, capacity=TOKENS if "sent" in modes else None, **way)
    compiled = torch.compile(layer, fullgraph=True)
    return run(inner, compiled if "compiled" in modes else layer, x, dy, probs, ids)

as_codes = {"payload": torch.float8_e4m3fn}
found, wanted = step(x, dy, **as_codes), step(stood_for(x), stood_for(dy))
for name, value in wanted.items():
    assert value.isfinite().all() and torch.equal(found[name], value), name
plain = step(x, dy)
for name in ("y", "dx", "dprobs"):  # fp8_block quantises tokens so anyhow
    assert torch.equal(found[name], plain[name]) == cell.endswith("fp8_block"), name
lost = x.clone()
lost[3, 5] = float("inf")
y = step(lost, dy, **as_codes)["y"]
assert y[3].isnan().all() and y.isnan().any(1).sum() == 1, "an overflow is not a number, not 448"
"""
)

# As many tokens as there is room for, and the others as if their routers had not chosen that rank.
CROWDED = (
    RANK.partition("inner = layer_of")[0]
    + """
def spread(capacity, ids):
    inner = layer_of((rank * own, rank * own + own), spread_module)
    layer = ExpertParallel(inner, capacity=capacity)
    return run(inner, layer, x[here], dy[here], probs[here], ids), layer.unsent.item()

here = slice(rank * TOKENS, (rank + 1) * TOKENS - 9 * rank)  # ranks have tokens as they come
capacity, left = int(modes[0]), ids[here].clone()
unsent = 0
for other in range(ranks):
    chosen = (left >= other * own) & (left < other * own + own)
    late = chosen.any(1) & (chosen.any(1).cumsum(0) > capacity)
    unsent += int(late.sum())
    left[late.unsqueeze(1) & chosen] = -1
found, counted = spread(capacity, ids[here])
assert counted == unsent and (unsent > 0) == (capacity < TOKENS // 2), (counted, unsent)
again, _ = spread(capacity, ids[here])
expected, none = spread(TOKENS, left)
assert none == 0
for name, value in expected.items():
    assert torch.equal(found[name], value) and torch.equal(again[name], value), name
assert found["y"].isfinite().all() and found["y"].any()

# Each rank's part by itself; in the order of ranks they add up to y and dx, rounded once.
parts = [torch.zeros_like(found["y"], dtype=torch.float32) for _ in range(2)]
for other in range(ranks):
    layer, theirs = layer_of((other * own, other * own + own)), left - other * own
    counts = torch.stack([(theirs == expert).sum() for expert in range(own)])
    part = run(layer, layer, x[here], dy[here], probs[here], theirs, counts)
    for total, name in zip(parts, ("y", "dx")):
        total += part[name].float()
for total, name in zip(parts, ("y", "dx")):
    assert torch.equal(total.bfloat16(), found[name]), name
"""
)

# Experts over some ranks and their weights over others: what one layer gives for what was sent.
MESH = (
    RANK.partition("inner = layer_of")[0]
    + """
from torch.distributed.device_mesh import init_device_mesh
from bundle.integrations import tensor_parallel

tensor = int(modes[0])
mesh = init_device_mesh(device, (ranks // tensor, tensor), mesh_dim_names=("experts", "tensor"))
count, own = mesh["experts"].size(), EXPERTS * tensor // ranks
first = own * mesh["experts"].get_local_rank()
split = importlib.import_module(f"bundle.{cell}__tensor_parallel")
every = [each[: count * TOKENS] for each in (x, dy, probs, ids)]
here = slice(TOKENS * (first // own), TOKENS * (first // own + 1))

for capacity in (None, TOKENS, 40):
    left = every[-1].clone()
    for other in range(count):  # those that find no room, of each rank's tokens
        chosen = (left >= other * own) & (left < other * own + own)
        late = chosen.any(1).view(count, -1)
        late &= late.cumsum(1) > (capacity or TOKENS)
        left[late.view(-1, 1) & chosen] = -1
    inner = split.MoELayer(
        own, HIDDEN, INTERMEDIATE // tensor, device=device, tensor_group=mesh["tensor"].get_group()
    )
    weights = {"fc1.weight": fc1[first : first + own], "fc2.weight": fc2[first : first + own]}
    inner.load_state_dict(tensor_parallel.read(inner, weights))
    layer = ExpertParallel(inner, mesh["experts"].get_group(), capacity=capacity)
    found = run(inner, layer, *(each[here] for each in every))
    whole = layer_of((0, EXPERTS))
    counts = torch.stack([(left == expert).sum() for expert in range(EXPERTS)])
    wanted = run(whole, whole, *every[:-1], left, counts)
    part = mesh["tensor"].get_local_rank()
    for name in ("y", "dx", "dprobs"):
        wanted[name] = wanted[name][here]
    halves = (each.chunk(tensor, 1)[part] for each in wanted["dfc1"].chunk(2, 1))
    wanted["dfc1"] = torch.cat([*halves], 1)[first : first + own]
    wanted["dfc2"] = wanted["dfc2"].chunk(tensor, 2)[part][first : first + own]
    assert (layer.unsent.item() > 0) == (capacity == 40)
    for name, value in wanted.items():
        error = (found[name].double() - value.double()).abs().max()
        assert error <= 2**-6 * value.double().abs().max(), (capacity, name, error)
"""
)

# Ranks that do not agree: each writes what it was told.
DIFFERENT = """
import importlib
from bundle.integrations.expert_parallel import ExpertParallel
cell, experts, *more = words[rank].split(":")
more = [eval(word, {"torch": torch}) for word in more]
layer = importlib.import_module(f"bundle.{cell}").MoELayer(int(experts), 128, 128, device=device)
try:
    ExpertParallel(layer, None, *more)
except ValueError as error:
    with open(f"{folder}/{rank}.txt", "w") as file:
        file.write(str(error))
"""

# A layer that exchanges slots by itself, asked for what it does not do.
ASKED = """
import importlib
from bundle.integrations.expert_parallel import ExpertParallel
name = "bundle.moe_layer__bf16__expert_parallel_all_to_all"
layer = importlib.import_module(name).MoELayer(2, 64, 64)
layer.__class__ = type("Wrapped", (type(layer),), {"__module__": "wrappers"})  # as FSDP2 does
four = {"capacity": 4}
ways = ({}, {**four, "payload": torch.float8_e4m3fn}, {**four, "group": dist.new_group()})
for way in ways:
    try:
        ExpertParallel(layer, **way)
    except ValueError as error:
        with open(f"{folder}/{rank}.txt", "a") as file:
            print(error, file=file)
"""

# A rank without tokens, and tensors of other numbers of them.
TOKENS = """
import importlib
from bundle.integrations.expert_parallel import ExpertParallel
for name in ("moe_layer__bf16", "moe_layer__bf16__expert_parallel_all_to_all"):
    torch.manual_seed(rank)
    layer = importlib.import_module(f"bundle.{name}").MoELayer(2, 64, 64)
    call = ExpertParallel(layer, capacity=5)
    x = torch.randn(5 * rank, 64).bfloat16().requires_grad_()
    probs, ids = torch.rand(5 * rank, 2), torch.arange(4).repeat(5)[: 10 * rank].view(-1, 2).int()
    y = call(x, probs, ids)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape and bool(y.any()) == bool(x.grad.any()) == bool(rank)
    assert layer.fc1.weight.grad.any(), "of the other rank's tokens"
    try:
        call(x, probs, torch.zeros(7, 2, dtype=torch.int32))
    except RuntimeError as error:
        assert f"tokens in x, probs and ids, got [{5 * rank}, {5 * rank}, 7]" in str(error), error
    else:
        raise AssertionError("seven tokens chose, and there are as many as ever")
"""

SHARED = """
import importlib
from bundle.integrations.expert_parallel import ExpertParallel
shared = importlib.import_module("bundle.shared_moe_layer__bf16").SharedMoELayer(2, 64, 64, 64)
spread = importlib.import_module("bundle.moe_layer__bf16__expert_parallel").MoELayer(2, 64, 64)
for layer in (shared, spread):
    try:
        ExpertParallel(layer)
    except TypeError as error:
        with open(f"{folder}/{rank}.txt", "a") as file:
            print(error, file=file)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where the ranks run."""
    return Place(generate("cpu", tmp_path_factory.mktemp("spread")))


@pytest.fixture(scope="module")
def slots(place: Place) -> Place:
    """Where layers are that exchange slots, beside those without an option."""
    return place


def generate(arch: str, out: Path) -> Path:
    """A bundle of layers, below a folder."""
    modules = ("moe_layer", "shared_moe_layer")
    request = api.Request(
        out=out, archs=(arch,), modules=modules, recipes=RECIPES, namespace="spread"
    )
    api.generate(request, api.Policy.WRITE)
    for word, recipes in (
        ("expert_parallel", RECIPES[:1]),
        ("tensor_parallel", RECIPES[:1]),
        ("expert_parallel_all_to_all", RECIPES),
    ):
        further = replace(request, modules=modules[:1], recipes=recipes, options=(word,))
        api.generate(further, api.Policy.WRITE)
    return out / arch


@pytest.fixture(scope="module")
def spread(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks found, of all recipes, routes and modes."""
    cases = [(f"moe_layer__{r}", *case, mode) for r, *case in UNDER for mode in MODES]
    return run_each(place, tmp_path_factory.mktemp("found"), cases)


@pytest.fixture(scope="module")
def spread_in_slots(slots: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by layers that exchange slots."""
    cases = [(f"moe_layer__{recipe}", *case, SLOTS) for recipe, *case in UNDER]
    return run_each(slots, tmp_path_factory.mktemp("slots"), cases)


def run_each(place: Place, folder: Path, cases: Iterable[tuple[str, ...]]) -> Path:
    """Run cases in the same processes; the folder has what they found."""
    run_ranks(EACH, folder, place, *map(" ".join, cases), ranks=RANKS)
    return folder


def found_by(folder: Path, *words: str, ranks: int = RANKS) -> list[Found]:
    """What ranks found of a case."""
    return [torch.load(folder / f"{rank}-{'-'.join(words)}.pt") for rank in range(ranks)]


def check(found: list[Found], *, alike: bool = True) -> None:
    """Bits of each rank's own experts, added up as the collective does; and one layer of all.

    Args:
        found: by each rank.
        alike: whether that layer quantises as those of some experts do.
    """
    for name in ("y", "dx", "dprobs"):
        first, *others = (each["part"][name] for each in found)
        spread = torch.cat([each["spread"][name] for each in found])
        total = sum(others, first)
        # Sums of more than two depend on an order, which is that of the collective.
        same = torch.equal(spread, total) if len(found) == 2 else is_near(spread, total)
        assert same, name
        assert not alike or is_near(spread, found[0]["whole"][name]), name
    for name in ("dfc1", "dfc2"):
        assert all(torch.equal(each["spread"][name], each["part"][name]) for each in found), name
        spread = torch.cat([each["spread"][name] for each in found])
        assert not alike or is_near(spread, found[0]["whole"][name]), name


def is_near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within some roundings of bf16, of the largest."""
    allowed = 2**-7 * wanted.double().abs().max()
    return bool(((found.double() - wanted.double()).abs() <= allowed).all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("recipe", "route"), UNDER)
def test_ranks_are_one_layer(spread: Path, recipe: str, route: str, mode: str) -> None:
    """Each rank quantises what is its own, as a layer of its experts does."""
    found = found_by(spread, f"moe_layer__{recipe}", route, mode)
    # One scale for all experts is not that of some.
    check(found, alike=recipe != "fp8_delayed")


@pytest.mark.parametrize("mode", MODES)
def test_four_ranks_are_one_layer(place: Place, mode: str, tmp_path: Path) -> None:
    words = ("moe_layer__bf16", "any", mode)
    run_ranks(RANK, tmp_path, place, *words, ranks=4)
    check(found_by(tmp_path, *words, ranks=4))


def test_eight_ranks_are_one_layer(place: Place, tmp_path: Path) -> None:
    """With an expert each, and sums of eight terms."""
    words = ("moe_layer__bf16", "any", "gathered")
    run_ranks(RANK, tmp_path, place, *words, ranks=8)
    check(found_by(tmp_path, *words, ranks=8))


@pytest.mark.parametrize("mode", MODES)
def test_compiles_whole(place: Place, mode: str, tmp_path: Path) -> None:
    words = ("moe_layer__bf16", "any", mode, "compiled")
    run_ranks(RANK, tmp_path, place, *words, ranks=RANKS)
    check(found_by(tmp_path, *words))


@pytest.mark.parametrize(("ranks", "route", "capacity"), CROWDS)
def test_no_more_tokens_than_there_is_room_for(
    place: Place, ranks: int, route: str, capacity: int, tmp_path: Path
) -> None:
    """More ranks than choices of a token, too; what is not sent is counted, and misses alone."""
    words = ("moe_layer__bf16", route, str(capacity))
    run_ranks(CROWDED, tmp_path, place, *words, ranks=ranks)


@pytest.mark.parametrize(("ranks", "route", "capacity"), CROWDS)
def test_no_more_tokens_than_there_are_slots_for(
    slots: Place, ranks: int, route: str, capacity: int, tmp_path: Path
) -> None:
    """The same by a layer that exchanges slots."""
    words = ("moe_layer__bf16", route, str(capacity), SLOTS)
    run_ranks(CROWDED, tmp_path, slots, *words, ranks=ranks)


@pytest.mark.parametrize(("recipe", "route"), UNDER)
def test_layers_exchange_slots(spread_in_slots: Path, recipe: str, route: str) -> None:
    found = found_by(spread_in_slots, f"moe_layer__{recipe}", route, SLOTS)
    check(found, alike=recipe != "fp8_delayed")


def test_four_ranks_exchange_slots(slots: Place, tmp_path: Path) -> None:
    words = ("moe_layer__bf16", "any", SLOTS)
    run_ranks(RANK, tmp_path, slots, *words, ranks=4)
    check(found_by(tmp_path, *words, ranks=4))


@pytest.mark.parametrize("way", [("compiled",), ("compiled", "watched")], ids="-".join)
def test_layers_that_exchange_slots_compile_whole(
    slots: Place, tmp_path: Path, way: tuple[str, ...]
) -> None:
    words = ("moe_layer__bf16", "any", SLOTS, *way)
    run_ranks(RANK, tmp_path, slots, *words, ranks=RANKS)
    check(found_by(tmp_path, *words))


@pytest.mark.parametrize("tensor", [4, 2, 1])
def test_experts_and_their_weights_are_spread(place: Place, tensor: int, tmp_path: Path) -> None:
    """As Megatron's tests of its dispatchers have it: over four ranks, tensor by expert parallel;
    without a capacity, with room for all, and with less.
    """
    run_ranks(MESH, tmp_path, place, "moe_layer__bf16", "any", str(tensor), ranks=4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_travel_as_codes(place: Place, recipe: str, mode: str, tmp_path: Path) -> None:
    run_ranks(ENCODED, tmp_path, place, f"moe_layer__{recipe}", "any", mode, ranks=RANKS)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_as_codes_compile_whole(place: Place, mode: str, tmp_path: Path) -> None:
    run_ranks(ENCODED, tmp_path, place, "moe_layer__bf16", "any", mode, "compiled", ranks=RANKS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 127, 128, 200, 384])
def test_codes_are_those_of_the_reference(place: Place, width: int, dtype: torch.dtype) -> None:
    name = load_bundle("spread_codes", place.bundle)
    payload = importlib.import_module(f"{name}.integrations._payload")
    reference = importlib.import_module(f"{name}.reference._quantize")
    finite = torch.finfo(dtype)
    draw = torch.Generator().manual_seed(width)
    size = torch.randn(600, 1, generator=draw).mul(40).exp2().clamp(0, finite.max / 8)
    x = torch.randn(600, width, generator=draw).mul(size).clamp(finite.min, finite.max).to(dtype)
    corners = torch.tensor([0.0, -0.0, finite.max, finite.tiny, finite.smallest_normal / 4, 1.75])
    x[: len(corners)] = corners.to(dtype).view(-1, 1)
    x[len(corners), 0] = x[len(corners) + 1, -1] = float("nan")
    quantization = reference.Quantization(
        "e4m3", (1, payload.BLOCK), "e8m0", "max_over_amax", "pow2_down"
    )
    wanted = reference.quantize(x, quantization).rowwise
    codes, exponents = payload.encode(x)
    assert codes.shape == x.shape and exponents.shape == (600, -(-width // payload.BLOCK))
    assert codes.dtype == exponents.dtype == torch.uint8
    assert torch.equal(codes, wanted.data[:, :width].view(torch.uint8))
    assert torch.equal(exponents, wanted.scale.view(torch.uint8))
    value = reference.dequantize(wanted).clamp(finite.min, finite.max).to(dtype)
    back = payload.decode(codes, exponents, dtype)
    assert back.dtype == dtype and torch.equal(back.isnan(), x.isnan())
    assert torch.equal(back.nan_to_num(7.0), value.nan_to_num(7.0))
    assert payload.decode(*payload.encode(x[:0]), dtype).shape == (0, width)


@pytest.mark.parametrize(
    ("way", "wanted"),
    [
        ({"capacity": 0}, "capacity: expected 1 token or more, got 0"),
        (
            {"payload": torch.float8_e5m2},
            "payload: expected torch.float8_e4m3fn or None, got torch.float8_e5m2",
        ),
    ],
    ids=["capacity", "payload"],
)
def test_what_is_no_way_to_send_is_refused(
    place: Place, way: dict[str, object], wanted: str
) -> None:
    name = load_bundle("spread_capacity", place.bundle)
    module = importlib.import_module(f"{name}.moe_layer__bf16")
    spread = importlib.import_module(f"{name}.integrations.expert_parallel")
    with pytest.raises(ValueError, match=wanted):
        spread.ExpertParallel(module.MoELayer(2, 64, 64), **way)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("moe_layer__bf16:2", "moe_layer__bf16:3"), "fc1.weight: (2, 256, 128, 'torch.bfloat16')"),
        (("moe_layer__bf16:2", "moe_layer__fp8_block:2"), "moe_layer__fp8_block on rank 1"),
        (("moe_layer__bf16:2", "moe_layer__bf16:2:96"), "capacity: None on rank 0, 96 on rank 1"),
        (
            ("moe_layer__bf16:2", "moe_layer__bf16:2:None:torch.float8_e4m3fn"),
            "payload: None on rank 0, torch.float8_e4m3fn on rank 1",
        ),
    ],
)
def test_ranks_that_differ_are_refused(
    place: Place, words: tuple[str, str], wanted: str, tmp_path: Path
) -> None:
    run_ranks(DIFFERENT, tmp_path, place, *words, ranks=RANKS)
    for rank in range(RANKS):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert "all ranks need the same" in said and f"rank {rank}" in said
    assert wanted in (tmp_path / "0.txt").read_text()


def test_a_layer_with_more_than_experts_or_on_ranks_already_is_refused(
    place: Place, tmp_path: Path
) -> None:
    run_ranks(SHARED, tmp_path, place, ranks=1)
    said = (tmp_path / "0.txt").read_text()
    assert "SharedMoELayer has shared" in said and "beside it" in said
    assert "MoELayer communicates by itself" in said


def test_a_layer_of_slots_is_asked_for_what_it_does(place: Place, tmp_path: Path) -> None:
    run_ranks(ASKED, tmp_path, place, ranks=1)
    said = (tmp_path / "0.txt").read_text().splitlines()
    wanted = ("expected a capacity", "expected no payload", "expected no group but its own")
    assert len(said) == len(wanted)
    assert all(words in line for words, line in zip(wanted, said, strict=True)), said


def test_ranks_may_have_no_tokens(place: Place, tmp_path: Path) -> None:
    run_ranks(TOKENS, tmp_path, place, ranks=RANKS)


def test_without_ranks_it_says_what_is_missing(place: Place) -> None:
    name = load_bundle("spread_alone", place.bundle)
    module = importlib.import_module(f"{name}.moe_layer__bf16")
    spread = importlib.import_module(f"{name}.integrations.expert_parallel")
    with pytest.raises(RuntimeError, match="init_process_group"):
        spread.ExpertParallel(module.MoELayer(2, 64, 64))
