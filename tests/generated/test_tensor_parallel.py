"""Weights that ranks have parts of, over gloo: what parts give alone, added up where they are."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from fusegen.ir.naming import Cell

from .loading import load_bundle, write_cells
from .ranks import Place, run_ranks

RANKS = 2
MODULES = {
    "column": ("linear", "grouped_linear"),
    "row": ("linear", "grouped_linear"),
    "tensor": ("mlp", "mlp_swiglu", "grouped_mlp", "moe_layer", "shared_moe_layer"),
    "expert": ("moe_layer", "moe_layer_srelu"),
}
RECIPES = ("fp8_block", "fp8_delayed", "mxfp8")
UNDER_RECIPES = (
    *(("column", "linear"), ("row", "linear"), ("tensor", "moe_layer"), ("expert", "moe_layer")),
)
QUANTIZED = (("column", "linear"), ("tensor", "mlp_swiglu"))
COMPILED = (*QUANTIZED, ("expert", "moe_layer"))
TRACED = ("collectives", "one_op")
SEQUENCE = "linear__bf16__column_sequence_parallel"
EXPERT_EACH = Cell("moe_layer", "bf16", ("parameter_per_group", "expert_parallel"))
PER_GROUP = Cell("grouped_linear", "bf16", ("parameter_per_group", "row_parallel"))
OF_SLOTS = tuple(
    Cell("moe_layer", recipe, options)
    for recipe in ("bf16", "fp8_block", "fp8_delayed")
    for options in ((), ("expert_parallel_all_to_all",))
)
"""Layers whose slots ranks exchange, and those without ranks."""
Tensors = dict[str, torch.Tensor]
Found = list[dict[str, Tensors]]
"""Of each rank: what its part gives with the others, and alone, and what the whole layer gives."""


@dataclass(frozen=True)
class Case:
    """A module that ranks have parts of."""

    split: str
    module: str
    recipe: str = "bf16"
    sequence: bool = False
    bias: bool = True
    compiled: str = ""  # what a compiler traces: collectives, or a direction as one op
    quantized: bool = False
    capacity: int = 0

    @property
    def options(self) -> tuple[str, ...]:
        """Words of the part's cell, in their order there."""
        tokens = "sequence_" if self.sequence and self.split != "expert" else ""
        word = f"{self.split}_{tokens}parallel"
        return ("quantized_input", word) if self.quantized else (word,)

    def __str__(self) -> str:
        words = [self.module, self.recipe, *self.options, self.compiled or "eager"]
        words += [f"capacity {self.capacity}"] if self.capacity else []
        return "-".join(words)


CASES = [
    Case(split, module, sequence=sequence)
    for split, modules in MODULES.items()
    for module in modules
    for sequence in (False, True)
    if not (sequence and module.startswith("grouped")) and (sequence or split != "expert")
]
CASES += [
    Case(*pair, recipe, sequence=True, bias=False) for pair in UNDER_RECIPES for recipe in RECIPES
]
# As TransformerEngine's distributed `test_numerics` and `test_fusible_ops` have it of linear
# layers: every recipe, by columns and by rows, with tokens of their own or not.
CASES += [
    Case(split, "linear", recipe, sequence=sequence)
    for split in ("column", "row")
    for recipe in (*RECIPES, "fp8_current", "fp8_rowwise", "nvfp4")
    for sequence in (False, True)
]
CASES += [Case(*pair, sequence=True, compiled=way) for pair in COMPILED for way in TRACED]
CASES += [  # its backward reads scales as they were before the forward changed them
    Case(*pair, "fp8_delayed", sequence=True, bias=False, compiled=way)
    for pair in QUANTIZED
    for way in TRACED
]
CASES += [Case("expert", "moe_layer", sequence=True, capacity=70)]  # of about 100 rows an expert
CASES += [Case("row", "linear", "fp8_block", sequence=True, bias=False, quantized=True)]
CASES += [
    Case(*pair, recipe, sequence=True, bias=False, quantized=True, compiled=compiled)
    for pair in QUANTIZED
    for recipe in ("fp8_block", "fp8_delayed", "mxfp8")
    for compiled in ("", *TRACED)
]

