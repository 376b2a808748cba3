"""Train one small mixture-of-experts language model under every recipe and compare the losses.

    python examples/train_recipes.py                                  # the CPU bundle
    python examples/train_recipes.py --bundle generated/sm_90a --arch sm_90a

All models start from the same weights and read the same batches of the Python standard library's
sources; only the numerics of the experts' GEMMs differ.  Writes the curves to
`examples/recipes_<arch>.json` and `.png`, and prints each recipe's loss against bf16's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from moe_layer import device_for

from fusegen.demo import experiment
from fusegen.demo import model as demo_model

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "bf16"
ALONE = (BASELINE, "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")


@dataclass(frozen=True, slots=True)
class Numerics:
    """Which recipe computes the experts of a run.

    Attributes:
        most: of all blocks but the last.
        last: of the last block.
        finish: share of the steps at the end that all blocks take in the baseline's recipe.
    """

    most: str
    last: str
    finish: float = 0.0


RUNS = {recipe: Numerics(recipe, recipe) for recipe in ALONE} | {
    "nvfp4 but last": Numerics("nvfp4", BASELINE),
    "nvfp4 but end": Numerics("nvfp4", BASELINE, finish=0.18),
}
"""With 4 bits, models are trained with some blocks, the last ones above all, in 16, and end their
training in 16 bits; the share of the steps is that of arXiv:2509.25149."""
SEED = 0
POINTS = 100
"""How many means of neighbouring steps a curve is recorded and drawn with."""

SMALL = replace(
    experiment.CPU_CONFIG,
    hidden=64,
    intermediate=128,
    experts=4,
    layers=2,
    batch=8,
    held_out_batches=64,
)
"""So small because a CPU computes every format in software."""

LARGE = replace(experiment.GPU_CONFIG, experts=8, context=256, batch=8, learning_rate=3e-4)
"""Reads its text about once in 2,000 steps. In later passes a model learns it by heart, and how
well changes by more with the least difference of rounding than a recipe changes anything; so it
does at three times the learning rate."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training.

    Attributes:
        curve: mean losses of equal runs of steps, nats per byte.
        final_loss: mean over the last tenth of the steps.
        held_out_loss: after training, on files never trained on.
    """

    curve: tuple[float, ...]
    final_loss: float
    held_out_loss: float


def train(
    bundle: Path, arch: str, name: str, config: experiment.DemoConfig, data: demo_model.Batches
) -> Run:
    """Train under the recipes of a run, from the common start."""
    device = "cpu" if arch == "cpu" else "cuda"
    numerics = RUNS[name]
    recipes = [numerics.most] * (config.layers - 1) + [numerics.last]
    torch.manual_seed(SEED)  # the seed of stochastic rounding
    model = build(bundle, arch, recipes, config)
    demo_model.initialise(model, SEED)
    optimiser = demo_model.MasterAdamW(model, config.steps, config.learning_rate)
    trainee = demo_model.Trainee(model, optimiser, device)
    early = config.steps - round(numerics.finish * config.steps)
    losses = [trainee.step(*data.train(step)).loss for step in range(early)]
    if early < config.steps:
        model = with_weights_of(model, build(bundle, arch, [BASELINE] * config.layers, config))
        trainee = demo_model.Trainee(model, optimiser, device)
        losses += [trainee.step(*data.train(step)).loss for step in range(early, config.steps)]
    model.eval()
    return Run(
        curve=tuple(means(losses)),
        final_loss=fmean(losses[-max(1, config.steps // 10) :]),
        held_out_loss=trainee.held_out(data),
    )


def build(
    bundle: Path, arch: str, recipes: Sequence[str], config: experiment.DemoConfig
) -> demo_model.ByteModel:
    """A model whose blocks have experts of these recipes, in order."""
    factories = iter([demo_model.load_experts(bundle, arch, recipe) for recipe in recipes])
    device = "cpu" if arch == "cpu" else "cuda"
    return demo_model.ByteModel(config, lambda **sizes: next(factories)(**sizes), device)


def with_weights_of(
    model: demo_model.ByteModel, other: demo_model.ByteModel
) -> demo_model.ByteModel:
    """The other model with the very parameters of a model, so that its optimiser goes on."""
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        setattr(other.get_submodule(owner), leaf, parameter)
    return other


def recorded(path: Path, facts: Mapping[str, object]) -> dict[str, Run]:
    """Runs of an earlier time, of the same model on the same device.

    Raises:
        SystemExit: there is no such record, or it is of something else.
    """
    if not path.is_file():
        raise SystemExit(f"{path}: nothing is recorded; train all runs first, without --run")
    found = json.loads(path.read_text(encoding="utf-8"))
    for name in ("device", "torch", "config"):
        if found[name] != facts[name]:
            raise SystemExit(f"{path}: recorded with {name} {found[name]}, now {facts[name]}")
    return {name: Run(**run) for name, run in found["runs"].items()}


def means(losses: list[float]) -> Iterator[float]:
    """At most `POINTS` means over runs of equal length."""
    length = -(-len(losses) // POINTS)
    for first in range(0, len(losses), length):
        yield round(fmean(losses[first : first + length]), 5)


def table(runs: Mapping[str, Run]) -> str:
    """Final losses, and their ratios to the baseline's."""
    lines = [f"{'recipe':14}  final loss          held out"]
    base = runs[BASELINE]
    for recipe, run in runs.items():
        final, held_out = run.final_loss, run.held_out_loss
        lines.append(
            f"{recipe:14}  {final:.4f} ({final / base.final_loss - 1:+.2%})"
            f"    {held_out:.4f} ({held_out / base.held_out_loss - 1:+.2%})"
        )
    return "\n".join(lines)


