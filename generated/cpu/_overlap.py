"""Rows of other ranks, which copy engines move while products run.

Every rank has buffers that the others write into (PyTorch's symmetric memory), and a flag for each.
A copy waits until its buffer is free; a product, until what it reads has come.  Streams wait and
set flags themselves, so that no kernel does: one would need a multiprocessor, and a persistent
product leaves it none.  A row has the bits that it has among others.

A flag is taken back by who has waited for it, so that a captured graph replays.  Its value says how
much was sent: of ranks that do not have as many rows, one waits for ever, as in other collectives.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

TURNS = 2  # buffers from each rank, taken in turn: one is filled while the other one is read
FULL, FREE = 0, 1  # of flags: rows have come; there is room for rows
COPIES, PRODUCTS = 0, 1  # of streams
ROOM = 1  # value of the latter
_ROUND = 2**21  # bytes
_VIEWS = 256  # of buffers, that are kept: numbers of tokens may differ from call to call
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


class Memory:
    """What the ranks of a group write into each other.

    Attributes:
        rank, size: of this process in the group.
        capacity: bytes of a buffer.
        buffers: of each rank, bytes [turns, senders, capacity].
        flags: of each rank, int32 [2, turns, size]: FULL by sender, FREE by receiver.
    """

    def __init__(self, ranks: Any, capacity: int) -> None:
        self.rank, self.size, self.capacity = ranks.rank(), ranks.size(), capacity
        self.buffers = self.everywhere(ranks, (TURNS, self.size, capacity), torch.uint8)
        self.flags = self.everywhere(ranks, (2, TURNS, self.size), torch.int32)
        self.flags[self.rank][FULL].zero_()
        self.flags[self.rank][FREE].fill_(ROOM)
        self._addresses = [flags.data_ptr() for flags in self.flags]
        self.buffer = lru_cache(_VIEWS)(self._buffer)  # a view costs the host as much as a copy
        self.begin(ranks)

    def everywhere(self, ranks: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """A tensor of each rank, which all see."""
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        own = symmetric.empty(shape, dtype=dtype, device=f"cuda:{torch.cuda.current_device()}")
        handle = symmetric.rendezvous(own, ranks)
        return [
            own if rank == self.rank else handle.get_buffer(rank, shape, dtype)
            for rank in range(self.size)
        ]

    def begin(self, ranks: Any) -> None:
        """Wait until all ranks have come so far."""
        self.streams = [torch.cuda.Stream() for _ in (COPIES, PRODUCTS)]
        torch.cuda.synchronize()
        torch.distributed.barrier(ranks)

    def fork(self, *streams: int) -> None:
        """Streams of this memory go on after what is now on the current one."""
        done = torch.cuda.current_stream().record_event()
        for each in streams:
            self.streams[each].wait_event(done)

    def run(self, stream: int, function: Callable[[], object]) -> Any:
        """Call a function with one of these streams as the current one; gives what `join` takes."""
        with torch.cuda.stream(self.streams[stream]):
            function()
            return torch.cuda.current_stream().record_event()

    def join(self, done: Any) -> None:
        """The current stream goes on after what a function did, and not after what came behind."""
        torch.cuda.current_stream().wait_event(done)

    def take(self, flag: int, value: int) -> None:
        """The current stream goes on once a flag has a value, and sets it to 0."""
        stream = torch.cuda.current_stream().cuda_stream
        _on_stream("cuStreamWaitValue32_v2", stream, flag, value, _EQUAL)
        _on_stream("cuStreamWriteValue32_v2", stream, flag, 0, 0)

    def set(self, flag: int, value: int) -> None:
        """The current stream sets a flag, for whoever then sees all that it has written."""
        stream = torch.cuda.current_stream().cuda_stream
        _on_stream("cuStreamWriteValue32_v2", stream, flag, value, 0)

    def flag(self, rank: int, kind: int, turn: int, of: int) -> int:
        """Its address."""
        return self._addresses[rank] + 4 * ((kind * TURNS + turn) * self.size + of)

    def _buffer(
        self, rank: int, turn: int, sender: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """A rank's buffer for what a sender sends, as a tensor of that."""
        whole = self.buffers[rank][turn, sender, : _nbytes(shape, dtype)]
        return whole.view(dtype).view(shape)


