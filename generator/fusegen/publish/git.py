"""What publishing asks git: blobs, what is not committed, merges of three texts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

# Set inside a hook, where they name the repository of the hook, not that of the bundle.
_PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


class GitError(Exception):
    """git is missing, or cannot do what it is asked for; the message says why."""


def blob(folder: Path, name: str) -> bytes | None:
    """The content that the repository of a folder keeps under an id; None where it keeps none."""
    if shutil.which("git") is None or not folder.is_dir():
        return None
    done = _run(folder, "cat-file", "blob", name)
    return done.stdout if done.returncode == 0 else None


def uncommitted(folder: Path, paths: Iterable[str]) -> tuple[str, ...]:
    """Which paths below a folder hold something else than the last commit of its repository.

    Files that git ignores, or does not know, count: no commit has them.

    Raises:
        GitError: git is missing, or the folder is in no work tree.
    """
    prefix = os.fsdecode(_ask(folder, "rev-parse", "--show-prefix")).rstrip("\n")
    words = ("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all")
    answer = _ask(folder, *words, "--ignored=matching", "--", ".")
    rows = [os.fsdecode(row)[3:] for row in answer.split(b"\0") if row]
    listed = {row.rstrip("/") for row in rows}
    # A folder that is ignored as a whole stands for what is in it.
    places = {path: PurePosixPath(prefix, path) for path in sorted(paths)}
    return tuple(p for p, place in places.items() if listed & {*map(str, (place, *place.parents))})


def merge_file(mine: str, base: str, other: str, labels: tuple[str, str, str]) -> str:
    """The changes from `base` to `other`, made to `mine`; where both changed a line, conflicts.

    Args:
        labels: what markers of conflicts call the three texts, in that order.

    Raises:
        GitError: git is missing, or takes one of them for binary.
    """
    with TemporaryDirectory(prefix="fusegen-") as name:
        folder = Path(name)
        words = [word for label in labels for word in ("-L", label)]
        for number, text in enumerate((mine, base, other)):
            (folder / str(number)).write_bytes(text.encode("utf-8"))
        done = _run(folder, "merge-file", "-p", "--diff3", *words, "0", "1", "2")
    # The exit code is the number of conflicts, 127 at most.
    if not 0 <= done.returncode <= 127:
        raise GitError(f"git merge-file: {_complaint(done)}")
    return done.stdout.decode("utf-8")


def _ask(folder: Path, *words: str) -> bytes:
    done = _run(folder, *words)
    if done.returncode != 0:
        raise GitError(f"git {words[0]}: {_complaint(done)}")
    return done.stdout


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    git = shutil.which("git")
    if git is None:
        raise GitError("git is not installed; install it (merges are made by `git merge-file`)")
    env = {name: value for name, value in os.environ.items() if name not in _PLACES}
    # A look at a repository must not wait for, or write, its index.
    env["GIT_OPTIONAL_LOCKS"] = "0"
    return subprocess.run([git, *words], cwd=folder, env=env, capture_output=True, check=False)


def _complaint(done: subprocess.CompletedProcess[bytes]) -> str:
    said = done.stderr.decode("utf-8", errors="replace").strip()
    return said.splitlines()[0] if said else f"ended with {done.returncode}"