# A rank runs its part with the others, then alone, on what all ranks have; and the whole layer.
RANK = """
import copy, importlib, json
from bundle.integrations import tensor_parallel
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, CHOICES = 128, 256, 512, 4, 2

def counted(inputs, experts=EXPERTS):
    ids = inputs["ids"]
    return torch.stack([(ids == expert).sum() for expert in range(experts)])

def run(layer, call, x, dy, inputs):
    x = x.clone().requires_grad_()
    inputs = {key: value.clone() for key, value in inputs.items()}
    if "probs" in inputs:
        inputs["probs"].requires_grad_()
    y = call(x, **inputs)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad}
    found |= {"dprobs": inputs["probs"].grad} if "probs" in inputs else {}
    found |= {f"d{key}": p.grad for key, p in layer.named_parameters()}
    return {key: value.cpu() for key, value in found.items()}

def find(name, recipe, split, words, sequence, bias, compiled, capacity):
    seed = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=seed).bfloat16().to(device)

    rows = TOKENS * ranks
    if "linear" in name:
        sizes = {"row": (HIDDEN // ranks, INTERMEDIATE), "column": (HIDDEN, INTERMEDIATE // ranks)}
        wide, own = (HIDDEN, INTERMEDIATE), sizes[split]
    else:
        part = INTERMEDIATE if split == "expert" else INTERMEDIATE // ranks
        wide, own = (HIDDEN, INTERMEDIATE), (HIDDEN, part)
        if name == "shared_moe_layer":
            wide, own = (*wide, INTERMEDIATE), (*own, INTERMEDIATE // ranks)
    outer = INTERMEDIATE if "linear" in name else HIDDEN
    x, dy = draw(rows, HIDDEN), draw(rows, outer)
    inputs = {}
    if "grouped" in name or "moe" in name:
        experts = (EXPERTS,)
        wide, own = (*experts, *wide), (*experts, *own)
    if split == "expert":
        own = (EXPERTS // ranks, *own[1:])
    if "grouped" in name:
        inputs["split_sizes"] = torch.tensor([rows // 2, 0, rows // 4, rows // 4], device=device)
    if name == "grouped_mlp":
        inputs["probs"] = torch.rand(rows, generator=seed).to(device)
    if "moe" in name:
        inputs["probs"] = torch.rand(rows, CHOICES, generator=seed).to(device)
        ids = torch.rand(rows, EXPERTS, generator=seed).topk(CHOICES).indices.int()
        ids[::5] = -1
        inputs["ids"] = ids.to(device)
        inputs["counts"] = counted(inputs)

    def build(cell, sizes):
        module = importlib.import_module(f"bundle.{cell}")
        (kind,) = (each for each in vars(module).values() if isinstance(each, type)
                   and issubclass(each, torch.nn.Module) and each.__module__ == module.__name__
                   and not each.__name__.startswith("_"))
        more = {"plan_capacity": capacity} if capacity else {}
        return kind(*sizes, bias=bias, device=device, **more)

    plain = f"{name}__{recipe}"
    whole, alone = build(plain, wide), build(plain, own)
    spread = build("__".join((plain, *words)), own)
    for key, initial in spread.named_parameters():
        if key.endswith("weight"):  # from inputs of all ranks
            bound = dict(whole.named_parameters())[key].shape[-1] ** -.5
            assert 0.95 * bound < initial.abs().max() <= bound * 1.004, (key, bound)
    state = {key: draw(*p.shape) * p.shape[-1] ** -0.5 for key, p in whole.named_parameters()}
    whole.load_state_dict({**whole.state_dict(), **state})
    own_state = tensor_parallel.read(spread, {f"a.{key}": v for key, v in state.items()}, "a.")
    spread.load_state_dict(own_state)
    written = tensor_parallel.write(spread, "b.")
    assert written.keys() == {f"b.{key}" for key in state}
    assert all(torch.equal(written[f"b.{key}"], value) for key, value in state.items())
    # A parameter that all ranks have and add to a sum is shared out.
    parts = {key: own_state[key] for key in state}
    parts |= {key: value / ranks for key, value in parts.items()
              if value.shape == state[key].shape and split != "expert"}
    alone.load_state_dict({**alone.state_dict(), **parts})

    def local(value, is_split, key=""):
        if is_split:
            return value.chunk(ranks, 1)[rank]
        return value.chunk(ranks)[rank] if sequence and key != "split_sizes" else value

    traced, aot_eager = set(), torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        graphs = [part.graph for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        traced.update(str(node.target) for each in graphs for node in each.nodes)
        return aot_eager(graph, inputs)

    call = torch.compile(spread, fullgraph=True, backend=backend) if compiled else spread
    tensor_parallel.watch(on=compiled == "one_op")
    part_x = local(x, True) if split == "row" else x
    part_dy = local(dy, True) if split == "column" else dy
    own_x, own_dy = local(x, split == "row"), local(dy, split == "column")
    own_inputs = {key: local(value, False, key) for key, value in inputs.items()}
    all_inputs = dict(inputs)
    if split == "expert":  # alone, a rank has what is for its own experts
        all_inputs["ids"] = inputs["ids"] - rank * own[0]
        all_inputs["counts"] = counted(all_inputs, own[0])
    if "counts" in inputs:
        own_inputs["counts"] = counted(own_inputs)
    eager = copy.deepcopy(spread)
    found = {
        "spread": run(spread, call, own_x, own_dy, own_inputs),
        "alone": run(alone, alone, part_x, part_dy, all_inputs),
        "whole": run(whole, whole, x, dy, inputs),
    }
    if compiled:
        ops = {each.partition(".")[2] for each in traced if "__" in each}
        whole = {each for each in ops if each.endswith(("_forward.default", "_backward.default"))}
        assert bool(whole) == (compiled == "one_op"), traced
        assert bool([each for each in traced if "c10d" in each]) != bool(whole), traced
        again = found["spread"]
        for step in range(1, 4):  # states move on alike
            for key, value in run(eager, eager, own_x * step, own_dy, own_inputs).items():
                assert torch.equal(value, again[key]), (name, recipe, words, step, key)
            for key, value in eager.state_dict().items():
                assert torch.equal(value, spread.state_dict()[key]), (recipe, words, step, key)
            spread.zero_grad(), eager.zero_grad()
            again = run(spread, call, own_x * (step + 1), own_dy, own_inputs)
    if recipe != "fp8_delayed":  # a forward that nobody asks gradients of is the same
        with torch.no_grad():
            assert torch.equal(spread(own_x, **own_inputs).cpu(), found["spread"]["y"])
    return found

torch.save([find(*case) for case in json.loads(words[0])], f"{folder}/{rank}.pt")
"""

