"""A training step of a whole mixture-of-experts model as one CUDA graph, under every recipe.

The model is the demo's: attention, router, loss and optimizer are PyTorch's, the experts generated
ones, or torch's grouped GEMMs. All contenders share weights, optimizer and tokens, and each
compiles into one graph of torch.compile and is captured whole: forward, backward and update. None
is timed before its replays were found to do what steps do that are neither compiled nor captured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import graphs
import mlp
import pairs
import torch
from common import OURS, Case, Outcome
from torch import Tensor

from fusegen.demo import model as demo_model
from fusegen.demo.experiment import DemoConfig

PEER = "torch compiled"
BATCHES = 4
SPAN, SHIFT = 64, 16  # bytes that a batch is of, and by how many each batch differs from the last
SIZES = DemoConfig(
    hidden=2048,
    intermediate=768,
    experts=64,
    top_k=2,
    layers=4,
    heads=16,
    context=2048,
    batch=8,
    steps=BATCHES,
    learning_rate=2e-4,
    held_out_batches=1,
)
QUICK = replace(SIZES, hidden=1024, experts=16, layers=2, context=1024, batch=2)

# How far losses may be from those of eager steps, as a part of how far the updates move these.
# Compiled code rounds elsewhere than eager code does, and then some tokens go to other experts.
DRIFT = 0.25
# Relative difference of a loss from that of torch's experts.
TOLERANCES = {f"{OURS} nvfp4": 5e-2}
TOLERANCE = 2e-2

Run = Callable[[], Tensor]  # one step on the tokens that lie there; its loss
Capture = Callable[["Training", Run], Run]
ExpertsOf = Callable[[DemoConfig, str], Any]
LossOf = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


class TorchExperts(demo_model.PlainExperts):
    """Torch's grouped GEMMs instead of a loop: no group size leaves the device."""

    def forward(self, x: Tensor, split_sizes: Tensor, probs: Tensor) -> Tensor:
        """x [T, H] sorted by expert, split_sizes int64 [E], probs [T] -> [T, H] in x's dtype."""
        ends = split_sizes.cumsum(0).to(torch.int32)
        return mlp.torch_mlp(x, self.fc1.weight, self.fc2.weight, probs, ends)


def in_torch(experts: ExpertsOf) -> demo_model.LayerFactory:
    """Layers in PyTorch around such experts."""
    return lambda config, device: demo_model.PlainLayer(config, device, experts(config, device))


def generated(experts: Callable[..., Any]) -> demo_model.LayerFactory:
    """The same around experts of a generated class."""

    def made(config: DemoConfig, device: str) -> Any:
        sizes = {"hidden": config.hidden, "intermediate": config.intermediate, "device": device}
        return experts(num_groups=config.experts, **sizes, bias=False, dtype=torch.bfloat16)

    return in_torch(made)


def loss_of(model: Any, window: Tensor) -> tuple[Tensor, Tensor]:
    """Loss, and what is differentiated, of a window of bytes, int64 [B, S + 1]."""
    with demo_model.precision(window.device.type):
        loss, balance = model(window[:, :-1], window[:, 1:])
    return loss, loss + demo_model.BALANCE * balance


