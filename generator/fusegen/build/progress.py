"""What a build tells while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Progress(Protocol):
    """Hears how a build goes on. Every call comes from the thread that called `build`."""

    def start(self, total: int) -> None:
        """`total` units are to be compiled or found in the cache."""

    def unit_done(self, name: str, *, cached: bool, seconds: float) -> None:
        """One unit is ready; `seconds` is the time its compilation took, now or when cached."""

    def link_done(self, library: Path, *, cached: bool) -> None:
        """The library is in place; `cached` if nothing had changed."""


class Silent:
    """Progress for callers that show none."""

    def start(self, total: int) -> None:
        """See Progress."""

    def unit_done(self, name: str, *, cached: bool, seconds: float) -> None:
        """See Progress."""

    def link_done(self, library: Path, *, cached: bool) -> None:
        """See Progress."""
