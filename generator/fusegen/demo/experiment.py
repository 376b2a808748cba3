"""What the demo trains, on what text, and what it measures of each step."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..spec.usage import UsageError

HELD_OUT_EVERY = 10
"""One source file in this many is kept for the held-out loss and never trained on."""


class DemoError(UsageError):
    """The demo cannot run: names the place, what was expected, what was got, and the remedy."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Sizes of the model and of its training. All counts; `learning_rate` is the peak.

    Raises:
        ValueError: a count below one, heads that do not divide `hidden`, or top_k above experts.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    held_out_batches: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"DemoConfig.{name}: expected a positive number, got {value}")
        if self.hidden % self.heads:
            raise ValueError(
                f"DemoConfig.heads: expected a divisor of hidden={self.hidden}, got {self.heads}"
            )
        if self.top_k > self.experts:
            raise ValueError(
                f"DemoConfig.top_k: expected at most experts={self.experts}, got {self.top_k}"
            )


CPU_CONFIG = DemoConfig(
    hidden=128,
    intermediate=256,
    experts=8,
    top_k=2,
    layers=2,
    heads=4,
    context=64,
    batch=16,
    steps=400,
    learning_rate=3e-3,
    held_out_batches=16,
)

GPU_CONFIG = DemoConfig(
    hidden=512,
    intermediate=1024,
    experts=16,
    top_k=2,
    layers=4,
    heads=8,
    context=512,
    batch=32,
    steps=300,
    learning_rate=1e-3,
    held_out_batches=8,
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on, bytes held out, and how many source files they come from."""

    train: bytes
    held_out: bytes
    files: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One training step of one model.

    `loss` is the cross entropy in nats per byte before the update, `milliseconds` covers forward,
    backward and update, `peak_mib` is the GPU memory the step needed above what was allocated
    when it began (None on a CPU, where the allocator does not say).
    """

    loss: float
    milliseconds: float
    peak_mib: float | None


@dataclass(frozen=True, slots=True)
class Step:
    """The same step of both models; `number` counts from 1."""

    number: int
    plain: Sample
    generated: Sample

    @property
    def difference(self) -> float:
        """Generated loss minus plain loss, in nats per byte."""
        return self.generated.loss - self.plain.loss


@dataclass(frozen=True, slots=True)
class Probe:
    """What one forward and backward before training shows.

    `saved_mib` is what autograd keeps between forward and backward, parameters not counted;
    `gradient_difference` is the largest, over the parameters, of |generated - plain| / |plain|
    in the Frobenius norm, and `gradient_name` the parameter it belongs to.
    """

    plain_saved_mib: float
    generated_saved_mib: float
    gradient_difference: float
    gradient_name: str


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Mean cross entropy on the held-out files after training, nats per byte."""

    plain: float
    generated: float


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read the top-level modules of Python's standard library as one text, split by file.

    Files are taken in the order of their names; every `HELD_OUT_EVERY`-th is held out whole, so
    no line of it is seen in training. `folder` replaces the standard library.

    Raises:
        DemoError: the folder holds too few `.py` files (a Python without its sources).
    """
    root = folder if folder is not None else Path(sysconfig.get_path("stdlib"))
    paths = sorted(root.glob("*.py"), key=lambda path: path.name)
    if len(paths) < HELD_OUT_EVERY:
        raise DemoError(
            f"{root}: expected at least {HELD_OUT_EVERY} Python source files to train on, "
            f"got {len(paths)}; run the demo with a Python that has its standard library as .py"
        )
    held_out = paths[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [path for path in paths if path not in set(held_out)]
    return Corpus(_concatenate(train), _concatenate(held_out), len(paths))


def _concatenate(paths: Iterable[Path]) -> bytes:
    return b"\n".join(path.read_bytes() for path in paths)
