"""Units of a bundle and the hash that each is known by.

A unit is a file of kernels (csrc/kernels/*.cu) or a launcher (csrc/*.cpp). It is known by the hash
of its text with its own headers put in place and comments taken out, so that a comment makes
nothing stale and a changed header makes stale exactly what uses it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from entries import LedgerError

# Comments are matched beside what may hold their signs without being one: strings, raw strings
# and character constants. A quote between digits is C++'s digit separator, no constant.
_TOKEN = re.compile(
    r"""(?P<raw>R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)")"""
    r"""|(?P<string>"(?:\\.|[^"\\\n])*")"""
    r"""|(?P<character>(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])*')"""
    r"""|(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)""",
    re.DOTALL,
)
_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')


def strip_comments(text: str) -> str:
    """C++ without comments; each becomes one space, as the language says."""
    return _TOKEN.sub(lambda match: " " if match["comment"] else match[0], text)


@dataclass(frozen=True)
class Line:
    """A line of a file that says something: its words, or the header that it includes."""

    words: str
    header: Path | None = None


@dataclass(frozen=True)
class Sources:
    """Files below a folder of sources as they are now: each is read once, however many include it.

    Attributes:
        root: where includes are looked for besides the folder of the file that names them.
    """

    root: Path
    _read: dict[Path, tuple[Line, ...]] = field(default_factory=dict)

    def expand(self, path: Path, seen: set[Path] | None = None) -> list[str]:
        """Lines of a unit with quoted includes put in place, and white space normalised.

        Args:
            path: the file.
            seen: headers already in place; every header here has `#pragma once`.

        Raises:
            LedgerError: an include that leads nowhere.
        """
        seen = set() if seen is None else seen
        lines: list[str] = []
        for line in self._lines(path):
            if line.header is None:
                lines.append(line.words)
            elif line.header not in seen:
                seen.add(line.header)
                lines += self.expand(line.header, seen)
        return lines

    def _lines(self, path: Path) -> tuple[Line, ...]:
        if path not in self._read:
            text = strip_comments(path.read_text("utf-8"))
            kept = (line for line in text.splitlines() if line.strip())
            self._read[path] = tuple(self._line(line, path) for line in kept)
        return self._read[path]

    def _line(self, text: str, path: Path) -> Line:
        words = " ".join(text.split())
        match = _INCLUDE.match(text)
        if match is None:
            return Line(words)
        header = _find(match[1], path.parent, self.root)
        if header is None:
            raise LedgerError(
                f'{path}: #include "{match[1]}" is in neither {path.parent} nor {self.root}'
            )
        return Line(words, header)


def _find(name: str, *folders: Path) -> Path | None:
    paths = ((folder / name).resolve() for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def hash_units(folder: Path) -> dict[str, str]:
    """Hash of every kernel and launcher of a bundle, by its path below csrc/."""
    csrc = folder / "csrc"
    launchers = (path for path in csrc.glob("*.cpp") if path.name != "digests.cpp")
    paths = sorted([*csrc.glob("kernels/*.cu"), *launchers])
    sources = Sources(csrc)
    return {
        str(path.relative_to(csrc)): hashlib.sha256(
            "\n".join(sources.expand(path)).encode()
        ).hexdigest()
        for path in paths
    }
