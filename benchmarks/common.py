"""What every benchmark shares: fair timing, facts about the machine, and the form of results."""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

import bundles as bundles  # for the others: it is importable from here on
import pairs
from meter import Meter, MeterError, Reading

DEVICE = bundles.DEVICE
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS = "fusegen"

L2_BYTES = 60 * 10**6
PIECE = 2**26  # elements compared at a time
# Blocks are short so that no contender heats the card for the next, and rests are equal.
ROUNDS = 15
QUICK_ROUNDS = 3
BLOCK_SECONDS = 0.02
REST_SECONDS = 0.005
# The device is kept busy for about a millisecond before a block: that ends its idle state, and the
# host is ahead of it when the block begins.
SPIN_CYCLES = 1_500_000


# ---- results


@dataclass(frozen=True)
class Row:
    """One contender on one case.

    Attributes:
        case: what was computed.
        contender: who computed it.
        unit: of median, low, high, samples and floor.
        median: over the samples.
        low: the least sample.
        high: the largest.
        samples: one per round.
        clocks, watts: of the GPU in every round, MHz and W; empty where it does not say.
        paired: ratios of the samples to those of another contender in the same rounds, by its name.
        floor: the least time that operations and bytes allow at the rates measured in this run.
        rate: work per time.
        rate_unit: of rate.
        fraction: floor over median, or rate over the measured ceiling.
        extra: further numbers by name.
    """

    case: str
    contender: str
    unit: str
    median: float
    low: float
    high: float
    samples: tuple[float, ...]
    floor: float | None = None
    rate: float | None = None
    rate_unit: str = ""
    fraction: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    clocks: tuple[float, ...] = ()
    watts: tuple[float, ...] = ()
    paired: Mapping[str, pairs.Ratio] = field(default_factory=dict)


def row(case: str, contender: str, unit: str, samples: Sequence[float], **more: Any) -> Row:
    """A row with its median and spread, and what the GPU did meanwhile."""
    values = tuple(float(f"{value:.6g}") for value in samples)
    readings = samples.readings if isinstance(samples, Samples) else ()
    return Row(
        *(case, contender, unit, statistics.median(values), min(values), max(values), values),
        clocks=tuple(each.clock for each in readings),
        watts=tuple(each.watts for each in readings),
        **more,
    )


@dataclass(frozen=True)
class Failure:
    """What stands in the place of a row that could not be measured.

    Attributes:
        case: what was to be computed.
        contender: who failed; `ALL` where it was not one of them.
        error: the message.
    """

    case: str
    contender: str
    error: str


ALL = "all"
Outcome = Row | Failure


@dataclass(frozen=True)
class Case:
    """A part of a benchmark that may fail without the others.

    Attributes:
        name: what its rows are of.
        measure: gives them.
    """

    name: str
    measure: Callable[[], Iterable[Outcome]]


def failure(case: str, contender: str, error: BaseException) -> Failure:
    """The failure that an error is; where the message alone does not say where, stderr does."""
    if isinstance(error, SystemExit):
        return Failure(case, contender, str(error))
    traceback.print_exception(error)
    return Failure(case, contender, f"{type(error).__name__}: {error}")


def outcomes(cases: Iterable[Case], wanted: Sequence[str] = ()) -> list[Outcome]:
    """The rows of all cases; a case that fails leaves a failure and loses no other.

    Args:
        cases: in order.
        wanted: parts of names; without any, all cases are measured.

    Raises:
        Exception, SystemExit: of what precedes the first case, when there is nothing to lose.
    """
    found: list[Outcome] = []
    try:
        for case in cases:
            if wanted and not any(part in case.name for part in wanted):
                continue
            try:
                found += case.measure()
            except (Exception, SystemExit) as error:
                found.append(failure(case.name, ALL, error))
    except (Exception, SystemExit) as error:
        if not found:
            raise
        found.append(failure("the cases that remained", ALL, error))
    return found


Given = TypeVar("Given")
Made = TypeVar("Made")


def try_each(
    case: str, contenders: Mapping[str, Given], make: Callable[[str, Given], Made]
) -> tuple[dict[str, Made], list[Failure]]:
    """What is made of each contender, and the failures of those of which nothing is."""
    made: dict[str, Made] = {}
    failures = []
    for name, given in contenders.items():
        try:
            made[name] = make(name, given)
        except (Exception, SystemExit) as error:
            failures.append(failure(case, name, error))
    return made, failures


