"""One hash per cell over every byte that decides what it computes, and what a library says of it.

A cell has two. The digest of its *sources* covers the C++ and CUDA that its part of the library is
compiled from, as they lie on the disk: CMakeLists.txt computes the same one. The *cell's* digest
covers those sources as they were rendered and the cell's Python; the Python states it. A library
carries both of each cell, so that Python knows a library of another plan, and a library of sources
that were edited on purpose is known from one of sources that were not.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

BUILD_FILE = "CMakeLists.txt"
"""States the flags, so it is among the sources of every cell."""

# CMakeLists.txt has the same pattern. Names with other characters are none of ours.
_INCLUDE = re.compile(rb'\n[ \t]*#[ \t]*include[ \t]*"([A-Za-z0-9_.+-][A-Za-z0-9_./+-]*)"')
_IMPORT = re.compile(rb"\nfrom (\.+)([\w.]*) import (\([^)]*\)|[^\n]*)")
_TABLE = re.compile(rb"fusegen digests\n((?:\w+ [0-9a-f]{64} [0-9a-f]{64}\n)*)\0")

Read = Callable[[str], bytes | None]
"""Content of a file by its path, None where there is no file."""


@dataclass(frozen=True, slots=True)
class Digests:
    """What a library says of one cell.

    Attributes:
        cell: the digest that the cell's Python stated.
        sources: that of the files it was compiled from.
    """

    cell: str
    sources: str


class Tree:
    """Files that refer to each other, each read once.

    Args:
        read: gives the content of one.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._hashes: dict[str, str | None] = {}
        self._names: dict[str, tuple[tuple[str, ...], ...]] = {}

    def digest(self, roots: Iterable[str], *facts: str) -> str:
        """Hash of the facts and of all files that the roots reach; those that are not there count
        as absent."""
        rows = [f"{self._hashes[path]}  {path}" for path in sorted(self._reach(roots))]
        return hashlib.sha256("".join(f"{row}\n" for row in (*facts, *rows)).encode()).hexdigest()

    def _reach(self, roots: Iterable[str]) -> set[str]:
        found: set[str] = set()
        waiting = list(roots)
        while waiting:
            path = waiting.pop()
            if path in found or not self._exists(path):
                continue
            found.add(path)
            for choices in self._names[path]:
                waiting += [name for name in choices if self._exists(name)][:1]
        return found

    def _exists(self, path: str) -> bool:
        if path not in self._hashes:
            data = self._read(path)
            self._hashes[path] = None if data is None else hashlib.sha256(data).hexdigest()
            self._names[path] = () if data is None else tuple(_named(path, b"\n" + data))
        return self._hashes[path] is not None


def _named(path: str, data: bytes) -> Iterator[tuple[str, ...]]:
    """What a file refers to: for each name the places where it may be, the first one counts."""
    folder = posixpath.dirname(path)
    if not path.endswith(".py"):
        for match in _INCLUDE.finditer(data):
            name = match[1].decode()
            yield posixpath.normpath(posixpath.join(folder, name)), posixpath.normpath(name)
        return
    for match in _IMPORT.finditer(data):
        package = posixpath.join(
            folder, *[".."] * (len(match[1]) - 1), *match[2].decode().split(".")
        )
        package = posixpath.normpath(package)
        yield f"{package}.py", posixpath.normpath(f"{package}/__init__.py")
        for word in re.findall(r"\w+", match[3].decode()):
            yield (posixpath.normpath(f"{package}/{word}.py"),)


def sources_digest(csrc: Tree, units: Iterable[str], gencode: str) -> str:
    """The digest of a cell's sources.

    Args:
        csrc: files by their path below `csrc`.
        units: that the cell is compiled from.
        gencode: what they are compiled for.
    """
    return csrc.digest((BUILD_FILE, *units), f"gencode {gencode}")


def cell_digest(bundle: Tree, cell: str, sources: str) -> str:
    """The digest of a cell.

    Args:
        bundle: files by their path in the bundle; the cell's own without its digest.
        cell: its name.
        sources: the digest of its sources; empty where it has none.
    """
    folders = ("", "reference/", "sharding/")
    return bundle.digest([f"{folder}{cell}.py" for folder in folders], f"sources {sources}")


def table(cells: Mapping[str, Digests]) -> str:
    """C++ string literals, a line per cell: what `digests.cpp` puts into the library."""
    rows = [f'"{name} {each.cell} {each.sources}\\n"\n' for name, each in cells.items()]
    return "".join(rows) or '""\n'


def read_library(library: Path) -> dict[str, Digests] | None:
    """What a library says of its cells by name, None where it says nothing that can be read.

    The whole file is searched, which takes a tenth of a second for a large one; bundles look the
    table up where it stands.
    """
    found = _TABLE.search(library.read_bytes())
    if found is None:
        return None
    rows = [line.split(" ") for line in found[1].decode().splitlines()]
    return {name: Digests(cell, sources) for name, cell, sources in rows}
