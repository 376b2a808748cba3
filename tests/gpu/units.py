"""Units of a bundle and the hash that each is known by.

A unit is a file of kernels (csrc/kernels/*.cu) or a launcher (csrc/*.cpp). It is known by the hash
of its text with its own headers put in place and comments taken out, so that a comment makes
nothing stale and a changed header makes stale exactly what uses it.
"""

from __future__ import annotations

import hashlib
import re
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


def expand(path: Path, root: Path, seen: set[Path] | None = None) -> list[str]:
    """Lines of a unit with quoted includes put in place, once each, and white space normalised.

    Args:
        path: the file.
        root: where includes are looked for besides the folder of the file that names them.
        seen: headers already in place; every header here has `#pragma once`.

    Raises:
        LedgerError: an include that leads nowhere.
    """
    seen = set() if seen is None else seen
    lines: list[str] = []
    for line in strip_comments(path.read_text("utf-8")).splitlines():
        match = _INCLUDE.match(line)
        if match is None:
            words = " ".join(line.split())
            lines += [words] if words else []
            continue
        header = _find(match[1], path.parent, root)
        if header is None:
            raise LedgerError(
                f'{path}: #include "{match[1]}" is in neither {path.parent} nor {root}'
            )
        if header not in seen:
            seen.add(header)
            lines += expand(header, root, seen)
    return lines


def _find(name: str, *folders: Path) -> Path | None:
    paths = ((folder / name).resolve() for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def hash_units(folder: Path) -> dict[str, str]:
    """Hash of every kernel and launcher of a bundle, by its path below csrc/."""
    csrc = folder / "csrc"
    launchers = (path for path in csrc.glob("*.cpp") if path.name != "digests.cpp")
    paths = sorted([*csrc.glob("kernels/*.cu"), *launchers])
    return {
        str(path.relative_to(csrc)): hashlib.sha256(
            "\n".join(expand(path, csrc)).encode()
        ).hexdigest()
        for path in paths
    }