def draw(runs: Mapping[str, Run], steps: int, title: str, output: Path) -> None:
    """Every curve, and below it the ratio to the baseline's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    losses, ratios = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    base = runs[BASELINE].curve
    ends = [(index + 1) * steps / len(base) for index in range(len(base))]
    for recipe, run in runs.items():
        losses.plot(ends, run.curve, lw=1.0, label=recipe)
        percent = [100 * (loss / other - 1) for loss, other in zip(run.curve, base, strict=True)]
        ratios.plot(ends, percent, lw=1.0)
    losses.set_title(title)
    losses.set_ylabel("loss, nats per byte")
    losses.legend()
    ratios.set_ylabel(f"above {BASELINE}, %")
    ratios.set_xlabel("step")
    for axes in (losses, ratios):
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=110)


def main() -> None:
    """Train, print, record and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--bundle", type=Path, default=ROOT / "generated" / "cpu")
    parser.add_argument("--arch", default="cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=ROOT / "examples")
    parser.add_argument(
        "--run", action="append", choices=RUNS, help="train these alone; others are as recorded"
    )
    words = parser.parse_args()
    config = replace(SMALL if words.arch == "cpu" else LARGE, steps=words.steps)
    device = device_for(words.arch)
    data = demo_model.Batches(experiment.load_corpus(), config, device, SEED)
    output = words.out / f"recipes_{words.arch}.json"
    name = demo_model.device_name(device)
    facts: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "torch": torch.__version__,
        "config": asdict(config),
    }
    known = recorded(output, facts) if words.run else {}
    for recipe in words.run or RUNS:
        known[recipe] = train(words.bundle, words.arch, recipe, config, data)
        print(f"{recipe}: {known[recipe].final_loss:.4f}", flush=True)
    runs = {recipe: known[recipe] for recipe in RUNS if recipe in known}
    print(table(runs))
    facts["runs"] = {recipe: asdict(run) for recipe, run in runs.items()}
    output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    title = f"{config.steps} steps of the same model under every recipe ({name})"
    draw(runs, config.steps, title, output.with_suffix(".png"))


if __name__ == "__main__":
    try:
        main()
    except experiment.DemoError as error:
        sys.exit(str(error))
