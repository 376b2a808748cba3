"""docs/performance.md and its figures, from the newest result of every benchmark and device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import figures
import labels
import plots
import shapes
import targets
from common import OURS, RESULTS, ROOT, Result

PAGE = ROOT / "docs" / "performance.md"
BASELINE_IN_WORDS = "PyTorch's grouped GEMMs under `torch.compile`"
SHOWN_RECIPES = ("fp8_delayed", "bf16")  # of ours, in the first sentence

TITLES = {
    "grouped": "Grouped GEMMs",
    "dense": "Dense GEMMs",
    "main_grad": "Weights' gradients added to main_grad",
    "mlp": "The expert MLP, forward and backward",
    "memory": "Memory of the expert MLP",
    "model": "A training step of a model",
    "layers": "Dense layers",
    "decoder": "A dense decoder layer",
    "pointwise": "Activations",
    "norms": "Norms of rows",
    "residual_norms": "Norms of a sum with a residual",
    "norm_quantize": "Norms that quantise",
    "dropout": "Dropout",
    "moe_layer": "Experts of a mixture-of-experts layer, from tokens to tokens",
    "moe_forms": "Forms of a mixture-of-experts layer",
    "moe_ops": "Around experts",
    "router": "Routers",
    "ranks": "Layers that ranks share",
    "ranks_of_4": "Layers that four ranks share",
    "softmax": "Softmax and cross entropy",
    "host": "Host time of one call",
    "revisions": "The revision before",
    "generate": "The generator",
    "mma": "bf16 grouped GEMMs by mma.sync",
    "kernels_gemm_fp8_bench": "FP8 grouped GEMMs, kernel by kernel",
    "kernels_quantize_bench": "Quantise kernels",
    "kernels_gemm_fp8_check": "Checks of FP8 GEMMs",
    "kernels_quantize_check": "Checks of quantise kernels",
}
NOTES = {
    "grouped": (
        "Group sizes are drawn from a Dirichlet(8) and rounded to nothing. *Of the ceiling*: rate "
        "over that of a dense 8192 x 8192 x 8192 GEMM in the same run. *Rounded groups* end at "
        "multiples of 128 tokens. What another library wants laid out otherwise is laid out before "
        "the timing."
    ),
    "main_grad": ("The same groups, results added to fp32; torch's are added after they are made."),
    "dense": "*Of the ceiling*: rate over that of torch's 8192 x 8192 x 8192 GEMM.",
    "mlp": (
        "fc1, SwiGLU times router probability, fc2, and all gradients; a recipe quantises weights, "
        "too. A library that wants groups padded gets them so before the timing. A second word of "
        "a case: other group sizes, or what else is computed."
    ),
    "memory": (
        "GiB above what a step finds: *held* when gradients are asked for, beside y, and at the "
        "worst moment of the step. *Planned*: what the plan comes to, for the backward alone."
    ),
    "model": (
        "Forward, loss, backward and AdamW of a mixture-of-experts model, compiled whole and "
        "replayed as one CUDA graph on tokens that change. All but the experts is PyTorch's, and "
        "the same for all; `torch compiled` has torch's grouped GEMMs in bf16 for experts. The "
        "peak is above weights, optimizer and recipe state."
    ),
    "layers": (
        "Norm, linear, SwiGLU, linear and residual, forward and backward, tokens x hidden x "
        "intermediate. A recipe quantises weights, too."
    ),
    "decoder": (
        "Sequences x tokens, hidden 4096, 32 heads, intermediate 14336; norm, queries, keys and "
        "values, causal attention of PyTorch's, output and MLP, forward and backward, compiled as "
        "one graph; *captured*: replayed as one CUDA graph."
    ),
    "pointwise": "*Of the ceiling*: bandwidth over that of a device copy in the same run.",
    "norms": (
        "Rows x width in bf16; the backward gives gradients of weight and bias, too. *Of the "
        "ceiling*: the time of a device copy of the same bytes in the same rounds, over ours."
    ),
    "residual_norms": (
        "Rows x width in bf16; the forward gives the sum, too, the backward adds its gradient to "
        "the norm's. *Of the ceiling* as for norms; x and the residual have one gradient, whose "
        "bytes count once."
    ),
    "norm_quantize": (
        "Rows x width in bf16, two copies in e4m3: by a scale of the tensor, or by scales of 128 "
        "elements. Times of kernels alone, as the profiler saw them, the copy's, too."
    ),
    "dropout": (
        "Rows x width in bf16. *Of the ceiling*: the time of a device copy of the same bytes in "
        "the same rounds, over ours; the mask has a bit for an element."
    ),
    "ranks": (
        "One process for each GPU of a host; a round takes as long as the slowest rank. *Column*, "
        "*row*: rows, contraction and columns of a rank's product in bf16, whose tokens are "
        "gathered before, or scattered behind; *product* is that alone; a *step* has its backward, "
        "too. *MLP*: tokens, their width, that of a rank's activations; SwiGLU, weights of a rank. "
        "*Overlapped*: copy engines move rows while products run. *Experts*: a step of a "
        "layer whose experts are spread, in bf16; *product* has the tokens of all ranks. *Gathered "
        "weights*: those of an expert MLP by FSDP2, in 16 bits or quantised. A rate counts what a "
        "rank receives."
    ),
    "ranks_of_4": "As of two; all tokens of a linear layer are as many, and experts' of each rank.",
    "moe_layer": (
        "Plan of a routing, gather, expert MLP in bf16 and combine, forward and backward: T tokens "
        "of H columns, K of E experts each, I intermediate columns. torch's layer is compiled "
        "whole, around its grouped GEMMs. *Held* between forward and backward, and *peak*, in GiB."
    ),
    "moe_forms": (
        "*Forms*: `written_rows` copies rows of tokens before products read them, "
        "`cache_quantized_input` saves codes; *held over formula* is what is held over the bytes "
        "of h, weights and places, x aside. *Whole*: from tokens to y and dx, beside the expert "
        "MLP alone, whose rows are there; the router is in it where a token has 8 choices."
    ),
    "moe_ops": (
        "Where choices of tokens lie among the rows of experts, by kernels alone, as the profiler "
        "saw them; whole calls that move rows there and back; and the kernels of a training step "
        "that quantise tokens in rows of experts: x by rows, dy both ways, x by columns. *Of the "
        "ceiling*: the time of a device copy of the same bytes in the same rounds, over ours; a "
        "token that several rows read counts once."
    ),
    "router": (
        "Tokens x width x experts in bf16, logits and both losses included; eight experts of each "
        "token. *Of the ceiling*: the time of a device copy of the same bytes in the same rounds, "
        "over ours; logits count twice. torch's logits have 16 bits."
    ),
    "softmax": (
        "*Of the ceiling*: the time of a device copy of the same bytes in the same rounds, over "
        "ours, of what is read and written once; of a causal softmax half of x, of a cross entropy "
        "no result. torch's cross entropies compute in fp32, as ours do."
    ),
    "host": (
        "Microseconds of the host for one call on 128 tokens and matrices of 128 x 128, no wait "
        "for the device inside; without a recipe's name a module is bf16's."
    ),
    "revisions": (
        "Every cell's modules, made by another revision, on the same inputs: all results have "
        "equal bits, or nothing is timed. Ratios are times of that revision over ours."
    ),
    "generate": "Wall time of the command, Python's start included.",
    "mma": (
        "What ships for sm_80, compiled as sm_90 code, and Triton's GEMMs told to use the same "
        "instruction, in the fastest of its configurations on each case. Group sizes as above."
    ),
    "kernels_gemm_fp8_bench": (
        "Group sizes as above; what ships, chosen as in a module, in its recipes' formats. *Of the "
        "ceiling*: rate over that of a dense 8192 x 8192 x 8192 FP8 GEMM of torch in the same "
        "run, with the same formats and accumulation."
    ),
    "kernels_quantize_bench": (
        "16384 x 8192 bf16, dense and in 128 ragged groups. *Of the ceiling*: bandwidth over that "
        "of a device copy in the same run, every byte counted once."
    ),
    "kernels_gemm_fp8_check": "GEMMs against float64 of the operands they read.",
    "kernels_quantize_check": "Bit for bit against the reference.",
}
FLOORS = {
    False: (
        "The floor counts the GEMMs at the dense bf16 rate and the activation's bytes at the "
        "copy's; *of the ceiling* is the rate over that of a dense bf16 GEMM, in FP8, too."
    ),
    True: (
        "Every recipe has its own floor: its GEMMs, then what its quantisation and activation "
        "move; *of the ceiling* is that floor over the time."
    ),
}
"""Of the expert MLP, by whether its rows have floors of their own."""
METHOD = """\
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


