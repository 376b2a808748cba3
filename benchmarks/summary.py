"""docs/performance.md and its figure, from the newest result of every benchmark and device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import targets
from common import OURS, RESULTS, ROOT, Result

PAGE = ROOT / "docs" / "performance.md"
FIGURE = ROOT / "docs" / "performance.png"

TITLES = {
    "grouped": "Grouped matrix products",
    "dense": "Dense matrix products",
    "main_grad": "Weights' gradients added to main_grad",
    "mlp": "The expert MLP, forward and backward",
    "model": "A training step of a model",
    "pointwise": "Activations",
    "host": "Host time of one call",
    "generate": "The generator",
    "kernels_gemm_fp8_bench": "FP8 grouped products, kernel by kernel",
    "kernels_quantize_bench": "Quantise kernels",
    "kernels_gemm_fp8_check": "Checks of FP8 products",
    "kernels_quantize_check": "Checks of quantise kernels",
}
NOTES = {
    "grouped": (
        "Group sizes are drawn from a Dirichlet(8) and rounded to nothing. *Of the ceiling*: rate "
        "over that of a dense 8192 x 8192 x 8192 product in the same run. *Rounded groups* end at "
        "multiples of 128 tokens."
    ),
    "main_grad": ("The same groups, results added to fp32; torch's are added after they are made."),
    "dense": "*Of the ceiling*: rate over that of torch's 8192 x 8192 x 8192 product.",
    "mlp": (
        "fc1, SwiGLU times router probability, fc2, and all gradients. The floor counts the "
        "products at the dense bf16 rate and the activation's bytes at the copy's; *of the "
        "ceiling* is the rate over that of a dense bf16 product. A recipe quantises weights, too."
    ),
    "model": (
        "Forward, loss, backward and AdamW of a mixture-of-experts model, compiled whole and "
        "replayed as one CUDA graph on tokens that change. All but the experts is PyTorch's, and "
        "the same for all; `torch compiled` has torch's grouped products in bf16 for experts. The "
        "peak is above weights, optimizer and recipe state."
    ),
    "pointwise": "*Of the ceiling*: bandwidth over that of a device copy in the same run.",
    "host": (
        "Microseconds of the host for one call on 128 tokens and matrices of 128 x 128, no wait "
        "for the device inside; without a recipe's name a module is bf16's."
    ),
    "generate": "Wall time of the command, Python's start included.",
    "kernels_gemm_fp8_bench": (
        "Group sizes as above, operands e4m3. *Of the ceiling*: rate over that of a dense 8192 x "
        "8192 x 8192 FP8 product of torch in the same run, with the same accumulation."
    ),
    "kernels_quantize_bench": (
        "16384 x 8192 bf16, dense and in 128 ragged groups. *Of the ceiling*: bandwidth over that "
        "of a device copy in the same run, every byte counted once."
    ),
    "kernels_gemm_fp8_check": "Products against float64 of the operands they read.",
    "kernels_quantize_check": "Bit for bit against the reference.",
}
INTRODUCTION = """\
# Performance

Written by `fusegen bench summary` from `benchmarks/results/`. Times are medians over
rounds in which the contenders take turns, with the spread from least to largest behind them;
ratios are taken within one run alone, because these cards are limited by power. The floor is the
least time that operations and bytes allow at the rates measured in the same run.
"""


def newest(folder: Path = RESULTS) -> list[Result]:
    """The newest result per benchmark and device, in the page's order."""
    found = common.newest(folder)
    order = list(TITLES)
    return [found[key] for key in sorted(found, key=lambda key: (order.index(key[0]), key[1]))]


def page(results: Sequence[Result], figure: bool) -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    if figure:
        parts.append(f"![Time of the others over ours]({FIGURE.name})\n")
    parts += [aims(shown)] if (shown := list(targets.compare(targets.load(), results))) else []
    parts += [section(result) for result in results]
    return "\n".join(parts)


