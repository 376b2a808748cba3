"""Linear layers that multiply the rows of one rank while those of others are on their way.

On the CPU ranks share files in the place of symmetric memory, and threads wait for flags where
streams would: every protocol runs, between processes that random delays part.  On two GPUs the same
script runs with memory and streams of theirs.
"""

from __future__ import annotations

import ctypes
import importlib
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from fusegen.ir.naming import Cell

from .loading import load_bundle, write_cells
from .ranks import Place, end_ranks, run_ranks

COLUMN = Cell("linear", "bf16", ("column_sequence_parallel",))
ROW = Cell("linear", "bf16", ("row_sequence_parallel",))
CODES = ("quantized_input", "column_sequence_parallel")
QUANTISED = (
    *(Cell("linear", recipe, CODES) for recipe in ("fp8_block", "fp8_delayed", "mxfp8")),
    *(
        Cell("linear", recipe, ("row_sequence_parallel",))
        for recipe in ("fp8_block", "fp8_current", "fp8_delayed", "fp8_rowwise", "mxfp8", "nvfp4")
    ),
    Cell("mlp_swiglu", "fp8_block", ("tensor_sequence_parallel",)),
    Cell("mlp_swiglu", "fp8_block", ("quantized_input", "tensor_sequence_parallel")),
    Cell("mlp", "fp8_delayed", ("quantized_input", "tensor_sequence_parallel")),
)
SEVERAL = (
    Cell("mlp", "bf16", ("tensor_sequence_parallel",)),
    Cell("mlp_swiglu", "bf16", ("tensor_sequence_parallel",)),
    Cell("moe_layer", "bf16", ("expert_parallel",)),
    Cell("moe_layer", "bf16", ("expert_parallel_all_to_all",)),
)
ALONE = Cell("moe_layer", "bf16")  # with which layers of several ranks are compared
CELLS = (COLUMN, ROW, *QUANTISED, *SEVERAL, ALONE)
LIMIT_S = 120  # for ranks that start, wait 2 seconds, and end

ON_CPU = """
import ctypes, os, random as pseudo, time
from concurrent.futures import ThreadPoolExecutor

pseudo.seed(rank)


class OnCpu(_streams.Memory):
    def everywhere(self, ranks_of, shape, dtype):
        OnCpu.count = getattr(OnCpu, "count", 0) + 1
        name = f"{folder}/{OnCpu.count}-"
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        with open(name + str(self.rank), "wb") as file:
            file.truncate(nbytes)
        dist.barrier()
        names = [name + str(r) for r in range(self.size)]
        files = [torch.from_file(each, True, nbytes, dtype=torch.uint8) for each in names]
        dist.barrier()
        os.remove(names[self.rank])
        return [each.view(dtype).view(shape) for each in files]

    def begin(self, ranks_of):
        self.threads = [ThreadPoolExecutor(1) for _ in (_streams.COPIES, _streams.PRODUCTS)]
        self.given = [[], []]
        dist.barrier()

    def fork(self, stream):
        pass

    def run(self, stream, function):
        self.threads[stream].submit(function).result()

    def give(self, stream, function, *words):
        if stream is None:
            function(*words)
        else:
            self.given[stream].append(self.threads[stream].submit(function, *words))

    def copied(self, turn):
        return self.so_far(_streams.COPIES)

    def made(self):
        return self.so_far(_streams.PRODUCTS)

    def so_far(self, stream):
        given, self.given[stream] = self.given[stream], []
        return given

    def join(self, done, stream=None):
        self.give(stream, lambda: [each.result() for each in done])

    def handle(self, stream):
        self.threads[stream].submit(int).result()  # ops wait for nobody here: all are there
        return 0

    def copy(self, target, rows, stream=None):
        assert target.is_contiguous() and rows.is_contiguous()
        assert target.shape == rows.shape and target.dtype == rows.dtype
        self.give(stream, torch.no_grad()(target.copy_), rows)

    def do(self, *ops, stream=None):
        self.give(stream, self.do_now, *ops)

    def do_now(self, *ops):
        for op in ops:
            word = ctypes.c_uint32.from_address(op.address)
            if op.code == _streams.WRITE:
                word.value = op.value
                continue
            time.sleep(pseudo.random() / 500)
            until = time.monotonic() + 60
            while word.value != op.value:
                assert time.monotonic() < until, f"waited for {op.value}, found {word.value}"
                time.sleep(0)

    def set(self, flags, value, stream=None):
        flags = [*flags]
        self.give(stream, self.no_flags, flags)
        super().set(flags, value, stream)

    def no_flags(self, flags):
        for flag in flags:
            word = ctypes.c_uint32.from_address(flag)
            assert word.value == 0, "a flag that nobody has taken back"



_exchanges.Memory = OnCpu
_asked.overlaps = lambda place, rows: _asked._asks(_asked._OVERLAPPING, place, rows)
"""