# Made while there are ranks, or before.
DIFFERENT = """
import importlib
cell, features, dtype, *late = words[rank].split(":")
module = importlib.import_module(f"bundle.{cell}")
if late:
    dist.destroy_process_group()
try:
    layer = module.Linear(256, int(features), dtype=getattr(torch, dtype))
    if late:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        layer(torch.randn(64, 256).to(layer.weight.dtype))
except ValueError as error:
    with open(f"{folder}/{rank}.txt", "w") as file:
        file.write(str(error))
"""

OVERLAP = """
from bundle.integrations import tensor_parallel
try:
    tensor_parallel.overlap(on=rank == 0)
except ValueError as error:
    with open(f"{folder}/{rank}.txt", "w") as file:
        file.write(str(error))
"""

UNEQUAL = f"""
import importlib
from bundle.integrations import tensor_parallel
layer = importlib.import_module("bundle.{SEQUENCE}").Linear(256, 64)
tensor_parallel.check()
assert layer(torch.randn(16, 256).bfloat16()).shape == (32, 64)
try:
    layer(torch.randn(24 - 8 * rank, 256).bfloat16())
except ValueError as error:
    with open(f"{{folder}}/{{rank}}.txt", "w") as file:
        file.write(str(error))
tensor_parallel.check(on=False)
"""

