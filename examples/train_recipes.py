"""Train one small mixture-of-experts language model under every recipe and compare the losses.

    python examples/train_recipes.py                  # on the CPU
    python examples/train_recipes.py --arch sm_90a --seeds 3 --jobs 12
    python examples/train_recipes.py --arch sm_90a --draw    # what is recorded, anew

Generates, and for a GPU builds, the layers that it trains: a router and experts from tokens to
tokens.  All models of a seed start from the same weights and read the same batches of the Python
standard library's sources; only the numerics of the experts' GEMMs differ.  Writes the curves to
`examples/recipes_<arch>.json` and `.png`, and prints each recipe's loss against bf16's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import torch
from moe_layer import device_for

from fusegen.build.library import is_current
from fusegen.build.toolchain import BuildError
from fusegen.demo import bundle as demo_bundle
from fusegen.demo import experiment
from fusegen.demo import model as demo_model

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "bf16"
ALONE = (BASELINE, "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
CACHED = "cache_quantized_input"


@dataclass(frozen=True, slots=True)
class Numerics:
    """Which recipe, with options behind two underscores each, computes the experts of a run.

    Attributes:
        most: of all blocks but the last.
        last: of the last block.
        finish: share of the steps at the end that all blocks take in the baseline's recipe.
    """

    most: str
    last: str
    finish: float = 0.0


RUNS = {recipe: Numerics(recipe, recipe) for recipe in ALONE} | {
    "fp8_delayed, h in 8 bits": Numerics(f"fp8_delayed__{CACHED}", f"fp8_delayed__{CACHED}"),
    "fp8_block, h in 8 bits": Numerics(f"fp8_block__{CACHED}", f"fp8_block__{CACHED}"),
    "nvfp4 but last": Numerics("nvfp4", BASELINE),
    "nvfp4 but end": Numerics("nvfp4", BASELINE, finish=0.18),
}
"""With 4 bits, models are trained with some blocks, the last ones above all, in 16, and end their
training in 16 bits; the share of the steps is that of arXiv:2509.25149."""
POINTS = 100
"""How many means of neighbouring steps a curve is recorded and drawn with."""

SMALL = replace(
    experiment.CPU_CONFIG,
    hidden=64,
    intermediate=128,
    experts=4,
    layers=2,
    batch=8,
    held_out_batches=16,
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


def prepare(arch: str, runs: Sequence[str]) -> Path:
    """The bundle that these runs need, in the demo's folder."""
    words = {BASELINE, *(each for run in runs for each in (RUNS[run].most, RUNS[run].last))}
    for word in sorted(words):
        recipe, *options = word.split("__")
        made = demo_bundle.generated(arch, demo_bundle.default_folder(), recipe, options)
    if arch != "cpu" and not is_current(made):
        demo_bundle.build(made)
    return made


def train(
    bundle: Path,
    arch: str,
    name: str,
    config: experiment.DemoConfig,
    corpus: experiment.Corpus,
    seed: int,
) -> Run:
    """Train under the recipes of a run, from the common start of a seed."""
    device = "cpu" if arch == "cpu" else "cuda"
    data = demo_model.Batches(corpus, config, device, seed)
    numerics = RUNS[name]
    recipes = [numerics.most] * (config.layers - 1) + [numerics.last]
    torch.manual_seed(seed)  # the seed of stochastic rounding
    model = build(bundle, arch, recipes, config)
    demo_model.initialise(model, seed)
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
    """A model whose blocks have layers of these recipes, in order."""
    factories = iter([demo_model.load_layer(bundle, arch, recipe) for recipe in recipes])
    device = "cpu" if arch == "cpu" else "cuda"
    return demo_model.ByteModel(config, lambda *given: next(factories)(*given), device)


def with_weights_of(
    model: demo_model.ByteModel, other: demo_model.ByteModel
) -> demo_model.ByteModel:
    """The other model with the very parameters of a model, so that its optimiser goes on."""
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        setattr(other.get_submodule(owner), leaf, parameter)
    return other


def recorded(path: Path, facts: Mapping[str, object]) -> dict[str, list[Run]]:
    """Runs of an earlier time, one for each seed, of the same model on the same device.

    Raises:
        SystemExit: there is no such record, or it is of something else.
    """
    if not path.is_file():
        raise SystemExit(f"{path}: nothing is recorded; train all runs first, without --run")
    found = json.loads(path.read_text(encoding="utf-8"))
    for name in ("device", "torch", "config", "seeds"):
        if found.get(name) != facts[name]:
            raise SystemExit(f"{path}: recorded with {name} {found.get(name)}, now {facts[name]}")
    return {name: [Run(**run) for run in runs] for name, runs in found["runs"].items()}


