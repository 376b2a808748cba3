"""Command lines that messages tell people to run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..ir.naming import Cell
from ..spec.serving import ALL
from .lock import LockError, read_lock


def is_fat(folder: Path) -> bool:
    """Whether a folder is a bundle that chooses among those in it, as far as its lock says so."""
    try:
        lock = read_lock(folder)
    except LockError:
        return False
    return lock is not None and lock.selection.get("arch") == ALL


def whole(bundle: Path) -> Path:
    """The bundle, or the fat one that it is in, with which alone it is made anew."""
    return bundle.parent if is_fat(bundle.parent) else bundle


def removal(cell: Cell, arch: str, bundle: Path) -> str:
    """The command that takes one cell out of a bundle."""
    names = f"--arch {arch} --module {cell.module} --recipe {cell.recipe}"
    names += "".join(f" --option {word}" for word in cell.options)
    return f"fusegen generate --remove {names}{out_option(bundle.parent)}"


def regeneration(bundles: Sequence[Path], folders: Mapping[str, Sequence[Path]]) -> str:
    """The command, or the lines of commands, that bring these bundles up to date.

    Args:
        folders: folders given on the command line by option, such as `--specs`.
    """
    extra = "".join(
        f" {option} {_word(path)}" for option, paths in folders.items() for path in paths
    )
    parents = dict.fromkeys(whole(bundle).parent for bundle in bundles)
    return "\n".join(f"fusegen generate{out_option(parent)}{extra}" for parent in parents)


def out_option(parent: Path) -> str:
    """`--out` where the bundles are not in the default folder."""
    return "" if parent == Path("generated") else f" --out {_word(parent)}"


def _word(path: Path) -> str:
    return shlex.quote(str(path))
