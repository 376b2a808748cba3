"""Streams that copy rows into other ranks' memory, and wait for theirs, without a kernel.

Every rank has buffers that the others write into (PyTorch's symmetric memory), and a flag for each.
A copy waits until its buffer is free; a product, until what it reads has come.  Streams wait and
set flags themselves, so that no kernel does: one would need a multiprocessor, and a persistent
product leaves it none.

A flag is taken back by who has waited for it, so that a captured graph replays.  Its value says how
much was sent: of ranks that do not have as many rows, one waits for what never comes.
"""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

TURNS = 2  # buffers from each rank, taken in turn: one is filled while the other one is read
FULL, FREE = 0, 1  # of flags: rows have come; there is room for rows
ROOM = 1  # value of the latter
WHAT = ("rows of", "room at")  # they tell, in words
COPIES, PRODUCTS = 0, 1  # of streams; None is the current one
WAITS, CAME = 0, 1  # of marks: the number of what a stream waits for; a wait has ended
WAIT, WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
STREAMS = 16  # of a rank, whose waits are told apart
_VIEWS = 256  # of buffers, that are kept: numbers of tokens may differ from call to call


class Op(NamedTuple):
    """What a stream does with a word of 32 bits: wait until it has a value, or write that."""

    code: int
    address: int
    value: int