def means(losses: list[float]) -> Iterator[float]:
    """At most `POINTS` means over runs of equal length."""
    length = -(-len(losses) // POINTS)
    for first in range(0, len(losses), length):
        yield round(fmean(losses[first : first + length]), 5)


def against(runs: Sequence[Run], base: Sequence[Run], loss: str) -> list[float]:
    """Of each seed, by how much a loss is above the baseline's, as a part of that."""
    pairs = zip(runs, base, strict=True)
    return [getattr(run, loss) / getattr(other, loss) - 1 for run, other in pairs]


def table(runs: Mapping[str, Sequence[Run]]) -> str:
    """Final losses, means over seeds, and what they are above the baseline's: mean, least, most."""
    lines = [f"{'recipe':24}  final loss                        held out"]
    for recipe, each in runs.items():
        words = []
        for loss in ("final_loss", "held_out_loss"):
            above = against(each, runs[BASELINE], loss)
            mean = fmean(getattr(run, loss) for run in each)
            spread = f", {min(above):+.2%} to {max(above):+.2%}" if len(each) > 1 else ""
            words.append(f"{mean:.4f} ({fmean(above):+.2%}{spread})")
        lines.append(f"{recipe:24}  {'    '.join(words)}")
    return "\n".join(lines)


def draw(runs: Mapping[str, Sequence[Run]], steps: int, title: str, output: Path) -> None:
    """Every recipe's curve, the mean over seeds, and below it what it is above the baseline's of
    the same seed: the mean, in the band of all seeds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 9.0), layout="constrained")
    FigureCanvasAgg(figure)
    losses, ratios = figure.subplots(2, 1, sharex=True)
    base = [run.curve for run in runs[BASELINE]]
    ends = [(index + 1) * steps / len(base[0]) for index in range(len(base[0]))]
    colors = [*(f"C{index}" for index in range(10)), "black"]
    for (recipe, each), color in zip(runs.items(), colors, strict=False):
        curves = [run.curve for run in each]
        mean = [fmean(at) for at in zip(*curves, strict=True)]
        losses.plot(ends, mean, lw=1.0, color=color, label=recipe)
        above = [
            [100 * (loss / other - 1) for loss, other in zip(*pair, strict=True)]
            for pair in zip(curves, base, strict=True)
        ]
        points = [*zip(*above, strict=True)]
        ratios.plot(ends, [*map(fmean, points)], lw=1.0, color=color)
        ratios.fill_between(
            ends, [*map(min, points)], [*map(max, points)], color=color, alpha=0.08, lw=0
        )
    losses.set_title(title)
    losses.set_ylabel("loss, nats per byte")
    losses.legend()
    ratios.set_ylabel(f"above {BASELINE} of the same seed, %")
    ratios.set_xlabel("step")
    for axes in (losses, ratios):
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=110)


def main() -> None:
    """Train, print, record and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", default="cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0 on")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, on one device")
    parser.add_argument("--out", type=Path, default=ROOT / "examples")
    parser.add_argument(
        "--run", action="append", choices=RUNS, help="train these alone; others are as recorded"
    )
    parser.add_argument("--draw", action="store_true", help="train nothing: show the record")
    words = parser.parse_args()
    output = words.out / f"recipes_{words.arch}.json"
    if not words.draw:
        for found in records(words, output):  # one that is ended early leaves what it has
            output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(output)


def records(words: argparse.Namespace, output: Path) -> Iterator[dict[str, object]]:
    """Train what is asked for; after each run what is known then, and what it was trained on."""
    config = replace(SMALL if words.arch == "cpu" else LARGE, steps=words.steps)
    facts: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "device": demo_model.device_name(device_for(words.arch)),
        "torch": torch.__version__,
        "config": asdict(config),
        "seeds": words.seeds,
    }
    wanted = words.run or [*RUNS]
    known = recorded(output, facts) if words.run else {}
    bundle, corpus = prepare(words.arch, wanted), experiment.load_corpus()
    with ProcessPoolExecutor(words.jobs, get_context("spawn")) as pool:  # as CUDA needs it
        futures = {
            run: [
                pool.submit(train, bundle, words.arch, run, config, corpus, seed)
                for seed in range(words.seeds)
            ]
            for run in wanted
        }
        for run, each in futures.items():
            known[run] = [future.result() for future in each]
            print(f"{run}: {', '.join(f'{one.final_loss:.4f}' for one in known[run])}", flush=True)
            found = {name: [asdict(one) for one in known[name]] for name in RUNS if name in known}
            yield facts | {"runs": found}


def show(output: Path) -> None:
    """Print the table of a record, and draw its curves beside it."""
    found = json.loads(output.read_text(encoding="utf-8"))
    runs = {name: [Run(**run) for run in runs] for name, runs in found["runs"].items()}
    print(table(runs))
    steps = found["config"]["steps"]
    title = f"{steps} steps of the same model under every recipe ({found['device']})"
    draw(runs, steps, title, output.with_suffix(".png"))


if __name__ == "__main__":
    try:
        main()
    except (experiment.DemoError, BuildError) as error:
        sys.exit(str(error))