BASELINES = (OURS, "torch", "torch compiled")
"""Whom every contender on the same case is compared with, round by round."""


def with_ratios(rows: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Rows as JSON, each with the ratios of its times to the baselines' on the same case."""
    found = []
    for each in rows:
        data = asdict(each)
        if isinstance(each, Row):
            ratios = {**_ratios(each, rows), **each.paired}
            data["paired"] = {name: asdict(ratio) for name, ratio in ratios.items()}
            if OURS in ratios or each.contender == OURS:
                data["times_ours"] = ratios[OURS].median if OURS in ratios else 1.0
        found.append(data)
    return found


def _ratios(row: Row, rows: Sequence[Outcome]) -> dict[str, pairs.Ratio]:
    """Of a row's times to those of the baselines; medians alone where rounds are not the same."""
    found = {}
    for other in rows:
        if not isinstance(other, Row) or other is row or other.case != row.case:
            continue
        same = len(other.samples) == len(row.samples)
        if other.contender == OURS or (other.contender in BASELINES and same):
            found[other.contender] = pairs.between(row.samples, other.samples)
    return found


Result = Mapping[str, Any]
"""What a result file holds: the benchmark's name, its environment, and what it measured."""


def result(name: str, rows: Sequence[Outcome], facts: Mapping[str, Any]) -> Result:
    """The result of one benchmark."""
    return {"name": name, "environment": dict(facts), "rows": with_ratios(rows)}


def measured(result: Result) -> list[Mapping[str, Any]]:
    """The rows of a result that are no failures."""
    return [row for row in result.get("rows", ()) if "error" not in row]


def failures(result: Result) -> list[Mapping[str, Any]]:
    """The failures among the rows of a result."""
    return [row for row in result.get("rows", ()) if "error" in row]


def told(result: Result) -> str:
    """The failures of a result, a line each."""
    return "\n".join(map(describe, failures(result)))


def save(
    result: Result,
    folder: Path = RESULTS,
    samples: Sequence[object] = (),
    *,
    partial: bool = False,
) -> Path:
    """Write one result file, named after benchmark, device and day.

    Args:
        result: what was measured.
        folder: where to.
        samples: a last key of their own, one a line, where there are many.
        partial: only some cases were measured: the file of the day keeps its others.

    Raises:
        SystemExit: the others are of another commit, PyTorch or CUDA; nothing is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = result["environment"]
    device = str(facts["device"]).lower().replace(" ", "-")
    path = folder / f"{result['name']}_{device}_{facts['date'][:10]}.json"
    if partial and path.is_file():
        result = _merged(json.loads(path.read_text("utf-8")), result, path)
    text = json.dumps(result, indent=1)
    if samples:
        lines = ",\n".join(f"  {json.dumps(each)}" for each in samples)
        text = f'{text[:-2]},\n "samples": [\n{lines}\n ]\n}}'
    path.write_text(text + "\n")
    return path


def _merged(old: Result, new: Result, path: Path) -> Result:
    """The old result with the cases of the new one; every case is of one run, as before."""
    for fact in ("commit", "torch", "cuda"):
        before, now = (each["environment"].get(fact) for each in (old, new))
        if before != now:
            raise SystemExit(
                f"{path}: its cases are of {fact} {before}, these of {now}; measure all of them, "
                "or name another folder by --results"
            )
    measured = {row["case"] for row in new["rows"]}
    kept = [row for row in old["rows"] if row["case"] not in measured]
    return {**new, "rows": [*kept, *new["rows"]]}


def newest(folder: Path = RESULTS) -> dict[tuple[str, str], Result]:
    """The newest result per benchmark and device."""
    found: dict[tuple[str, str], Result] = {}
    for path in sorted(folder.glob("*.json")):
        each = json.loads(path.read_text("utf-8"))
        key = (each["name"], each["environment"]["device"])
        if key not in found or each["environment"]["date"] > found[key]["environment"]["date"]:
            found[key] = each
    return found


def show(result: Result) -> None:
    """Print the rows of a result."""
    for each in result["rows"]:
        print(describe(each))


def write(result: Result, folder: Path = RESULTS, *, partial: bool = False) -> Path:
    """Write one result file, or some cases of it, and print its rows."""
    show(result)
    path = save(result, folder, partial=partial)
    print(path)
    return path


# A GEMM's tiles are contenders named by their schedule; the fastest also stands under our name.
_TILE = re.compile(r"_\d+x\d+x\d+_")


def is_tile(contender: str) -> bool:
    """Whether a contender is one tile of ours among several."""
    return _TILE.search(contender) is not None


def describe(data: Mapping[str, Any]) -> str:
    """A row as one line."""
    if "error" in data:
        return f"{data['case']:34} {data['contender']:16} {failed(data)}"
    words = f"{data['case']:34} {data['contender']:16} {data['median']:10.4g} {data['unit']}"
    words += f" [{data['low']:.4g}, {data['high']:.4g}]"
    if data["rate"] is not None:
        words += f"  {data['rate']:.4g} {data['rate_unit']}"
    if data["fraction"] is not None:
        words += f"  {data['fraction']:.3f} of the ceiling"
    if "times_ours" in data and data["contender"] != OURS:
        words += f"  x{data['times_ours']:.3f} of {OURS}'s time"
        ratio = data.get("paired", {}).get(OURS)
        if ratio and ratio["low"] is not None:
            words += f" [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    return words


def failed(data: Mapping[str, Any]) -> str:
    """A failure in the place of its time: the first line of what it says."""
    return f"failed: {data['error'].partition(chr(10))[0]}"


# ---- the machine


def _output(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


_QUERY = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


def _commit() -> str:
    """Of what is measured; "-dirty" where files differ, other than results just written.

    A copy of a checkout on another machine may lack its history: `FUSEGEN_COMMIT` tells it.
    """
    told = os.environ.get("FUSEGEN_COMMIT")
    if told:
        return told
    changed = _output("git", "status", "--porcelain", "-uno", "--", ":!benchmarks/results")
    return _output("git", "rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def environment() -> dict[str, Any]:
    """The date, this commit, and the processor's share of the facts."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _commit(),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "device": "cpu",
    }