class Marks:
    """What a rank's streams wait for: numbers in memory of the host, which they write.

    Args:
        count: of streams that may wait at a time.
    """

    def __init__(self, count: int) -> None:
        pinned = torch.cuda.is_available()
        self._marks = torch.zeros(2, count, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._waits: list[str] = []
        self._since: dict[int, tuple[int, float]] = {}

    def around(self, index: int, waits: Sequence[str]) -> tuple[tuple[Op, ...], tuple[Op, Op]]:
        """What a stream does before each of several waits, given in words, and after the last."""
        self._waits += [each for each in dict.fromkeys(waits) if each not in self._waits]
        waiting, came = (self._marks[each, index].data_ptr() for each in (WAITS, CAME))
        before = tuple(Op(WRITE, waiting, 1 + self._waits.index(each)) for each in waits)
        return before, (Op(WRITE, came, 1), Op(WRITE, waiting, 0))

    def overdue(self, now: float, limit_s: float) -> str | None:
        """A wait, in words, that goes on since a look so many seconds ago.

        It reads and writes memory of the host alone: no call of CUDA's, any of which may wait for
        the device, or end a capture.
        """
        for index in self._marks[CAME].nonzero().flatten().tolist():
            self._marks[CAME, index] = 0  # before WAITS is read: what comes later is seen next time
            self._since.pop(index, None)
        waits = {index: at for index, at in enumerate(self._marks[WAITS].tolist()) if at}
        before, self._since = self._since, {}
        for index, at in waits.items():
            known, since = before.get(index, (at, now))
            self._since[index] = (at, since if at == known else now)
        late = (at for at, since in self._since.values() if now - since > limit_s)
        return next((self._waits[at - 1] for at in late), None)


class Memory:
    """What the ranks of a group write into each other.

    Attributes:
        rank, size: of this process in the group.
        capacity: bytes of a buffer.
        buffers: of each rank, bytes [turns, senders, capacity]; these are those behind it in a
            circle.
        flags: of each rank, int32 [2, turns, size]: FULL by sender, FREE by receiver.
        marks: of waits for this rank's flags.
    """

    def __init__(self, ranks: Any, capacity: int) -> None:
        self.rank, self.size, self.capacity = ranks.rank(), ranks.size(), capacity
        self.buffers = self.everywhere(ranks, (TURNS, self.size - 1, capacity), torch.uint8)
        self.flags = self.everywhere(ranks, (2, TURNS, self.size), torch.int32)
        self.flags[self.rank][FULL].zero_()
        self.flags[self.rank][FREE].fill_(ROOM)
        self._addresses = [flags.data_ptr() for flags in self.flags]
        self.marks = Marks(2 * TURNS * self.size)
        self.buffer = lru_cache(_VIEWS)(self._buffer)  # a view costs the host as much as a copy
        self._taking = lru_cache(_VIEWS)(self._take)
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
        self._device = torch.cuda.current_device()
        self.streams = [torch.cuda.Stream() for _ in (COPIES, PRODUCTS)]
        self._handles = [each.cuda_stream for each in self.streams]
        self._forks, self._copied, self._made = _event(), [_event() for _ in range(TURNS)], _event()
        torch.cuda.synchronize()
        torch.distributed.barrier(ranks)

    def fork(self, stream: int) -> None:
        """A stream of this memory goes on after what is now on the current one."""
        _driver("cuEventRecord", self._forks, self.handle(None))
        _driver("cuStreamWaitEvent", self._handles[stream], self._forks, 0)

    def run(self, stream: int, function: Callable[[], object]) -> None:
        """Call a function with one of these streams as the current one."""
        with torch.cuda.stream(self.streams[stream]):
            function()

    def copied(self, turn: int) -> Any:
        """What the stream of copies has been given, of which the last is of a turn, for `join`.

        It lasts until the next one of that turn.
        """
        return self._recorded(self._copied[turn], COPIES)

    def made(self) -> Any:
        """What the stream of products has been given, for `join`; it lasts until the next one."""
        return self._recorded(self._made, PRODUCTS)

    def _recorded(self, event: int, stream: int) -> int:
        _driver("cuEventRecord", event, self._handles[stream])
        return event

    def join(self, done: Any, stream: int | None = None) -> None:
        """A stream goes on after what another had been given, and not after what came behind."""
        _driver("cuStreamWaitEvent", self.handle(stream), done, 0)

    def handle(self, stream: int | None) -> int:
        """A stream, as ops know it."""
        if stream is None:
            return current_stream(self._device)
        return self._handles[stream]

    def copy(self, target: Tensor, rows: Tensor, stream: int | None = None) -> None:
        """A stream copies rows to as many of the same type; both are contiguous."""
        if nbytes := rows.nbytes:
            pointers = target.data_ptr(), rows.data_ptr()
            _driver("cuMemcpyAsync", *pointers, nbytes, self.handle(stream))

    def take(
        self,
        kind: int,
        turn: int,
        of: tuple[int, ...],
        value: int,
        place: str,
        stream: int | None = None,
    ) -> None:
        """A stream goes on once flags of this rank have a value, and sets them to 0.

        All in one: a stream takes some 2 us to begin with such ops, and 1 for each.

        Args:
            kind, turn, of: which flags, one for each rank.
            value: that it waits for.
            place: where, in words.
            stream: which.
        """
        self.do(*self._taking(kind, turn, of, value, place), stream=stream)

    def _take(
        self, kind: int, turn: int, of: tuple[int, ...], value: int, place: str
    ) -> tuple[Op, ...]:
        flags = [self.flag(self.rank, kind, turn, each) for each in of]
        words = [f"{place}\n{WHAT[kind]} rank {each}" for each in of]
        before, after = self.marks.around(self._index(kind, turn, of[0]), words)
        taking = (
            (mark, Op(WAIT, flag, value), Op(WRITE, flag, 0))
            for mark, flag in zip(before, flags, strict=True)
        )
        return *(op for each in taking for op in each), *after

    def set(self, flags: Iterable[int], value: int, stream: int | None = None) -> None:
        """A stream sets flags, for whoever then sees all that it has written."""
        self.do(*(Op(WRITE, flag, value) for flag in flags), stream=stream)

    def do(self, *ops: Op, stream: int | None = None) -> None:
        """A stream does them, one after the other."""
        do(self.handle(stream), *ops)

    def flag(self, rank: int, kind: int, turn: int, of: int) -> int:
        """Its address."""
        return self._addresses[rank] + 4 * self._index(kind, turn, of)

    def _index(self, kind: int, turn: int, of: int) -> int:
        return (kind * TURNS + turn) * self.size + of

    def overdue(self, now: float, limit_s: float) -> str:
        """A message of a wait that takes longer than that; nothing while there is none."""
        late = self.marks.overdue(now, limit_s)
        if late is None:
            return ""
        place, awaited = late.split("\n")
        return (
            f"{place} failed on rank {self.rank} of {self.size}: overlap: its stream has waited "
            f"more than {limit_s:g} s for {awaited}, which is lost or late, "
            f"or has another number of tokens; overlap(timeout=...) waits longer"
        )

    def _buffer(
        self,
        rank: int,
        turn: int,
        sender: int | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        begin: int = 0,
    ) -> Tensor:
        """A rank's buffer for what a sender sends, as a tensor of that from a byte on; without a
        sender, those of all [size - 1, *shape].
        """
        rows = self.buffers[rank][turn, :, begin : begin + nbytes_of(shape, dtype)]
        whole = rows.view(dtype).view(self.size - 1, *shape)
        return whole if sender is None else whole[(sender - rank - 1) % self.size]


class Waits:
    """Waits for what NCCL brings: a stream tells the host when it begins to wait, and goes on.

    Args:
        rank, size: of this process in the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._marks = Marks(STREAMS)
        self._streams: dict[int, int] = {}

    @contextmanager
    def of(self, place: str) -> Iterator[None]:
        """The current stream waits for other ranks in here, at a place in words."""
        stream = current_stream(torch.cuda.current_device())
        index = self._streams.setdefault(stream, len(self._streams) % STREAMS)
        before, after = self._marks.around(index, [place])
        do(stream, *before)
        yield
        do(stream, *after)

    def overdue(self, now: float, limit_s: float) -> str:
        """A message of a wait that takes longer than that; nothing while there is none."""
        late = self._marks.overdue(now, limit_s)
        if late is None:
            return ""
        return (
            f"{late} failed on rank {self._rank} of {self._size}: its stream has waited more than "
            f"{limit_s:g} s for the others, of which one is lost or late; watch(timeout=...) waits "
            "longer"
        )


def current_stream(device: int) -> int:
    """The current stream of a device, as the driver knows it."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def do(stream: int, *ops: Op) -> None:
    """A stream, as the driver knows it, does them, one after the other."""
    params = _params(ops)
    _driver("cuStreamBatchMemOp_v2", stream, len(params), params, 0)


def nbytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


class _Param(ctypes.Structure):
    """CUstreamBatchMemOpParams (CUDA driver API, "Stream Memory Operations")."""

    _fields_ = [
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    ]


@lru_cache(_VIEWS)
def _params(ops: tuple[Op, ...]) -> Any:
    equal = 1  # CU_STREAM_WAIT_VALUE_EQ
    each = (_Param(op.code, op.address, op.value, equal * (op.code == WAIT)) for op in ops)
    return (_Param * len(ops))(*each)


def _event() -> int:
    """An event, for streams alone, as the driver knows it."""
    event = ctypes.c_void_p()
    disable_timing = 2  # CU_EVENT_DISABLE_TIMING
    _driver("cuEventCreate", ctypes.byref(event), disable_timing)
    assert event.value is not None
    return event.value


def _driver(name: str, *words: Any) -> None:
    """Call the driver: a stream or an event of PyTorch's costs the host more than what it does.

    Raises:
        RuntimeError: it fails.
    """
    if code := _function(name)(*words):
        raise RuntimeError(f"overlap: {name}: CUDA driver error {code}")


@cache
def _function(name: str) -> Any:
    found = getattr(ctypes.CDLL("libcuda.so.1"), name)
    found.argtypes = _ARGUMENTS[name]
    return found


_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "cuEventCreate": (ctypes.c_void_p, ctypes.c_uint),
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
    "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
    "cuStreamBatchMemOp_v2": (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint),
    "cuStreamWaitEvent": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
}