ODD = """
import importlib
module = importlib.import_module("bundle.linear__bf16__row_sequence_parallel")
layer = module.Linear(64, 64)
for shape in ((33, 64), (64,)):
    try:
        layer(torch.randn(shape).bfloat16())
    except RuntimeError as error:
        with open(f"{folder}/{rank}.txt", "a") as file:
            print(error, file=file)
"""

# A rank's own tokens as codes: what is sent of them, forwards and backwards, and what is refused.
COPIES = """
import importlib, json
from torch.utils._python_dispatch import TorchDispatchMode
module = importlib.import_module(
    "bundle.linear__fp8_block__quantized_input__column_sequence_parallel")
layer = module.Linear(256, 128, bias=False)
sent = []

class Sent(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "all_gather" in str(function):
            sent.append([str(args[0].dtype), args[0].numel()])
        return function(*args, **(kwargs or {}))

def called(given):
    sent.clear()
    with Sent():
        return layer(given), [*sent]

torch.manual_seed(rank)
x = torch.randn(2, 64, 256).bfloat16().requires_grad_()
y, forward = called(x)
sent.clear()
with Sent():
    y.sum().backward()
backward, dx, dweight = [*sent], x.grad, layer.weight.grad
x.grad = layer.weight.grad = None
again, _ = called(layer.quantize_input(x))  # as a norm would leave it
again.sum().backward()
assert torch.equal(again, y) and torch.equal(x.grad, dx) and torch.equal(layer.weight.grad, dweight)
with torch.no_grad():
    rows, alone = called(layer.quantize_input(x, columnwise=False))
assert torch.equal(rows, y) and alone == forward
none = layer(torch.empty(0, 256, dtype=torch.bfloat16))
try:
    layer(x[0])
except RuntimeError as error:
    refused = str(error)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump([forward, backward, [*y.shape], [*none.shape], refused], file)
"""

# Ranks with tokens of other sizes each have one scale: that of all tokens.
ONE_SCALE = """
import importlib
torch.manual_seed(0)
plain = importlib.import_module("bundle.linear__fp8_delayed").Linear(256, 64, bias=False)
module = importlib.import_module(
    "bundle.linear__fp8_delayed__quantized_input__column_sequence_parallel")
layer = module.Linear(256, 64, bias=False)
layer.load_state_dict(plain.state_dict())
for step in range(3):
    torch.manual_seed(step)
    x = torch.randn(64, 256).bfloat16() * torch.arange(1, 65)[:, None]  # rank 1 has the largest
    own = x.chunk(ranks)[rank].clone().requires_grad_()
    whole = x.requires_grad_()
    given = layer.quantize_input(own) if step == 1 else own
    y, wanted = layer(given), plain(whole)
    assert torch.equal(y, wanted), step
    y.sum().backward(), wanted.sum().backward()
    assert torch.equal(own.grad, (ranks * whole.grad).chunk(ranks)[rank]), step
    assert torch.equal(layer.weight.grad, plain.weight.grad), step
    assert layer.state_dict().keys() == plain.state_dict().keys()
    for key, value in plain.state_dict().items():
        assert torch.equal(layer.state_dict()[key], value), (step, key)
assert plain.state_dict()["input_scale"] != 1
before = layer.state_dict()["input_scale"].clone()
with torch.no_grad():
    given = layer.quantize_input(own)  # leaves the state alone
    assert torch.equal(layer.state_dict()["input_scale"], before)
    other = given._replace(rowwise_scale_inv=given.rowwise_scale_inv * (1 + rank))
    try:
        layer(other)
    except RuntimeError as error:
        with open(f"{folder}/{rank}.txt", "w") as file:
            file.write(str(error))
"""