def page(results: Sequence[Result], drawn: Mapping[str, Path]) -> str:
    """The whole page.

    Args:
        results: in order.
        drawn: the figure of a benchmark, by its name.
    """
    first = [each for each in results if each["name"] == plots.HEADLINE and plots.models(each)]
    parts = ["# Performance\n"]
    if first:
        parts += [opening(first[0], drawn), contents(first[0])]
    parts.append(METHOD)
    parts += [aims(shown)] if (shown := list(targets.compare(targets.load(), results))) else []
    rest = {name: path for name, path in drawn.items() if not first or name != plots.HEADLINE}
    parts += [section(each, rest.get(each["name"])) for each in results]
    return "\n".join(parts)


def opening(result: Result, drawn: Mapping[str, Path]) -> str:
    """The figure that comes first, and what it shows in two sentences."""
    found = plots.models(result)
    device = result["environment"]["device"]
    speeds = [_speed(found, recipe) for recipe in SHOWN_RECIPES]
    sentences = [
        f"On one {device}, a forward and backward of fusegen's expert MLP is "
        f"{' and '.join(filter(None, speeds))} as fast as {BASELINE_IN_WORDS} in bf16."
    ]
    sentences += _comparison(list(plots.compared(found)))
    image = image_of(plots.HEADLINE, drawn.get(plots.HEADLINE))
    return f"{image}{' '.join(sentences)}\n"


