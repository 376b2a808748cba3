"""Layers that ranks share, against the same products without communication, and against PyTorch's.

One process for each of two GPUs, or of four (`ranks_of_4`); a round's time is that of the slowest
rank, and every block begins with all of them.  The link is measured first, by NCCL's own
all-gather.  Contenders:

    product                     the rank's own product, of what communication would have brought
    fusegen                     the module, whose ops communicate
    fusegen overlapped          the same, with the rows of one rank at a time (`overlap`)
    fusegen, option             experts that communicate by themselves, with gradients of weights
    fusegen, slots              the same, which send tokens to the ranks that they chose alone
    fusegen, codes              experts whose tokens travel in 8 bits (`payload`)
    ..., captured               that as a CUDA graph, which needs no host
    NCCL + torch                a collective, and torch's product behind it or before it
    torch symmetric memory      torch's fused operators, which overlap the two by parts of tokens
    TransformerEngine ...       its linear layer over userbuffers, where it is installed
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import pairs
import peers
import torch
import torch.distributed as dist
from common import OURS, Case, Outcome
from torch import Tensor
from torch.distributed import _symmetric_memory  # noqa: F401  its operators are there once it is

PRODUCT, NCCL, SYMMETRIC = "product", "NCCL + torch", "torch symmetric memory"
OVERLAPPED = f"{OURS} overlapped"
OPTION, SLOTS, CODES = (f"{OURS}, {word}" for word in ("option", "slots", "codes"))
OVERLAPPING_OPTION, OVERLAPPING_SLOTS = (f"{OVERLAPPED}, {word}" for word in ("option", "slots"))
CAPTURED = "{}, captured"
BACKWARD = "{}, for a backward"
OPTIONS = {"column": "column_sequence_parallel", "row": "row_sequence_parallel"}
MLP = "mlp_swiglu"
MLP_OPTION = "tensor_sequence_parallel"
CACHED = ("fp8_block", "fp8_delayed")
TIMEOUT_S = 900
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "UB_SKIPMC": "1",
}
_GROUP = "ranks"
"""Of further bundles: a folder below `build`."""


@dataclass(frozen=True)
class Linear:
    """A linear layer that ranks share: tokens of all ranks, and one rank's part of the weight."""

    tokens: int
    inputs: int
    outputs: int

    @property
    def name(self) -> str:
        """Rows, contraction and columns of a rank's product."""
        return f"{self.tokens}x{self.inputs}x{self.outputs}"


@dataclass(frozen=True)
class Layer:
    """A layer whose experts are spread: tokens of a rank, experts of all ranks."""

    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Sizes:
    """What is measured: bytes that a rank sends over the link, and layers.

    Of an MLP a linear layer says its tokens, and the width of tokens and of a rank's activations.
    """

    link: int
    linears: tuple[Linear, ...]
    mlps: tuple[Linear, ...]
    layers: tuple[Layer, ...]


FULL = Sizes(
    2**28,
    tuple(Linear(8192, k, n) for k in (4096, 8192) for n in (4096, 8192)),
    (Linear(8192, 4096, 7168), Linear(8192, 8192, 3584)),
    (
        Layer("mixtral", 8192, 4096, 14336, 8, 2),
        Layer("qwen3", 8192, 2048, 768, 128, 8),
        Layer("dsv3", 4096, 7168, 2048, 32, 8),
    ),
)
QUICK = Sizes(
    2**16, (Linear(64, 64, 64),), (Linear(64, 64, 64),), (Layer("small", 64, 64, 32, 4, 2),)
)


@dataclass(frozen=True)
class Timed:
    """Milliseconds of a contender, a sample of each round, and what its rate counts, in bytes."""

    case: str
    contender: str
    samples: tuple[float, ...]
    moved: int = 0


# ---- the process that asks


def ranks(*, quick: bool = False) -> Iterator[Case]:
    """Cases of two ranks, in the order of the module's first lines."""
    return _cases(2, quick)


