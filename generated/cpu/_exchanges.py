"""What ranks send each other while kernels run: one exchange for each collective, or for several.

No wait is for ever: streams write into memory of the host that they wait, and for whom, and that
they have gone on.  A thread reads it, and ends the process once one wait takes too long, as the
watchdog of NCCL does; that sees nothing of replayed graphs, this one does.  Where ranks `watch` it,
it sees what NCCL brings, too.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from ._alike import is_captured
from ._place import Place
from ._streams import COPIES, FREE, FULL, ROOM, TURNS, Memory, Waits, nbytes_of

Like = tuple[tuple[int, ...], torch.dtype]  # shape and type
SMALL = 2**21  # bytes of what is sent with others: it takes the link less time than streams a flag
TIMEOUT = timedelta(minutes=10)  # NCCL's in PyTorch
_LOOKS_S = 1.0  # seconds between them
_ROUND = 2**21  # bytes
_ALIGNED = 256  # bytes: where what is sent together begins


def exchange_of(place: Place, rows: Tensor) -> Exchange | Small:
    """The next one of a group, of tensors like one.

    Raises:
        RuntimeError: as `_Group.take_turn`.
    """
    group = group_of(place.ranks)
    if rows.nbytes <= SMALL:
        return Small(group, place, (tuple(rows.shape), rows.dtype))
    group.send()
    return Exchange(group, place, (tuple(rows.shape), rows.dtype))


def group_of(ranks: Any) -> _Group:
    """The memory of a group and what goes on there; none at first."""
    group = _GROUPS.get(ranks)
    if group is None:
        group = _GROUPS[ranks] = _Group()
    return group


def limit(ranks: Any, timeout: timedelta) -> None:
    """How long streams wait for another rank of a group, from here on."""
    group_of(ranks).limit_s = timeout.total_seconds()


def waits_of(ranks: Any) -> Waits:
    """What streams of this rank wait for in collectives of a group that NCCL runs.

    Asked for once before a graph is captured: it takes memory of the host.
    """
    group = group_of(ranks)
    if group.waits is None:
        group.waits = Waits(ranks.rank(), ranks.size())
        group.look()
    return group.waits


class _Group:
    """Memory of a group, the last one the largest: graphs may have captured those before it; and
    the exchanges that go on there.

    Attributes:
        waits: for what NCCL brings, where they are told; None elsewhere.
        open: exchanges, in the order in which they began.
        batch: of what is sent next of small ones.
        limit_s: seconds that a wait may take.
    """

    def __init__(self) -> None:
        self.waits: Waits | None = None
        self.memories: list[Memory] = []
        self.open: list[Exchange] = []
        self.batch = Batch(self)
        self.limit_s = TIMEOUT.total_seconds()
        self._turn = 0
        self._looks = False

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
            if is_captured():
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
        self.look()

    def overdue(self, now: float) -> str:
        """A message of a wait that takes too long; nothing while there is none."""
        late = [each.overdue(now, self.limit_s) for each in self.memories]
        if self.waits is not None:
            late.append(self.waits.overdue(now, self.limit_s))
        return next(filter(None, late), "")

    def look(self) -> None:
        """Whether a wait is overdue is looked at from here on."""
        if not self._looks:
            self._looks = True
            threading.Thread(target=_watch, args=(ref(self),), daemon=True).start()


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
        self.others = others_of(self.rank, self.memory.size)
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
        self.others = others_of(self.rank, place.ranks.size())
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
        others = others_of(place.ranks.rank(), place.ranks.size())
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
        rows = self._found[:, begin : begin + nbytes_of(shape, dtype)].view(dtype)
        return rows.view(len(rows), *shape)


def others_of(rank: int, size: int) -> tuple[int, ...]:
    """Ranks behind a rank, in a circle."""
    return tuple((rank + step) % size for step in range(1, size))


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
        end = begins[-1] + nbytes_of(*like)
    return [*begins, end]


_GROUPS: WeakKeyDictionary[Any, _Group] = WeakKeyDictionary()


def _watch(watched: ReferenceType[_Group]) -> None:
    """End the process once a stream of a group has waited too long, and say where and for whom."""
    while (group := watched()) is not None:
        now = time.monotonic()
        if late := group.overdue(now):
            print(late, file=sys.stderr, flush=True)
            faulthandler.dump_traceback()
            os.abort()
        pause = min(_LOOKS_S, group.limit_s / 4)
        del group
        time.sleep(pause)