BEGIN = """
from bundle import _asked, _collectives, _exchanges, _overlap, _streams
from bundle.integrations import tensor_parallel
"""

SAME = """
import gc, weakref
from random import Random

if device == "cpu":
    exec(ON_CPU)
exchanges = []
exchange = _overlap.exchange_of


def counted(*args):
    exchanges.append(len(args))  # not what it sends, which would live on
    return exchange(*args)


_overlap.exchange_of = counted


def run(layer, x, dy):
    x = x.clone().requires_grad_()
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), dy)


def random(*shape):
    return torch.randn(*shape, device=device).bfloat16()


def sizes(first):  # of x, and of y
    return (first, first * ranks) if gathers else (first * ranks, first)


exact = ranks == 2  # other collectives round sums of more in between
torch.manual_seed(rank)
layer = Linear(64, 128, bias=True, device=device, dtype=torch.bfloat16)
torch._dynamo.config.recompile_limit = 16  # few lengths and two ways; not one for each call
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
lengths = ((8,), (24,), (256,), (1,), (4, 6), (0,), (8,))
for first, *others in lengths * (2 if ranks < 8 else 1):
    _exchanges.SMALL = 0 if _exchanges.SMALL else 2**21  # by themselves, or with others
    for repeat in range(int(words[0])):
        rows, given = sizes(first)
        x, dy = random(rows, *others, 64), random(given, *others, 128)
        expected = run(layer, x, dy)
        assert not exchanges
        tensor_parallel.overlap()
        found = run(layer, x, dy)
        asked = 3 if gathers else 2
        assert len(exchanges) == asked, "the forward's, and those of the backward"
        exchanges.clear()
        traced = run(compiled, x, dy)
        assert len(exchanges) == asked, "a direction is one op"
        exchanges.clear()
        tensor_parallel.overlap(on=False)
        if not shared:  # a compiler traces the collectives themselves
            assert all(map(torch.equal, run(compiled, x, dy), expected))
            assert not exchanges, "what was compiled for the other way is not taken"
        for one, other, third in zip(found, expected, traced, strict=True):
            assert one.shape == other.shape and one.isfinite().all()
            same = torch.equal(one, other) if exact else torch.allclose(one, other, 5e-2, 5e-2)
            assert same and torch.equal(third, one), (first, others)
here = _collectives.Place("test", "rows", "group", dist.group.WORLD)
_exchanges.SMALL = 0
for ahead in (False, True):  # rows of its own for each rank
    rows = random(7 * ranks, 64)
    gathering = _overlap.Gathering(rows.chunk(ranks), here, ahead)
    every = torch.empty_like(rows)
    dist.all_to_all_single(every, rows)
    assert torch.equal(gathering(), every)
sent = [random(8 + i, 64) for i in range(5)]  # more under way than there are buffers from a rank
arriving = [_overlap.Gathering([rows] * ranks, here) for rows in sent]
adding = [_overlap.start_to_scatter(rows.repeat(ranks, 1), here) for rows in sent]
try:
    adding[0]()
except RuntimeError as error:
    assert "in the order in which they start" in str(error), error
else:
    raise AssertionError("what came first was taken for what comes later")
totals = []
broken, second = (_overlap.Gathering([sent[0]] * ranks, here) for _ in range(2))
for rows, arrive in zip(sent, arriving):
    every = rows.new_empty(ranks * len(rows), 64)
    dist.all_gather_into_tensor(every, rows)
    assert torch.equal(arrive(), every)
    parts = every.float().unflatten(0, (ranks, -1)).roll(-rank - 1, 0)  # this rank's are the last
    totals.append(sum(parts[1:], parts[0]).bfloat16())
for total, add_up in zip(totals, adding):
    assert torch.equal(add_up(), total)
found = []


def fail(every, first=0, end=0, stream=0):
    found.append((every, first, end))
    raise ValueError("an op that fails")


def fail_of_others(every):
    if every is not sent[0]:
        raise ValueError("an op that fails")


ways = [lambda: broken.arriving(fail), lambda: second.products(fail, ())]
for failing in (fail, fail_of_others):
    ways.append(lambda failing=failing: _overlap.gathered([sent[0]], failing, (), here, sent[0]))
for way in ways:
    try:
        way()
    except ValueError as error:
        assert "an op that fails" in str(error)
    else:
        raise AssertionError("an op failed, and nobody knew")
every, first, end = found[0]
assert torch.equal(every[first:end], sent[0]) and (first, end) == (8 * rank, 8 * rank + 8)
again = _overlap.Gathering([sent[0]] * ranks, here)
assert torch.equal(again(), every), "nothing else goes on after it"
_overlap.PIECE, calls = 4, []


def twice(rows):
    calls.append(len(rows))
    if failing and len(calls) > failing:
        raise ValueError("an op that fails")
    return rows + rows


# Pieces of a rank's rows: as many as asked for, of few rows fewer, one where others are under way.
for length, most, failing in ((9, 2, 0), (7, 2, 0), (9, 1, 0), (9, 2, 2 * ranks - 2), (9, 2, 0)):
    rows, count = random(length * ranks, 64), 2 if most == 2 and length == 9 else 1
    for pending in (False, True):
        exchanges.clear()
        calls.clear()
        under_way = _overlap.Gathering([sent[0]] * ranks, here) if pending else None
        failing = failing and (1 if pending else count) * (ranks - 1)
        try:
            found = _overlap.scattered([(part,) for part in rows.chunk(ranks)], twice, here, most)
        except ValueError:
            assert failing and len(calls) == failing + 1, calls
            found = None
        of_others = [5, 4] if count == 2 and not pending else [length]
        assert calls == [each for each in of_others for _ in range(ranks - 1)] + [length], calls
        assert len(exchanges) == len(of_others) + pending
        parts = rows.new_empty(ranks, *rows.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), rows)
        own = parts.unflatten(1, (ranks, -1))[:, rank].add(0).roll(-rank - 1, 0)
        total = sum((2 * own[1:]).float(), (2 * own[0]).float()).bfloat16()
        assert found is None and failing or torch.equal(found, total), (length, most, pending)
        assert not pending or torch.equal(under_way(), every)
exchanges.clear()
# What is small is sent together, when something is waited for or something large sent.
_exchanges.SMALL = 2**12
Exchange, begun = _exchanges.Exchange, []
_exchanges.Exchange = lambda *args, **how: begun.append(args[2:]) or Exchange(*args, **how)
small, numbers = random(3, 5), torch.arange(7, device=device, dtype=torch.int64) + rank
large = random(300, 64)
for order in ((0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 1, 3), (0, 2, 3, 1)):
    begun.clear()
    waiting = [
        _overlap.Gathering([small] * ranks, here),
        _overlap.start_to_scatter(numbers.repeat(ranks), here),
        _overlap.Gathering([large] * ranks, here),
        _overlap.start_to_scatter(small.repeat(ranks, 1), here),
    ]
    assert [len(each) for each in begun] == [2, 1], begun
    got = {at: waiting[at]() for at in order}
    assert [len(each) for each in begun] == [2, 1, 1], begun
    smalls, larges = small.new_empty(ranks * 3, 5), large.new_empty(ranks * 300, 64)
    dist.all_gather_into_tensor(smalls, small)
    dist.all_gather_into_tensor(larges, large)
    assert torch.equal(got[0], smalls) and torch.equal(got[2], larges)
    assert torch.equal(got[1], ranks * numbers - ranks * rank + ranks * (ranks - 1) // 2)
    parts = smalls.float().unflatten(0, (ranks, -1)).roll(-rank - 1, 0)
    assert torch.equal(got[3], sum(parts[1:], parts[0]).bfloat16())
failing = True
try:  # of three ranks the second product fails, when one was sent: it is never sent
    _overlap.scattered([(small,)] * ranks, lambda rows: calls.append(0) or 1 / 0, here, 1)
except ZeroDivisionError:
    pass
assert torch.equal(_overlap.Gathering([small] * ranks, here)(), smalls)
gc.disable()
for rows in (small, large):  # what has ended holds no memory until Python looks for circles
    gathering = _overlap.Gathering([rows] * ranks, here)
    gathering()
    kept = weakref.ref(getattr(gathering._exchange, "_batch", gathering._exchange))
    del gathering
    assert kept() is None, type(kept())
gc.enable()
_exchanges.SMALL = 2**21
if device == "cuda":
    x = random(sizes(64)[0], 64)
    tensor_parallel.overlap()
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        late = Random(rank)  # each rank at other replays, and by other times, up to about 1 ms
        for replay in range(1000):
            x.copy_(random(*x.shape))
            if late.random() < 0.2:
                torch.cuda._sleep(late.randrange(2_000_000))
            graph.replay()
            if replay % 10 == 0:
                tensor_parallel.overlap(on=not exact)
                assert torch.equal(y, layer(x)), replay
                tensor_parallel.overlap()
        torch.cuda.synchronize()
    graphs = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for replay in range(20):  # of forward and backward, which the first of these capture
        x, dy = random(sizes(64)[0], 64), random(sizes(64)[1], 128)
        if late.random() < 0.2:
            torch.cuda._sleep(late.randrange(2_000_000))
        torch.compiler.cudagraph_mark_step_begin()
        exchanges.clear()
        found = [each.clone() for each in run(graphs, x, dy)]
        assert replay < 4 or not exchanges, "what is replayed calls nothing"
        assert all(map(torch.equal, found, run(layer, x, dy))), replay
    with torch.no_grad():
        fresh = torch.cuda.CUDAGraph()
        large = random(sizes(2**16)[0], 64)
        try:
            with torch.cuda.graph(fresh):
                layer(large)
        except RuntimeError as error:
            assert "run the same call once before the capture" in str(error), error
        else:
            raise AssertionError("memory was made while a graph was captured")

tensor_parallel.overlap()
try:
    layer(torch.zeros(64, device=device, dtype=torch.bfloat16))
except RuntimeError as error:
    assert "expected 2 dimensions or more, the first of them of tokens" in str(error), error
else:
    raise AssertionError("a row is none of several")
"""


