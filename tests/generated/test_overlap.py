"""Linear layers that multiply the rows of one rank while those of others are on their way.

On the CPU ranks share files in the place of symmetric memory, and threads wait for flags where
streams would: every protocol runs, between processes that random delays part.  On two GPUs the same
script runs with memory and streams of theirs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen.ir.naming import Cell

from .loading import write_cells
from .ranks import Place, run_ranks

COLUMN = Cell("linear", "bf16", ("column_sequence_parallel",))
ROW = Cell("linear", "bf16", ("row_sequence_parallel",))
SEVERAL = (
    Cell("linear", "fp8_block", ("quantized_input", "column_sequence_parallel")),
    Cell("mlp", "bf16", ("tensor_sequence_parallel",)),
)

ON_CPU = """
import ctypes, os, random as pseudo, time
from concurrent.futures import ThreadPoolExecutor

pseudo.seed(rank)


class OnCpu(_overlap.Memory):
    def everywhere(self, ranks_of, shape, dtype):
        OnCpu.made = getattr(OnCpu, "made", 0) + 1
        name = f"{folder}/{OnCpu.made}-"
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
        self.threads = [ThreadPoolExecutor(1) for _ in (_overlap.COPIES, _overlap.PRODUCTS)]
        dist.barrier()

    def fork(self, *streams):
        pass

    def run(self, stream, function):
        return self.threads[stream].submit(function)

    def join(self, done):
        done.result()

    def take(self, flag, value):
        time.sleep(pseudo.random() / 500)
        word = ctypes.c_uint32.from_address(flag)
        until = time.monotonic() + 60
        while word.value != value:
            assert time.monotonic() < until, f"waited for {value}, found {word.value}"
            time.sleep(0)
        word.value = 0

    def set(self, flag, value):
        word = ctypes.c_uint32.from_address(flag)
        assert word.value == 0, "a flag that nobody has taken back"
        word.value = value


_overlap.Memory = OnCpu
_collectives._overlaps = lambda place, source: not torch.compiler.is_compiling() and (
    place.ranks.group_name in _collectives._OVERLAPPING)
"""

BEGIN = """
from bundle import _collectives, _overlap
from bundle.integrations import tensor_parallel
"""

SAME = """
if device == "cpu":
    exec(ON_CPU)
exchanges = []
exchange = _overlap._exchange


def counted(*args):
    exchanges.append(args)
    return exchange(*args)


_overlap._exchange = counted


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
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
for first, *others in ((8,), (24,), (256,), (1,), (4, 6), (0,), (8,)):
    for repeat in range(int(words[0])):
        rows, given = sizes(first)
        x, dy = random(rows, *others, 64), random(given, *others, 128)
        expected = run(layer, x, dy)
        assert not exchanges
        tensor_parallel.overlap()
        found = run(layer, x, dy)
        assert len(exchanges) == (3 if gathers else 2), "the forward's, and those of the backward"
        exchanges.clear()
        traced = run(compiled, x, dy)
        assert not exchanges, "traced layers wait for all rows"
        tensor_parallel.overlap(on=False)
        for one, other, third in zip(found, expected, traced, strict=True):
            assert one.shape == other.shape and one.isfinite().all()
            same = torch.equal(one, other) if exact else torch.allclose(one, other, 5e-2, 5e-2)
            assert same and torch.equal(third, other), (first, others)
group = dist.group.WORLD  # more under way than there are buffers from a rank
sent = [random(8 + i, 64) for i in range(5)]
arriving = [_overlap.start_to_gather(rows, group) for rows in sent]
adding = [_overlap.start_to_scatter(rows.repeat(ranks, 1), group) for rows in sent]
try:
    adding[0]()
except RuntimeError as error:
    assert "in the order in which they start" in str(error), error
else:
    raise AssertionError("what came first was taken for what comes later")
totals = []
for rows, arrive in zip(sent, arriving):
    every = rows.new_empty(ranks * len(rows), 64)
    dist.all_gather_into_tensor(every, rows)
    assert torch.equal(arrive(), every)
    totals.append(every.float().unflatten(0, (ranks, -1)).sum(0).bfloat16())
for total, add_up in zip(totals, adding):
    assert torch.equal(add_up(), total)
if device == "cuda":
    x = random(sizes(64)[0], 64)
    tensor_parallel.overlap()
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for replay in range(1000):
            x.copy_(random(*x.shape))
            if replay % 7 == rank:
                torch.cuda._sleep(1_000_000)
            graph.replay()
            if replay % 10 == 0:
                tensor_parallel.overlap(on=False)
                assert torch.equal(y, layer(x)), replay
                tensor_parallel.overlap()
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
from bundle.linear__fp8_block__quantized_input__column_sequence_parallel import Linear
from bundle.mlp__bf16__tensor_sequence_parallel import MLP

if device == "cpu":
    exec(ON_CPU)
torch.manual_seed(rank)
layers = (
    (Linear(256, 128, bias=True, device=device), 128, 128 * ranks),
    (MLP(256, 128 * ranks, bias=True, device=device), 24, 24),
)
for layer, rows, given in layers:
    for repeat in range(3):
        x = torch.randn(rows, 256, device=device).bfloat16().requires_grad_()
        dy = torch.randn(given, layer(x).shape[-1], device=device).bfloat16()
        found = []
        for on in (False, True):
            tensor_parallel.overlap(on=on)
            y = layer(x)
            found.append((y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), dy)))
        tensor_parallel.overlap(on=False)
        for one, other in zip(*found, strict=True):
            assert one.isfinite().all() and torch.equal(one, other), type(layer)
"""


def script(cell: Cell) -> str:
    """What each rank runs for a cell."""
    module = f"from bundle.{cell} import Linear\ngathers = {cell == COLUMN}\n"
    return f"{BEGIN}{module}ON_CPU = {ON_CPU!r}\n{SAME}"


def others() -> str:
    """What each rank runs for modules whose directions have several collectives."""
    return f"{BEGIN}ON_CPU = {ON_CPU!r}\n{OTHERS}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("overlap")
    return Place(write_cells("overlapping", "cpu", folder, (COLUMN, ROW, *SEVERAL)))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("cell", [COLUMN, ROW], ids=str)
def test_rows_by_rank_are_rows_of_all(place: Place, tmp_path: Path, cell: Cell, ranks: int) -> None:
    run_ranks(script(cell), tmp_path, place, "2", ranks=ranks)


def test_modules_of_several_collectives(place: Place, tmp_path: Path) -> None:
    """Copies of tokens and gradients are under way together."""
    run_ranks(others(), tmp_path, place)
