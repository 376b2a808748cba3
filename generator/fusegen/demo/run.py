"""`fusegen demo`: train one small mixture-of-experts language model twice and compare.

Both models start from the same weights and read the same batches. One has its mixture-of-experts
layers in plain PyTorch, the other generated: `router_mixtral__bf16.MixtralRouter` and
`moe_layer__bf16.MoELayer`. If these are right, the two loss curves lie on each other; what differs
is time and memory.

Importing this file costs nothing: torch and matplotlib are imported inside the functions that
need them, everything built from torch lives in `fusegen.demo.model`.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..cli.output import answer
from .experiment import (
    CPU_CONFIG,
    GPU_CONFIG,
    Corpus,
    DemoConfig,
    DemoError,
    Probe,
    Sample,
    Step,
    load_corpus,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPORT_LINES = 12
"""How many progress lines a run prints, whatever its number of steps."""

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

PLAIN, GENERATED = "plain PyTorch", "generated"


@dataclass(frozen=True, slots=True)
class Summary:
    """The answer of one model: losses in nats per byte, times in milliseconds per step."""

    final_loss: float
    held_out_loss: float
    mean_ms: float
    median_ms: float
    peak_mib: float | None
    saved_mib: float


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything a run measured.

    `final_loss` of both summaries is the mean over the last tenth of the steps; step times leave
    out the first step, in which the optimiser allocates its state. `speedup` is plain over
    generated median time, which other work on the machine disturbs less than the mean.
    `process_peak_mib` is the largest resident set of this process, which holds both models.
    `planned_steps` exceeds `len(steps)` when the time limit ended the run.
    """

    arch: str
    device: str
    config: DemoConfig
    planned_steps: int
    steps: tuple[Step, ...]
    probe: Probe
    plain: Summary
    generated: Summary
    process_peak_mib: float
    plot: Path | None

    @property
    def speedup(self) -> float:
        return self.plain.median_ms / self.generated.median_ms

    @property
    def mean_difference(self) -> float:
        """Mean |generated loss - plain loss| over the steps, nats per byte."""
        return fmean(abs(step.difference) for step in self.steps)

    @property
    def largest_difference(self) -> float:
        """Largest |generated loss - plain loss| of any step, nats per byte."""
        return max(abs(step.difference) for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """The result as plain data, for `--json`."""
        data = asdict(self)
        data["plot"] = None if self.plot is None else str(self.plot)
        data["speedup"] = self.speedup
        data["mean_difference"] = self.mean_difference
        data["largest_difference"] = self.largest_difference
        return data


def run_demo(
    bundle: Path,
    arch: str,
    *,
    steps: int | None = None,
    output: Path = Path("demo.png"),
    device: str | None = None,
    config: DemoConfig | None = None,
    time_limit_s: float = 60.0,
    seed: int = 0,
    as_json: bool = False,
) -> DemoResult:
    """Train both models, print the comparison to stdout and draw it to `output`.

    Args:
        bundle: folder of a generated (and for a GPU: built) bundle that has
            `router_mixtral__bf16` and `moe_layer__bf16`.
        arch: architecture of that bundle; `cpu` runs on the CPU, any other on `cuda`.
        steps: training steps of each model; the config's own number when None.
        output: picture to write (.png, .svg or .pdf); missing folders are made.
        device: torch device, in place of the one that follows from `arch`.
        config: sizes, in place of `CPU_CONFIG` or `GPU_CONFIG`.
        time_limit_s: seconds of training (both models together) after which the run ends early,
            so that a CPU without bfloat16 instructions still ends in time.
        seed: of the initial weights and of the order of the batches.
        as_json: print one JSON object instead of the table.

    Raises:
        DemoError: torch is missing, no such device, no such module in the bundle, a bundle that
            breaks its contract, or a bad `steps` or `output`.
    """
    place = device or ("cpu" if arch == "cpu" else "cuda")
    sizes = config or (CPU_CONFIG if place == "cpu" else GPU_CONFIG)
    planned = sizes.steps if steps is None else steps
    _check_arguments(planned, output)
    # Late: it imports torch, whose absence has just been looked for.
    from . import model as demo_model

    corpus = load_corpus()
    console = Console(stderr=True)
    _say(console, _introduction(bundle, arch, place, sizes, corpus))
    demo_model.check_device(place, arch)
    layer = demo_model.load_layer(bundle, arch)
    pair = demo_model.Pair.build(sizes, layer, place, planned, seed)
    data = demo_model.Batches(corpus, sizes, place, seed)
    probe = pair.probe(data)
    with _progress(console, planned) as progress:
        report = _reporter(console, progress, planned)
        trained = pair.train(data, time_limit_s, report)
    held_out = pair.held_out(data)
    result = DemoResult(
        arch=arch,
        device=demo_model.device_name(place),
        config=sizes,
        planned_steps=planned,
        steps=tuple(trained),
        probe=probe,
        plain=_summarise([s.plain for s in trained], held_out.plain, probe.plain_saved_mib),
        generated=_summarise(
            [s.generated for s in trained], held_out.generated, probe.generated_saved_mib
        ),
        process_peak_mib=_process_peak_mib(),
        plot=_try_plot(trained, arch, output, console),
    )
    _print_answer(result, as_json)
    return result


def _check_arguments(steps: int, output: Path) -> None:
    if steps < 1:
        raise DemoError(f"--steps: expected at least 1, got {steps}")
    if output.suffix not in PLOT_SUFFIXES:
        raise DemoError(
            f"{output}: expected a picture ending in {', '.join(PLOT_SUFFIXES)}; "
            f"name it {output.with_suffix('.png').name}"
        )
    if importlib.util.find_spec("torch") is None:
        raise DemoError(
            f"PyTorch is not installed for {sys.executable}; run: pip install 'fusegen[torch]'"
        )


def _say(console: Console, text: str) -> None:
    """Print plain text: paths in brackets are no markup, long lines are left to the terminal."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _introduction(bundle: Path, arch: str, place: str, sizes: DemoConfig, corpus: Corpus) -> str:
    return (
        f"Byte-level language model: {sizes.layers} layers, hidden {sizes.hidden}, "
        f"{sizes.experts} experts of {sizes.intermediate}, top {sizes.top_k}; "
        f"{sizes.batch} x {sizes.context} bytes a step.\n"
        f"Text: {corpus.files} modules of Python's standard library, "
        f"{len(corpus.train) / 2**20:.1f} MiB to train on, "
        f"{len(corpus.held_out) / 2**20:.1f} MiB held out.\n"
        f"Layers: {PLAIN} against router_mixtral and moe_layer of {bundle} ({arch}) on {place}."
    )


def _progress(console: Console, steps: int) -> Progress:
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    progress.add_task("training", total=steps)
    return progress


def _reporter(console: Console, progress: Progress, steps: int) -> Callable[[Step], None]:
    """A callback that moves the bar and prints about `REPORT_LINES` lines in all."""
    every = max(1, math.ceil(steps / REPORT_LINES))

    def report(step: Step) -> None:
        progress.advance(progress.task_ids[0])
        if step.number == 1 or step.number % every == 0 or step.number == steps:
            _say(console, _step_line(step))

    return report


def _step_line(step: Step) -> str:
    plain, generated = step.plain, step.generated
    line = (
        f"step {step.number:4d}  loss {plain.loss:.4f} {PLAIN}, "
        f"{generated.loss:.4f} {GENERATED} ({step.difference:+.4f})  "
        f"{plain.milliseconds:.1f} / {generated.milliseconds:.1f} ms"
    )
    if plain.peak_mib is None or generated.peak_mib is None:
        return f"{line}  resident {_process_peak_mib():.0f} MiB"
    return f"{line}  {plain.peak_mib:.0f} / {generated.peak_mib:.0f} MiB"


def _summarise(samples: Sequence[Sample], held_out: float, saved_mib: float) -> Summary:
    last = samples[-math.ceil(len(samples) / 10) :]
    timed = samples[1:] or samples
    peaks = [sample.peak_mib for sample in samples if sample.peak_mib is not None]
    return Summary(
        final_loss=fmean(sample.loss for sample in last),
        held_out_loss=held_out,
        mean_ms=fmean(sample.milliseconds for sample in timed),
        median_ms=median(sample.milliseconds for sample in timed),
        peak_mib=max(peaks) if peaks else None,
        saved_mib=saved_mib,
    )


def _process_peak_mib() -> float:
    """Largest resident set of this process so far, MiB."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage counts in bytes on macOS and in KiB everywhere else.
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _try_plot(steps: Sequence[Step], arch: str, output: Path, console: Console) -> Path | None:
    if importlib.util.find_spec("matplotlib") is None:
        _say(console, f"{output} was not drawn, matplotlib is missing; run: pip install matplotlib")
        return None
    plot(steps, arch, output)
    return output


def plot(steps: Sequence[Step], arch: str, output: Path) -> None:
    """Draw loss, difference of the losses and step time over the steps. Needs matplotlib.

    The figure never touches pyplot, so no display is needed and no global state changes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 9.0), layout="constrained")
    FigureCanvasAgg(figure)
    losses, difference, times = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.5, 1.5))
    _draw_losses(losses, steps, arch)
    _draw_difference(difference, steps)
    _draw_times(times, steps)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)


def _draw_losses(axes: Axes, steps: Sequence[Step], arch: str) -> None:
    numbers = [step.number for step in steps]
    axes.plot(numbers, [s.plain.loss for s in steps], color="tab:gray", lw=3.0, label=PLAIN)
    axes.plot(numbers, [s.generated.loss for s in steps], color="tab:red", lw=1.0, label=GENERATED)
    axes.set_ylabel("loss, nats per byte")
    axes.set_title(f"Same model, same batches, two mixture-of-experts layers ({arch})")
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_difference(axes: Axes, steps: Sequence[Step]) -> None:
    axes.plot([s.number for s in steps], [s.difference for s in steps], color="tab:purple", lw=1.0)
    axes.axhline(0.0, color="black", lw=0.5)
    axes.set_ylabel(f"{GENERATED} - plain")
    axes.grid(alpha=0.3)


def _draw_times(axes: Axes, steps: Sequence[Step]) -> None:
    timed = steps[1:] or steps
    numbers = [step.number for step in timed]
    plain = [step.plain.milliseconds for step in timed]
    generated = [step.generated.milliseconds for step in timed]
    axes.plot(numbers, plain, color="tab:gray", lw=1.0, label=PLAIN)
    axes.plot(numbers, generated, color="tab:red", lw=1.0, label=GENERATED)
    # One interrupted step on a busy machine would otherwise flatten both curves.
    ordered = sorted(plain + generated)
    axes.set_ylim(0.0, 1.5 * ordered[int(0.98 * (len(ordered) - 1))])
    axes.set_ylabel("ms per step")
    axes.set_xlabel("step")
    axes.legend()
    axes.grid(alpha=0.3)


def _print_answer(result: DemoResult, as_json: bool) -> None:
    if as_json:
        answer(result.to_json())
        return
    console = Console()
    console.print(_summary_table(result))
    for line in _closing_lines(result):
        _say(console, line)


def _summary_table(result: DemoResult) -> Table:
    table = Table(title=f"{len(result.steps)} steps on {result.device} ({result.arch})")
    table.add_column("")
    for name in (PLAIN, GENERATED, "compared"):
        table.add_column(name, justify="right")
    plain, generated = result.plain, result.generated
    for label, a, b in (
        ("final loss, nats/byte", plain.final_loss, generated.final_loss),
        ("held-out loss, nats/byte", plain.held_out_loss, generated.held_out_loss),
    ):
        table.add_row(label, f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}")
    costs: list[tuple[str, float, float]] = [
        ("mean time per step, ms", plain.mean_ms, generated.mean_ms),
        ("median time per step, ms", plain.median_ms, generated.median_ms),
    ]
    if plain.peak_mib is not None and generated.peak_mib is not None:
        costs.append(("peak GPU memory/step, MiB", plain.peak_mib, generated.peak_mib))
    costs.append(("saved for backward, MiB", plain.saved_mib, generated.saved_mib))
    for label, a, b in costs:
        table.add_row(label, f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}x")
    return table


def _closing_lines(result: DemoResult) -> list[str]:
    first = result.steps[0].plain.loss
    lines = [
        f"Loss fell from {first:.2f} to {result.generated.final_loss:.2f} nats per byte; "
        f"step by step the two curves lie {result.mean_difference:.4f} apart on average, "
        f"{result.largest_difference:.4f} at most.",
        f"Before the first update, where no difference has grown yet, gradients differ by at most "
        f"{result.probe.gradient_difference:.1e} of their norm ({result.probe.gradient_name}); "
        f"one bfloat16 rounding is up to 3.9e-03.",
        f"Peak resident memory of the process, both models: {result.process_peak_mib:.0f} MiB.",
    ]
    if len(result.steps) < result.planned_steps:
        lines.append(
            f"The time limit ended the run after {len(result.steps)} of "
            f"{result.planned_steps} steps."
        )
    if result.plot is not None:
        lines.append(f"Plot: {result.plot}")
    return lines
