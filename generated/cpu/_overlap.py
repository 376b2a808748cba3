"""Rows of other ranks, which copy engines move while products run.

Each rank sends (`_exchanges.py`), and its streams wait for what they read alone (`_streams.py`).  A
row has the bits that it has among others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ._add_rows import add_rows
from ._exchanges import Exchange, Small, exchange_of, group_of, others_of
from ._place import Place
from ._streams import PRODUCTS, TURNS, Memory

T = TypeVar("T")
PIECE = 2048  # rows of a piece, at least: one more costs streams some 10 us, the host as much again


def gathered(
    sources: Sequence[Tensor],
    product: Callable[..., object],
    widths: tuple[int | None, ...],
    place: Place,
    like: Tensor,
) -> tuple[Tensor | None, ...]:
    """Products of the rows of all ranks, in their order.

    Products of others' rows have a stream of their own: they begin where the one before ends.

    Args:
        sources: this rank's rows, contiguous, alike on all ranks; several tensors have some of
            each, the largest first.
        product: of rows of one rank, into tensors of as many.
        widths: columns of each; None for one that is not wanted.
        place: where.
        like: [T, ...], as many rows as a rank has, in the type of products.
    """
    exchanges: list[Exchange | Small] = []
    for rows in reversed(sources):  # what is small is sent when something large is
        exchange = exchange_of(place, rows)
        exchange.send(dict.fromkeys(exchange.others, (rows,)))
        exchanges.insert(0, exchange)
    memory, arrivals = exchange.memory, _together(exchanges)
    made = _Made(like, memory.size, widths)

    def others() -> None:
        for source, found in arrivals:
            product(*found, *made.of_rank(source))

    with _beside(memory, arrivals):
        product(*sources, *made.of_rank(exchange.rank))
        memory.run(PRODUCTS, others)
    return made.whole()


def _together(exchanges: Sequence[Exchange | Small]) -> Iterator[tuple[int, list[Tensor]]]:
    """What each rank sends in several exchanges, and which, as `Exchange.arrivals` gives it."""
    for each in zip(*(exchange.arrivals() for exchange in exchanges), strict=True):
        yield each[0][0], [found for _, found in each]


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
    parts: Sequence[Sequence[Tensor]], product: Callable[..., Tensor], place: Place, pieces: int
) -> Tensor:
    """This rank's rows of a product, added up over ranks and rounded once.

    Its own come last, behind the others and not beside them: of two products that may run, a graph
    takes either first.

    Args:
        parts: of each rank, contiguous rows [T, ...] of whose product it gets as many; several
            tensors have some of each.
        product: of rows of one rank.
        place: where.
        pieces: in how many a rank's rows are made and sent, at most: the first travels while the
            second is made.  Of few rows, or beside other exchanges, they are not divided, nor are
            those of several tensors.
    """
    own, size = place.ranks.rank(), place.ranks.size()
    count = _pieces(place, parts[own][0], pieces) if len(parts[own]) == 1 else 1
    exchanges = []
    for each in zip(*(_divided(part, count) for part in parts), strict=True):
        exchange = None
        for target in others_of(own, size):
            part = product(*each[target])
            if exchange is None:
                exchange = exchange_of(place, part)
                exchanges.append(exchange)
            exchange.send({target: (part,)})
    try:
        total = product(*parts[own])
    except BaseException:  # other ranks wait for this one to have read what they sent
        _exhaust(each for exchange in exchanges for each in exchange.arrivals())
        raise
    for exchange, piece in zip(exchanges, total.chunk(len(exchanges)), strict=True):
        _add_up(exchange, piece, piece)
    return total


def _divided(part: Sequence[Tensor], count: int) -> Iterator[tuple[Tensor, ...]]:
    """The rows of a rank in so many pieces."""
    return (
        zip(*(each.chunk(count) for each in part), strict=True)
        if count > 1
        else iter([tuple(part)])
    )


def _pieces(place: Place, part: Tensor, most: int) -> int:
    """How many of a rank's rows: as many as there are buffers that nothing else waits in."""
    free = 1 if group_of(place.ranks).open else TURNS
    return max(min(most, free, len(part) // PIECE), 1)


class Gathering:
    """Rows that all ranks send to each other, whatever runs meanwhile.

    Args:
        parts: what each rank gets, in their order, and this one keeps; [T, ...], contiguous, alike
            on all.
        place: where.
        ahead: whether this rank's take their place among those of all at once, before there is
            anything to wait for; else when they are waited for, which is when the memory is needed.
    """

    def __init__(self, parts: Sequence[Tensor], place: Place, ahead: bool = False) -> None:
        self._exchange = exchange_of(place, parts[0])
        self._rows = parts[self._exchange.rank]
        self._exchange.send({target: (parts[target],) for target in self._exchange.others})
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
    exchange = exchange_of(place, parts[0])
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
