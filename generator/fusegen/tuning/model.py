"""Times of GEMMs by a model, where there is no GPU to measure them on.

A GPU makes waves of tiles.  Each takes the time to multiply or the time to load, whichever is
longer, along the contraction, and at its ends the time until the first stage is there and until
results are stored.  What is known of a GPU is its data sheet; what is known of a kernel is its
configuration: how much of a result an SM makes at a time, and how many bytes of stages it has in
flight, which over the latency of memory is the most that it can load.

No overlap of tiles is modelled, nor what schedules differ by: the model is to choose among sizes of
tiles sensibly until somebody measures (`bench --sweep`), not to predict times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..families.family import Config
from ..families.gpus import Gpu
from ..ir.kernel import GemmKind, WaveTime, Work
from ..ir.predicate import SizeVariable
from ..spec.arch import RuleSpec
from .cases import Case, Sample
from .fit import Choice, Observations, Rules, fit
from .waves import WHEN

LAUNCH = 3000
"""Nanoseconds until the first tile of a kernel begins."""
LATENCY = 800
"""Nanoseconds of a load that misses the caches of an SM, under load."""
BYTES_PER_CYCLE = 64
"""That an SM loads from the L2 cache at most: of every GPU from 8.0 on."""
_RESULT_BYTES = 2
_NANOSECONDS = 10**6  # in a millisecond


@dataclass(frozen=True, slots=True)
class Kernel:
    """A configuration, as far as the model knows it.

    Attributes:
        work: of a result that SMs make at a time.
        bits: of an element of its operands.
        stage_bytes: of all stages of a CTA.
    """

    work: Work
    bits: int
    stage_bytes: int

    @classmethod
    def of(cls, config: Config, constants: Mapping[str, int]) -> Kernel:
        """Of a configuration, by the numbers that its family states of it."""
        bits = constants.get("element_bits", 8 * constants.get("element_bytes", 0))
        extents = constants["tile_m"] + constants["tile_n"]
        stage = extents * constants["tile_k"] * bits // 8
        return cls(config.work, bits, constants["stages"] * stage)


def wave_time(kernel: Kernel, gpu: Gpu) -> WaveTime:
    """The three numbers of an estimate."""
    work, cycles = kernel.work, gpu.gigahertz  # per nanosecond
    per_sm = work.clusters / work.sms
    rate = gpu.rates[kernel.bits] / gpu.sms / 10**9
    math = per_sm * 2 * work.rows * work.columns * 1024 / rate
    most = min(BYTES_PER_CYCLE * cycles, kernel.stage_bytes * work.clusters / LATENCY)
    loads = per_sm * (work.rows + work.columns) * 1024 * kernel.bits / 8 / most
    stores = per_sm * work.rows * work.columns * _RESULT_BYTES / (BYTES_PER_CYCLE * cycles)
    return WaveTime(LAUNCH, round(LATENCY + stores), round(max(math, loads)))


def milliseconds(kind: GemmKind, case: Case, kernel: Kernel, gpu: Gpu) -> float:
    """Of one GEMM, groups alike; no less than its operands and its result take of the memory."""
    sizes = {**case.sizes(kind), SizeVariable.SMS: gpu.sms}
    if kind is not GemmKind.WGRAD:
        sizes[SizeVariable.ROWS] = case.tokens // case.groups
    one = wave_time(kernel, gpu)
    tiles = case.groups * _tiles(kernel.work, sizes)
    at_once = max(1, gpu.sms // kernel.work.sms * kernel.work.clusters)
    wave = one.wave + one.k * sizes[SizeVariable.K] / 1024
    elements = case.tokens * (case.n + case.k) + case.groups * case.n * case.k
    floor = elements * kernel.bits / 8 / gpu.bandwidth * 10**9
    return max(one.launch + -(-tiles // at_once) * wave, floor) / _NANOSECONDS


def _tiles(work: Work, sizes: Mapping[SizeVariable, int]) -> int:
    """Of one group."""
    rows, columns = sizes[SizeVariable.ROWS], sizes[SizeVariable.COLUMNS]
    return -(-rows // work.rows) * -(-columns // work.columns)


def modelled(
    kind: GemmKind, cases: Sequence[Case], kernels: Mapping[str, Kernel], gpu: Gpu
) -> Iterator[Sample]:
    """What measuring would give, by the model: every point on every case."""
    for case in cases:
        times = {name: milliseconds(kind, case, each, gpu) for name, each in kernels.items()}
        yield Sample(kind, f"model of {gpu.name}", case, times)


def chosen_by_model(
    samples: Sequence[Sample],
    before: Rules,
    kernels: Mapping[str, Kernel],
    gpu: Gpu,
    models: Sequence[Case],
    anywhere: Collection[str] | None,
) -> Choice:
    """Rules that lose least by the model; what they lose is said of the thresholds alone.

    Args:
        samples: of one kind, by the model.
        before: rules that there were.
        kernels: points.
        gpu: of the model.
        models: GEMMs whose cases count for more.
        anywhere: points that every GPU which runs the code can launch; None for all.
    """
    observed = Observations.of(samples, models, anywhere)
    plain = fit(observed)
    least = {name: wave_time(each, gpu) for name, each in kernels.items()}
    front = (RuleSpec(when=WHEN, least=least),) if len(kernels) > 1 else ()
    old = tuple(rule for rule in before if not rule.least)
    losses = observed.loss(old), observed.loss(plain)
    return Choice(len(samples), before, (*front, *plain), *losses)