def _speed(found: plots.Models, recipe: str) -> str:
    """How many times as fast ours is under a recipe, over all models."""
    name = common.contender(f"grouped_mlp__{recipe}")
    speeds = [
        plots.over(rows[name], rows[plots.BASELINE]).inverse().value
        for rows in found.values()
        if name in rows
    ]
    if not speeds:
        return ""
    return f"{between(speeds)} times ({labels.RECIPES[recipe]})"


def _comparison(compared: Sequence[plots.Compared]) -> Iterator[str]:
    """Of others under a recipe that ours has, too: how often ours is faster beyond the spread."""
    if not compared:
        return
    slower = sum((each.ratio.low or each.ratio.value) > 1 for each in compared)
    closest = min(compared, key=lambda each: each.ratio.value)
    who = labels.Contender.parse(closest.name)
    yield (
        f"In {slower} of {len(compared)} comparisons with another library under the same recipe it "
        "is faster, whatever end of the ratio's interval is taken; the best of those, "
        f"{who.library} ({labels.RECIPES[who.recipe]}, {labels.model(closest.case)}), takes "
        f"{closest.ratio.value:.2f} times as long."
    )


def between(values: Sequence[float]) -> str:
    """The range of some numbers."""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def contents(result: Result) -> str:
    """What the models of the headline are, under the names that the tables have for them."""
    experts = (*shapes.EXPERTS, *shapes.MORE_EXPERTS)
    known = {each.name: each for each in experts}
    lines = [
        [
            f"`{case}`",
            labels.model(case),
            *map(str, (known[case].groups, known[case].tokens)),
            f"{known[case].hidden} x {known[case].intermediate}",
        ]
        for case in plots.models(result)
        if case in known
    ]
    heads = ["in tables", "model", "experts", "routed tokens", "hidden x intermediate"]
    return _table(heads, lines) + "\n"


def image_of(name: str, path: Path | None) -> str:
    """A figure in Markdown, and the end of its paragraph."""
    return f"![{TITLES[name]}]({path.name})\n\n" if path else ""