OTHERS = """
from bundle.mlp__bf16__tensor_sequence_parallel import MLP
from bundle.mlp_swiglu__bf16__tensor_sequence_parallel import SwiGLUMLP
from bundle.moe_layer__bf16__expert_parallel import MoELayer
from bundle.moe_layer__bf16__expert_parallel_all_to_all import MoELayer as LayerOfSlots

if device == "cpu":
    exec(ON_CPU)
torch.manual_seed(rank)
layers = (
    (MLP(256, 128 * ranks, bias=True, device=device), 24, 24),
    (SwiGLUMLP(256, 128 * ranks, bias=True, device=device), 24, 24),
    (MoELayer(3, 256, 128, bias=True, device=device), 24, 24),
    (LayerOfSlots(3, 256, 128, bias=True, device=device), 8 * ranks, 8 * ranks),
)
for layer, rows, given in layers:
    for repeat in range(3):
        inputs = [torch.randn(rows, 256, device=device).bfloat16().requires_grad_()]
        further = []
        if isinstance(layer, (MoELayer, LayerOfSlots)):
            ids = torch.rand(rows, 3 * ranks, device=device).topk(2).indices.int()
            if isinstance(layer, LayerOfSlots):
                of = torch.arange(rows, device=device) // 8
                ids[ids // 3 != of.unsqueeze(1)] = -1
            inputs.append(torch.rand(rows, 2, device=device).requires_grad_())
            further = [ids, torch.stack([(ids == expert).sum() for expert in range(3 * ranks)])]
        dy = torch.randn(given, layer(*inputs, *further).shape[-1], device=device).bfloat16()
        found = []
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for on, call in ((False, layer), (True, layer), (True, compiled)):
            tensor_parallel.overlap(on=on)
            y = call(*inputs, *further)
            gradients = torch.autograd.grad(y, (*inputs, *layer.parameters()), dy)
            found.append((y.detach(), *gradients))
            with torch.no_grad():  # what a backward would read is not there
                assert torch.equal(call(*inputs, *further), y) or ranks != 2
            if not further:  # gradients of weights alone, of inputs alone
                for wanted in ([*layer.parameters()], inputs):
                    found[-1] += torch.autograd.grad(call(*inputs), wanted, dy)
        tensor_parallel.overlap(on=False)
        for one, other, traced in zip(*found, strict=True):
            assert traced.equal(other), type(layer)
            # Other collectives round sums of more than two in between.
            same = torch.equal(one, other) if ranks == 2 else torch.allclose(one, other, 0.1, 0.1)
            assert one.isfinite().all() and same, type(layer)
"""