class Exchange:
    """What one call sends and receives, in buffers of one turn, each of as many rows.

    Any number of them may be under way: a send waits for those who read what came a turn before,
    and nothing waits for sends but the end of their own exchange.

    Args:
        group: whose memory it is.
        shape, dtype: of what is in a buffer.
    """

    def __init__(self, group: _Group, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.memory, self._turn, self._before = group.memories[-1], group.turn, group.open
        self.rank, self._like = self.memory.rank, (shape, dtype)
        self._full = ROOM + _nbytes(shape, dtype)
        self._sent: list[tuple[Tensor, Any]] = []
        size = self.memory.size
        self.others = [(self.rank + step) % size for step in range(1, size)]

    def send(self, target: int, rows: Tensor) -> None:
        """Copy rows to a rank, when it has room for them; whatever else runs meanwhile."""
        self.memory.fork(COPIES)
        # Kept until `end`: the allocator knows of no other stream that reads it.
        self._sent.append((rows, self.memory.run(COPIES, partial(self._copy, target, rows))))

    def _copy(self, target: int, rows: Tensor) -> None:
        memory = self.memory
        memory.take(memory.flag(self.rank, FREE, self._turn, target), ROOM)
        buffer = memory.buffer(target, self._turn, self.rank, *self._like)
        buffer.copy_(rows, non_blocking=True)
        memory.set(memory.flag(target, FULL, self._turn, self.rank), self._full)

    def received(self, source: int) -> Tensor:
        """What a rank sends, once it is there.

        Raises:
            RuntimeError: the buffer has what came for an exchange before, which has not ended.
        """
        if next(each for each in self._before if each._turn == self._turn) is not self:
            raise RuntimeError(
                "overlap: collectives of a group are waited for in the order in which they start, "
                "and one before this was not"
            )
        memory = self.memory
        memory.take(memory.flag(self.rank, FULL, self._turn, source), self._full)
        return memory.buffer(self.rank, self._turn, source, *self._like)

    def release(self, source: int) -> None:
        """What it sent has been read."""
        self.memory.set(self.memory.flag(source, FREE, self._turn, self.rank), ROOM)

    def end(self) -> None:
        """The current stream goes on after all that this rank sends."""
        for _, done in self._sent:
            self.memory.join(done)
        self._sent.clear()
        self._before.remove(self)


def gathered(
    rows: Tensor, product: Callable[[Tensor, Tensor], object], width: int, ranks: Any
) -> Tensor:
    """The product of the rows of all ranks, in their order.

    Products of others' rows have a stream of their own: they begin where the one before ends.

    Args:
        rows: [T, ...], this rank's, contiguous, as many on all.
        product: of rows of one rank, into a tensor of as many.
        width: columns of it.
        ranks: the group.
    """
    exchange = _exchange(ranks, tuple(rows.shape), rows.dtype)
    memory = exchange.memory
    out = rows.new_empty(memory.size, *rows.shape[:-1], width)
    for target in exchange.others:
        exchange.send(target, rows)

    def others() -> None:
        for source in reversed(exchange.others):  # in the order in which they send to this one
            product(exchange.received(source), out[source])
            exchange.release(source)

    memory.fork(PRODUCTS)
    product(rows, out[memory.rank])
    memory.join(memory.run(PRODUCTS, others))
    exchange.end()
    return out.flatten(0, 1)


def scattered(rows: Tensor, product: Callable[[Tensor], Tensor], width: int, ranks: Any) -> Tensor:
    """This rank's rows of a product, added up over ranks in their order and rounded once.

    Its own come last, behind the others and not beside them: of two products that may run, a graph
    takes either first.

    Args:
        rows: [T, ...], contiguous, of whose product each rank gets as many rows.
        product: of rows of one rank.
        width: columns of it.
        ranks: the group.
    """
    parts = rows.chunk(ranks.size())
    exchange = _exchange(ranks, (*parts[0].shape[:-1], width), rows.dtype)
    for target in exchange.others:
        exchange.send(target, product(parts[target]))
    return _add_up(exchange, product(parts[exchange.rank]))


def start_to_gather(rows: Tensor, ranks: Any) -> Callable[[], Tensor]:
    """Send rows to all ranks, whatever runs meanwhile.

    Args:
        rows: [T, ...], this rank's, contiguous, as many on all.
        ranks: the group.

    Returns:
        What gives those of all, in their order.
    """
    exchange = _exchange(ranks, tuple(rows.shape), rows.dtype)
    for target in exchange.others:
        exchange.send(target, rows)

    def arrive() -> Tensor:
        every = rows.new_empty(exchange.memory.size, *rows.shape)
        every[exchange.rank].copy_(rows)
        for source in reversed(exchange.others):
            every[source].copy_(exchange.received(source))
            exchange.release(source)
        exchange.end()
        return every.flatten(0, 1)

    return arrive


def start_to_scatter(rows: Tensor, ranks: Any) -> Callable[[], Tensor]:
    """Send each rank its rows, whatever runs meanwhile.

    Args:
        rows: [T, ...], contiguous, of which each rank gets as many.
        ranks: the group.

    Returns:
        What gives this rank's, added up over ranks as `scattered` does.
    """
    parts = rows.chunk(ranks.size())
    exchange = _exchange(ranks, tuple(parts[0].shape), rows.dtype)
    for target in exchange.others:
        exchange.send(target, parts[target])
    return partial(_add_up, exchange, parts[exchange.rank])


def _add_up(exchange: Exchange, own: Tensor) -> Tensor:
    """A rank's own rows and those that it is sent, in the order of the ranks."""
    ranks = range(exchange.memory.size)
    total = _sum([own if r == exchange.rank else exchange.received(r) for r in ranks])
    for source in exchange.others:
        exchange.release(source)
    exchange.end()
    return total


def _sum(terms: list[Tensor]) -> Tensor:
    first, second, *others = terms
    if not others:
        return first + second
    total = first.float() + second.float()
    for each in others:
        total += each
    return total.to(first.dtype)


class _Group:
    """Memory of a group, the last one the largest: graphs may have captured those before it; and
    the exchanges that go on there."""

    def __init__(self) -> None:
        self.memories: list[Memory] = []
        self.turn = 0
        self.open: list[Exchange] = []  # in the order in which they began


_GROUPS: WeakKeyDictionary[Any, _Group] = WeakKeyDictionary()


def _exchange(ranks: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Exchange:
    """The next one of a group.

    Raises:
        RuntimeError: its ranks have no memory for so many rows, and cannot make it together while
            a graph is captured.
    """
    group = _GROUPS.setdefault(ranks, _Group())
    nbytes = _nbytes(shape, dtype)
    if not group.memories or group.memories[-1].capacity < nbytes:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "overlap: ranks make memory for so many tokens together, which no graph can "
                "capture; run the same call once before the capture"
            )
        group.memories.append(Memory(ranks, -(-max(nbytes, 1) // _ROUND) * _ROUND))
    group.turn = (group.turn + 1) % TURNS
    group.open.append(Exchange(group, shape, dtype))
    return group.open[-1]


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _on_stream(function: str, stream: int, flag: int, value: int, flags: int) -> None:
    """A memory operation of a stream (CUDA driver API, "Stream Memory Operations")."""
    if code := _driver(function)(stream, flag, value, flags):
        raise RuntimeError(f"overlap: {function}: CUDA driver error {code}")


@cache
def _driver(function: str) -> Any:
    found = getattr(ctypes.CDLL("libcuda.so.1"), function)
    found.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return found
