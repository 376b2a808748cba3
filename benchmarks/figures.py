"""Bars in panels that share their rows: the one kind of figure that docs/performance.md has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Told apart with any kind of colour vision (M. Okabe, K. Ito), and by where bars end.
OURS, THEIRS, PLAIN = "#0072B2", "#D55E00", "#8C8C8C"
WIDTH, DPI = 10.0, 160
ROW, HEAD, LABELS, MARGIN = 0.19, 1.4, 2.05, 0.12  # inches
WIDEST = 4  # panels in a row
# A log axis shows at least the one and at most the other, so that no bar squashes the rest; what is
# longer ends there with an arrow.
NARROWEST, FARTHEST = (0.8, 1.25), (1 / 3, 4.0)
BEYOND = "\N{BLACK LEFT-POINTING SMALL TRIANGLE}\N{BLACK RIGHT-POINTING SMALL TRIANGLE}"
COARSE, MIDDLE = (0.5, 1, 2, 4), (0.7, 0.8, 1, 1.2, 1.5)
FINE = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.7, 2)


@dataclass(frozen=True)
class Bar:
    """One number.

    Attributes:
        value: where the bar ends; on a log axis it begins at 1, else at 0.
        low: of the value's interval, where there is one.
        high: likewise.
        colour: of the bar.
        strong: whether its number is printed in bold.
    """

    value: float
    low: float | None = None
    high: float | None = None
    colour: str = PLAIN
    strong: bool = False


@dataclass(frozen=True)
class Panel:
    """Bars by row; a row without one stays empty."""

    title: str
    bars: Mapping[str, Bar]


@dataclass(frozen=True)
class Figure:
    """Panels over the same rows.

    Attributes:
        title: one line.
        note: under it.
        axis: what the numbers are.
        groups: by group, its rows: a key of the bars, and a label.
        panels: from left to right.
        log: whether the axis is.
    """

    title: str
    note: str
    axis: str
    groups: Mapping[str, Sequence[tuple[str, str]]]
    panels: Sequence[Panel]
    log: bool = True
    places: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        places, line = {}, 0
        for rows in self.groups.values():
            line += 1
            for key, _ in rows:
                places[key] = line
                line += 1
        object.__setattr__(self, "places", places)

    @property
    def lines(self) -> int:
        """Rows, and one above every group for its name."""
        return len(self.groups) + len(self.places)


def number(value: float) -> str:
    """Of a bar: two decimals, one from 10 on."""
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def draw(figure: Figure, path: Path) -> None:
    """Write a figure as PNG (needs matplotlib)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(WIDEST, len(figure.panels))
    rows = math.ceil(len(figure.panels) / columns)
    titles = max(panel.title.count("\n") for panel in figure.panels) * 0.17
    between = 0.6 + titles
    height = HEAD + titles + rows * figure.lines * ROW + (rows - 1) * between
    drawn, axes = pyplot.subplots(
        rows, columns, figsize=(WIDTH, height), sharex=True, sharey=True, squeeze=False
    )
    limits = _limits(figure)
    for place, each in enumerate(axes.flat):
        if place < len(figure.panels):
            _panel(each, figure, figure.panels[place], limits, named=place % columns == 0)
            each.tick_params(labelbottom=True)
        else:
            each.set_visible(False)
    drawn.text(MARGIN / WIDTH, 1 - 0.26 / height, figure.title, fontsize=12, weight="bold")
    drawn.text(MARGIN / WIDTH, 1 - 0.5 / height, figure.note, fontsize=8.5, color="#444444")
    drawn.supxlabel(_axis(figure), fontsize=9, y=0.1 / height)
    drawn.subplots_adjust(
        left=LABELS / WIDTH,
        right=1 - MARGIN / WIDTH,
        top=1 - (0.85 + titles) / height,
        bottom=0.52 / height,
        wspace=0.06,
        hspace=between / (figure.lines * ROW),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=DPI, metadata={"Software": None})
    pyplot.close(drawn)


