"""What this process has of each op namespace: which cells, whose they are, which libraries.

Copies of a cell share its ops; a copy that differs is refused.  A library says in the section
`.fusegen`, a line per cell, what it was built from: the digest that the cell's Python
stated then, and one of its sources as they lay on the disk.
"""

from __future__ import annotations

import mmap
import struct
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

_SECTION = b".fusegen\0"
_REGISTRY = "_fusegen_namespaces"
_MUTEX = threading.RLock()


class Built(NamedTuple):
    """A cell in a library: its digest, that of its sources, and where the library is."""

    digest: str
    sources: str
    library: Path


class Namespace:
    """One op namespace in this process, shared by all copies of a bundle.

    Attributes:
        ops: overloads by name.
        library: defines them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: dict[str, Any] = {}
        self.library = torch.library.Library(name, "FRAGMENT")
        self._stated: dict[str, tuple[str, Path]] = {}
        self._loaded: dict[str, Built] = {}
        self._absences: dict[str, torch.library.Library] = {}

    def compiled(self, cell: str) -> bool:
        """Whether a loaded library has the cell."""
        return cell in self._loaded

    def absence(self, cell: str) -> torch.library.Library:
        """What registers errors in the place of kernels; it goes when a library with them comes."""
        if cell not in self._absences:
            self._absences[cell] = torch.library.Library(self.name, "FRAGMENT")
        return self._absences[cell]

    def join(self, cell: str, digest: str, folder: Path, library: Path) -> None:
        """Add a bundle's cell, and load the bundle's library unless its kernels are here.

        Raises:
            ImportError: the library does not fit the cell, or this process has another cell or
                library of the same names.
        """
        with _MUTEX:
            built = read_library(library)
            if built is not None and (cell not in built or built[cell].digest != digest):
                raise ImportError(
                    f"{library} was built from another {cell} than {folder} states now; "
                    f"rebuild it: fusegen build {folder}"
                )
            self._check(cell, digest, folder)
            if built is not None:
                self._load(built, library, folder)
            self._stated.setdefault(cell, (digest, folder))

    def _check(self, cell: str, digest: str, folder: Path) -> None:
        """Refuse a cell that is not the one of this name that this process has."""
        known, home = self._stated.get(cell, (digest, folder))
        if known != digest:
            self._refuse(f"{cell} of {folder}", f"another {cell} in {home}")
        if cell in self._loaded and self._loaded[cell].digest != digest:
            self._refuse(f"{cell} of {folder}", f"another {cell} in {self._loaded[cell].library}")

    def _load(self, built: dict[str, Built], library: Path, folder: Path) -> None:
        """Load a library for all of its cells, if all of them are what this process has."""
        for cell, mine in built.items():
            known, home = self._stated.get(cell, (mine.digest, folder))
            if known != mine.digest:
                self._refuse(f"{library}, for its {cell},", f"another {cell} in {home}")
            theirs = self._loaded.get(cell, mine)
            if theirs[:2] == mine[:2]:
                continue
            if theirs.library == library:
                raise ImportError(f"{library} was rebuilt after it was loaded; restart Python")
            self._refuse(f"{library}, for its {cell},", f"other sources of it in {theirs.library}")
        if built.keys() <= self._loaded.keys():
            return
        for cell in built:
            self._absences.pop(cell, None)
        torch.ops.load_library(library)
        self._loaded = {**built, **self._loaded}

    def _refuse(self, whose: str, other: str) -> None:
        raise ImportError(
            f"op namespace {self.name!r} is taken: this process cannot have {whose} besides "
            f"{other}; regenerate one of the bundles with: fusegen generate --namespace NAME"
        )


def namespace(name: str) -> Namespace:
    """This process's namespace of a name, made by the first copy that asks.

    A module of its own holds them, because copies do not share theirs.
    """
    registry = sys.modules.setdefault(_REGISTRY, types.ModuleType(_REGISTRY))
    known: dict[str, Namespace] = registry.__dict__.setdefault("namespaces", {})
    with _MUTEX:
        return known[name] if name in known else known.setdefault(name, Namespace(name))


def define(
    space: Namespace, name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """An op of tensors alone, the same on every device; the first copy that asks defines it.

    Args:
        space: whose op it is.
        name: of the op there.
        schema: its arguments and results.
        run: what it does.
        fake: the shapes and types of its results, for compilers.
    """
    with _MUTEX:
        if name not in space.ops:
            space.library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
            space.library.impl(name, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{space.name}::{name}", fake, lib=space.library)
            space.ops[name] = getattr(getattr(torch.ops, space.name), name).default
    return space.ops[name]


def read_library(library: Path) -> dict[str, Built] | None:
    """What a library says of its cells, None where there is no library.

    Nothing of it is run, and only a few pages are read.

    Raises:
        ImportError: it is no library that fusegen has built.
    """
    if not library.exists() or library.stat().st_size == 0:
        return None
    try:
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            lines = _section(data).rstrip(b"\0").decode("ascii").splitlines()
        rows = [line.split(" ") for line in lines[1:]]
        return {cell: Built(digest, sources, library) for cell, digest, sources in rows}
    except (ValueError, IndexError, OverflowError, struct.error):
        raise ImportError(
            f"{library} does not say what it was built from; rebuild it: "
            f"fusegen build {library.parents[1]}"
        ) from None


def _section(data: mmap.mmap) -> bytes:
    """The content of our section of a 64-bit, little-endian ELF file.  ValueError without one."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<3H", data, 0x3A)
    # Of each section: name, type, flags, address, offset, size.
    headers = [struct.unpack_from("<2I4Q", data, table + size * i) for i in range(count)]
    start = headers[names][4]
    for name, *_, offset, length in headers:
        if data[start + name : start + name + len(_SECTION)] == _SECTION:
            return data[offset : offset + length]
    raise ValueError("no such section")
