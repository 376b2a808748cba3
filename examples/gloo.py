"""Process groups of gloo with one thread each, for ranks on the CPU.

PyTorch 2.13 gives a group of gloo two threads.  Each notes the name of what it has completed in one
string of the group, without a lock (`ProcessGroupGloo::runLoop`), so that two collectives that
complete at once may free its memory twice; only a name of more than 15 letters has any, which is
that of functional all-gathers.  The process ends by `malloc(): unaligned tcache chunk detected` or
the like, later and elsewhere, once in some dozens of starts.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store


def use_one_thread() -> None:
    """Give the groups that are made from here on one thread each; collectives go one by one.

    They complete in the order in which they were started, as NCCL's do.
    """
    made = ProcessGroupGloo.__init__

    def make(
        self: ProcessGroupGloo,
        store: Store,
        rank: int,
        size: int,
        *options: Any,
        timeout: timedelta | None = None,
    ) -> None:
        if timeout is not None:
            one = ProcessGroupGloo._Options()
            one._devices, one._threads = [ProcessGroupGloo.create_default_device()], 1
            one._timeout = timeout
            options = (one,)
        made(self, store, rank, size, *options)

    ProcessGroupGloo.__init__ = make  # type: ignore[method-assign]
