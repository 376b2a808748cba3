"""What a library is built from: `csrc/sources.cmake`, which its CMakeLists.txt reads, too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..spec.fields import GENCODE
from ..spec.files import read
from .toolchain import BuildError

DIGESTS_SOURCE: Final = "digests.cpp"
EXPORTS: Final = "exports.map"


@dataclass(frozen=True, slots=True)
class CellUnits:
    """A cell: its digest, and the units it is compiled from."""

    digest: str
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sources:
    """What `sources.cmake` says. Paths are relative to `csrc`, separated by `/`."""

    namespace: str
    gencode: str
    cells: Mapping[str, CellUnits]

    @property
    def host_sources(self) -> tuple[str, ...]:
        """The launchers."""
        return self._units(".cpp")

    @property
    def kernel_sources(self) -> tuple[str, ...]:
        """The kernels, each once."""
        return self._units(".cu")

    def _units(self, suffix: str) -> tuple[str, ...]:
        units = (unit for cell in self.cells.values() for unit in cell.units)
        return tuple(dict.fromkeys(unit for unit in units if unit.endswith(suffix)))

    @property
    def code(self) -> str:
        """The architecture that the kernels are compiled for, such as "sm_90a"."""
        return self.gencode.rpartition("code=")[2].strip("[]").partition(",")[0]


_RESTORE: Final = "restore it from version control, or delete it and make the bundle again"

_TOKEN: Final = re.compile(
    r"(?P<blank>[ \t\r\n]+|#[^\n]*)|(?P<paren>[()])"
    r'|"(?P<quoted>[^"\\$;]*)"|(?P<bare>[^\s()"#\\$;]+)'
)
_RULES: Final[Mapping[str, tuple[bool, str, str]]] = {
    # name: (is a list, pattern of a value, how people call such a value)
    "FUSEGEN_NAMESPACE": (False, r"[A-Za-z_][A-Za-z0-9_]*", "an identifier"),
    "FUSEGEN_GENCODE": (
        False,
        GENCODE.strip("^$"),
        "arch=compute_<n>,code=sm_<n> or arch=compute_<n>,code=[sm_<n>,compute_<n>]",
    ),
    "FUSEGEN_CELLS": (True, r"[A-Za-z_][A-Za-z0-9_]*", "an identifier"),
}
_CELL_RULES: Final[Mapping[str, tuple[bool, str, str]]] = {
    "FUSEGEN_DIGEST_": (False, r"[0-9a-f]{64}", "a hash of 64 hexadecimal digits"),
    "FUSEGEN_UNITS_": (
        True,
        r"(\w[\w.-]*/)*\w[\w.-]*\.(cpp|cu)",
        "a relative path to a .cpp or .cu file",
    ),
}
"""The same for what is stated of each cell, by the begin of the name."""


def read_sources(path: Path) -> Sources:
    """Read `sources.cmake`: statements `set(NAME value...)`, comments, nothing else.

    Raises:
        BuildError: naming file, line and column, what was expected and what was found.
    """
    try:
        text = read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BuildError(f"{path}: byte {error.start} is not UTF-8; {_RESTORE}") from None
    except FileNotFoundError:
        raise BuildError(
            f"{path} does not exist: this is not a bundle with kernels; one for cpu has nothing to "
            "build and runs as it is"
        ) from None
    values = dict(_statements(path, text))
    for name in _rules(values.get("FUSEGEN_CELLS", ())):
        if name not in values:
            raise BuildError(
                f"{path}: expected a statement set({name} ...), found none; {_RESTORE}"
            )
    return Sources(
        namespace=values["FUSEGEN_NAMESPACE"][0],
        gencode=values["FUSEGEN_GENCODE"][0],
        cells={
            cell: CellUnits(values[f"FUSEGEN_DIGEST_{cell}"][0], values[f"FUSEGEN_UNITS_{cell}"])
            for cell in values["FUSEGEN_CELLS"]
        },
    )


def _rules(cells: Sequence[str]) -> dict[str, tuple[bool, str, str]]:
    """The rules of all statements of a file that names these cells."""
    of_cells = {f"{begin}{cell}": rule for cell in cells for begin, rule in _CELL_RULES.items()}
    return {**_RULES, **of_cells}


def _statements(path: Path, text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The statements of the file, each checked against its rule."""
    tokens = _tokens(path, text)
    rules = _rules(())
    seen: set[str] = set()
    for start, word in tokens:
        if word != "set" or next(tokens, (0, ""))[1] != "(":
            raise _malformed(path, text, start, "expected `set(`", word)
        at, name = next(tokens, (start, "the end of the file"))
        if name not in rules or name in seen:
            expected = "expected one of " + ", ".join(n for n in rules if n not in seen)
            raise _malformed(path, text, at, expected, name)
        seen.add(name)
        values: list[str] = []
        for at, value in tokens:
            if value == ")":
                break
            if not re.fullmatch(rules[name][1], value) or value in values:
                expected = f"{name}: expected {rules[name][2]}, each once"
                raise _malformed(path, text, at, expected, value)
            values.append(value)
        else:
            raise _malformed(path, text, len(text), f"{name}: expected `)`", "the end of the file")
        if not rules[name][0] and len(values) != 1:
            raise _malformed(path, text, at, f"{name}: expected one value", f"{len(values)}")
        if name == "FUSEGEN_CELLS":
            rules = _rules(values)
        yield name, tuple(values)


def _tokens(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Offset and text of every word and parenthesis."""
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _malformed(path, text, at, "expected a word, a string or a parenthesis", text[at])
        if match["blank"] is None:
            yield at, next(v for v in match.group("paren", "quoted", "bare") if v is not None)
        at = match.end()


def _malformed(path: Path, text: str, offset: int, expected: str, found: str) -> BuildError:
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    return BuildError(f"{path}:{line}:{column}: {expected}, found {found!r}; {_RESTORE}")


def check_files(csrc: Path, sources: Sources) -> None:
    """Raises BuildError where a file that is compiled or linked does not exist."""
    names = (*sources.host_sources, *sources.kernel_sources, DIGESTS_SOURCE, EXPORTS)
    missing = [name for name in names if not (csrc / name).is_file()]
    if missing:
        raise BuildError(
            f"{csrc / 'sources.cmake'} needs files that do not exist: {', '.join(missing)};"
            " restore them from version control, or make the bundle again"
        )
