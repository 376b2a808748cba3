"""The figures of docs/performance.md, each from one benchmark's rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import common
import figures
import labels
import pairs
from common import OURS, Result
from figures import Bar, Figure, Panel
from labels import RECIPES, Contender

Row = Mapping[str, Any]
Models = Mapping[str, Mapping[str, Row]]  # by case and contender
BASELINE = "torch compiled"
EAGER = "torch eager"  # shown, and no rival: the baseline is the same, and faster
HEADLINE = "mlp"


@dataclass(frozen=True)
class Ratio:
    """One time over another, with an interval where rounds were paired."""

    value: float
    low: float | None = None
    high: float | None = None

    def inverse(self) -> Ratio:
        """The other time over the one."""
        ends = (self.low, self.high)
        low, high = (None if end is None else 1 / end for end in reversed(ends))
        return Ratio(1 / self.value, low, high)


def over(row: Row, other: Row) -> Ratio:
    """A row's time over another's of the same case: of paired rounds, else of the medians."""
    paired = row.get("paired", {}).get(other["contender"])
    if paired:
        return Ratio(paired["median"], paired["low"], paired["high"])
    times, others = row.get("samples", ()), other.get("samples", ())
    if times and len(times) == len(others):  # of the same rounds, as in `common.with_ratios`
        ratio = pairs.ratio(times, others)
        return Ratio(ratio.median, ratio.low, ratio.high)
    return Ratio(row["median"] / other["median"])


def rows_of(result: Result, case: str) -> dict[str, Row]:
    """The rows of one case by contender."""
    found = (row for row in common.measured(result) if row["case"] == case)
    return {row["contender"]: row for row in found}


def cases(result: Result) -> list[str]:
    """The cases of a result that were measured, in its order."""
    return list(dict.fromkeys(row["case"] for row in common.measured(result)))


def note(result: Result, more: str) -> str:
    """Where and when, and how to read the figure."""
    facts = result["environment"]
    torch = facts["torch"].partition("+")[0]
    return f"one {facts['device']}, torch {torch}, {facts['date'][:10]}.  {more}"


# ---- the expert MLP of every model


def models(result: Result) -> dict[str, dict[str, Row]]:
    """Rows of the cases that are a model alone, by case, where the baseline is among them."""
    found = {case: rows_of(result, case) for case in cases(result) if " " not in case}
    return {case: rows for case, rows in found.items() if BASELINE in rows}


def plain(rows: Mapping[str, Row]) -> dict[str, Contender]:
    """Contenders without choices by name: by recipe, ours first."""
    read = {name: Contender.parse(name) for name in rows}
    order = list(RECIPES)
    names = sorted(read, key=lambda name: (order.index(read[name].recipe), not read[name].ours))
    return {name: read[name] for name in names if not read[name].choices}


def headline(result: Result) -> Figure | None:
    """Everybody's speed over the baseline's, by model and recipe."""
    found = models(result)
    if not found:
        return None
    everybody: dict[str, Row] = {}
    for rows in found.values():
        everybody |= rows
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, who in plain(everybody).items():
        groups.setdefault(RECIPES[who.recipe], []).append((name, who.library))
    return Figure(
        title="Expert MLP, forward and backward: speed over PyTorch's, compiled, in bf16",
        note=note(result, "Longer is faster; bold: the fastest under its recipe."),
        axis=f"time of {BASELINE} in bf16 over time",
        groups=groups,
        panels=[Panel(labels.model(case), _speeds(rows)) for case, rows in found.items()],
    )


def _speeds(rows: Mapping[str, Row]) -> dict[str, Bar]:
    read = plain(rows)
    found = {}
    for name, who in read.items():
        speed = over(rows[name], rows[BASELINE]).inverse()
        rivals = [rows[other]["median"] for other in read if read[other].recipe == who.recipe]
        found[name] = Bar(
            *(speed.value, speed.low, speed.high),
            colour=figures.OURS if who.ours else figures.PLAIN,
            strong=len(rivals) > 1 and rows[name]["median"] == min(rivals),
        )
    return found


# ---- GEMMs: ours against every other contender


def gemms(result: Result) -> Figure | None:
    """The time of every other contender over ours, by GEMM."""
    found: dict[str, dict[str, Bar]] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    for case in cases(result):
        rows = rows_of(result, case)
        named, mode = _gemm(result, case)
        theirs = [
            row
            for name, row in rows.items()
            if not name.startswith(OURS) and not common.is_tile(name)
        ]
        if OURS not in rows or not theirs:
            continue
        model, what = labels.gemm(named)
        if (named, what) not in groups.setdefault(model, []):
            groups[model].append((named, what))
        for row in theirs:
            title = f"{row['contender']}\n{mode}" if mode else row["contender"]
            found.setdefault(title, {})[named] = _faster(over(row, rows[OURS]))
    if not found:
        return None
    return Figure(
        title=GEMMS[result["name"]],
        note=note(result, "Right of 1, fusegen is faster; left of it, the other."),
        axis="time of the other over time of fusegen",
        groups=groups,
        panels=[Panel(title, bars) for title, bars in found.items()],
    )


GEMMS = {
    "grouped": "Grouped GEMMs in bf16: fusegen against others",
    "main_grad": "Gradients of weights, added to fp32: fusegen against others",
    "dense": "Dense GEMMs in bf16: fusegen against torch",
    "kernels_gemm_fp8_bench": "Grouped GEMMs in FP8: fusegen against others",
}


def _gemm(result: Result, case: str) -> tuple[str, str]:
    """A case without the words on its numerics, and those in words."""
    words = case.split()
    if result["name"] != "kernels_gemm_fp8_bench" or len(words) < 4:
        return case, ""
    said = [
        labels.SCALINGS.get(words[-2], words[-2]),
        labels.ACCUMULATIONS.get(words[-1], words[-1]),
    ]
    return " ".join(words[:-2]), ", ".join(said)


def _faster(ratio: Ratio) -> Bar:
    colour = figures.OURS if ratio.value >= 1 else figures.THEIRS
    return Bar(ratio.value, ratio.low, ratio.high, colour=colour)


# ---- quantise kernels


def quantised(result: Result) -> Figure | None:
    """Bandwidth over that of a device copy, by scaling and by what is made."""
    panels: dict[str, dict[str, Bar]] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    for row in common.measured(result):
        case, _, where = row["case"].rpartition(", ")
        scaling, made = labels.quantised(case)
        if row["fraction"] is None or case.partition(" ")[2] not in MADE:
            continue
        if (case, made) not in groups.setdefault(scaling, []):
            groups[scaling].append((case, made))
        title = "dense" if where == "dense" else f"{where.removeprefix('ragged')} ragged groups"
        panels.setdefault(title, {})[case] = Bar(row["fraction"], colour=figures.OURS)
    if not panels:
        return None
    return Figure(
        title="Quantise kernels: bandwidth over that of a device copy",
        note=note(result, "16384 x 8192 bf16. Bytes that are read twice count once."),
        axis="bandwidth over a copy's",
        groups=groups,
        panels=[Panel(title, bars) for title, bars in panels.items()],
        log=False,
    )


MADE = ("rowwise", "columnwise", "both")


# ---- host time


def hosted(result: Result) -> Figure | None:
    """Times of calls over nn.Linear's, by module and recipe."""
    panels: dict[str, dict[str, Bar]] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    for row in common.measured(result):
        call, _, name = row["case"].partition(": ")
        ratio = row["extra"].get("times_nn_linear")
        if ratio is None or name == "nn.Linear":
            continue
        made, _, experts = name.partition(", ")
        who = Contender.parse(made)
        module = who.library.replace("te.", "TransformerEngine ")
        group = ", ".join(filter(None, [module, experts]))
        key = (name, RECIPES[who.recipe])
        if key not in groups.setdefault(group, []):
            groups[group].append(key)
        colour = figures.OURS if row["contender"] == OURS else figures.PLAIN
        panels.setdefault(call, {})[name] = Bar(ratio, colour=colour)
    if not panels:
        return None
    return Figure(
        title="Host time of one call, over that of nn.Linear",
        note=note(result, "Shorter is better; left of 1, a call takes less than nn.Linear's."),
        axis="time over nn.Linear's",
        groups={group: sorted(rows, key=_recipe) for group, rows in groups.items()},
        panels=[Panel(call, bars) for call, bars in panels.items()],
    )


def _recipe(row: tuple[str, str]) -> int:
    """The place of a row that is labelled with a recipe."""
    return list(RECIPES.values()).index(row[1])


FIGURES = {
    HEADLINE: headline,
    **dict.fromkeys(GEMMS, gemms),
    "kernels_quantize_bench": quantised,
    "host": hosted,
}
"""By benchmark; each gives none where no row says anything."""


def of(result: Result) -> Figure | None:
    """The figure of a benchmark."""
    make = FIGURES.get(result["name"])
    return make(result) if make else None


@dataclass(frozen=True)
class Compared:
    """A contender that is not ours, and its time over ours of its recipe."""

    case: str
    name: str
    ratio: Ratio


def compared(found: Models) -> Iterator[Compared]:
    """Everybody of every model that has a rival of ours."""
    for case, rows in found.items():
        read = plain(rows)
        own = {who.recipe: rows[name] for name, who in read.items() if who.ours}
        for name, who in read.items():
            if not who.ours and name != EAGER and who.recipe in own:
                yield Compared(case, name, over(rows[name], own[who.recipe]))
