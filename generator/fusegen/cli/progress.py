"""How far a build is, on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..build.progress import Progress


class Bar:
    """A build's progress on stderr: a line per compiled unit and, on a terminal, a bar."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._title = title
        self._total = self._done = 0

    def __enter__(self) -> Progress:
        self._bar.start()
        self._task = self._bar.add_task(self._title, total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start(self, total: int) -> None:
        """See `fusegen.build.progress.Progress`."""
        self._total = total
        self._bar.update(self._task, total=total)

    def unit_done(self, name: str, *, cached: bool, seconds: float) -> None:
        """See `fusegen.build.progress.Progress`."""
        self._done += 1
        self._bar.advance(self._task)
        if not cached:
            self._line(f"[{self._done}/{self._total}] {name}  {seconds:.1f} s")

    def link_done(self, library: Path, *, cached: bool) -> None:
        """See `fusegen.build.progress.Progress`."""
        if not cached:
            self._line(f"linked {library}")

    def _line(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