def ranks_of_4(*, quick: bool = False) -> Iterator[Case]:
    """The same of four."""
    return _cases(4, quick)


def _cases(count: int, quick: bool) -> Iterator[Case]:
    if common.DEVICE != "cpu" and torch.cuda.device_count() < count:
        raise SystemExit(f"ranks: needs {count} GPUs, torch sees {torch.cuda.device_count()}")
    folder = _bundle()
    sizes = QUICK if quick else FULL
    kinds = (*OPTIONS, *(f"{split} step" for split in OPTIONS))
    names = ["link", *(f"{kind} {each.name}" for kind in kinds for each in sizes.linears)]
    names += [f"{kind} {each.name}" for kind in ("mlp", "mlp step") for each in sizes.mlps]
    names += [f"experts {each.name}" for each in sizes.layers]
    names += [f"gathered weights {each.name}" for each in sizes.layers]
    for name in names:
        yield Case(name, partial(_run, folder, name, count, quick))


def _run(folder: Path, case: str, count: int, quick: bool) -> Iterator[Outcome]:
    """The rows of a case, which all ranks measure together."""
    environment = {**os.environ, **WITHOUT_MULTICAST}
    with tempfile.TemporaryDirectory() as scratch:
        words = [str(folder), f"{scratch}/store", f"{scratch}/found.json", case, str(int(quick))]
        start = [sys.executable, __file__, *words, str(common.ROUNDS), str(count)]
        running = [subprocess.Popen([*start, str(rank)], env=environment) for rank in range(count)]
        try:
            codes = [process.wait(timeout=TIMEOUT_S) for process in running]
        finally:
            for process in running:
                process.kill()
        if any(codes):
            raise SystemExit(f"{case}: ranks ended with {codes}")
        found = json.loads(Path(scratch, "found.json").read_text("utf-8"))
    for each in found["failed"]:
        yield common.Failure(case, *each)
    for each in found["timed"]:
        timed = Timed(**{**each, "samples": tuple(each["samples"])})
        yield common.row(case, timed.contender, "ms", timed.samples, **_rate(timed))


def _rate(timed: Timed) -> dict[str, Any]:
    if not timed.moved:
        return {}
    return {"rate": timed.moved / statistics.median(timed.samples) / 1e6, "rate_unit": "GB/s"}


def _bundle() -> Path:
    """The bundle of all cells, for this GPU; on the CPU of the reference."""
    import bundles
    import further

    from fusegen.build.library import build, is_current
    from fusegen.ir.naming import Cell

    cells = [
        Cell("linear", "bf16"),
        *(Cell("linear", "bf16", (option,)) for option in OPTIONS.values()),
        *(Cell(MLP, "bf16", options) for options in ((), (MLP_OPTION,))),
        *(Cell(module, "bf16") for module in ("moe_layer", "grouped_mlp")),
        Cell("moe_layer", "bf16", ("expert_parallel",)),
        Cell("moe_layer", "bf16", ("expert_parallel_all_to_all",)),
        *(Cell("grouped_mlp", recipe, ("cached_weights",)) for recipe in CACHED),
    ]
    arch = "cpu"
    if common.DEVICE != "cpu":
        capability = torch.cuda.get_device_capability()
        codes = {bundles.code_on(each, capability): each for each in bundles.compiled_bundles()}
        arch = next(codes[code].name for code in bundles.Code if code in codes)
    out: Path = bundles.BUILD / _GROUP
    further.generate(out, {arch: cells}, ())
    if common.DEVICE != "cpu" and not is_current(out / arch):
        build(out / arch)
    return out / arch


# ---- a rank


Run = Callable[[], Any]