class Training:
    """What all contenders share; a graph reads and writes it where it lies.

    Attributes:
        config: sizes.
        window: int64 [B, S + 1]; the bytes of the next step.
        batches: int64 [BATCHES, B, S + 1]; each of other bytes, so the experts get other shares.
        optimizer: AdamW over the weights, its learning rate a tensor.
        pool: of the graphs' memory: one is replayed at a time, so they may share it.
    """

    def __init__(self, config: DemoConfig) -> None:
        self.config = config
        torch.manual_seed(0)
        self._model = demo_model.ByteModel(config, in_torch(TorchExperts), common.DEVICE)
        self._initialise()
        self._start = [each.detach().clone() for each in self._model.parameters()]
        on_gpu = common.DEVICE != "cpu"
        self._rate = torch.zeros((), device=common.DEVICE)
        self.optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=self._rate, fused=True, capturable=on_gpu
        )
        shape = (config.batch, config.context + 1)
        make: dict[str, Any] = {"device": common.DEVICE, "dtype": torch.int64}
        self.window = torch.zeros(shape, **make)
        draws = [
            torch.randint(low, low + SPAN, shape, **make)
            for low in range(0, SHIFT * BATCHES, SHIFT)
        ]
        self.batches = torch.stack(draws)
        self.pool = torch.cuda.graph_pool_handle() if on_gpu else None

    def _initialise(self) -> None:
        """As the demo does, but drawn on the device: there are a billion weights."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)

    def model(self, factory: demo_model.LayerFactory) -> demo_model.ByteModel:
        """A model of other experts with these weights."""
        made = demo_model.ByteModel(self.config, factory, common.DEVICE)
        for name, parameter in self._model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if made.get_parameter(name).shape != parameter.shape:
                raise ValueError(f"{name}: expected the shape {tuple(parameter.shape)}")
            setattr(made.get_submodule(owner), leaf, parameter)
        return made

    @torch.no_grad()
    def restart(self, rate: float) -> None:
        """Weights and optimizer as they were before the first step, under this learning rate."""
        for parameter, value in zip(self._model.parameters(), self._start, strict=True):
            parameter.copy_(value)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self._rate.fill_(rate)


class Subject:
    """One contender: a model, its own state, and its steps."""

    def __init__(self, training: Training, factory: demo_model.LayerFactory) -> None:
        self.training = training
        self.model = training.model(factory)
        self._start = [each.clone() for each in self.model.buffers()]

    def step(self, function: LossOf) -> Tensor:
        """Forward, loss, backward and update; the loss before the update, fp32 scalar."""
        self.training.optimizer.zero_grad(set_to_none=True)
        loss, objective = function(self.model, self.training.window)
        objective.backward()  # type: ignore[no-untyped-call]
        self.training.optimizer.step()
        return loss.detach()

    def losses(self, run: Run, rate: float) -> Tensor:
        """Of one step on each batch, from the start, fp32 [BATCHES]."""
        self.training.restart(rate)
        for buffer, value in zip(self.model.buffers(), self._start, strict=True):
            buffer.copy_(value)
        found = []
        for batch in self.training.batches:
            self.training.window.copy_(batch)
            found.append(run().clone())
        return torch.stack(found)

    def group_sizes(self) -> set[tuple[int, ...]]:
        """Of the first layer's experts on every batch."""
        found = set()

        def look(module: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
            found.add(tuple(inputs[1].tolist()))

        experts = self.model.blocks[0].get_submodule("moe.experts")
        with experts.register_forward_pre_hook(look), torch.no_grad():
            self.losses(lambda: loss_of(self.model, self.training.window)[0], 0.0)
        return found


def capture(training: Training, run: Run) -> Run:
    """The step as one CUDA graph; on the CPU the step itself."""
    return graphs.capture(run, training.pool)


@dataclass(frozen=True)
class Ready:
    """A checked contender.

    Attributes:
        run: a captured step.
        losses: of its first steps, fp32 [BATCHES].
        peak_gib: of one step above weights, optimizer and state; None on the CPU.
    """

    run: Run
    losses: Tensor
    peak_gib: float | None


def prepare(
    subject: Subject, *, backend: str = "inductor", capture_step: Capture = capture
) -> Ready:
    """Compile, capture and check one contender.

    Under a learning rate of zero, replays on other tokens give the losses of the same compiled code
    without a graph, bit for bit. Where weights move they follow the losses of eager steps; not bit
    for bit, because the gradient of an embedding is summed by atomic additions.

    Raises:
        SystemExit: it was not one graph, or losses differ.
    """
    training, rate = subject.training, subject.training.config.learning_rate
    eager = partial(subject.step, loss_of)
    still, moved = subject.losses(eager, 0.0), subject.losses(eager, rate)
    with graphs.one_graph():
        compiled = torch.compile(loss_of, fullgraph=True, dynamic=False, backend=backend)
        run = partial(subject.step, compiled)
        trained, fixed = subject.losses(run, rate), subject.losses(run, 0.0)
        training.optimizer.zero_grad(set_to_none=True)
        peak_gib = None if common.DEVICE == "cpu" else common.peak_gib(run)
        replay = capture_step(training, run)
        replayed_fixed, replayed = subject.losses(replay, 0.0), subject.losses(replay, rate)
    require_losses("replays without updates", replayed_fixed, fixed, 0.0)
    allowed = DRIFT * float((moved - still).abs().max())
    require_losses("compiled steps", trained, moved, allowed)
    require_losses("replays", replayed, moved, allowed)
    return Ready(replay, replayed, peak_gib)


def require_losses(what: str, got: Tensor, expected: Tensor, allowed: float) -> None:
    """Losses that differ from the expected ones by no more than is allowed.

    Raises:
        SystemExit: one does, or is not a number.
    """
    if not float((got - expected).abs().max()) <= allowed:
        raise SystemExit(
            f"{what}: losses {got.tolist()}, expected {expected.tolist()} within {allowed:.2g}"
        )


def factories(package: Any) -> dict[str, demo_model.LayerFactory]:
    """Experts by contender: torch's first, then ours of every recipe of the bundle."""
    found: dict[str, demo_model.LayerFactory] = {PEER: in_torch(TorchExperts)}
    for cell in common.bundles.cells_of(Path(package.__path__[0]), "grouped_mlp"):
        experts = common.bundles.load_cell(package, cell).GroupedMLP
        found[common.contender(cell)] = generated(experts)
    return found


def case_of(config: DemoConfig) -> str:
    """Sizes in words."""
    tokens = config.batch * config.context
    return f"{config.layers} layers, {config.experts} experts, {tokens} tokens"


def measure(package: Any, config: DemoConfig, *, backend: str = "inductor") -> list[Outcome]:
    """Check every contender, then time their replays in turns."""
    case = case_of(config)
    with graphs.own_stream():
        training = Training(config)
        expected: list[Tensor] = []

        def ready(name: str, factory: demo_model.LayerFactory) -> Ready:
            subject = Subject(training, factory)
            if not expected and len(subject.group_sizes()) != BATCHES:
                raise SystemExit("the batches do not have group sizes of their own")
            made = prepare(subject, backend=backend)
            expected.append(made.losses)
            allowed = TOLERANCES.get(name, TOLERANCE) * float(expected[0].max())
            require_losses(f"against {PEER}", made.losses, expected[0], allowed)
            return made

        made, failures = common.try_each(case, factories(package), ready)
        training.restart(0.0)
        contenders = {name: partial(_turn, training, each.run) for name, each in made.items()}
        samples = common.compare(contenders, seconds=mlp.BLOCK_SECONDS) if contenders else {}
    rows = [_row(config, name, each, samples) for name, each in made.items()]
    return [*rows, *failures]


def _turn(training: Training, run: Run, index: int) -> Tensor:
    """A step on the next tokens; the learning rate is zero, so all steps find the same weights."""
    training.window.copy_(training.batches[index % BATCHES])
    return run()


def _row(
    config: DemoConfig, name: str, ready: Ready, samples: Mapping[str, list[float]]
) -> common.Row:
    median = statistics.median(samples[name])
    extra = {} if ready.peak_gib is None else {"peak_gib": ready.peak_gib}
    if PEER in samples:
        extra["speedup_over_torch"] = pairs.ratio(samples[PEER], samples[name]).median
    return common.row(
        *(case_of(config), name, "ms", samples[name]),
        rate=config.batch * config.context / median / 1e3,
        rate_unit="Mtoken/s",
        extra=extra,
    )


def model(*, quick: bool = False) -> Iterator[Case]:
    """The training step; quick: of a smaller model."""
    config = QUICK if quick else SIZES
    yield Case(case_of(config), partial(measure, common.bundle(), config))
