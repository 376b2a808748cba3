"""Wall time of the program itself: generating every bundle, and asking for help."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import common
from common import OURS, Case, Row

REPEATS = 7


def _seconds(words: Sequence[str]) -> float:
    """Wall time of one command.

    Raises:
        SystemExit: it failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(common.ROOT / "generator")}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "fusegen", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=common.ROOT,
        env=environment,
        text=True,
        check=False,
    )
    elapsed = time.perf_counter() - start
    if done.returncode != 0:
        raise SystemExit(f"fusegen {' '.join(words)} ended with {done.returncode}:\n{done.stdout}")
    return elapsed


def targets() -> list[str]:
    """Every named target."""
    return sorted(path.stem for path in (common.ROOT / "specs" / "targets").glob("*.yaml"))


def generate() -> Iterator[Case]:
    """Seconds per command, caches of files and byte code warm."""
    with tempfile.TemporaryDirectory() as folder:
        commands = {"fusegen --help": ["--help"]}
        everything: list[str] = []
        for target in targets():
            words = ["--target", target]
            everything += words
            out = str(Path(folder) / target)
            commands[f"fusegen generate --target {target}"] = ["generate", *words, "--out", out]
        out = str(Path(folder) / "everything")
        commands["fusegen generate, every target"] = ["generate", *everything, "--out", out]
        for case, words in commands.items():
            yield Case(case, partial(_measure, case, words))


def _measure(case: str, words: Sequence[str]) -> list[Row]:
    _seconds(words)
    return [common.row(case, OURS, "s", [_seconds(words) for _ in range(REPEATS)])]