@dataclass(frozen=True)
class Rank:
    """A process of the group."""

    rank: int
    count: int
    package: str
    device: str
    rounds: int

    @property
    def order(self) -> float:
        """By how much sums over ranks may differ that are added up in another order: of two terms
        none does.
        """
        return 0.0 if self.count == 2 else 1e-2

    def cell(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.{name}")

    def integration(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.integrations.{name}")

    def overlapped(self, run: Run) -> Run:
        """A call in which products overlap with what they wait for."""
        overlap = self.integration("tensor_parallel").overlap

        def overlapping() -> Any:
            overlap()
            try:
                return run()
            finally:
                overlap(on=False)

        return overlapping

    def both(self, run: Run) -> dict[str, Run]:
        """The same overlapped, as it is called and captured: neither may differ more than sums do
        whose order differs.
        """
        overlapped, expected = self.overlapped(run), _tensors(run())

        def same(name: str, made: Any) -> None:
            for got, wanted in zip(_tensors(made), expected, strict=True):
                common.require_close(name, got, wanted, self.order)

        same(OVERLAPPED, overlapped())
        if self.device == "cpu":
            return {OVERLAPPED: overlapped}
        replay, made = self.captured(overlapped)
        replay()
        same(CAPTURED.format(OVERLAPPED), made)
        return {OVERLAPPED: overlapped, CAPTURED.format(OVERLAPPED): replay}

    def others(self, split: str, x: Tensor, weight: Tensor, expected: Tensor) -> dict[str, Run]:
        """Other libraries' calls of such a layer that are right on all ranks."""
        group = dist.group.WORLD
        found = peers.shared_calls(peers.installed(peers.SHARED), split, x, weight, group, expected)
        missing = {name: self.slowest(float(name not in found)) for name in peers.SHARED}
        return {name: run for name, run in found.items() if not missing[name]}

    def captured(self, run: Run) -> tuple[Run, Any]:
        """A call as a graph, and what it leaves; it has run before."""
        common.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = run()
        return graph.replay, made

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Random values, which differ between ranks."""
        made: Tensor = common.normal(*shape, scale=scale)
        return made

    def slowest(self, value: float) -> float:
        """Of what each rank says."""
        most = torch.tensor(value, device=self.device, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    def block(self, run: Run, count: int) -> float:
        """Milliseconds per call, of the slowest rank."""
        common.synchronize()
        dist.barrier()
        common.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            run()
        common.synchronize()
        return self.slowest((time.perf_counter() - begin) * 1e3 / count)

    def compare(self, contenders: Mapping[str, Run]) -> tuple[dict[str, list[float]], list[Any]]:
        """Samples of those that every rank can run, and the errors of the others."""
        counts: dict[str, int] = {}
        failed = []
        for name, run in contenders.items():
            error = ""
            try:
                run()
                common.synchronize()
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}".partition("\n")[0]
            if self.slowest(float(bool(error))):
                failed.append((name, error or "failed on another rank"))
                continue
            run()
            counts[name] = max(1, min(200, int(20 / self.block(run, 3))))
        samples: dict[str, list[float]] = {name: [] for name in counts}
        for order in pairs.orders(list(counts), self.rounds):
            for name in order:
                samples[name].append(self.block(contenders[name], counts[name]))
        return samples, failed


def _tensors(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _link(here: Rank, sizes: Sizes) -> tuple[dict[str, Run], int]:
    own = torch.empty(sizes.link // here.count, dtype=torch.uint8, device=here.device)
    every = own.new_empty(sizes.link)
    received = sizes.link - sizes.link // here.count
    return {"NCCL all-gather": lambda: dist.all_gather_into_tensor(every, own)}, received


def _layers(here: Rank, linear: Linear, option: str) -> tuple[Any, Any]:
    """A layer of this rank's part that communicates, and one that does not, of the same weight."""
    sizes = (linear.inputs, linear.outputs)
    layer, alone = (
        here.cell(cell).Linear(*sizes, bias=False, device=here.device)
        for cell in (f"linear__bf16__{option}", "linear__bf16")
    )
    alone.load_state_dict(layer.state_dict())
    return layer, alone


def _column(here: Rank, linear: Linear) -> dict[str, Run]:
    """x [T / p, K] of each rank's own tokens, weight [N, K] of a rank: y [T, N]."""
    x = here.normal(linear.tokens // here.count, linear.inputs)
    layer, whole = _layers(here, linear, OPTIONS["column"])
    weight, group = layer.weight.detach(), _group_name()
    every = x.new_empty(linear.tokens, linear.inputs)
    dist.all_gather_into_tensor(every, x)

    def gathered() -> Tensor:
        dist.all_gather_into_tensor(every, x)
        y: Tensor = torch.nn.functional.linear(every, weight)
        return y

    def fused() -> Tensor:
        both = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.T], 0, group)
        product: Tensor = both[1][0]
        return product

    common.require_close("column", layer(x), whole(every), 0.0)
    common.require_close("column", fused() if _can(fused) else gathered(), whole(every))
    return {
        PRODUCT: lambda: whole(every),
        OURS: lambda: layer(x),
        **here.both(lambda: layer(x)),
        NCCL: gathered,
        SYMMETRIC: fused,
        **here.others("column", x, weight, whole(every)),
    }


def _row(here: Rank, linear: Linear) -> dict[str, Run]:
    """x [T, K] of all tokens, K of a rank, weight [N, K]: y [T / p, N] of a rank's own tokens."""
    x = here.normal(linear.tokens, linear.inputs)
    layer, whole = _layers(here, linear, OPTIONS["row"])
    weight, group = layer.weight.detach(), _group_name()
    own = x.new_empty(linear.tokens // here.count, linear.outputs)

    def scattered() -> Tensor:
        every = torch.nn.functional.linear(x, weight)
        dist.reduce_scatter_tensor(own, every)
        return own

    def fused() -> Tensor:
        product: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x, weight.T, "sum", 0, group
        )
        return product

    common.require_close("row", layer(x), scattered())
    return {
        PRODUCT: lambda: whole(x),
        OURS: lambda: layer(x),
        **here.both(lambda: layer(x)),
        NCCL: scattered,
        SYMMETRIC: fused,
        **here.others("row", x, weight, layer(x)),
    }


def _step(here: Rank, linear: Linear, split: str) -> dict[str, Run]:
    """Forward and backward of such a layer: gradients of x and of the weight."""
    part, every = linear.tokens // here.count, linear.tokens
    rows = (part, every) if split == "column" else (every, part)
    widths = (linear.inputs, linear.outputs)
    return _steps(here, *_layers(here, linear, OPTIONS[split]), rows, widths, every)


def _mlp(here: Rank, linear: Linear, *, backward: bool) -> dict[str, Run]:
    """An MLP of each rank's own tokens, gates and activations of a rank; with gradients or not."""
    sizes = (linear.inputs, linear.outputs)
    layer, whole = (
        here.cell(cell).SwiGLUMLP(*sizes, bias=False, device=here.device)
        for cell in (f"{MLP}__bf16__{MLP_OPTION}", f"{MLP}__bf16")
    )
    whole.load_state_dict(layer.state_dict())
    part = linear.tokens // here.count
    if backward:
        widths = (linear.inputs, linear.inputs)
        return _steps(here, layer, whole, (part, part), widths, linear.tokens)
    x, every = (here.normal(rows, linear.inputs) for rows in (part, linear.tokens))

    def forward(layer: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = layer(x)
        return y

    plain = partial(forward, layer, x)
    return {PRODUCT: partial(forward, whole, every), OURS: plain, **here.both(plain)}


def _steps(
    here: Rank,
    layer: Any,
    whole: Any,
    rows: tuple[int, int],
    widths: tuple[int, int],
    tokens: int,
) -> dict[str, Run]:
    """Forward and backward of a layer that communicates, and of one of all tokens that does not:
    gradients of x and of weights.

    Args:
        here: the rank.
        layer, whole: the two.
        rows: of x and y of the first.
        widths: of x and y.
        tokens: of all ranks.
    """
    x, every = (here.normal(n, widths[0]).requires_grad_() for n in (rows[0], tokens))
    dy, dy_all = (here.normal(n, widths[1]) for n in (rows[1], tokens))

    def step(layer: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        y = layer(x)
        return (y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), dy))

    plain = partial(step, layer, x, dy)
    return {PRODUCT: partial(step, whole, every, dy_all), OURS: plain, **here.both(plain)}


def _group_name() -> str:
    """Of all ranks, as operators of symmetric memory know it."""
    every: Any = dist.group.WORLD
    name: str = every.group_name
    return name


def _can(run: Run) -> bool:
    try:
        run()
    except Exception:
        return False
    return True


def _experts(here: Rank, sizes: Layer) -> dict[str, Run]:
    """A step of a layer whose experts are spread, and of the same ones on tokens that are there."""

    def made(cell: str, **words: Any) -> Any:
        experts = sizes.experts // here.count
        kind = here.cell(cell).MoELayer
        return kind(experts, sizes.hidden, sizes.intermediate, device=here.device, **words)

    own, parallel = made("moe_layer__bf16"), made("moe_layer__bf16__expert_parallel")
    # A rank by itself leaves rows of others as all ranks do, and sends nothing.
    groups = [dist.new_group([rank]) for rank in range(here.count)]
    alone = made("moe_layer__bf16__expert_parallel", expert_group=groups[here.rank])
    of_slots = made("moe_layer__bf16__expert_parallel_all_to_all")
    for layer in (parallel, alone, of_slots):
        layer.load_state_dict(own.state_dict())
    expert_parallel = here.integration("expert_parallel").ExpertParallel
    spread = expert_parallel(own)
    encoded = expert_parallel(own, payload=torch.float8_e4m3fn)
    in_slots = expert_parallel(of_slots, capacity=sizes.tokens)
    x = here.normal(sizes.tokens, sizes.hidden).requires_grad_()
    draw = torch.Generator().manual_seed(here.rank)
    chosen = torch.rand(sizes.tokens, sizes.experts, generator=draw).topk(sizes.top_k).indices
    ids = chosen.int().to(here.device)
    probs = torch.rand(ids.shape, generator=draw).to(here.device).requires_grad_()
    tokens = sizes.tokens * here.count
    every = here.normal(tokens, sizes.hidden).requires_grad_()
    all_ids, all_probs = (t.new_empty(tokens, sizes.top_k) for t in (ids, probs.detach()))
    dist.all_gather_into_tensor(all_ids, ids)
    dist.all_gather_into_tensor(all_probs, probs.detach())
    first = here.rank * (sizes.experts // here.count)
    inside = (all_ids >= first) & (all_ids < first + sizes.experts // here.count)
    all_ids = torch.where(inside, all_ids - first, -1)
    experts = torch.arange(sizes.experts // here.count, device=here.device)
    counts = (all_ids.flatten()[:, None] == experts).sum(0)
    every_expert = torch.arange(sizes.experts, device=here.device, dtype=ids.dtype)
    own_counts = (ids.flatten()[:, None] == every_expert).sum(0)
    all_probs.requires_grad_()

    def step(layer: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        y = layer(*inputs)
        wanted = (*inputs[:2], *layer.parameters())
        return (y.detach(), *torch.autograd.grad(y, wanted, y.detach()))

    spreading = partial(step, spread, x, probs, ids)
    communicating = partial(step, parallel, x, probs, ids, own_counts)
    exchanging = partial(step, in_slots, x, probs, ids)
    steps: dict[str, Run] = {
        PRODUCT: partial(step, alone, every, all_probs, all_ids, counts),
        OURS: spreading,
        OPTION: communicating,
        SLOTS: exchanging,
        CODES: partial(step, encoded, x, probs, ids),
        OVERLAPPED: here.overlapped(spreading),
        OVERLAPPING_OPTION: here.overlapped(communicating),
        OVERLAPPING_SLOTS: here.overlapped(exchanging),
    }
    expected = spreading()
    for name in (OPTION, SLOTS, OVERLAPPED, OVERLAPPING_OPTION, OVERLAPPING_SLOTS):
        for got, wanted in zip(steps[name](), expected, strict=True):
            common.require_close(name, got, wanted, here.order)
    if here.device == "cpu":
        return steps
    for run in steps.values():
        run()
    graphs = {CAPTURED.format(name): here.captured(run)[0] for name, run in steps.items()}
    return {**steps, **graphs}


def _weights(here: Rank, sizes: Layer) -> dict[str, Run]:
    """Parameters of an expert MLP, gathered by FSDP2 and let go again; of quantised ones a backward
    transposes what it reads, besides.
    """
    from torch.distributed.fsdp import fully_shard

    def gathered(cell: str, quantized: bool, backward: bool = False) -> Run:
        made = here.cell(cell).GroupedMLP
        layer = fully_shard(
            made(sizes.experts, sizes.hidden, sizes.intermediate, device=here.device)
        )
        if quantized:
            here.integration("fsdp").gather_quantized(layer)

        def run() -> None:
            layer.unshard()
            if backward:
                for part in (layer.fc1, layer.fc2):
                    for copy in part.weight.copies.values():
                        copy[:0]  # any op reads all of it
            layer.reshard()

        return run

    recipes = {f"{OURS} {recipe}": f"grouped_mlp__{recipe}__cached_weights" for recipe in CACHED}
    return {
        OURS: gathered("grouped_mlp__bf16", False),
        **{name: gathered(cell, True) for name, cell in recipes.items()},
        **{BACKWARD.format(name): gathered(cell, True, True) for name, cell in recipes.items()},
    }


def _contenders(here: Rank, case: str, sizes: Sizes) -> tuple[dict[str, Run], int]:
    """Who takes part in a case, and bytes of their rates."""
    if case == "link":
        return _link(here, sizes)
    for linear in sizes.linears:
        for split, make in (("column", _column), ("row", _row)):
            if case == f"{split} {linear.name}":
                return make(here, linear), 0
            if case == f"{split} step {linear.name}":
                return _step(here, linear, split), 0
    for linear in sizes.mlps:
        if case in (f"mlp {linear.name}", f"mlp step {linear.name}"):
            return _mlp(here, linear, backward="step" in case), 0
    for layer in sizes.layers:
        if case == f"experts {layer.name}":
            return _experts(here, layer), 0
        if case == f"gathered weights {layer.name}":
            return _weights(here, layer), 0
    raise ValueError(case)


def main(words: list[str]) -> None:
    """``BUNDLE STORE OUT CASE QUICK ROUNDS COUNT RANK``: one rank of a case."""
    import bundles

    folder, store, out, case, *numbers = words
    quick, rounds, count, rank = map(int, numbers)
    if common.DEVICE != "cpu":
        torch.cuda.set_device(rank)
    backend, device = (
        ("gloo", None) if common.DEVICE == "cpu" else ("nccl", torch.device("cuda", rank))
    )
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=count, device_id=device
    )
    torch.manual_seed(rank)
    package = bundles.load_bundle(Path(folder)).__name__
    here = Rank(rank, count, package, common.DEVICE, rounds)
    contenders, moved = _contenders(here, case, QUICK if quick else FULL)
    samples, failed = here.compare(contenders)
    timed = [asdict(Timed(case, name, tuple(each), moved)) for name, each in samples.items()]
    if rank == 0:
        Path(out).write_text(json.dumps({"timed": timed, "failed": failed}), "utf-8")
    dist.barrier()
    common.synchronize()
    sys.stdout.flush()
    # Past Python's own end: functional collectives keep their group for ever.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
