"""What a checkout records of modules: which ran on a GPU, and what benchmarks measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..emit.report.page import Item, Table, TableRow
from ..families.gpus import gpu_called
from ..ir.naming import Cell
from ..publish import paths
from ..spec.arch import ArchSpec
from ..spec.files import resolve
from ..spec.usage import UsageError

# ---- the ledger, as README.md prints it


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a bundle's runs on a GPU.

    Attributes:
        cells: by name, without options, how each ran; none where nothing is known.
        run: where and when the bundle ran last.
    """

    cells: Mapping[str, str] = field(default_factory=dict)
    run: str = ""


_UNKNOWN = Evidence()
_MATRIX = re.compile(r"<!-- matrix:begin -->\n(.*?)<!-- matrix:end -->", re.DOTALL)


def evidence(bundle: Path) -> Evidence:
    """What the support matrix of the checkout says of one of its own bundles."""
    root = paths.checkout()
    if root is None or resolve(bundle).parent != root / "generated":
        return _UNKNOWN
    return _matrix(root / "README.md").get(resolve(bundle).name, _UNKNOWN)


@cache
def _matrix(readme: Path) -> Mapping[str, Evidence]:
    """The first table of the matrix by architecture, and the line below it of each."""
    found = _MATRIX.search(readme.read_text(encoding="utf-8"))
    lines = found[1].splitlines() if found else []
    runs = dict(re.findall(r"^- `(\w+)`: (.*)$", "\n".join(lines), re.MULTILINE))
    rows = [[part.strip(" `") for part in line.split("|")[1:-1]] for line in lines]
    table = [*takewhile(bool, rows)]
    if not table:
        return {}
    (_, _, *archs), _, *body = table
    return {
        arch: Evidence(
            {
                str(Cell(module, recipe)): ", ".join(states[place].split(", ")[1:])
                for module, recipe, *states in body
            },
            runs.get(arch, ""),
        )
        for place, arch in enumerate(archs)
    }


# ---- benchmarks

OURS = "fusegen"
WHOLE = {"mlp": "grouped_mlp", "grouped": "grouped_linear", "dense": "linear"}
"""Benchmarks of one module; of others, cases begin with the name of theirs."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a benchmark measured on one day.

    Attributes:
        file: that it is in.
        name: of the benchmark.
        device: that it ran on.
        date, torch, commit: of the run.
        rows: one per case and contender, as the file has them.
    """

    file: str
    name: str
    device: str
    date: str
    torch: str
    commit: str
    rows: tuple[Mapping[str, Any], ...]


_FACTS = ("device", "date", "torch", "commit")


def records(folder: Path | None) -> tuple[Record, ...]:
    """The latest record of every benchmark on every device, in the order of their names.

    Args:
        folder: of the records; the checkout's own, if there is one, if None.

    Raises:
        UsageError: the folder is not there, or a file in it is no record.
    """
    if folder is None:
        root = paths.checkout()
        folder = root / "benchmarks" / "results" if root else None
        if folder is None or not folder.is_dir():
            return ()
    elif not folder.is_dir():
        raise UsageError(f"--results {folder}: there is no such folder")
    latest: dict[tuple[str, str], Record] = {}
    for path in sorted(folder.glob("*.json")):
        record = _read(path)
        key = (record.name, record.device)
        if key not in latest or latest[key].date <= record.date:
            latest[key] = record
    return tuple(latest[key] for key in sorted(latest))


def _read(path: Path) -> Record:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        facts, rows = data["environment"], data["rows"]
        measured = tuple(_checked(row) for row in rows if "median" in row)
        device, date, torch, commit = (str(facts.get(key, "")) for key in _FACTS)
        return Record(path.name, str(data["name"]), device, date, torch, commit, measured)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path}: is no record of a benchmark ({type(error).__name__}: {error}); take it out "
            "of the folder, or name another one with --results"
        ) from None


def _checked(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of a record.  Raises ValueError where it has not what is shown of it."""
    if not all(isinstance(row[key], str) for key in ("case", "contender", "unit")):
        raise ValueError("a row's case, contender and unit are text")
    if not all(isinstance(row[key], int | float) for key in ("median", "low", "high")):
        raise ValueError("a row's median, low and high are numbers")
    return row


Provided = Sequence[tuple[Cell, ArchSpec]]
"""Cells, and the architecture that each is for."""


def measured_tables(known: Iterable[Record], provided: Provided) -> tuple[Table, ...]:
    """A table per record of what was measured of cells on the GPU that they are made for."""
    made = ((record, tuple(_rows(record, provided))) for record in known)
    heads = ("case", "who", "median", "least to most")
    return tuple(Table(_caption(r), heads, rows, folded=True) for r, rows in made if rows)


def _caption(record: Record) -> str:
    where = f"{record.device}, {record.date[:10]}, torch {record.torch}"
    return f"{record.name}: {where}, at commit {record.commit} ({record.file})"


def _rows(record: Record, provided: Provided) -> Iterator[TableRow]:
    """Cases in which a cell took part, with everybody who did."""
    gpu = gpu_called(record.device)
    own = {cell for cell, arch in provided if gpu and arch.capability == gpu.capability}
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for row in record.rows:
        cases.setdefault(row["case"], []).append(row)
    for case, rows in cases.items():
        module = WHOLE.get(record.name, case.split(" ")[0])
        shown = [row for row in rows if not _is_ours(row) or _cell_of(row, module) in own]
        if any(map(_is_ours, shown)):
            longest = max(float(row["median"]) for row in shown) or 1.0
            yield from (_row(case, row, longest) for row in shown)


def _is_ours(row: Mapping[str, Any]) -> bool:
    return str(row["contender"]).split(" ")[0] == OURS


def _cell_of(row: Mapping[str, Any], module: str) -> Cell:
    """The cell that a row of ours is of, by the words behind our name; bf16 goes unsaid."""
    _, *words = row["contender"].split(" ")
    recipe, *options = words or ["bf16"]
    return Cell(module, recipe, tuple(options))


def _row(case: str, row: Mapping[str, Any], longest: float) -> TableRow:
    unit = row["unit"]
    bar = "ours" if _is_ours(row) else "theirs"
    share = round(100 * float(row["median"]) / longest)
    return TableRow(
        Item(case),
        (
            Item(row["contender"]),
            Item(f"{row['median']:.4g} {unit}", style=bar, share=share),
            Item(f"{row['low']:.4g} to {row['high']:.4g} {unit}"),
        ),
    )