OF_CODES = """
import importlib, re
from collections import Counter
from pathlib import Path
from random import Random

if device == "cpu":
    exec(ON_CPU)
torch.manual_seed(rank)
late = Random(rank)  # each rank at other replays, and by other times, up to about 1 ms
seen = Counter()
for name in ("gathered", "scattered"):
    def counted(*args, name=name, way=getattr(_overlap, name)):
        seen[name] += 1
        return way(*args)
    setattr(_overlap, name, counted)


def run(layer, x, dy):
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), dy)


for cell in words:
    module = importlib.import_module(f"bundle.{cell}")
    text = Path(module.__file__).read_text()
    unit = int((re.findall(r"unit=([0-9]+)", text) or ["1"])[0])
    is_mlp, gathers = cell.startswith("mlp"), "quantized_input" in cell
    column = "column" in cell
    sizes = (256, 128 * ranks) if is_mlp else (256, 128)
    names = ("Linear", "MLP", "SwiGLUMLP")
    kind = next(getattr(module, name) for name in names if hasattr(module, name))
    layers = [kind(*sizes, bias=True, device=device) for _ in range(3)]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    if not (shared and gathers and "delayed" in cell):  # where an amax goes by way of the host
        layers[2] = torch.compile(layers[2], fullgraph=True, backend="aot_eager")
    for first, *others in ((128,), (2, 128)) + (() if gathers else ((8,), (2, 5))):
        for small in (0, 2**21):  # by themselves, or with others
            _exchanges.SMALL = small
            rows = first if column or is_mlp else first * ranks
            given = first * ranks if column else first
            shape = (rows, *others, 256)
            x = torch.randn(shape, device=device).bfloat16().requires_grad_()
            dy = torch.randn(given, *others, 128 if not is_mlp else 256, device=device).bfloat16()
            found = []
            # States of scales move on in each alone; compiling takes a while.
            for on, layer in enumerate(layers[: 3 if first == 128 else 2]):
                seen.clear()
                tensor_parallel.overlap(on=bool(on))
                found.append(run(layer, x, dy))
                with torch.no_grad():
                    found[-1] += (layer(x),)
            tensor_parallel.overlap(on=False)
            told = torch.Size((first, *others)).numel() % unit == 0
            assert seen["gathered"] == 2 * text.count("product_of_gathered("), (cell, seen)
            assert seen["scattered"] == 2 * text.count("scattered_product(") * told, (cell, seen)
            for one, other, *traced in zip(*found, strict=True):
                assert all(each.equal(other) for each in traced), (cell, first, others)
                # Other collectives round sums of more than two in between.
                same = one.equal(other) if ranks == 2 else one.allclose(other, 0.1, 0.1)
                assert one.isfinite().all() and same, (cell, first, others)
    if device == "cuda":
        tensor_parallel.overlap()
        with torch.no_grad():
            graph, x, layer = torch.cuda.CUDAGraph(), x.detach(), layers[1]
            layer(x)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                y = layer(x)
            for replay in range(100):
                x.normal_()
                if late.random() < 0.2:
                    torch.cuda._sleep(late.randrange(2_000_000))
                graph.replay()
                if replay % 10 == 0:
                    tensor_parallel.overlap(on=ranks != 2)
                    assert y.equal(layer(x)), (cell, replay)
                    tensor_parallel.overlap()
        tensor_parallel.overlap(on=False)
"""

