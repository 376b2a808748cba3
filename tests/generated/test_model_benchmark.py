"""The benchmark of a whole training step, on the CPU.

In the place of CUDA graphs stands a recorder that replays as they do: the same operations on the
same memory, with whatever the host put into them once. The kernels alone are not a GPU's.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusegen.commands import bench

aten = torch.ops.aten
COMPILER = "aot_eager"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, on the CPU and so small that it takes no time."""
    benchmarks = bench.find()
    common, model = benchmarks.module("common"), benchmarks.module("model")
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "REST_SECONDS", 0.0)
    monkeypatch.setattr(common, "compare", partial(common.compare, rounds=2))
    monkeypatch.setattr(model, "prepare", partial(model.prepare, capture_step=record))
    small = replace(model.SIZES, hidden=64, intermediate=48, experts=4, heads=2, context=32)
    small = replace(small, layers=2, batch=2, learning_rate=3e-3)
    return SimpleNamespace(module=model, common=common, small=small)


def subject_of(model: Any, contender: str) -> Any:
    factories = model.module.factories(model.common.bundle())
    return model.module.Subject(model.module.Training(model.small), factories[contender])


class Recorder(TorchDispatchMode):
    """Keeps every operation with the tensors that it read and wrote.

    Refuses those whose result the host would have to wait for, which no captured step may.
    """

    REFUSED = frozenset(
        {
            aten._local_scalar_dense.default,
            aten.bincount.default,
            aten.equal.default,
            aten.nonzero.default,
            aten.masked_select.default,
            aten.repeat_interleave.Tensor,
        }
    )

    supports_higher_order_operators = True  # compiled code calls ops that change state through one

    @classmethod
    def is_infra_mode(cls) -> bool:
        """What was compiled runs as it is under the recorder."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[[], Any], Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in self.REFUSED:
            raise AssertionError(f"{function} reads the device on the host")
        call = partial(function, *args, **(kwargs or {}))
        results = call()
        self._calls.append((call, results))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        for call, results in self._calls:
            for old, new in zip(tree_leaves(results), tree_leaves(call()), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(training: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """The step as a recorder has it."""
    with Recorder() as recorder:
        loss = run()

    def replay() -> Any:
        recorder.replay()
        return loss

    return replay


RECIPES = ("fp8_block", "fp8_current", "fp8_delayed", "fp8_rowwise", "mxfp8", "nvfp4")
OURS = ("fusegen", *(f"fusegen {recipe}" for recipe in RECIPES))


def test_every_recipe_is_checked_and_timed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        model.common, "compare", lambda them, **_: {name: [2.0, 3.0] for name in them}
    )
    rows = model.module.measure(model.common.bundle(), model.small, backend=COMPILER)
    result = model.common.result("model", rows, {})
    assert model.common.failures(result) == []
    assert [row["contender"] for row in result["rows"]] == ["torch compiled", *OURS]
    for row in result["rows"]:
        assert row["case"] == "2 layers, 4 experts, 64 tokens"
        assert (row["median"], row["times_ours"], row["rate"]) == (2.5, 1.0, 64 / 2.5e3)
        assert row["extra"] == {"speedup_over_torch": 1.0}


def test_mixed_precision_stays_one_graph(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where attention and head run in bfloat16 too."""

    def precision(device: str) -> Any:
        return torch.autocast(device, torch.bfloat16)

    monkeypatch.setattr(model.module.demo_model, "precision", precision)
    ready = model.module.prepare(subject_of(model, "fusegen fp8_block"), backend=COMPILER)
    assert ready.losses.dtype == torch.float32 and ready.losses.isfinite().all()