def _limits(figure: Figure) -> tuple[float, float]:
    """Of the axis: all bars, and room for the numbers at their ends."""
    values = [bar.value for panel in figure.panels for bar in panel.bars.values()]
    if not figure.log:
        return 0, 1.2 * max(values)
    low = _within(min([NARROWEST[0], *values]))
    high = _within(max([NARROWEST[1], *values]))
    room = (high / low) ** (0.07 * min(WIDEST, len(figure.panels)))
    return (low / room if min(values) < 1 else 1 / room), high * room


def _axis(figure: Figure) -> str:
    """What the numbers are, and what an arrow beside one says."""
    values = [bar.value for panel in figure.panels for bar in panel.bars.values()]
    beyond = figure.log and any(_within(value) != value for value in values)
    ends = f"; {BEYOND[0]} {BEYOND[1]} ends beyond the axis" if beyond else ""
    return f"{figure.axis}, log{ends}" if figure.log else figure.axis


def _within(value: float) -> float:
    return min(max(value, FARTHEST[0]), FARTHEST[1])


def _ticks(limits: tuple[float, float], columns: int) -> list[float]:
    """Round numbers of a log axis: few, but more than one and its double where it is short."""
    ticks = (FINE if columns < 3 else MIDDLE) if limits[1] / limits[0] < 3 else COARSE
    return [tick for tick in ticks if limits[0] <= tick <= limits[1]]


def _panel(
    axes: Any, figure: Figure, panel: Panel, limits: tuple[float, float], named: bool
) -> None:
    axes.set_title(panel.title, fontsize=9, weight="bold", loc="left")
    if figure.log:
        axes.set_xscale("log")
        ticks = _ticks(limits, len(figure.panels))
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
        axes.set_xticks([], minor=True)
    axes.set_xlim(*limits)
    axes.set_ylim(figure.lines - 0.3, -0.7)
    start = 1 if figure.log else 0
    axes.axvline(start, color="black", linewidth=0.8, zorder=3)
    axes.grid(axis="x", color="#E3E3E3", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for key, bar in panel.bars.items():
        _bar(axes, figure.places[key], bar, figure.log)
    axes.tick_params(axis="both", length=0, labelsize=8)
    axes.set_yticks([])
    if named:
        _names(axes, figure)


def _bar(axes: Any, line: int, bar: Bar, log: bool) -> None:
    """One bar, its interval, and its number beyond both."""
    start, shown = (1, _within) if log else (0, float)
    end, left = shown(bar.value), bar.value < start
    axes.barh(line, end - start, left=start, height=0.72, color=bar.colour, zorder=2)
    ends = [end]
    if bar.low is not None and bar.high is not None:
        ends += [shown(bar.low), shown(bar.high)]
        axes.plot(ends[1:], [line, line], color="black", linewidth=1, zorder=4)
    text = number(bar.value)
    if end != bar.value:
        text = f"{BEYOND[0]} {text}" if left else f"{text} {BEYOND[1]}"
    axes.annotate(
        text,
        (min(ends) if left else max(ends), line),
        xytext=(-3 if left else 3, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        va="center_baseline",
        fontsize=7.5,
        weight="bold" if bar.strong else "normal",
    )


def _names(axes: Any, figure: Figure) -> None:
    """Names of rows, and above those of a group its own, in the figure's left margin."""
    edge, line = axes.get_yaxis_transform(), 0

    def name(text: str, place: int, inches: float, **more: Any) -> None:
        axes.annotate(
            text,
            (0, place),
            xytext=(-72 * inches, 0),
            xycoords=edge,
            textcoords="offset points",
            va="center",
            **more,
        )

    for group, rows in figure.groups.items():
        name(group, line, LABELS - MARGIN, fontsize=8.5, weight="bold")
        for place, (_, label) in enumerate(rows, line + 1):
            name(label, place, 0.06, fontsize=8, ha="right")
        line += 1 + len(rows)