# What a stream does is done at once where there are none: the host waits for gloo itself.
WATCHED_ON_CPU = """
import ctypes


def do_now(stream, *ops):
    for op in ops:
        ctypes.c_uint32.from_address(op.address).value = op.value


_streams.do, _streams.current_stream = do_now, lambda device: 0
torch.cuda.current_device = lambda: 0
_asked.watches = lambda place, sent: _asked._asks(_asked._WATCHED, place, sent)
"""

# Rank 0 waits for what does not come, and ends.
WAITING = """
import datetime, time

how, by = words
if device == "cpu":
    exec(ON_CPU if by == "overlap" else WATCHED_ON_CPU)


def settle():
    if device == "cuda":
        torch.cuda.synchronize()


layer = Linear(64, 128, device=device, dtype=torch.bfloat16)
if how == "compiled":
    layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
first = 16 if gathers else 16 * ranks
x = torch.zeros(first, 64, device=device, dtype=torch.bfloat16)
getattr(tensor_parallel, by)(timeout=datetime.timedelta(seconds=2))
with torch.no_grad():
    for repeat in range(4):
        layer(x)
    call = layer
    if how == "replayed":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x)
        call = lambda _: graph.replay()
        call(x)
    settle()
    dist.barrier()
    settle()
    if rank == 0:
        for repeat in range(4):
            call(x)
        settle()
    elif how == "fewer":
        layer(x[: first // 2])
        settle()
    elif how in ("late", "compiled"):
        time.sleep(10)
    else:
        os._exit(3)
raise AssertionError("nothing came, and it went on")
"""


