"""The support matrix of README.md: what runs where, under which recipe, on what evidence."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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


def read_manifest(text: str) -> list[Cell]:
    """Cells of which a bundle has digests, without those that have options."""
    rows = json.loads(text)["cells"].items()
    named = ((name, name.split("__"), said) for name, said in sorted(rows))
    return [
        Cell(parts[0], parts[1], said.partition(" ")[0].removesuffix(":"), name)
        for name, parts, said in named
        if len(parts) == 2
    ]


@dataclass(frozen=True)
class BundleFacts:
    """All that the matrix says of one bundle.

    Attributes:
        arch: its architecture.
        cells: that it has files of.
        owners: units of every cell.
        hashes: of the units as they are.
        entries: of the ledger.
        digests: cells that its manifest has.
        others: what is known of bundles that speak for it, which hold more cells or ran as twins,
            each behind the words that it is called by.
        compiled: whether every cell of the architecture was compiled, with those of the manifest.
    """

    arch: str
    cells: tuple[Cell, ...]
    owners: Mapping[str, set[str]]
    hashes: Mapping[str, str]
    entries: Mapping[str, Entry]
    digests: tuple[Cell, ...] = ()
    others: tuple[tuple[str, BundleFacts], ...] = ()
    compiled: bool = False

    def evidence(self, cell: Cell) -> str:
        """Why somebody should believe that this cell works."""
        if cell in self.digests:
            return self._of_digest(cell)
        if not self.hashes:
            return "reference"
        # A cell without kernels of its own passes tensors through.
        if not self._units(cell.name):
            return f"{cell.status}, no kernels"
        return f"{cell.status}, {self.said(cell.name)}"

    def _of_digest(self, cell: Cell) -> str:
        """Of one without files here; others may have some."""
        if cell.status == "unsupported":
            return cell.status
        never = "compiled only" if self.compiled else "generated only"
        return f"{cell.status}, {self._elsewhere(cell.name) or never}"

    def said(self, cell: str) -> str:
        """What ran of a cell with kernels, in few words."""
        state = self.state(cell)
        if state is State.NEVER:
            return self._elsewhere(cell) or "compiled only"
        ran = self._ran(self._units(cell))
        return f"{ran}, changed since" if state is State.STALE else ran

    def _elsewhere(self, cell: str) -> str:
        """What ran of the cell in the others; empty where nothing did."""
        ran = (o.said(cell) for _, o in self.others if o.state(cell) is not State.NEVER)
        return next(ran, "")

    @property
    def ran(self) -> str:
        """How and where its units ran."""
        return self._ran(self.entries)

    def _ran(self, units: Iterable[str]) -> str:
        found = {self.entries[unit].ran for unit in units if unit in self.entries}
        return " and ".join(sorted(found))

    def state(self, cell: str) -> State:
        """Of all units of a cell together; what a launcher calls may have run for other cells."""
        units = {unit: self.hashes[unit] for unit in self._units(cell)}
        if any(unit.endswith(".cpp") and unit not in self.entries for unit in units):
            return State.NEVER
        return combine(state_of(units, self.entries).values())

    def _units(self, cell: str) -> set[str]:
        return self.owners.get(cell, set()) & self.hashes.keys()

    def run(self) -> str:
        """Where and when the bundle ran last, and what speaks for it."""
        if not self.hashes:
            return "the PyTorch reference; runs in every test"
        others = (f"{words} {other.run()}" for words, other in self.others if other.entries)
        return "; ".join([self._run(), *others])

    def _run(self) -> str:
        if not self.entries:
            return "compiled only: it has run on no GPU yet"
        runs = sorted({(entry.date, entry.tests): entry for entry in self.entries.values()}.items())
        (date, tests), first = runs[0]
        ran = f"{first.where}, torch {first.torch}, CUDA {first.cuda}, {date}; {tests} tests"
        # Later runs are of what had changed, or of all: see `ledger.py test --changed`.
        later: Counter[str] = Counter()
        for (on, more), entry in runs[1:]:
            elsewhere = "" if entry.device == first.device else f" ({entry.where})"
            later[f"{on}{elsewhere}"] += more
        for when, more in later.items():
            ran += f", and {more} of units that changed by {when}"
        ran += f"; compute-sanitizer: {runs[-1][1].sanitizer}"
        states = {*state_of(self.hashes, self.entries).values()}
        said = {State.STALE: "some kernels have changed since", State.NEVER: "some never ran"}
        return "; ".join([ran, *(words for state, words in said.items() if state in states)])


def matrix(facts: Iterable[BundleFacts]) -> str:
    """The support matrix as Markdown: a row per module and recipe, then a line per architecture."""
    columns = sorted(facts, key=lambda bundle: _place(bundle.arch))
    shown_of = {bundle.arch: (*bundle.cells, *bundle.digests) for bundle in columns}
    rows = sorted({(cell.module, cell.recipe) for cells in shown_of.values() for cell in cells})
    heads = ["module", "recipe", *(f"`{bundle.arch}`" for bundle in columns)]
    lines = [table_row(heads), "|" + "---|" * len(heads)]
    for module, recipe in rows:
        shown = [
            next(
                (
                    bundle.evidence(c)
                    for c in shown_of[bundle.arch]
                    if (c.module, c.recipe) == (module, recipe)
                ),
                "not generated",
            )
            for bundle in columns
        ]
        lines.append(table_row([f"`{module}`", f"`{recipe}`", *shown]))
    return "\n".join([*lines, "", *(f"- `{bundle.arch}`: {bundle.run()}" for bundle in columns)])


def _place(arch: str) -> tuple[int, str]:
    """In the order of compute capabilities; what has none, the CPU, is the first."""
    digits = re.search(r"\d+", arch)
    return (int(digits[0]) if digits else 0, arch)


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
