"""What the ledger says of a unit that ran, and what that means for the units of today."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from bundles import Code


class LedgerError(Exception):
    """Something is missing, malformed or failed; the message names it and the way out."""


class State(str, Enum):
    """Of a unit, a module or a bundle."""

    CURRENT = "current"
    STALE = "stale"
    NEVER = "never ran"


_RAN = {Code.SASS: "ran", Code.PTX: "PTX ran", Code.TWIN: "twin ran"}
_NOT_RUN = {
    Code.SASS: "",
    Code.PTX: "; SASS compiled, not run",
    Code.TWIN: ", with matrix instructions in software; its own code compiled, not run",
}


@dataclass(frozen=True)
class Entry:
    """One unit, as it ran.

    Attributes:
        hash: of the unit then.
        device: the GPU's name.
        driver: its driver.
        torch: version that it ran under.
        cuda: version that torch was built for.
        date: of the run, UTC.
        tests: how many passed.
        sanitizer: what compute-sanitizer found.
        code: what of the library ran, as ``bundles.Code`` says it.
    """

    hash: str
    device: str
    driver: str
    torch: str
    cuda: str
    date: str
    tests: int
    sanitizer: str
    code: str = Code.SASS.value

    @property
    def ran(self) -> str:
        """What ran, on which GPU, in few words: ``PTX ran on H200``."""
        return f"{_RAN[Code(self.code)]} on {self.device.removeprefix('NVIDIA ')}"

    @property
    def where(self) -> str:
        """The same in whole words, with what did not run."""
        what = Code(self.code)
        return f"{_RAN[what]} on {self.device}{_NOT_RUN[what]}"


Entries = Mapping[str, Mapping[str, Entry]]


def state_of(hashes: Mapping[str, str], entries: Mapping[str, Entry]) -> dict[str, State]:
    """State of every unit that exists."""
    states = {}
    for unit, value in hashes.items():
        entry = entries.get(unit)
        if entry is None:
            states[unit] = State.NEVER
        else:
            states[unit] = State.CURRENT if entry.hash == value else State.STALE
    return states


def combine(states: Iterable[State]) -> State:
    """State of a whole: stale if any part that ran is, or if only some parts ever ran."""
    found = set(states)
    if found <= {State.NEVER}:
        return State.NEVER
    return State.CURRENT if found == {State.CURRENT} else State.STALE


def gaps(hashes: Mapping[str, str], entries: Mapping[str, Entry]) -> list[str]:
    """What a bundle that has run lacks: stale and new units, one line each; recorded ones gone."""
    if not entries:
        return []
    lines = []
    for unit, state in sorted(state_of(hashes, entries).items()):
        if state is State.STALE:
            lines.append(f"{unit}: stale, changed since it ran on {entries[unit].date}")
        elif state is State.NEVER:
            lines.append(f"{unit}: never ran")
    lines += [
        f"{unit}: gone, last ran on {entries[unit].date}"
        for unit in sorted(entries.keys() - hashes.keys())
    ]
    return lines