def script(cell: Cell, body: str = SAME) -> str:
    """What each rank runs for a cell."""
    module = f"import os\nfrom bundle.{cell} import Linear\ngathers = {cell == COLUMN}\n"
    return f"{BEGIN}{module}{ON_CPU=!r}\n{WATCHED_ON_CPU=!r}\n{body}"


def check_waits_end(place: Place, folder: Path, cell: Cell, how: str, by: str = "overlap") -> None:
    """A rank ends after its time, with the names of what it was at and of whom it waited for."""
    begin = time.monotonic()
    codes = end_ranks(script(cell, WAITING), folder, place, how, by, said=folder)
    said = (folder / "0.err").read_text()
    assert codes[0] == -signal.SIGABRT, said
    step = "all_gather of x" if cell == COLUMN else "reduce_scatter of y"
    late = {
        "overlap": "rank 1, which is lost or late",
        "watch": "the others, of which one is lost or late",
    }[by]
    assert f"{cell}: forward: {step}" in said and "failed on rank 0 of 2: " in said, said
    assert "has waited more than 2 s for" in said and late in said, said
    assert f"{by}(timeout=...) waits longer" in said, said
    assert time.monotonic() - begin < LIMIT_S


def others() -> str:
    """What each rank runs for modules whose directions have several collectives."""
    return f"{BEGIN}ON_CPU = {ON_CPU!r}\n{OTHERS}"


def quantised() -> str:
    """What each rank runs for modules that multiply codes, whose names it is given."""
    return f"{BEGIN}ON_CPU = {ON_CPU!r}\n{OF_CODES}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("overlap")
    return Place(write_cells("overlapping", "cpu", folder, CELLS))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cell", [COLUMN, ROW], ids=str)
def test_rows_by_rank_are_rows_of_all(place: Place, tmp_path: Path, cell: Cell, ranks: int) -> None:
    run_ranks(script(cell), tmp_path, place, "2", ranks=ranks)


