"""The support matrix of README.md: what runs where, under which recipe, on what evidence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bundles import Code
from entries import Entry, LedgerError, State, combine, state_of

BEGIN = "<!-- matrix:begin -->"
END = "<!-- matrix:end -->"


@dataclass(frozen=True)
class Cell:
    """A module under a recipe in one bundle, as the bundle's README states it."""

    module: str
    recipe: str
    status: str
    name: str


_ROW = re.compile(
    r"^\| \[`(?P<name>\w+)`\]\([^)]*\) \| `\w+` \| (?P<recipe>\w+) \| (?P<status>\w+)", re.MULTILINE
)


def read_cells(readme: str) -> list[Cell]:
    """Rows of the table of modules of a bundle's README."""
    return [
        Cell(match["name"].split("__")[0], match["recipe"], match["status"], match["name"])
        for match in _ROW.finditer(readme)
    ]


def read_owners(lock: str) -> dict[str, set[str]]:
    """Units of every cell, from a bundle's lock."""
    owners: dict[str, set[str]] = {}
    for path, record in json.loads(lock)["files"].items():
        if path.startswith("csrc/") and path.endswith((".cu", ".cpp")):
            for owner in record["owners"]:
                owners.setdefault(owner, set()).add(path.removeprefix("csrc/"))
    return owners


@dataclass(frozen=True)
class BundleFacts:
    """All that the matrix says of one bundle."""

    arch: str
    cells: tuple[Cell, ...]
    owners: Mapping[str, set[str]]
    hashes: Mapping[str, str]
    entries: Mapping[str, Entry]

    def evidence(self, cell: Cell) -> str:
        """Why somebody should believe that this cell works."""
        if not self.hashes:
            return "reference"
        # A cell without kernels of its own passes tensors through.
        if not self._units(cell.name):
            return f"{cell.status}, no kernels"
        words = {State.CURRENT: self.ran, State.STALE: "stale", State.NEVER: "compiled only"}
        return f"{cell.status}, {words[self.state(cell.name)]}"

    @property
    def ran(self) -> str:
        """How what ran as it is did."""
        ptx = any(entry.code == Code.PTX.value for entry in self.entries.values())
        return "ran as PTX" if ptx else "ran"

    def state(self, cell: str) -> State:
        """Of all units of a cell together."""
        units = {unit: self.hashes[unit] for unit in self._units(cell)}
        return combine(state_of(units, self.entries).values())

    def _units(self, cell: str) -> set[str]:
        return self.owners.get(cell, set()) & self.hashes.keys()

    def run(self) -> str:
        """Where and when the bundle ran last."""
        if not self.hashes:
            return "the PyTorch reference; runs in every test"
        if not self.entries:
            return "compiled only: it has run on no GPU yet"
        latest = max(self.entries.values(), key=lambda entry: entry.date)
        ran = (
            f"{latest.where}, torch {latest.torch}, CUDA {latest.cuda}, {latest.date}; "
            f"{latest.tests} tests; compute-sanitizer: {latest.sanitizer}"
        )
        stale = combine(state_of(self.hashes, self.entries).values()) is State.STALE
        return f"{ran}; some kernels have changed since" if stale else ran


def matrix(facts: Iterable[BundleFacts]) -> str:
    """The support matrix as Markdown: a row per module and recipe, then a line per architecture."""
    columns = sorted(facts, key=lambda bundle: (bundle.arch != "cpu", bundle.arch))
    rows = sorted({(cell.module, cell.recipe) for bundle in columns for cell in bundle.cells})
    heads = ["module", "recipe", *(f"`{bundle.arch}`" for bundle in columns)]
    lines = [table_row(heads), "|" + "---|" * len(heads)]
    for module, recipe in rows:
        shown = [
            next(
                (
                    bundle.evidence(c)
                    for c in bundle.cells
                    if (c.module, c.recipe) == (module, recipe)
                ),
                "not generated",
            )
            for bundle in columns
        ]
        lines.append(table_row([f"`{module}`", f"`{recipe}`", *shown]))
    return "\n".join([*lines, "", *(f"- `{bundle.arch}`: {bundle.run()}" for bundle in columns)])


def table_row(cells: Iterable[str]) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def replace_matrix(readme: str, text: str) -> str:
    """The README with the matrix between its marks.

    Raises:
        LedgerError: the marks are not there, once each and in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise LedgerError(f"README.md: expected {BEGIN} and then {END}, once each")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"