def gpu_environment() -> dict[str, Any]:
    """The above, and device, driver, versions and clocks."""
    import torch

    answer = _output("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", "--id=0")
    clocks = dict(zip(_QUERY.split(","), answer.split(", "), strict=False))
    return {
        **environment(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": clocks.pop("driver_version", "unknown"),
        "clocks": clocks,
    }


def contender(cell: str) -> str:
    """What a cell of ours is called beside others: by recipe and choices; bf16 alone has none."""
    recipe = cell.partition("__")[2]
    return OURS if recipe == "bf16" else f"{OURS} {recipe.replace('__', ' ')}"


def bundle() -> ModuleType:
    """The bundle for this GPU, loaded by path; on the CPU the reference."""
    import torch

    if DEVICE == "cpu":
        return bundles.load_bundle(bundles.GENERATED / "cpu")
    folders = bundles.bundles_to_test(torch.cuda.get_device_capability())
    if not folders:
        raise SystemExit("no built bundle runs on this GPU; build one: fusegen build generated/...")
    return bundles.load_bundle(folders[0])


def op(package: ModuleType, name: str) -> Callable[..., Any]:
    """An op of the bundle, such as linear__bf16_forward."""
    import torch

    importlib.import_module(f"{package.__name__}.{name.rpartition('_')[0]}")
    library = importlib.import_module(f"{package.__name__}._library")
    overload: Callable[..., Any] = getattr(getattr(torch.ops, library.NAMESPACE), name).default
    return overload


# ---- timing


Contender = Callable[[int], Any]  # runs once on the operand set of that number


def operand_sets(bytes_per_set: int) -> int:
    """How many operand sets one rotates among so that the cache never holds the next one."""
    return 1 + math.ceil(4 * L2_BYTES / max(bytes_per_set, 1))


def synchronize() -> None:
    """Wait for the device."""
    import torch

    if DEVICE != "cpu":
        torch.cuda.synchronize()


class Samples(list[float]):
    """Milliseconds per call in every round, and what the GPU said in the middle of each."""

    def __init__(self, times: Iterable[float] = (), readings: Iterable[Reading] = ()) -> None:
        super().__init__(times)
        self.readings = list(readings)


@lru_cache(maxsize=1)
def _meter() -> Meter | None:
    """Of the current device; None, with a line on stderr, where it cannot be read."""
    import torch

    try:
        meter = Meter(str(torch.cuda.get_device_properties(0).uuid))
        meter.read()
    except (MeterError, AttributeError) as error:
        print(f"clocks and power are not recorded: {error}", file=sys.stderr)
        return None
    return meter


def _block(run: Contender, count: int) -> tuple[float, Reading | None]:
    """Milliseconds per call of `count` calls in a row, by CUDA events; on the CPU by its clock.

    Clock and power are read once all calls are in the queue.
    """
    import torch

    if DEVICE == "cpu":
        begin = time.perf_counter()
        for index in range(count):
            run(index)
        return (time.perf_counter() - begin) / count * 1e3, None
    cuda: Any = torch.cuda  # its classes carry no types
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(SPIN_CYCLES)
    start.record()
    for index in range(count):
        run(index)
    end.record()
    meter = _meter()
    reading = None if meter is None else meter.read()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / count, reading


def calls_per_block(run: Contender, seconds: float) -> int:
    """How many calls take about so long, at least one."""
    run(0)  # warms up
    once, _ = _block(run, 1)
    if 10 * once < 1e3 * seconds:  # so short that one call says little
        once, _ = _block(run, 10)
    return max(1, min(2000, int(seconds * 1e3 / once)))


def compare(
    contenders: Mapping[str, Contender],
    *,
    rounds: int | None = None,
    seconds: float = BLOCK_SECONDS,
) -> dict[str, Samples]:
    """Milliseconds per call in every round, contenders taking turns.

    A card under a power limit slows down under load: so blocks are short, each begins after the
    same rest, and in every round the order is another one (pairs.py).

    Args:
        contenders: by name.
        rounds: how often each has its turn, by default `ROUNDS`.
        seconds: of a block, about; at least one call.
    """
    counts = {name: calls_per_block(run, seconds) for name, run in contenders.items()}
    samples = {name: Samples() for name in contenders}
    for order in pairs.orders(list(contenders), rounds or ROUNDS):
        for name in order:
            time.sleep(REST_SECONDS)
            milliseconds, reading = _block(contenders[name], counts[name])
            samples[name].append(milliseconds)
            samples[name].readings += [] if reading is None else [reading]
    return samples


@contextmanager
def rounds_of(rounds: int | None) -> Iterator[None]:
    """Inside, everybody has so many turns where nothing else is said; None: as many as always."""
    global ROUNDS
    before = ROUNDS
    ROUNDS = rounds or before
    try:
        yield
    finally:
        ROUNDS = before


def copy_rate() -> float:
    """Bytes read plus bytes written per second of a device copy of 2 GiB."""
    import torch

    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    times = compare({"copy": lambda _: target.copy_(source)})["copy"]
    return 2 * source.numel() / statistics.median(times) * 1e3


def peak_gib(step: Callable[[], Any]) -> float:
    """Memory of the GPU in use at the worst moment of one step, above what it finds in use."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def normal(*shape: int, scale: float = 1.0, dtype: Any = None) -> Any:
    """Random values; zeros would run faster than real data."""
    import torch

    dtype = torch.bfloat16 if dtype is None else dtype
    return torch.empty(*shape, dtype=dtype, device=DEVICE).normal_(std=scale)


def require_close(case: str, got: Any, expected: Any, tolerance: float = 1e-2) -> None:
    """Refuse to time a wrong result.

    Raises:
        SystemExit: the relative Frobenius distance is larger than `tolerance`, or not a number.
    """
    error = distance(got, expected)
    if not error <= tolerance:
        raise SystemExit(f"{case}: relative difference {error:.2e}, expected at most {tolerance}")


def distance(got: Any, expected: Any) -> float:
    """Relative Frobenius distance, piece by piece: fp32 of a large tensor is twice its memory."""
    import torch

    off = size = torch.zeros((), dtype=torch.float64)
    pieces = (torch.split(each.detach().reshape(-1), PIECE) for each in (got, expected))
    for own, wanted in zip(*pieces, strict=True):
        off = off + (own.float() - wanted.float()).double().square().sum().cpu()
        size = size + wanted.float().double().square().sum().cpu()
    return float((off / size).sqrt())