def test_eight_ranks_wait_for_each_other(place: Place, tmp_path: Path) -> None:
    run_ranks(script(COLUMN), tmp_path, place, "1", ranks=8)


@pytest.mark.parametrize("ranks", [2, 3])
def test_quantised_rows_by_rank_are_rows_of_all(place: Place, tmp_path: Path, ranks: int) -> None:
    """Codes, and their scales where each row has some, one behind the other or on their way."""
    run_ranks(quantised(), tmp_path, place, *map(str, QUANTISED), ranks=ranks)


@pytest.mark.parametrize("how", ["lost", "fewer"])
@pytest.mark.parametrize("cell", [COLUMN, ROW], ids=str)
def test_no_wait_is_for_ever(place: Place, tmp_path: Path, cell: Cell, how: str) -> None:
    check_waits_end(place, tmp_path, cell, how)


@pytest.mark.parametrize("how", ["late", "compiled"])
@pytest.mark.parametrize("cell", [COLUMN, ROW], ids=str)
def test_no_wait_for_a_backend_is_for_ever(
    place: Place, tmp_path: Path, cell: Cell, how: str
) -> None:
    check_waits_end(place, tmp_path, cell, how, by="watch")


@pytest.mark.parametrize("by", ["overlap", "watch"])
def test_a_timeout_of_nothing_is_refused(place: Place, by: str) -> None:
    name = load_bundle("overlap_timeout", place.bundle)
    tensor_parallel = importlib.import_module(f"{name}.integrations.tensor_parallel")
    with pytest.raises(ValueError, match=f"{by}: timeout: expected some time, got 0:00:00"):
        getattr(tensor_parallel, by)(timeout=timedelta(0))


def test_waits_that_end_are_none_that_last(place: Place) -> None:
    """However often a look finds a stream waiting, at the same place: others have ended between."""
    name = load_bundle("overlap_marks", place.bundle)
    streams = importlib.import_module(f"{name}._streams")
    marks = streams.Marks(3)
    ((_, waits, here), (_, same, beside)), ((_, came, _), _) = marks.around(1, ["here", "beside"])
    assert same == waits
    (((_, _, there),), _) = marks.around(1, ["there"])
    word, ended = (ctypes.c_uint32.from_address(each) for each in (waits, came))
    word.value = here
    for now in range(100):
        assert marks.overdue(now, 2) is None
        ended.value = now % 2
    assert [marks.overdue(now, 2) for now in (100, 102, 103)] == [None] * 2 + ["here"]
    word.value = beside  # the next of several waits, whose time begins here
    assert [marks.overdue(now, 2) for now in (103, 105, 106)] == [None] * 2 + ["beside"]
    word.value, ended.value = there, 1
    assert [marks.overdue(now, 2) for now in (107, 109, 110)] == [None] * 2 + ["there"]
    word.value = 0
    assert marks.overdue(1000, 2) is None


def test_counts_are_added_up_exactly(place: Place) -> None:
    name = load_bundle("overlap_counts", place.bundle)
    add_rows = importlib.import_module(f"{name}._add_rows").add_rows
    odd = torch.tensor([2**24 + 1])
    for ranks in (2, 3, 4):
        total = torch.zeros_like(odd)
        add_rows(torch.stack([odd] * (ranks - 1)), odd, total)
        assert total.equal(odd * ranks)


def test_modules_of_several_collectives(place: Place, tmp_path: Path) -> None:
    """Copies of tokens and gradients are under way together."""
    run_ranks(others(), tmp_path, place)


def test_ops_that_begin_before_all_rows_are_there(tmp_path: Path) -> None:
    """Those whose GEMMs gather rows: the plan of a GPU, which CPU tensors run in plain PyTorch."""
    bundle = write_cells("arriving", "sm_90a", tmp_path, SEVERAL)
    cell = next(each for each in SEVERAL if each.module == "moe_layer")
    assert (bundle / f"{cell}.py").read_text().count("call_as_they_arrive") == 2
    run_ranks(others(), tmp_path, Place(bundle))
