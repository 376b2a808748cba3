"""Steps as one graph: of torch.compile, and of CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import common
import torch
from torch._dynamo.utils import counters

Results = TypeVar("Results")


@contextmanager
def one_graph() -> Iterator[None]:
    """What is compiled inside is one graph, once.

    Raises:
        SystemExit: it is not; torch raises what breaks a graph or asks for another one.
    """
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    if graphs != 1 or breaks:
        raise SystemExit(f"expected one graph of torch.compile, got {graphs}, breaks: {breaks}")


@dataclass(frozen=True)
class Replay(Generic[Results]):
    """A captured step.

    Attributes:
        graph: of all of it.
        results: what a replay writes.
        step: what was captured. It holds the tensors that the graph reads and does not own, such as
            a recipe's state: their memory must not become another one's.
    """

    graph: Any
    results: Results
    step: Callable[[], Results]

    def __call__(self) -> Results:
        self.graph.replay()
        return self.results


def capture(step: Callable[[], Results], pool: Any = None) -> Callable[[], Results]:
    """The step as one CUDA graph; on the CPU the step itself.

    Args:
        step: ran before, on the current stream, which is not the default one.
        pool: of the graphs' memory, where several share it.
    """
    if common.DEVICE == "cpu":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        results = step()
    return Replay(graph, results, step)


def own_stream() -> AbstractContextManager[Any]:
    """A stream that may be captured: steps before, while and after run on the same one."""
    if common.DEVICE == "cpu":
        return nullcontext()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context
