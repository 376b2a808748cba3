"""What rendering hands to publishing: texts by relative path, each with its owners and inputs."""

from __future__ import annotations

import enum
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

RESERVED_PREFIXES = ("fusegen.lock", ".fusegen")
"""First path components that publishing keeps for itself; no rendered file may use them."""


class RenderError(Exception):
    """A rendered file is not publishable; the message names it, its inputs and the remedy."""


class PathError(ValueError):
    """A path that may not stand in a bundle; the message names it and the reason."""


class ArtifactKind(enum.Enum):
    """Decides how a file is checked, formatted and marked as generated."""

    PYTHON = "python"
    CUDA = "cuda"
    """C++ and CUDA sources and headers: .cu, .cuh, .h, .cpp."""
    CMAKE = "cmake"
    MARKDOWN = "markdown"
    STATIC = "static"
    """A copy, byte for byte; carries no header, owned by the lock alone."""
    JSON = "json"
    """Has no comment syntax, so it carries no header; owned by the lock alone."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file of a bundle.

    Attributes:
        text: the whole content, written as UTF-8 with the newlines it holds.
        kind: how to check, format and mark it.
        owners: the cells that need the file; it is removed with the last of them.
        inputs: the specs and templates it came from, relative and `/`-separated.
    """

    text: str
    kind: ArtifactKind
    owners: tuple[str, ...]
    inputs: tuple[str, ...]

    @property
    def data(self) -> bytes:
        """The bytes that stand on disk once the file is published."""
        return self.text.encode("utf-8")


class FileSet(Mapping[str, Artifact]):
    """Files of one bundle by relative path, iterated in sorted order.

    Raises:
        RenderError: a path is given twice, leaves the bundle, is reserved, or meets another one on
            a file system that ignores case or that cannot hold a file and a folder of one name.
    """

    __slots__ = ("_files",)

    @property
    def inputs(self) -> frozenset[str]:
        """The specs and templates that its files are made from."""
        return frozenset(name for artifact in self.values() for name in artifact.inputs)

    def __init__(self, files: Iterable[tuple[str, Artifact]] = ()) -> None:
        collected: dict[str, Artifact] = {}
        for path, artifact in files:
            try:
                check_path(path)
            except PathError as error:
                raise RenderError(f"{error} ({_from(artifact)})") from None
            if path in collected:
                raise RenderError(
                    f"{path}: rendered twice, {_from(collected[path])} and {_from(artifact)}; give "
                    "one of them another name or render the file once with both owners"
                )
            collected[path] = artifact
        self._files = dict(sorted(collected.items()))
        _refuse_collisions(self._files)

    def __getitem__(self, path: str) -> Artifact:
        return self._files[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __repr__(self) -> str:
        return f"FileSet({list(self._files)})"


def check_path(path: str) -> None:
    """Accept `path` only if it names a file inside a bundle, the same one on every system.

    Raises:
        PathError: absolute, empty, with `.` or `..` or a backslash, or reserved for publishing.
    """
    parts = path.split("/")
    if not path or path.startswith("/"):
        raise PathError(f"{path!r}: expected a path relative to the bundle, such as csrc/gemm.cu")
    if any(part in ("", ".", "..") for part in parts):
        raise PathError(f"{path!r}: a path may not hold empty, `.` or `..` components")
    if any(char in path for char in '\\:*?"<>|') or not path.isprintable():
        raise PathError(f"{path!r}: holds a character that not every file system can store")
    if parts[0].casefold().startswith(RESERVED_PREFIXES):
        raise PathError(f"{path!r}: {' and '.join(RESERVED_PREFIXES)} belong to publishing itself")


def _refuse_collisions(files: Mapping[str, Artifact]) -> None:
    """Compare every file and every folder above it as a case-blind file system would."""
    spelled: dict[str, str] = {}
    for path, artifact in files.items():
        for place in (path, *_parents(path)):
            first = spelled.setdefault(_fold(place), place)
            if first != place:
                raise RenderError(
                    f"{path}: {place} and {first} are one name where case is ignored "
                    f"({_from(artifact)}); rename one of them"
                )
        for parent in _parents(path):
            if parent in files:
                raise RenderError(
                    f"{path}: {parent} is a file ({_from(files[parent])}) and would also have to "
                    "be a folder; rename one of them"
                )


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]


def _fold(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()


def _from(artifact: Artifact) -> str:
    return "from " + (", ".join(artifact.inputs) or "no recorded input")