# Layers of values that follow from the whole one's: saved by some ranks, loaded by others, also
# where they are split in another way.
CHECKPOINT = (
    f"""
import importlib, torch.distributed.checkpoint as dcp
from bundle.integrations import expert_parallel, tensor_parallel
E, H, F = 4, 64, 128
EACH, GROUPED = "{EXPERT_EACH}", "{PER_GROUP}"
"""
    + """
def draw(*shape):
    return torch.randn(shape, generator=seed).bfloat16()

seed = torch.Generator().manual_seed(0)
EXPERTS = {"fc1.weight": draw(E, 2 * F, H), "fc1.bias": draw(E, 2 * F),
           "fc2.weight": draw(E, H, F), "fc2.bias": draw(E, H)}
GATED = {key: value[0] for key, value in EXPERTS.items()}
LINEAR = {"weight": draw(F, H), "bias": draw(F)}
EACH_EXPERT = {f"{key}{n}": value[n] for key, value in EXPERTS.items() for n in range(E)}
EACH_LINEAR = {f"{key}{n}": value for key, value in LINEAR.items() for n in range(E)}

def build(cell, *sizes):
    module = importlib.import_module(f"bundle.{cell}")
    (kind,) = (each for each in vars(module).values() if isinstance(each, type)
               and issubclass(each, torch.nn.Module) and each.__module__ == module.__name__
               and not each.__name__.startswith("_"))
    return kind(*sizes, bias=True)

def layers(loads):
    "Each with its key in the checkpoint, and the whole layer's values."
    yield build("linear__bf16__column_parallel", H, F // ranks), "column.", LINEAR
    yield build("linear__bf16__row_parallel", H // ranks, F), "row.", LINEAR
    yield build("mlp_swiglu__bf16__tensor_parallel", H, F // ranks), "gated.", GATED
    yield build(GROUPED, E, H // ranks, F), "rows.", EACH_LINEAR
    yield build(EACH, E // ranks, H, F), "each.", EACH_EXPERT
    yield build("moe_layer__bf16__tensor_parallel", E, H, F // ranks), "experts.", EXPERTS
    if loads:
        yield build("moe_layer__bf16__expert_parallel", E // ranks, H, F), "experts.", EXPERTS
        yield build("moe_layer__bf16", E, H, F), "experts.", EXPERTS
        yield build("mlp_swiglu__bf16", H, F), "gated.", GATED
        spread = expert_parallel.ExpertParallel(build("moe_layer__bf16", E // ranks, H, F))
        yield spread, "experts.", {key: v.chunk(ranks)[rank] for key, v in EXPERTS.items()}

def of_rank(layer, whole):
    try:
        return tensor_parallel.read(layer, whole)
    except TypeError:  # of whole layers, and of experts alone
        return whole

def sharded(layer, tensors, prefix):
    if isinstance(layer, expert_parallel.ExpertParallel):
        return layer.sharded(tensors, prefix)
    return tensor_parallel.sharded(layer, tensors, prefix)

for layer, prefix, whole in layers(words[0] == "load"):
    inner = getattr(layer, "layer", layer)
    wanted = of_rank(layer, whole)
    moments = {path: torch.zeros_like(p) for path, p in inner.named_parameters()}
    if words[0] == "save":
        inner.load_state_dict(wanted)
        written = tensor_parallel.write(layer)
        assert written.keys() == whole.keys()
        assert all(torch.equal(value, whole[key]) for key, value in written.items()), prefix
        moments = {path: 2 * wanted[path] for path in moments}
    state = {**sharded(layer, None, prefix), **sharded(layer, moments, f"moment.{prefix}")}
    place = f"{words[1]}/{prefix}"
    if words[0] == "save":
        dcp.save(state, checkpoint_id=place)
        continue
    dcp.load(state, checkpoint_id=place)
    for path, parameter in inner.named_parameters():
        assert torch.equal(parameter, wanted[path]), (prefix, path)
        assert torch.equal(moments[path], 2 * wanted[path]), (prefix, path)

meta = dcp.FileSystemReader(f"{words[1]}/experts.").read_metadata().state_dict_metadata
assert meta["experts.fc1.weight"].size == (E, 2, F, H) and meta["experts.fc2.bias"].size == (E, H)
both = expert_parallel.ExpertParallel(build("moe_layer__bf16__tensor_parallel", E, H, F // ranks))
try:
    both.sharded()
    raise SystemExit("parts of features for all")
except TypeError as error:
    assert "ranks share features of moe_layer__bf16__tensor_parallel" in str(error), error
state = both.sharded(tensor_parallel.write(both.layer))
assert state["fc1.weight"].shape == (ranks * E, 2, F, H)
row = build("linear__bf16__row_parallel", H, F)
mesh = dist.init_device_mesh("cpu", (ranks,))
for p in ("weight", "bias"):
    whole = torch.distributed.tensor.distribute_tensor(getattr(row, p).data, mesh)
    setattr(row, p, torch.nn.Parameter(whole))
try:
    tensor_parallel.sharded(row)
    raise SystemExit("shards of shards")
except TypeError as error:
    assert "weight: expected a plain tensor, got a DTensor" in str(error), error
"""
)

