"""Rows of other ranks, which copy engines move while products run.

Every rank has buffers that the others write into (PyTorch's symmetric memory), and a flag for each.
A copy waits until its buffer is free; a product, until what it reads has come.  Streams wait and
set flags themselves, so that no kernel does: one would need a multiprocessor, and a persistent
product leaves it none.  A row has the bits that it has among others.

A flag is taken back by who has waited for it, so that a captured graph replays.  Its value says how
much was sent: of ranks that do not have as many rows, one waits for what never comes.

No wait is for ever: streams write into memory of the host that they wait, and for whom, and that
they have gone on.  A thread reads it, and ends the process once one wait takes too long, as the
watchdog of NCCL does; that sees nothing of replayed graphs, this one does.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property, lru_cache, partial
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from ._add_rows import add_rows
from ._place import Place

T = TypeVar("T")
Like = tuple[tuple[int, ...], torch.dtype]  # shape and type
TURNS = 2  # buffers from each rank, taken in turn: one is filled while the other one is read
FULL, FREE = 0, 1  # of flags: rows have come; there is room for rows
ROOM = 1  # value of the latter
WHAT = ("rows of", "room at")  # they tell, in words
COPIES, PRODUCTS = 0, 1  # of streams; None is the current one
_ROUND = 2**21  # bytes
PIECE = 2048  # rows of a piece, at least: one more costs streams some 10 us, the host as much again
SMALL = 2**21  # bytes of what is sent with others: it takes the link less time than streams a flag
_ALIGNED = 256  # bytes: where what is sent together begins
_VIEWS = 256  # of buffers, that are kept: numbers of tokens may differ from call to call
WAITS, CAME = 0, 1  # of marks: the number of what a stream waits for; a wait has ended
TIMEOUT = timedelta(minutes=10)  # NCCL's in PyTorch
_LOOKS_S = 1.0  # seconds between them
WAIT, WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32


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
            return torch._C._cuda_getCurrentRawStream(self._device)
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
        params = _params(ops)
        _driver("cuStreamBatchMemOp_v2", self.handle(stream), len(params), params, 0)

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
        rows = self.buffers[rank][turn, :, begin : begin + _nbytes(shape, dtype)]
        whole = rows.view(dtype).view(self.size - 1, *shape)
        return whole if sender is None else whole[(sender - rank - 1) % self.size]


class Exchange:
    """What one call sends and receives, in buffers of one turn, each of as many rows.

    Any number of them may be under way: a send waits for those who read what came a turn before,
    and nothing waits for sends but the end of their own exchange.

    A send behind an exchange of its turn begins once that has ended here.  Sooner, its stream would
    wait for what the others' hosts have yet to ask for; and a host that loads a kernel at its first
    launch (CUDA's lazy loading) may wait for all streams of its GPU: both ranks would, for ever.
    As it is, a stream waits for nothing but what a host asks for that is no further than this one.

    Args:
        group: whose memory it is.
        place: where the call is.
        likes: shapes and types of what lies in a buffer, one behind the other.
        as_bytes: whether what is received is bytes, of all of it; else of the first one's type.
    """

    def __init__(self, group: _Group, place: Place, *likes: Like, as_bytes: bool = False) -> None:
        *self._begins, nbytes = _offsets(likes)
        self.memory, self._turn = group.take_turn(place.ranks, nbytes)
        self._group, self._place, self._full = group, place.words, ROOM + nbytes
        self._like = ((nbytes,), torch.uint8) if as_bytes else likes[0]
        self._sent: list[Mapping[int, Sequence[Tensor]]] = []
        self._late: list[Mapping[int, Sequence[Tensor]]] = []
        self._copied: Any = None
        self.rank = self.memory.rank
        self.others = _others(self.rank, self.memory.size)
        group.open.append(self)

    def send(self, parts: Mapping[int, Sequence[Tensor]]) -> None:
        """Copy to ranks what each gets, when they have room; whatever else runs meanwhile."""
        if self._first_of_turn() is self:
            self._send(parts)
        else:
            self._late.append(parts)

    def _first_of_turn(self) -> Exchange:
        return next(each for each in self._group.open if each._turn == self._turn)

    def _send(self, parts: Mapping[int, Sequence[Tensor]]) -> None:
        memory, turn = self.memory, self._turn
        memory.fork(COPIES)
        memory.take(FREE, turn, (*parts,), ROOM, self._place, COPIES)
        for target, tensors in parts.items():
            for begin, each in zip(self._begins, tensors, strict=True):
                like = tuple(each.shape), each.dtype
                memory.copy(memory.buffer(target, turn, self.rank, *like, begin), each, COPIES)
            memory.set([memory.flag(target, FULL, turn, self.rank)], self._full, COPIES)
        # Kept until `end`: the allocator knows of no other stream that reads it.
        self._sent.append(parts)
        self._copied = memory.copied(turn)

    def received(self, source: int | None = None, stream: int | None = None) -> Tensor:
        """What a rank sends, once it is there; without one, what all others do, [ranks - 1, ...].

        Args:
            source: the rank.
            stream: which waits for it.

        Raises:
            RuntimeError: the buffer has what came for an exchange before, which has not ended.
        """
        if self._first_of_turn() is not self:
            raise RuntimeError(
                "overlap: collectives of a group are waited for in the order in which they start, "
                "and one before this was not"
            )
        self._group.send()
        memory = self.memory
        memory.take(FULL, self._turn, self._of(source), self._full, self._place, stream)
        return memory.buffer(self.rank, self._turn, source, *self._like)

    def release(self, source: int | None = None, stream: int | None = None) -> None:
        """What it sent has been read; without one, what all others did."""
        free = partial(self.memory.flag, kind=FREE, turn=self._turn, of=self.rank)
        self.memory.set(map(free, self._of(source)), ROOM, stream)

    def _of(self, source: int | None) -> tuple[int, ...]:
        return self.others if source is None else (source,)

    def arrivals(self, stream: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """What each rank sends, and which, in the order in which they send to this one; the
        exchange ends behind the last.  Each is let go of where the next is asked for.
        """
        for source in reversed(self.others):
            yield source, self.received(source, stream)
            self.release(source, stream)
        self.end(stream)

    def end(self, stream: int | None = None) -> None:
        """A stream goes on after all that this rank sends."""
        if self._sent:
            self.memory.join(self._copied, stream)
        self._sent.clear()
        still = self._group.open
        still.remove(self)
        later = next((each for each in still if each._turn == self._turn), None)
        if later is not None:
            for parts in later._late:
                later._send(parts)
            later._late.clear()


class Small:
    """An exchange of something small, which is sent together with others.

    They go off when anything of the group is waited for, or something large is sent: on every rank
    the same do.  Each flag that a stream sets or waits for takes it longer than bytes take the
    link.

    Args:
        group: whose memory it will lie in.
        place: where the call is.
        like: shape and type of what is in a buffer.
    """

    def __init__(self, group: _Group, place: Place, like: Like) -> None:
        self.rank = place.ranks.rank()
        self.others = _others(self.rank, place.ranks.size())
        self._batch, self._member = group.batch, Member(place, like)
        self._batch.members.append(self._member)

    @property
    def memory(self) -> Memory:
        """Where it lies, for which it is sent."""
        return self._batch.exchange.memory

    def send(self, parts: Mapping[int, Sequence[Tensor]]) -> None:
        """As an exchange's."""
        self._member.parts |= {target: part for target, (part,) in parts.items()}

    def received(self, source: int | None = None, stream: int | None = None) -> Tensor:
        """As an exchange's; the current stream receives it, whichever goes on with it."""
        rows = self._batch.received(self._member)
        if stream is not None:
            self.memory.fork(stream)
        return rows if source is None else rows[self.others.index(source)]

    def release(self, source: int | None = None, stream: int | None = None) -> None:
        """Nothing: it has left the buffers."""

    def arrivals(self, stream: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """As an exchange's."""
        for source in reversed(self.others):
            yield source, self.received(source, stream)

    def end(self, stream: int | None = None) -> None:
        """Nothing: the exchange that it is a part of ended where it left the buffers."""


@dataclass
class Member:
    """One of a batch.

    It knows of no exchange, and no exchange is known to its batch: in a circle, what they hold
    would stay until Python looks for such.

    Attributes:
        place: where the call is.
        like: shape and type of what is in a buffer.
        parts: what each rank gets.
        begin: where it lies in the batch, in bytes, once that is sent.
    """

    place: Place
    like: Like
    parts: dict[int, Tensor] = field(default_factory=dict)
    begin: int | None = None


class Batch:
    """Small exchanges of a group that are sent together.

    What a member sends does not change until then: no step writes what a collective reads.

    Attributes:
        members: in their order; those that have nothing to send are left out, since what was to
            make it failed.
    """

    def __init__(self, group: _Group) -> None:
        self.members: list[Member] = []
        self._group = group
        self._found: Tensor | None = None

    @cached_property
    def exchange(self) -> Exchange:
        """The one exchange that they are, which begins here."""
        self._group.batch = Batch(self._group)
        place = self.members[0].place
        others = _others(place.ranks.rank(), place.ranks.size())
        whole = [each for each in self.members if len(each.parts) == len(others)]
        likes = [each.like for each in whole]
        for each, begin in zip(whole, _offsets(likes), strict=False):
            each.begin = begin
        exchange = Exchange(self._group, place, *likes, as_bytes=True)
        exchange.send({target: tuple(m.parts[target] for m in whole) for target in others})
        return exchange

    def received(self, member: Member) -> Tensor:
        """What all other ranks sent of a member [ranks - 1, *shape], behind each other in a
        circle; all that came together leaves the buffers at once.
        """
        if self._found is None:
            exchange = self.exchange
            self._found = _copied(exchange.received(), exchange.memory)
            exchange.release()
            exchange.end()
            for each in self.members:
                each.parts.clear()
        begin, (shape, dtype) = member.begin, member.like
        assert begin is not None, "what was not sent is not waited for"
        rows = self._found[:, begin : begin + _nbytes(shape, dtype)].view(dtype)
        return rows.view(len(rows), *shape)


def _copied(rows: Tensor, memory: Memory) -> Tensor:
    """Bytes of ranks [ranks - 1, n], each of which begin where any type may."""
    nbytes = rows.shape[1]
    pitch = (nbytes // _ALIGNED + 1) * _ALIGNED
    found = torch.empty(len(rows), pitch, dtype=rows.dtype, device=rows.device)[:, :nbytes]
    for here, there in zip(found, rows, strict=True):
        memory.copy(here, there)
    return found


def _offsets(likes: Sequence[Like]) -> list[int]:
    """Where each begins of what lies one behind the other, in bytes; and where the last one ends,
    to which nothing is added.
    """
    begins, end = [], 0
    for like in likes:
        begins.append(-(-end // _ALIGNED) * _ALIGNED)
        end = begins[-1] + _nbytes(*like)
    return [*begins, end]


def _others(rank: int, size: int) -> tuple[int, ...]:
    """Ranks behind a rank, in a circle."""
    return tuple((rank + step) % size for step in range(1, size))


def gathered(
    rows: Tensor, product: Callable[..., object], widths: tuple[int | None, ...], place: Place
) -> tuple[Tensor | None, ...]:
    """Products of the rows of all ranks, in their order.

    Products of others' rows have a stream of their own: they begin where the one before ends.

    Args:
        rows: [T, ...], this rank's, contiguous, as many on all.
        product: of rows of one rank, into tensors of as many.
        widths: columns of each; None for one that is not wanted.
        place: where.
    """
    exchange = _exchange(place, rows)
    exchange.send(dict.fromkeys(exchange.others, (rows,)))
    memory, arrivals = exchange.memory, exchange.arrivals()
    made = _Made(rows, memory.size, widths)

    def others() -> None:
        for source, found in arrivals:
            product(found, *made.of_rank(source))

    with _beside(memory, arrivals):
        product(rows, *made.of_rank(exchange.rank))
        memory.run(PRODUCTS, others)
    return made.whole()


@contextmanager
def _beside(memory: Memory, arrivals: Iterator[object]) -> Iterator[None]:
    """What the stream of products is given goes beside the current one, which then joins it.

    Whatever fails, all arrives: other ranks wait for this one, and streams may still write.
    """
    memory.fork(PRODUCTS)
    try:
        yield
    except BaseException:
        memory.run(PRODUCTS, partial(_exhaust, arrivals))
        raise
    finally:
        memory.join(memory.made())


class _Made:
    """What is made of the rows of all ranks, tensors of as many rows.

    Args:
        rows: [T, ...], of one rank.
        ranks: how many there are.
        widths: columns of each; None for one that is not wanted.
    """

    def __init__(self, rows: Tensor, ranks: int, widths: tuple[int | None, ...]) -> None:
        shape = (ranks, *rows.shape[:-1])
        self._made = [None if width is None else rows.new_empty(*shape, width) for width in widths]

    def of_rank(self, rank: int) -> Iterator[Tensor | None]:
        """Rows of a rank."""
        return (None if each is None else each[rank] for each in self._made)

    def whole(self) -> tuple[Tensor | None, ...]:
        """Those of all, in their order."""
        return tuple(None if each is None else each.flatten(0, 1) for each in self._made)


def scattered(
    rows: Tensor, product: Callable[[Tensor], Tensor], place: Place, pieces: int
) -> Tensor:
    """This rank's rows of a product, added up over ranks and rounded once.

    Its own come last, behind the others and not beside them: of two products that may run, a graph
    takes either first.

    Args:
        rows: [T, ...], contiguous, of whose product each rank gets as many rows.
        product: of rows of one rank.
        place: where.
        pieces: in how many a rank's rows are made and sent, at most: the first travels while the
            second is made.  Of few rows, or beside other exchanges, they are not divided.
    """
    own, size = place.ranks.rank(), place.ranks.size()
    parts = rows.chunk(size)
    exchanges = []
    for each in zip(*(part.chunk(_pieces(place, part, pieces)) for part in parts), strict=True):
        exchange = None
        for target in _others(own, size):
            part = product(each[target])
            if exchange is None:
                exchange = _exchange(place, part)
                exchanges.append(exchange)
            exchange.send({target: (part,)})
    try:
        total = product(parts[own])
    except BaseException:  # other ranks wait for this one to have read what they sent
        _exhaust(each for exchange in exchanges for each in exchange.arrivals())
        raise
    for exchange, piece in zip(exchanges, total.chunk(len(exchanges)), strict=True):
        _add_up(exchange, piece, piece)
    return total


def _pieces(place: Place, part: Tensor, most: int) -> int:
    """How many of a rank's rows: as many as there are buffers that nothing else waits in."""
    free = 1 if _group_of(place.ranks).open else TURNS
    return max(min(most, free, len(part) // PIECE), 1)


class Gathering:
    """Rows that all ranks send to each other, whatever runs meanwhile.

    Args:
        rows: [T, ...], this rank's, contiguous, as many on all.
        place: where.
        ahead: whether they take their place among those of all at once, before there is anything to
            wait for; else when they are waited for, which is when the memory is needed.
    """

    def __init__(self, rows: Tensor, place: Place, ahead: bool = False) -> None:
        self._rows, self._exchange = rows, _exchange(place, rows)
        self._exchange.send(dict.fromkeys(self._exchange.others, (rows,)))
        self._every = self._own() if ahead else None

    def __call__(self) -> Tensor:
        """Those of all, in their order."""
        every = self._all()
        _exhaust(self._receive(every))
        return every.flatten(0, 1)

    def arriving(self, op: Callable[[Tensor, int, int, int], T]) -> tuple[Tensor, T]:
        """The same, and what an op makes of them, which begins before others' are there.

        Args:
            op: of the rows of all; of the tokens that are there, the first and one past the last;
                and of the handle of a stream that brings the others.
        """
        memory, own = self._exchange.memory, self._rows.shape[:-1].numel()
        every = self._all()
        memory.fork(PRODUCTS)
        _exhaust(self._receive(every, PRODUCTS))
        there = memory.made()
        first = own * self._exchange.rank
        try:
            made = op(every.flatten(0, 1), first, first + own, memory.handle(PRODUCTS))
        finally:
            memory.join(there)  # whatever the op did: this stream may have the memory again
        return every.flatten(0, 1), made

    def products(
        self, product: Callable[..., object], widths: tuple[int | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """The same, and products of them, as `gathered` makes them."""
        memory, every = self._exchange.memory, self._all()
        made = _Made(self._rows, memory.size, widths)
        sources = self._receive(every)

        def others() -> None:
            for source in sources:
                product(every[source], *made.of_rank(source))

        with _beside(memory, sources):
            product(self._rows, *made.of_rank(memory.rank))
            memory.run(PRODUCTS, others)
        return every.flatten(0, 1), *made.whole()

    def _all(self) -> Tensor:
        """The same, once."""
        every, self._every = self._every, None
        return self._own() if every is None else every

    def _own(self) -> Tensor:
        """Room for the rows of all ranks, with this rank's."""
        every = self._rows.new_empty(self._exchange.memory.size, *self._rows.shape)
        self._exchange.memory.copy(every[self._exchange.rank], self._rows)
        return every

    def _receive(self, every: Tensor, stream: int | None = None) -> Iterator[int]:
        """Ranks whose rows are there, in the order in which they send to this one."""
        for source, rows in self._exchange.arrivals(stream):
            self._exchange.memory.copy(every[source], rows, stream)
            yield source


def _exhaust(arrivals: Iterator[object]) -> None:
    """Let come what has not come yet."""
    for _ in arrivals:
        pass


def start_to_scatter(rows: Tensor, place: Place) -> Callable[[], Tensor]:
    """Send each rank its rows, whatever runs meanwhile.

    Args:
        rows: [T, ...], contiguous, of which each rank gets as many.
        place: where.

    Returns:
        What gives this rank's, added up over ranks as `scattered` does.
    """
    parts = rows.chunk(place.ranks.size())
    exchange = _exchange(place, parts[0])
    exchange.send({target: (parts[target],) for target in exchange.others})
    own = parts[exchange.rank]

    def add_up() -> Tensor:
        total = torch.empty_like(own)
        _add_up(exchange, own, total)
        return total

    return add_up


def _add_up(exchange: Exchange | Small, own: Tensor, total: Tensor) -> None:
    """A rank's own rows and those that it is sent: of those behind it in a circle, then its own."""
    add_rows(exchange.received(), own, total)
    exchange.release()
    exchange.end()


class _Group:
    """Memory of a group, the last one the largest: graphs may have captured those before it; and
    the exchanges that go on there.

    Attributes:
        open: exchanges, in the order in which they began.
        batch: of what is sent next of small ones.
        limit_s: seconds that a wait may take.
    """

    def __init__(self) -> None:
        self.memories: list[Memory] = []
        self.open: list[Exchange] = []
        self.batch = Batch(self)
        self.limit_s = TIMEOUT.total_seconds()
        self._turn = 0

    def send(self) -> None:
        """What is small and has not been sent goes off."""
        if self.batch.members:
            self.batch.exchange  # noqa: B018

    def take_turn(self, ranks: Any, nbytes: int) -> tuple[Memory, int]:
        """Memory for so many bytes of each rank, and whose turn it is there.

        Raises:
            RuntimeError: there is none for so many, and ranks cannot make it together while a graph
                is captured.
        """
        if not self.memories or self.memories[-1].capacity < nbytes:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "overlap: ranks make memory for so many tokens together, which no graph can "
                    "capture; run the same call once before the capture"
                )
            self.add(Memory(ranks, -(-max(nbytes, 1) // _ROUND) * _ROUND))
        self._turn = (self._turn + 1) % TURNS
        return self.memories[-1], self._turn

    def add(self, memory: Memory) -> None:
        """Memory whose waits are watched from here on."""
        self.memories.append(memory)
        if len(self.memories) == 1:
            threading.Thread(target=_watch, args=(ref(self),), daemon=True).start()


_GROUPS: WeakKeyDictionary[Any, _Group] = WeakKeyDictionary()


def _group_of(ranks: Any) -> _Group:
    group = _GROUPS.get(ranks)
    if group is None:
        group = _GROUPS[ranks] = _Group()
    return group


def limit(ranks: Any, timeout: timedelta) -> None:
    """How long streams wait for another rank of a group, from here on."""
    _group_of(ranks).limit_s = timeout.total_seconds()


def _watch(watched: ReferenceType[_Group]) -> None:
    """End the process once a stream of a group has waited too long, and say where and for whom."""
    while (group := watched()) is not None:
        now = time.monotonic()
        for memory in group.memories:
            if late := memory.overdue(now, group.limit_s):
                print(late, file=sys.stderr, flush=True)
                faulthandler.dump_traceback()
                os.abort()
        pause = min(_LOOKS_S, group.limit_s / 4)
        del group
        time.sleep(pause)


def _exchange(place: Place, rows: Tensor) -> Exchange | Small:
    """The next one of a group, of tensors like one.

    Raises:
        RuntimeError: as `_Group.take_turn`.
    """
    group = _group_of(place.ranks)
    if rows.nbytes <= SMALL:
        return Small(group, place, (tuple(rows.shape), rows.dtype))
    group.send()
    return Exchange(group, place, (tuple(rows.shape), rows.dtype))


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
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