def aims(reached: Sequence[targets.Reached]) -> str:
    """Every target beside what came of it."""
    met = sum(each.met for each in reached)
    lines = (
        [
            each.target.title,
            each.case,
            f"{'≥' if each.target.least else '≤'} {each.bound:g}",
            "not measured" if each.number is None else f"{each.number:.3f}",
            "yes" if each.met else "**no**",
        ]
        for each in reached
    )
    return (
        f"## Targets\n\n{met} of {len(reached)} are met (`benchmarks/targets.yaml`); why others "
        "are not, and what was tried, is in `benchmarks/notes`. Between two runs numbers vary by "
        "3 %, host times by more.\n\n"
        + _table(["what", "case", "target", "reached", "met"], lines)
        + "\n"
    )


def section(result: Result) -> str:
    """A benchmark on one device."""
    heading = (
        f"## {TITLES[result['name']]}\n\n{machine(result['environment'])} {NOTES[result['name']]}\n"
    )
    return heading + "\n" + table(result) + "\n"


def machine(facts: Mapping[str, Any]) -> str:
    """Where a result comes from, as one sentence."""
    words = [f"one {facts['device']}"] if facts["device"] != "cpu" else ["the CPU"]
    words += [f"torch {facts['torch']}"] if "torch" in facts else []
    words += [f"CUDA {facts['cuda']}"] if facts.get("cuda") else []
    words += [f"driver {facts['driver']}"] if "driver" in facts else []
    return f"Measured on {', '.join(words)}, {facts['date'][:10]}, commit {facts['commit']}."


def _shown(result: Result) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if not common.is_tile(row["contender"])]


def table(result: Result) -> str:
    """A line per case and contender; a column only where a row fills it."""
    rows = _shown(result)
    extras = sorted({name for row in rows for name in row.get("extra", ())})
    columns = ["case", "by", "time", "floor", "rate", "of the ceiling", "time over ours", *extras]
    lines = [_cells(row, extras) for row in rows]
    used = [index for index in range(len(columns)) if any(line[index] for line in lines)]
    heads = [columns[index].replace("_", " ") for index in used]
    return _table(heads, ([line[index] for index in used] for line in lines))


def _cells(row: Mapping[str, Any], extras: list[str]) -> list[str]:
    if "error" in row:
        return [row["case"], row["contender"], common.failed(row), *[""] * (4 + len(extras))]
    ratio = row.get("times_ours")
    unit = row["unit"]
    return [
        row["case"],
        row["contender"],
        f"{number(row['median'])} {unit} ({number(row['low'])} to {number(row['high'])})",
        "" if row["floor"] is None else f"{number(row['floor'])} {unit}",
        "" if row["rate"] is None else f"{number(row['rate'])} {row['rate_unit']}",
        "" if row["fraction"] is None else f"{row['fraction']:.2f}",
        "" if ratio is None or row["contender"] == OURS else f"{ratio:.2f}",
        *(number(row["extra"][name]) if name in row["extra"] else "" for name in extras),
    ]


def number(value: float) -> str:
    """Three significant digits and no exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def _table(heads: Sequence[str], lines: Iterable[Iterable[str]]) -> str:
    return "\n".join([_line(heads), "|" + "---|" * len(heads), *map(_line, lines)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def bars(results: Iterable[Result]) -> dict[str, float]:
    """Best other time over ours, by case, of the benchmarks that have another contender."""
    found: dict[str, float] = {}
    for result in results:
        if result["name"] == "host":
            continue
        for row in _shown(result):
            if not row["contender"].startswith(OURS) and "times_ours" in row:
                case = f"{result['name']}: {row['case']}"
                found[case] = min(row["times_ours"], found.get(case, math.inf))
    return found


def draw(ratios: Mapping[str, float], path: Path) -> None:
    """Bars to the right of 1 are faster than the best of the others."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(ratios)[::-1]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.24 * len(names)))
    colours = ["#3a7d44" if ratios[name] >= 1 else "#b5523b" for name in names]
    axes.barh(names, [ratios[name] for name in names], color=colours)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time of the best other over time of fusegen")
    axes.tick_params(axis="y", labelsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def summarise() -> list[Path]:
    """Write the page and, where contenders were compared, its figure (needs matplotlib).

    Returns:
        The files written.

    Raises:
        SystemExit: there is nothing to write about.
    """
    results = newest()
    if not results:
        raise SystemExit(f"no results in {RESULTS}; run: fusegen bench grouped")
    ratios = bars(results)
    if ratios:
        draw(ratios, FIGURE)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(results, bool(ratios)), "utf-8")
    return [PAGE, FIGURE] if ratios else [PAGE]