# Rank 1 is gone, or does something else, when rank 0 waits for it.
DEAD = """
import datetime, importlib, os, time
dist.destroy_process_group()
dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", ranks), rank=rank,
                        world_size=ranks, timeout=datetime.timedelta(seconds=5))
layer = importlib.import_module("bundle.mlp__bf16__tensor_parallel").MLP(64, 64)
x = torch.randn(32, 64).bfloat16().requires_grad_()
y = layer(x)
if rank == 1:
    while words[0] == "stalls" and not os.path.exists(f"{folder}/0.txt"):
        time.sleep(0.1)
    os._exit(0)
try:
    y.sum().backward()
except RuntimeError as error:
    with open(f"{folder}/{rank}.txt", "w") as file:
        file.write(str(error))
os._exit(0)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where the ranks run."""
    return Place(generate("cpu", tmp_path_factory.mktemp("split")))


@pytest.fixture(scope="module")
def found(place: Place, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Found]:
    """What ranks give, in every case."""
    return run_cases(place, tmp_path_factory.mktemp("ranks"))


def generate(arch: str, out: Path, cases: Sequence[Case] = CASES) -> Path:
    """A bundle of whole and of split modules, below a folder.

    Its kernels are in the namespace of the committed bundle, so that objects of these are its own.
    """
    words = ((case, ()) for case in cases), ((case, case.options) for case in cases)
    cells = {Cell(case.module, case.recipe, chosen) for each in words for case, chosen in each}
    return write_cells("fusegen", arch, out, sorted({*cells, PER_GROUP, EXPERT_EACH, *OF_SLOTS}))


def run_cases(
    place: Place, folder: Path, cases: Sequence[Case] = CASES, ranks: int = RANKS
) -> dict[Case, Found]:
    """What each rank found, of all cases in as many processes."""
    words = [
        (c.module, c.recipe, c.split, c.options, c.sequence, c.bias, c.compiled, c.capacity)
        for c in cases
    ]
    run_ranks(RANK, folder, place, json.dumps(words), ranks=ranks)
    found = (torch.load(folder / f"{rank}.pt") for rank in range(ranks))
    return dict(zip(cases, map(list, zip(*found, strict=True)), strict=True))


def test_ranks_are_one_layer(found: dict[Case, Found]) -> None:
    for case in CASES:
        check(found[case], case)