def test_turns_take_other_tokens_and_leave_the_weights(model: Any) -> None:
    module, subject = model.module, subject_of(model, "fusegen")
    run = partial(subject.step, module.loss_of)
    fixed = subject.losses(run, 0.0)
    turns = [float(module._turn(subject.training, run, index)) for index in range(8)]
    assert turns == fixed.tolist() * 2 and len(set(turns)) == module.BATCHES
    samples = model.common.compare(
        {"fusegen": partial(module._turn, subject.training, run)}, seconds=0.01
    )
    assert len(samples["fusegen"]) == 2 and min(samples["fusegen"]) > 0


def test_a_contender_that_is_wrong_is_a_row_of_its_own(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are measured; what cannot be compared with torch is not."""
    module = model.module
    factories = module.factories(model.common.bundle())

    class Broken(module.TorchExperts):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, split_sizes: Any, probs: Any) -> Any:
            torch._dynamo.graph_break()
            return super().forward(x, split_sizes, probs)

    broken = module.in_torch(Broken)
    chosen = {"torch compiled": broken, "fusegen": factories["fusegen"]}
    monkeypatch.setattr(module, "factories", lambda package: chosen)
    row, failure = module.measure(model.common.bundle(), model.small, backend=COMPILER)
    assert (row.contender, dict(row.extra)) == ("fusegen", {})
    assert failure.contender == "torch compiled" and "graph_break" in failure.error


def stale(training: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """A graph that does not read the tokens of its replay."""
    training.window.copy_(training.batches[0])
    loss = run()
    return lambda: loss


def forgetful(training: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """A graph that lacks the update."""

    def replay() -> Any:
        weights = [each.detach().clone() for each in training._model.parameters()]
        loss = run()
        with torch.no_grad():
            for weight, value in zip(training._model.parameters(), weights, strict=True):
                weight.copy_(value)
        return loss

    return replay


def resizing(training: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """Steps on another number of tokens, for which the step would be compiled again."""

    def replay() -> Any:
        window, training.window = training.window, training.window[:, :-4]
        try:
            return run()
        finally:
            training.window = window

    return replay


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        (stale, "replays without updates: losses"),
        (forgetful, "replays: losses"),
        (resizing, "[Rr]ecompil"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_replays_that_differ_are_not_timed(model: Any, capture: Any, message: str) -> None:
    subject = subject_of(model, "fusegen")
    with pytest.raises((SystemExit, Exception), match=message):
        model.module.prepare(subject, backend=COMPILER, capture_step=capture)


def test_every_batch_has_group_sizes_of_its_own(model: Any) -> None:
    sizes = subject_of(model, "fusegen").group_sizes()
    assert len(sizes) == model.module.BATCHES
    rows = 2 * model.small.batch * model.small.context
    assert {sum(each) for each in sizes} == {rows}


def test_what_is_captured_keeps_what_it_reads(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else holds the state of a recipe while the others are prepared."""
    replays: list[str] = []
    given: dict[str, Any] = {}

    @contextmanager
    def graph(graph: Any, **words: Any) -> Iterator[None]:
        given.update(words)
        yield

    captured = SimpleNamespace(replay=lambda: replays.append("replay"))
    subject = subject_of(model, "fusegen fp8_delayed")
    monkeypatch.setattr(model.common, "DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: captured)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "a stream")
    subject.training.pool = "a pool"
    run = partial(subject.step, model.module.loss_of)
    replay = model.module.capture(subject.training, run)
    assert given == {"pool": "a pool", "stream": "a stream"}
    state = weakref.ref(next(subject.model.buffers()))
    del subject, run
    gc.collect()
    assert state() is not None
    assert float(replay()) > 0 and replays == ["replay"]


@pytest.mark.parametrize("contender", ["torch compiled", "fusegen", "fusegen fp8_delayed"])
def test_a_step_reads_nothing_on_the_host(model: Any, contender: str) -> None:
    subject = subject_of(model, contender)
    subject.losses(partial(subject.step, model.module.loss_of), 0.0)
    with Recorder():
        subject.step(model.module.loss_of)
        with pytest.raises(AssertionError, match="on the host"):
            subject.training.window.max().item()
