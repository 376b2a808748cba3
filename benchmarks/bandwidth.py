"""What memory bounds: times beside that of a device copy of the same bytes in the same rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import common
import peers
import torch
from common import OURS, Row
from torch import Tensor

COPY = "copy"
LARGE = 256 * 2**20
"""Bytes moved from which the fraction of a copy's bandwidth counts; below, microseconds do."""

Call = Callable[[], Any]


def results(given: Any) -> tuple[Tensor, ...]:
    """The tensors that a call returned."""
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def copy(moved: int) -> Call:
    """A copy that reads half of the bytes and writes the other."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=common.DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def require_results(case: str, got: Any, wanted: Any, tolerance: float = 1e-2) -> None:
    """Refuse to time other results than those wanted, which may be the first few alone.

    Raises:
        SystemExit: the relative Frobenius distance of a tensor is larger than `tolerance`.
    """
    for own, other in zip(results(got), results(wanted), strict=False):
        common.require_close(case, own, other, tolerance)


def with_peers(
    case: str, contenders: Mapping[str, Call], kind: str, operands: Sequence[Any]
) -> dict[str, Call]:
    """The contenders, and other libraries' calls of an op where their results are ours.

    Args:
        case: what is computed.
        contenders: ours among them.
        kind: what `peers.row_calls` knows it as.
        operands: that a library is given, `kind` says which.
    """
    expected = results(contenders[OURS]())
    return {**contenders, **peers.row_calls(_installed(), kind, operands, expected)}


@lru_cache(maxsize=1)
def _installed() -> dict[str, peers.Peer]:
    return peers.installed(peers.ROWS)


def measure(case: str, contenders: Mapping[str, Call], moved: int) -> Iterator[Row]:
    """Times of all contenders; the floor is that of the copy.

    Args:
        case: what is computed.
        contenders: calls by name.
        moved: bytes that are read and written, each once.
    """
    calls = {**contenders, COPY: copy(moved)}
    samples = common.compare({name: _ignoring_sets(call) for name, call in calls.items()})
    return rows(case, samples, moved)


def rows(case: str, samples: Mapping[str, Sequence[float]], moved: int) -> Iterator[Row]:
    """A row for each contender, the copy included, from milliseconds of every round."""
    floor = statistics.median(samples[COPY])
    for name, times in samples.items():
        median = statistics.median(times)
        yield common.row(
            *(case, name, "ms", times),
            floor=floor,
            rate=moved / median / 1e9,
            rate_unit="TB/s",
            fraction=floor / median,
            extra={} if moved >= LARGE else {"us_above_copy": (median - floor) * 1e3},
        )


def _ignoring_sets(call: Call) -> common.Contender:
    return lambda _: call()