def check(found: Found, case: Case) -> None:
    """Bits of what each rank's part gives alone, added up where the collective does; and nearly
    what the whole layer gives.
    """
    all_of = {"y", "dx", "dprobs"}
    added_up = {"column": {"dx"}, "row": {"y"}, "tensor": all_of, "expert": all_of}[case.split]
    limit = {"bf16": 1e-2, "nvfp4": 0.3}.get(case.recipe, 0.1)
    for name, whole in found[0]["whole"].items():
        alone = [each["alone"][name] for each in found]
        spread = [each["spread"][name] for each in found]
        same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal
        if name in added_up:
            total, ranks = sum(alone[1:], alone[0]), len(found)
            wanted = [*total.chunk(ranks)] if case.sequence else [total] * ranks
            # Sums of more than two depend on an order, which is that of the collective.
            same = same if ranks == 2 else partial(torch.allclose, rtol=5e-2, atol=5e-2)
        else:
            wanted = alone
        # What is rounded at random is drawn in another order by ops that are cut.
        drawn = case.recipe == "nvfp4" and name != "y"
        assert drawn or all(map(same, spread, wanted)), f"{case}: {name}"
        if case.split == "expert" and name not in added_up and case.recipe != "fp8_delayed":
            assert torch.equal(torch.cat(spread), whole), f"{case}: {name}"
        error = (joined(spread, whole).double() - whole.double()).norm()
        assert error <= limit * whole.double().norm(), f"{case}: {name}"


def joined(spread: list[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """What ranks have, side by side; gates are before all that they gate, of all ranks."""
    if spread[0].shape == whole.shape:
        return spread[0]
    shapes = zip(spread[0].shape, whole.shape, strict=True)
    axis = next(axis for axis, (own, every) in enumerate(shapes) if own != every)
    halves = [half for k in (0, 1) for each in spread for half in each.chunk(2, axis)[k : k + 1]]
    ways = (torch.cat(spread, axis), torch.cat(halves, axis))
    return min(ways, key=lambda way: float((way.double() - whole.double()).norm()))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((f"{SEQUENCE}:64:float16", f"{SEQUENCE}:128:float16"), "sizes"),
        ((f"{SEQUENCE}:64:float16", "linear__bf16__row_parallel:64:float16"), "module"),
        ((f"{SEQUENCE}:64:float16", f"{SEQUENCE}:64:bfloat16"), "dtype"),
        ((f"{SEQUENCE}:64:float16:late", f"{SEQUENCE}:128:float16:late"), "sizes"),
        ((f"{SEQUENCE}:64:float16:late", f"{SEQUENCE}:64:bfloat16:late"), "dtype"),
    ],
)
def test_ranks_that_differ_are_refused(
    place: Place, words: tuple[str, str], wanted: str, tmp_path: Path
) -> None:
    run_ranks(DIFFERENT, tmp_path, place, *words, ranks=RANKS)
    for rank in range(RANKS):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert "all ranks need the same" in said and f"rank {1 - rank}" in said
        assert f"tensor_group: {wanted}: " in said


def test_a_module_that_is_gone_is_not_compared(place: Place) -> None:
    """Nor does what is left of it keep it."""
    name = load_bundle("split_late", place.bundle)
    alike = importlib.import_module(f"{name}._alike")
    layer = importlib.import_module(f"{name}.{SEQUENCE}").Linear(64, 64)
    assert [*alike._LATE] == [layer]
    del layer
    assert not alike._LATE


def test_overlap_is_asked_for_alike(place: Place, tmp_path: Path) -> None:
    run_ranks(OVERLAP, tmp_path, place, ranks=RANKS)
    for rank in range(RANKS):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert f"overlap: group: on: {rank == 0} on rank {rank}, {rank != 0} on rank" in said


def test_tokens_that_differ_are_noticed_where_ranks_check_them(
    place: Place, tmp_path: Path
) -> None:
    run_ranks(UNEQUAL, tmp_path, place, ranks=RANKS)
    for rank in range(RANKS):
        said = (tmp_path / f"{rank}.txt").read_text()
        where = f"{SEQUENCE}: tensor_group: forward: all_gather of x: [({24 - 8 * rank}, 256, "
        assert where in said and f"on rank {rank}, [({16 + 8 * rank}, 256, " in said


