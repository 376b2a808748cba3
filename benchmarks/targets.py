"""What results are to reach (targets.yaml), beside what they do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pairs
import yaml
from common import OURS, Result

TARGETS = Path(__file__).with_suffix(".yaml")
DEVICE = "H200"  # whose results are looked at; another GPU's where a benchmark has none there
Row = Mapping[str, Any]
Rows = Mapping[tuple[str, str], Row]  # by case and contender


@dataclass(frozen=True)
class Target:
    """One number that a benchmark is to reach on each of some cases.

    Attributes:
        title: what the number is.
        benchmark: whose results have it.
        value, of: which number, as targets.yaml explains.
        bounds: by case.
        least: whether the number is to be at least its bound, else at most.
        contender: whose number.
    """

    title: str
    benchmark: str
    value: str
    of: Any
    bounds: Mapping[str, float]
    least: bool
    contender: str

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Target:
        """Read an entry of targets.yaml.

        Raises:
            ValueError: it has both kinds of bounds, or neither, or a word that is none of its own.
        """
        bounds = [kind for kind in ("at_least", "at_most") if kind in entry]
        known = {"title", "benchmark", "value", "of", "contender", *bounds}
        if len(bounds) != 1 or not entry.keys() <= known:
            raise ValueError(
                f"{TARGETS.name}: {entry.get('title')}: expected one of at_least and at_most, and "
                f"besides them {', '.join(sorted(known - {*bounds}))}"
            )
        return cls(
            title=entry["title"],
            benchmark=entry["benchmark"],
            value=entry["value"],
            of=entry.get("of"),
            bounds=entry[bounds[0]],
            least=bounds == ["at_least"],
            contender=entry.get("contender", OURS),
        )

    def reached(self, case: str, rows: Rows) -> float:
        """The number of a case.

        Raises:
            KeyError: the result has no such row, or the row no such number.
        """
        row = rows[case, self.contender]
        if self.value == "fraction":
            return float(row["fraction"])
        if self.value == "floor":
            return float(row["floor"] / row["median"])
        if self.value == "time":
            paired = row.get("paired", {}).get(self.of)
            if paired:
                return float(paired["median"])
            return pairs.between(row["samples"], rows[case, self.of]["samples"]).median
        if self.value == "rate":
            return float(row["rate"] / rows[case.replace(*self.of), self.contender]["rate"])
        if self.value == "us":
            return float(1000 * row["median"])
        number = row["extra"][self.value]
        return float(number / rows[case, self.of]["extra"][self.value] if self.of else number)

    def met(self, number: float, bound: float) -> bool:
        """Whether a number, as it is shown to three decimals, is on the right side of its bound."""
        shown = round(number, 3)
        return shown >= bound if self.least else shown <= bound


@dataclass(frozen=True)
class Reached:
    """What came of a target on one case, on a device; no number: its row is missing or failed."""

    target: Target
    case: str
    bound: float
    number: float | None
    device: str

    @property
    def met(self) -> bool:
        """Whether there is a number, and it is on the right side of its bound."""
        return self.number is not None and self.target.met(self.number, self.bound)


def load(path: Path = TARGETS) -> list[Target]:
    """All targets, in the file's order."""
    return [Target.parse(entry) for entry in yaml.safe_load(path.read_text("utf-8"))]


def compare(targets: Iterable[Target], results: Iterable[Result]) -> Iterator[Reached]:
    """Every target beside the results of its benchmark on `DEVICE`, or of a case that none has
    there, on another GPU.

    Those of a benchmark that has no result on one have no number; none has where no benchmark has.
    """
    on_gpus = [result for result in results if result["environment"]["device"] != "cpu"]
    found: dict[str, list[Result]] = {}
    for result in sorted(on_gpus, key=_is_wanted, reverse=True):
        found.setdefault(result["name"], []).append(result)
    for target in targets if found else ():
        given = found.get(target.benchmark, [])
        for case, bound in target.bounds.items():
            reached = [_reached(target, case, bound, each) for each in given]
            none = Reached(target, case, bound, None, reached[0].device if reached else "")
            yield next((each for each in reached if each.number is not None), none)


def _reached(target: Target, case: str, bound: float, result: Result) -> Reached:
    rows = {(row["case"], row["contender"]): row for row in result["rows"]}
    device = result["environment"]["device"].removeprefix("NVIDIA ")
    return Reached(target, case, bound, _number(target, case, rows), device)


def _is_wanted(result: Result) -> bool:
    return DEVICE in result["environment"]["device"]


def _number(target: Target, case: str, rows: Rows) -> float | None:
    try:
        return target.reached(case, rows)
    except KeyError:
        return None
