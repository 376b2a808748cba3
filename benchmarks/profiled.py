"""Time of kernels alone, as the profiler saw them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import common
import pairs


@dataclass(frozen=True)
class Ran:
    """Something that ran on the device: its name, and microseconds of its begin and end."""

    name: str
    start: float
    end: float


def alone(ran: Sequence[Ran]) -> Iterator[tuple[str, float]]:
    """Names and milliseconds, each from when what ran before has ended.

    A kernel may be launched before its predecessor's end, for which it then waits.
    """
    ended = 0.0
    for each in sorted(ran, key=lambda each: each.start):
        yield each.name, (each.end - max(each.start, ended)) / 1e3
        ended = max(ended, each.end)


@contextmanager
def profiled() -> Iterator[Callable[[], list[Ran]]]:
    """All that runs on the device inside, once it has ended."""
    import torch
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    profiler: Any = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])

    def ran() -> list[Ran]:
        return [
            Ran(event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            # Compiled regions are annotated: such a range is no work of the device.
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]

    torch.cuda.synchronize()
    with profiler:
        yield ran
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Part:
    """A call, and which of the kernels that it runs count.

    Attributes:
        run: the call, on the operand set of a number.
        until: a word in the name of the last kernel that counts; empty where none is the last.
        of: a word in the names of all that count; empty where any may.
    """

    run: common.Contender
    until: str = ""
    of: str = ""

    def counted(self, kernels: Sequence[str]) -> list[int]:
        """Places of the kernels that count among those of a call."""
        places = [place for place, name in enumerate(kernels) if self.until in name]
        until = places[-1] + 1 if places else 0
        return [place for place in range(until) if self.of in kernels[place]]


CALLS = 10  # of a turn


def compare(contenders: Mapping[str, Part]) -> dict[str, list[float]]:
    """Milliseconds of a call's kernels that count, in every round, contenders taking turns.

    The stream runs in the order of the calls, so kernels are told apart by how many a call has. On
    the CPU, which has no kernels, whole calls are timed.

    Raises:
        SystemExit: calls of a contender do not run the same kernels every time, or none counts.
    """
    if common.DEVICE == "cpu":
        times = common.compare({name: part.run for name, part in contenders.items()})
        return {name: [*each] for name, each in times.items()}
    kernels = {name: _kernels(name, part) for name, part in contenders.items()}
    turns = [name for order in pairs.orders(list(contenders), common.ROUNDS) for name in order]
    with profiled() as ran:
        for name in turns:
            for index in range(CALLS):
                contenders[name].run(index)
    return by_turn(turns, contenders, kernels, ran())


def by_turn(
    turns: Sequence[str],
    contenders: Mapping[str, Part],
    kernels: Mapping[str, Sequence[str]],
    ran: Sequence[Ran],
) -> dict[str, list[float]]:
    """Milliseconds of a call in every turn of each contender.

    Args:
        turns: whose `CALLS` calls followed whose.
        contenders: by name.
        kernels: names of those of one call.
        ran: all of them.

    Raises:
        SystemExit: calls of a contender do not run the same kernels every time.
    """
    times = alone(ran)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for name in turns:
        names, total = kernels[name], 0.0
        for _ in range(CALLS):
            call = [*islice(times, len(names))]
            if [kernel for kernel, _ in call] != [*names]:
                raise SystemExit(f"{name}: its calls do not run the same kernels every time")
            total += sum(call[place][1] for place in contenders[name].counted(names))
        found[name].append(total / CALLS)
    return found


def _kernels(name: str, part: Part) -> list[str]:
    """Names of the kernels of one call, once it is warm."""
    part.run(0)
    with profiled() as ran:
        part.run(0)
    names = [each.name for each in sorted(ran(), key=lambda each: each.start)]
    if not part.counted(names):
        raise SystemExit(f"{name}: none of its kernels counts: {', '.join(names)}")
    return names
