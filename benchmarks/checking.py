"""Whether a benchmark came out worse than its record: ratios within one run, never times.

The same card is slower or faster by a few per cent from day to day, but then so are all contenders
of one run. What is compared is each contender's time over ours, and our part of the ceiling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import common
from common import OURS, Result

TOLERANCE = 0.05
"""Beyond the recorded interval: cards limited by their power vary by 5 % either way
(notes/gemm_sm90.md), and the rounds of one run do not see all of it."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Quantity:
    """One number of a row that a check compares.

    Attributes:
        name: what it is.
        value: the more, the better for us.
        least: the value that the row's own spread allows.
    """

    name: str
    value: float
    least: float


@dataclass(frozen=True)
class Finding:
    """A quantity that is worse than its record, or that one of the runs lacks.

    Attributes:
        benchmark, case, contender, quantity: what it is of.
        recorded: its value in the record.
        least: what would still pass.
        measured: its value now, None where this run has none.
    """

    benchmark: str
    case: str
    contender: str
    quantity: str
    recorded: float
    least: float
    measured: float | None

    @property
    def worse(self) -> bool:
        """Whether it is a loss; a peer that is not installed here is none."""
        if self.measured is None:
            return self.contender.startswith(OURS)
        return self.measured < self.least

    def __str__(self) -> str:
        now = "not measured" if self.measured is None else f"{self.measured:.3f}"
        return (
            f"{self.benchmark}: {self.case}, {self.contender}: {self.quantity} "
            f"{self.recorded:.3f} recorded, at least {self.least:.3f} expected, {now}"
        )


def quantities(row: Row, ours: Row | None) -> Iterator[Quantity]:
    """What a check compares of a row.

    Args:
        row: of a result.
        ours: our row on the same case, if there is one.
    """
    mine = row["contender"].startswith(OURS) or common.is_tile(row["contender"])
    if mine and row["fraction"] is not None:
        slowest = row["fraction"] * row["median"] / row["high"]
        yield Quantity("of the ceiling", row["fraction"], slowest)
    if ours is not None and row["contender"] != OURS:
        least, most = _bounds(row, ours)
        if mine:  # another recipe or tile of ours: the less, the better
            yield Quantity(f"time of {OURS} over it", 1 / row["times_ours"], 1 / most)
        else:
            yield Quantity("time over ours", row["times_ours"], least)
    if mine:
        for name, value in row["extra"].items():
            if name.startswith("times_"):
                least = row["median"] / row["high"] / value
                yield Quantity(f"1 over {name.replace('_', ' ')}", 1 / value, least)


def _bounds(row: Row, ours: Row) -> tuple[float, float]:
    """Of the ratio to our time: its interval over the rounds, else the ends of both spreads."""
    paired = row.get("paired", {}).get(OURS)
    if paired and paired["low"] is not None:
        return paired["low"], paired["high"]
    return row["low"] / ours["high"], row["high"] / ours["low"]


def compared(result: Result) -> dict[tuple[str, str, str], Quantity]:
    """Everything a check compares, by case, contender and name."""
    rows = common.measured(result)
    ours = {row["case"]: row for row in rows if row["contender"] == OURS}
    return {
        (row["case"], row["contender"], each.name): each
        for row in rows
        for each in quantities(row, ours.get(row["case"]))
    }


def findings(measured: Result, record: Result) -> list[Finding]:
    """Every recorded quantity that is worse now or was not measured."""
    now = compared(measured)
    found = []
    for key, old in compared(record).items():
        least, new = old.least * (1 - TOLERANCE), now.get(key)
        if new is None or new.value < least:
            value = None if new is None else new.value
            found.append(Finding(record["name"], *key, old.value, least, value))
    return found


class NoRecordError(Exception):
    """There is nothing to compare with; the message says of what, and how one is made."""


def record_of(name: str, device: str, records: Mapping[tuple[str, str], Result]) -> Result:
    """The newest record of a benchmark on a device.

    Raises:
        NoRecordError: there is none, or it states times alone.
    """
    record = records.get((name, device))
    if record is None:
        known = ", ".join(sorted({on for each, on in records if each == name})) or "no device"
        raise NoRecordError(
            f"no record of {name} on {device} to compare with (there is one of: {known}); make "
            f"one: fusegen bench {name}"
        )
    if not compared(record):
        raise NoRecordError(f"{name} records times alone: they say nothing about another machine")
    return record