def aims(reached: Sequence[targets.Reached]) -> str:
    """Every target beside what came of it."""
    met = sum(each.met for each in reached)
    lines = (
        [
            each.target.title,
            each.case,
            f"{'≥' if each.target.least else '≤'} {each.bound:g}",
            "not measured" if each.number is None else f"{each.number:.3f}",
            "" if each.number is None else each.device,
            "yes" if each.met else "**no**",
        ]
        for each in reached
    )
    return (
        f"## Targets\n\n{met} of {len(reached)} are met (`benchmarks/targets.yaml`); why others "
        "are not, and what was tried, is in `benchmarks/notes`.\n\n"
        + _table(["what", "case", "target", "reached", "on", "met"], lines)
        + "\n"
    )


def section(result: Result, figure: Path | None = None) -> str:
    """A benchmark on one device."""
    name = result["name"]
    text = f"{machine(result['environment'])} {NOTES[name]}"
    if name == plots.HEADLINE:
        own = any("floor_products_ms" in row["extra"] for row in common.measured(result))
        text += f" {FLOORS[own]}"
    shown = ratios(result) if name == "revisions" else table(result)
    return f"## {TITLES[name]}\n\n{text}\n\n{image_of(name, figure)}{shown}\n"


def ratios(result: Result) -> str:
    """A line per cell and part: the ratio of another revision's times to ours over all shapes."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in common.measured(result):
        if row["contender"] != OURS:
            cell, _, rest = row["case"].partition(", ")
            found.setdefault((cell, rest.rpartition(" ")[2]), []).append(row["times_ours"])
    lines = [
        [*key, str(len(values)), *(f"{each:.3f}" for each in _spread(values))]
        for key, values in found.items()
    ]
    lost = [[row["case"], "", common.failed(row), "", "", ""] for row in common.failures(result)]
    return _table(["cell", "part", "shapes", "median", "least", "largest"], [*lines, *lost])


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


_COUNTED = {1: "one", 2: "two", 4: "four", 8: "eight"}


def machine(facts: Mapping[str, Any]) -> str:
    """Where a result comes from, as one sentence."""
    count = _COUNTED.get(facts.get("gpus", 1), str(facts.get("gpus")))
    words = [f"{count} {facts['device']}"] if facts["device"] != "cpu" else ["the CPU"]
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
    unit = row["unit"]
    return [
        row["case"],
        row["contender"],
        f"{number(row['median'])} {unit} ({number(row['low'])} to {number(row['high'])})",
        "" if row["floor"] is None else f"{number(row['floor'])} {unit}",
        "" if row["rate"] is None else f"{number(row['rate'])} {row['rate_unit']}",
        "" if row["fraction"] is None else f"{row['fraction']:.2f}",
        "" if row["contender"] == OURS else _over_ours(row),
        *(number(row["extra"][name]) if name in row["extra"] else "" for name in extras),
    ]


def _over_ours(row: Mapping[str, Any]) -> str:
    """A row's time over ours, with its interval where rounds were paired."""
    if row.get("times_ours") is None:
        return ""
    paired = row.get("paired", {}).get(OURS, {})
    interval = ""
    if paired.get("low") is not None:
        interval = f" ({paired['low']:.2f} to {paired['high']:.2f})"
    return f"{row['times_ours']:.2f}{interval}"


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


def draw(results: Iterable[Result]) -> dict[str, Path]:
    """Write the figures (needs matplotlib), one for every benchmark that has something to show.

    Returns:
        The files by benchmark.
    """
    found = {}
    for result in results:
        figure = plots.of(result) if result["environment"]["device"] != "cpu" else None
        if figure is not None:
            name = result["name"]
            suffix = "" if name == plots.HEADLINE else f"_{name.removeprefix('kernels_')}"
            found[name] = PAGE.with_name(f"{PAGE.stem}{suffix}.png")
            figures.draw(figure, found[name])
    return found


def summarise() -> list[Path]:
    """Write the page and its figures.

    Returns:
        The files written.

    Raises:
        SystemExit: there is nothing to write about.
    """
    results = newest()
    if not results:
        raise SystemExit(f"no results in {RESULTS}; run: fusegen bench grouped")
    drawn = draw(results)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(results, drawn), "utf-8")
    return [PAGE, *drawn.values()]
