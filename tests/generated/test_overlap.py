"""Linear layers that multiply the rows of one rank while those of others are on their way.

On the CPU PyTorch's pipelines, which are of GPUs, have stand-ins over gloo: what is given to them,
and what is done with what they give.  On two GPUs the same script runs with PyTorch's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen.ir.naming import Cell

from .loading import write_cells
from .ranks import Place, run_ranks

CELLS = tuple(Cell("linear", "bf16", (f"{way}_sequence_parallel",)) for way in ("column", "row"))

SAME = """
import importlib
from bundle import _collectives, _overlap
from bundle.integrations import tensor_parallel

calls = []
pipelines = ("_pipelined_all_gather_and_consume", "_pipelined_produce_and_all2all")
if device == "cpu":
    class Pipelines:
        def _pipelined_all_gather_and_consume(rows, consume, every, name, ag_out_needed):
            dist.all_gather_into_tensor(every, rows)
            for rank in reversed(range(ranks)):
                consume(every.chunk(ranks)[rank], rank)

        def _pipelined_produce_and_all2all(produce, each, name):
            made = torch.full_like(each, torch.nan)
            for rank in reversed(range(ranks)):
                produce(rank, made.chunk(ranks)[rank])
            dist.all_to_all_single(each, made)
    _overlap._symmetric = Pipelines
    own = _collectives._overlaps
    _collectives._overlaps = lambda place, source: not torch.compiler.is_compiling() and (
        place.ranks.group_name in _collectives._OVERLAPPING)

for name in pipelines:
    def counted(*args, name=name, run=getattr(_overlap._symmetric, name), **more):
        calls.append(name)
        return run(*args, **more)
    setattr(_overlap._symmetric, name, counted)


def layer_of(way):
    module = importlib.import_module(f"bundle.linear__bf16__{way}_sequence_parallel")
    return module.Linear(64, 128, bias=True, device=device, dtype=torch.bfloat16)


def run(layer, x, dy):
    x = x.clone().requires_grad_()
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), dy)


def random(*shape):
    return torch.randn(*shape, device=device).bfloat16()


torch.manual_seed(rank)
for way, pipeline in zip(("column", "row"), pipelines):
    layer = layer_of(way)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for shape in ((8,), (24,), (256,), (1,), (4, 6)):
        first = shape[0]
        inside = (first * (1 if way == "column" else ranks), *shape[1:], 64)
        outside = (first * (ranks if way == "column" else 1), *shape[1:], 128)
        for repeat in range(int(words[0])):
            x, dy = random(*inside), random(*outside)
            expected = run(layer, x, dy)
            assert not calls
            tensor_parallel.overlap()
            found = run(layer, x, dy)
            assert calls == [pipeline], calls
            traced = run(compiled, x, dy)
            assert calls == [pipeline], "traced layers gather first"
            tensor_parallel.overlap(on=False)
            calls.clear()
            for one, other, third in zip(found, expected, traced, strict=True):
                assert one.shape == other.shape and one.isfinite().all()
                assert torch.equal(one, other) and torch.equal(third, other), (way, shape)
    if device == "cuda":
        x = random(64 * (1 if way == "column" else ranks), 64)
        tensor_parallel.overlap()
        with torch.no_grad():
            layer(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
            for replay in range(200):
                x.copy_(random(*x.shape))
                if replay % 7 == rank:
                    torch.cuda._sleep(1_000_000)
                graph.replay()
                tensor_parallel.overlap(on=False)
                assert torch.equal(y, layer(x)), replay
                tensor_parallel.overlap()
        tensor_parallel.overlap(on=False)
        calls.clear()

layer = layer_of("row")
tensor_parallel.overlap()
try:
    layer(random(33, 64))
except RuntimeError as error:
    assert "expected a first dimension that 2 ranks have equal parts of, got 33" in str(error)
else:
    raise AssertionError("rows that ranks cannot share")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(write_cells("overlapping", "cpu", tmp_path_factory.mktemp("overlap"), CELLS))


def test_rows_by_rank_are_rows_of_all(place: Place, tmp_path: Path) -> None:
    run_ranks(SAME, tmp_path, place, "1")
