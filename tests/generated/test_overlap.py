"""Linear layers that multiply the rows of one rank while those of others are on their way.

On the CPU PyTorch's pipeline, which is of GPUs, has a stand-in over gloo: what is given to it, and
what is done with what it gives.  On two GPUs the same script runs with PyTorch's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen.ir.naming import Cell

from .loading import write_cells
from .ranks import Place, run_ranks

CELL = Cell("linear", "bf16", ("column_sequence_parallel",))

SAME = """
from bundle import _collectives, _overlap
from bundle.integrations import tensor_parallel
from bundle.linear__bf16__column_sequence_parallel import Linear

if device == "cpu":
    class Pipelines:
        def _pipelined_all_gather_and_consume(rows, consume, every, name, ag_out_needed):
            dist.all_gather_into_tensor(every, rows)
            for rank in reversed(range(ranks)):
                consume(every.chunk(ranks)[rank], rank)

    _overlap._symmetric = Pipelines
    _collectives._overlaps = lambda place, source: not torch.compiler.is_compiling() and (
        place.ranks.group_name in _collectives._OVERLAPPING)

pipeline = _overlap._symmetric._pipelined_all_gather_and_consume
calls = []


def counted(*args, **more):
    calls.append(args[3])
    return pipeline(*args, **more)


_overlap._symmetric._pipelined_all_gather_and_consume = counted


def run(layer, x, dy):
    x = x.clone().requires_grad_()
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), dy)


def random(*shape):
    return torch.randn(*shape, device=device).bfloat16()


torch.manual_seed(rank)
layer = Linear(64, 128, bias=True, device=device, dtype=torch.bfloat16)
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
for first, *others in ((8,), (24,), (256,), (1,), (4, 6)):
    for repeat in range(int(words[0])):
        x, dy = random(first, *others, 64), random(first * ranks, *others, 128)
        expected = run(layer, x, dy)
        assert not calls
        tensor_parallel.overlap()
        found = run(layer, x, dy)
        assert len(calls) == 1
        traced = run(compiled, x, dy)
        assert len(calls) == 1, "traced layers gather first"
        tensor_parallel.overlap(on=False)
        calls.clear()
        for one, other, third in zip(found, expected, traced, strict=True):
            assert one.shape == other.shape and one.isfinite().all()
            assert torch.equal(one, other) and torch.equal(third, other), (first, others)
if device == "cuda":
    x = random(64, 64)
    tensor_parallel.overlap()
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for replay in range(200):
            x.copy_(random(64, 64))
            if replay % 7 == rank:
                torch.cuda._sleep(1_000_000)
            graph.replay()
            tensor_parallel.overlap(on=False)
            assert torch.equal(y, layer(x)), replay
            tensor_parallel.overlap()

tensor_parallel.overlap()
try:
    layer(torch.zeros(64, device=device, dtype=torch.bfloat16))
except RuntimeError as error:
    assert "expected 2 dimensions or more, the first of them of tokens" in str(error), error
else:
    raise AssertionError("a row is none of several")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(write_cells("overlapping", "cpu", tmp_path_factory.mktemp("overlap"), (CELL,)))


def test_rows_by_rank_are_rows_of_all(place: Place, tmp_path: Path) -> None:
    run_ranks(SAME, tmp_path, place, "1")