def test_tokens_that_ranks_cannot_share_are_refused(place: Place, tmp_path: Path) -> None:
    run_ranks(ODD, tmp_path, place, ranks=RANKS)
    odd, one_row = (tmp_path / "0.txt").read_text().splitlines()
    assert "expected a first dimension that 2 ranks have equal parts of, got 33" in odd
    assert "expected 2 dimensions or more, the first of them of tokens" in one_row


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_copies_are_gathered_as_kernels_have_them(arch: str, tmp_path: Path) -> None:
    """Scales that end in padding, or lie in atoms of 128 rows, and codes that lie transposed."""
    cases = [case for case in CASES if case.quantized and not case.compiled]
    place = Place(generate(arch, tmp_path, cases))
    for case, found in run_cases(place, tmp_path, cases).items():
        check(found, case)


def test_ops_that_may_begin_early_are_one_graph(tmp_path: Path) -> None:
    """Those whose GEMMs gather rows of tokens, as a GPU has them; traced ones wait for all."""
    cases = [each for each in CASES if each.split == "expert" and each.recipe == "bf16"]
    assert any(case.compiled for case in cases)
    place = Place(generate("sm_90a", tmp_path, cases))
    for case, found in run_cases(place, tmp_path, cases).items():
        check(found, case)


def test_codes_and_scales_are_gathered(place: Place, tmp_path: Path) -> None:
    """Those that the forward reads in the forward, those that the backward reads in the backward:
    a byte for each element of x each time, and a scale of four bytes for 128 of them."""
    run_ranks(COPIES, tmp_path, place, ranks=RANKS)
    for rank in range(RANKS):
        forward, backward, y, none, refused = json.loads((tmp_path / f"{rank}.json").read_text())
        sent = [["torch.uint8", 128 * 256], ["torch.float32", 128 * 256 // 128]]
        assert forward == sent and backward == sent
        assert y == [4, 64, 128] and none == [0, 128]
        assert "placeholder of x: expected a multiple of 128 tokens of each rank" in refused
        assert "got 64; pad the tokens" in refused


def test_tokens_of_all_ranks_have_one_delayed_scale(place: Place, tmp_path: Path) -> None:
    run_ranks(ONE_SCALE, tmp_path, place, ranks=RANKS)
    for rank in range(RANKS):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert "x_rowwise_scale of x: expected copies by one scale on all ranks" in said
        assert "quantise with `quantize_input` of this module" in said


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_rank_that_is_lost_is_an_error_that_names_rank_and_step(
    place: Place, how: str, tmp_path: Path
) -> None:
    run_ranks(DEAD, tmp_path, place, how, ranks=RANKS)
    said = (tmp_path / "0.txt").read_text()
    assert "mlp__bf16__tensor_parallel: backward: all_reduce of dx_part over tensor_group" in said
    assert "failed on rank 0 of 2" in said


def test_a_whole_layer_is_no_part(place: Place) -> None:
    name = load_bundle("split_alone", place.bundle)
    module = importlib.import_module(f"{name}.linear__bf16")
    parallel = importlib.import_module(f"{name}.integrations.tensor_parallel")
    with pytest.raises(TypeError, match="expected a module of this bundle of whose weights"):
        parallel.read(module.Linear(64, 64), {})


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2)])
def test_distributed_checkpoints_are_of_whole_layers(
    place: Place, before: int, after: int, tmp_path: Path
) -> None:
    """By another number of ranks, split in another way, one parameter for each expert, moments."""
    for what, ranks in (("save", before), ("load", after)):
        run_ranks(CHECKPOINT, tmp_path, place, what, str(tmp_path / "saved"), ranks=ranks)


def test_modules_of_others_have_no_parts(place: Place) -> None:
    name = load_bundle("split_others", place.bundle)
    parallel = importlib.import_module(f"{name}.integrations.tensor_parallel")
    for function in (parallel.sharded, parallel.write):
        with pytest.raises(TypeError, match=r"Linear of torch.*: expected a module of this bundle"):
            function(torch.nn.Linear(2, 2))
