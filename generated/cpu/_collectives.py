"""Collectives between the ops of a module: each is started, and waited for when it is needed.

They are PyTorch's functional ones, which compilers trace and CUDA graphs capture.  No op has a
process group in its schema; groups are attributes of modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from . import _asked, _exchanges, _overlap
from ._alike import require_alike
from ._place import Place


class Lies(NamedTuple):
    """How each rank's part of what was gathered lies.

    Attributes:
        ranks: how many parts there are.
        dtype: of its elements; those of 8 bits were sent as bytes.
        shape: of it.
        dim: that its tokens run along.
        tail: elements there behind those of the tokens.
    """

    ranks: int
    dtype: torch.dtype
    shape: torch.Size
    dim: int
    tail: int

    def joined(self, every: Tensor) -> Tensor:
        """The parts of all ranks side by side, with one tail."""
        parts = every.view(self.ranks, *self.shape)
        own = self.shape[self.dim] - self.tail
        tokens = parts.narrow(self.dim + 1, 0, own).movedim(0, self.dim)
        tokens = tokens.flatten(self.dim, self.dim + 1)
        if self.tail:
            tokens = torch.cat((tokens, parts[-1].narrow(self.dim, own, self.tail)), self.dim)
        return tokens.view(self.dtype)


class Pending(NamedTuple):
    """A collective that was started, or one that has nothing to send.

    Attributes:
        place: where.
        value: what it gives, once it is waited for; None where nothing was sent.
        shapes: of the parts of several sources, one behind the other; None for an absent source.
            Empty where there is one source alone.
        here: the results where nothing was sent.
        arriving: gives what copy engines bring, in the place of `value`; rows of all ranks, as a
            `Gathering`.
        lies: how parts of ranks lie that are side by side in the result; None where these are rows.
        first: of what the result numbers, the one that this rank counts from.
    """

    place: Place
    value: Tensor | None
    shapes: tuple[torch.Size | None, ...] = ()
    here: tuple[Tensor | None, ...] = ()
    arriving: Callable[[], Tensor] | None = None
    lies: Lies | None = None
    first: int = 0


def start_all_reduce(place: Place, sources: tuple[Tensor | None, ...], *, op: str) -> Pending:
    """Start to reduce tensors elementwise over ranks: one collective for all of them.

    Args:
        place: where.
        sources: of one type; absent ones are the same on every rank.
        op: such as `max`.

    Raises:
        RuntimeError: there are no ranks, or one of them is lost; the message names the place.
    """
    require_alike(place, sources)
    present = [source for source in sources if source is not None]
    if not present or place.ranks.size() == 1:
        return Pending(place, None, here=sources)
    name = place.ranks.group_name
    with _named(place):
        if len(sources) == 1:
            every = torch.ops._c10d_functional.all_reduce(present[0].contiguous(), op, name)
            return Pending(place, every)
        shapes = tuple(None if source is None else source.shape for source in sources)
        joined = torch.cat([source.flatten() for source in present])
        return Pending(place, torch.ops._c10d_functional.all_reduce(joined, op, name), shapes)


def start_all_gather(
    place: Place, sources: tuple[Tensor | None], *, dims: int = 1, ahead: bool = False
) -> Pending:
    """Start to gather the rows of all ranks, in their order; of all dimensions the first grows.

    Args:
        place: where.
        sources: one, of the same shape on all ranks.
        dims: that it has at least, if the first is to be one of rows.
        ahead: whether what waits for it begins with this rank's rows.

    Raises:
        RuntimeError: as `start_all_reduce`; or it has no rows.
    """
    (source,) = sources
    _require_rows(place, source, dims)
    if source is None or place.ranks.size() == 1:
        return Pending(place, None, here=sources)
    return _start_to_gather(place, source.contiguous(), ahead)


def _start_to_gather(place: Place, source: Tensor, ahead: bool = False) -> Pending:
    ranks = place.ranks
    with _named(place):
        if _asked.overlaps(place, source):
            parts = [source] * ranks.size()
            return Pending(place, None, arriving=_overlap.Gathering(parts, place, ahead))
        every = torch.ops._c10d_functional.all_gather_into_tensor(
            source, ranks.size(), ranks.group_name
        )
    return Pending(place, every)


def start_gather_numbers(
    place: Place, sources: tuple[Tensor | None], *, own: int, dims: int = 1
) -> Pending:
    """Start to gather rows of numbers of all ranks, which each then counts from its own first.

    Args:
        place: where.
        sources: one, of the same shape on all ranks: numbers of what each rank has as many of, the
            first rank's first.  Below 0, and from ``own`` on, they are then of no rank or another.
        own: how many each rank has.
        dims: as of `start_all_gather`.

    Raises:
        RuntimeError: as `start_all_gather`.
    """
    pending = start_all_gather(place, sources, dims=dims)
    return pending._replace(first=own * place.ranks.rank())


def start_gather_copy(
    place: Place, sources: tuple[Tensor | None], *, dim: int, tail: int
) -> Pending:
    """Start to gather a copy, its codes or its scales, of the tokens of all ranks, in their order.

    Args:
        place: where.
        sources: one, of the same shape on all ranks.
        dim: that tokens run along.
        tail: elements there behind those of the tokens, which are there once in the result.

    Raises:
        RuntimeError: as `start_all_reduce`.
    """
    (source,) = sources
    require_alike(place, sources)
    if source is None or place.ranks.size() == 1:
        return Pending(place, None, here=sources)
    sent = source.contiguous()
    if sent.element_size() == 1:  # few operations know each format of 8 bits
        sent = sent.view(torch.uint8)
    lies = Lies(place.ranks.size(), source.dtype, source.shape, dim, tail)
    return _start_to_gather(place, sent)._replace(lies=lies)


def start_placeholder(
    place: Place, sources: tuple[Tensor | None], *, rows: int, dims: int = 1
) -> Pending:
    """What stands for a tensor's rows of all ranks, of which there are copies; nothing is sent.

    Args:
        place: where.
        sources: one.
        rows: number of which the tokens of a rank are a multiple.
        dims: as of `start_all_gather`.

    Raises:
        RuntimeError: there are no ranks; it has no rows, or another number of them.
    """
    (source,) = sources
    _require_rows(place, source, dims)
    if source is None or place.ranks.size() == 1:
        return Pending(place, None, here=sources)
    tokens = source.shape[:-1].numel()
    if tokens % rows:
        raise RuntimeError(
            f"{place.cell}: {place.step}: expected a multiple of {rows} tokens of each rank, so "
            f"that no scale is of those of two, got {tokens}; pad the tokens"
        )
    first, *others = source.shape
    # As of `_quantized_tensors`, which not every bundle with collectives has.
    one = torch.full((), math.nan, device=source.device, dtype=source.dtype)
    return Pending(place, None, here=(one.expand(first * place.ranks.size(), *others),))


def start_reduce_scatter(place: Place, sources: tuple[Tensor | None], *, dims: int = 1) -> Pending:
    """Start to add up tensors over ranks, of which each gets its own rows.

    Args:
        place: where.
        sources: one, of the same shape on all ranks.
        dims: as of `start_all_gather`.

    Raises:
        RuntimeError: as `start_all_gather`; or ranks would not get as many rows each.
    """
    (source,) = sources
    _require_rows(place, source, dims)
    if source is None or place.ranks.size() == 1:
        return Pending(place, None, here=sources)
    ranks = place.ranks
    _refuse_unequal(place, source)
    with _named(place):
        if _asked.overlaps(place, source):
            arriving = _overlap.start_to_scatter(source.contiguous(), place)
            return Pending(place, None, arriving=arriving)
        own = torch.ops._c10d_functional.reduce_scatter_tensor(
            source.contiguous(), "sum", ranks.size(), ranks.group_name
        )
    return Pending(place, own)


def start_all_to_all(
    place: Place, sources: tuple[Tensor | None], *, dims: int = 1, ahead: bool = False
) -> Pending:
    """Start to send every rank its rows, and to get this one's from all, in their order.

    Args:
        place: where.
        sources: one, of the same shape on all ranks, as many rows for each of them.
        dims: as of `start_all_gather`.
        ahead: as of `start_all_gather`.

    Raises:
        RuntimeError: as `start_reduce_scatter`.
    """
    (source,) = sources
    _require_rows(place, source, dims)
    if source is None or place.ranks.size() == 1:
        return Pending(place, None, here=sources)
    ranks = place.ranks
    _refuse_unequal(place, source)
    with _named(place):
        if _asked.overlaps(place, source):
            parts = source.contiguous().chunk(ranks.size())
            return Pending(place, None, arriving=_overlap.Gathering(parts, place, ahead))
        own = [source.shape[0] // ranks.size()] * ranks.size()
        every = torch.ops._c10d_functional.all_to_all_single(
            source.contiguous(), own, own, ranks.group_name
        )
    return Pending(place, every)


def start_all_to_all_numbers(
    place: Place, sources: tuple[Tensor | None], *, own: int, dims: int = 1
) -> Pending:
    """The same of numbers, which this rank then counts from its own first.

    Args:
        place: where.
        sources: one, numbers as of `start_gather_numbers`.
        own: how many each rank has.
        dims: as of `start_all_gather`.

    Raises:
        RuntimeError: as `start_all_to_all`.
    """
    pending = start_all_to_all(place, sources, dims=dims)
    return pending._replace(first=own * place.ranks.rank())


def product_of_gathered(
    place: Place,
    sources: tuple[Tensor, ...],
    product: Callable[..., object],
    *,
    widths: tuple[int | None, ...],
    dims: int = 1,
    like: Tensor | None = None,
    lies: tuple[tuple[int, int], ...] = (),
) -> tuple[Any, ...]:
    """What `product` writes for the rows of all ranks, in their order; None for what is not wanted.

    Args:
        place: where they are gathered.
        sources: of the same shapes on all ranks: rows; or a copy of such, its codes, and its scales
            where each row has some.
        product: of any rows, each by itself, into tensors of as many; of copies, and what stands
            for their rows, which comes first.
        widths: columns of each; None for one that is not wanted.
        dims: as of `start_all_gather`.
        like: what stands for the rows of all that the sources are copies of (`start_placeholder`).
        lies: of each of a copy's tensors, ``dim`` and ``tail`` as of `start_gather_copy`.

    Raises:
        RuntimeError: as `start_all_gather`.
    """
    if not _asked.overlaps(place, sources[0]):
        if like is None:
            (every,) = wait(start_all_gather(place, (sources[0],), dims=dims))
            return _products((every,), product, widths)
        whole = [like]
        for source, (dim, tail) in zip(sources, lies, strict=True):
            whole += wait(start_gather_copy(place, (source,), dim=dim, tail=tail))
        return _products(whole, product, widths)
    sent = tuple(source.contiguous() for source in sources)
    with _named(place):
        if like is None:
            _require_rows(place, sources[0], dims)
            return _overlap.gathered(sent, product, widths, place, sent[0])
        require_alike(place, sources)
        own = like.chunk(place.ranks.size())[0]
        return _overlap.gathered(sent, partial(product, own), widths, place, own)


def scattered_product(
    place: Place,
    sources: tuple[Tensor, ...],
    product: Callable[..., Tensor],
    *,
    dims: int = 1,
    pieces: int = 1,
    lies: tuple[tuple[int, int], ...] = ((0, 0),),
    unit: int = 1,
) -> Tensor:
    """This rank's rows of what `product` gives, added up over ranks.

    Args:
        place: where sums are scattered.
        sources: of the same shapes on all ranks: rows; then a copy of them, its codes, and its
            scales where each row has some.
        product: of any rows, each by itself, a row for each.
        dims: as of `start_reduce_scatter`.
        pieces: in how many a rank's rows may be made, if that costs nothing; of one source.
        lies: of each source, ``dim`` and ``tail`` as of `start_gather_copy`.
        unit: number of which the tokens of a rank are a multiple, or they are not told apart.

    Raises:
        RuntimeError: as `start_reduce_scatter`.
    """
    rows = sources[0] if len(sources) > 1 else sources[0].contiguous()
    if not _asked.overlaps(place, rows) or rows.shape[:-1].numel() % (unit * place.ranks.size()):
        (own,) = wait(start_reduce_scatter(place, (product(*sources),), dims=dims))
        return own
    _require_rows(place, rows, dims)
    _refuse_unequal(place, rows)
    size = place.ranks.size()
    every = zip((rows, *sources[1:]), lies, strict=True)
    parts = (_parts(each, size, *how) for each, how in every)
    with _named(place):
        return _overlap.scattered([*zip(*parts, strict=True)], product, place, pieces)


def _parts(rows: Tensor, ranks: int, dim: int, tail: int) -> tuple[Tensor, ...]:
    """The rows of each rank, contiguous; what lies behind those of one may be another's first."""
    if not dim and not tail:
        return rows.chunk(ranks)
    own = (rows.shape[dim] - tail) // ranks
    return tuple(rows.narrow(dim, own * r, own + tail).contiguous() for r in range(ranks))


def start_share(place: Place, sources: tuple[Tensor | None]) -> Pending:
    """This rank's share of what is added once to a sum over ranks; nothing is sent.

    Args:
        place: where.
        sources: one, the same on all ranks.

    Raises:
        RuntimeError: there are no ranks.
    """
    (source,) = sources
    if source is None or place.ranks.size() == 1:
        return Pending(place, None, here=sources)
    return Pending(place, None, here=(source / place.ranks.size(),))


def wait(pending: Pending) -> tuple[Any, ...]:
    """The results of a collective, in the order of the current stream: a tensor for each source,
    None for an absent one.

    Raises:
        RuntimeError: as `start_all_reduce`.
    """
    sent, arriving = pending.value, pending.arriving
    if arriving is not None:
        with _named(pending.place):
            given = arriving()
    elif sent is not None:
        with _named(pending.place):
            given = _waited(pending.place, sent)
    else:
        return pending.here
    if pending.lies:
        return (pending.lies.joined(given),)
    if pending.first:
        return (given - pending.first,)
    if not pending.shapes:
        return (given,)
    sizes = [shape.numel() for shape in pending.shapes if shape is not None]
    parts = iter(given.split(sizes))
    return tuple(None if shape is None else next(parts).view(shape) for shape in pending.shapes)


def _waited(place: Place, sent: Tensor) -> Tensor:
    """What was sent, in the order of the current stream."""
    if not _asked.watches(place, sent):
        return functional.wait_tensor(sent)
    with _exchanges.waits_of(place.ranks).of(place.words):
        return functional.wait_tensor(sent)


def call_as_they_arrive(
    pending: Pending, op: Callable[..., Any], *others: Any
) -> tuple[Tensor, Any]:
    """The rows of all ranks, and what an op gives that may begin with this rank's own.

    Args:
        pending: of an all-gather.
        op: of those rows, then of the others; and last, of tokens that are there when it is called,
            the first and one past the last, and of the stream that brings the rest, by its handle:
            0 where all are there.
        others: its further arguments.

    Raises:
        RuntimeError: as `start_all_reduce`.
    """
    if not isinstance(pending.arriving, _overlap.Gathering):
        (every,) = wait(pending)
        return every, op(every, *others, 0, 0, 0)
    with _named(pending.place):
        return pending.arriving.arriving(lambda every, *there: op(every, *others, *there))


def product_as_they_arrive(
    pending: Pending,
    op: Callable[..., object],
    others: tuple[Tensor | None, ...],
    scalars: tuple[object, ...],
    *,
    widths: tuple[int | None, ...],
) -> tuple[Any, ...]:
    """The rows of all ranks, and what an op writes for them, this rank's own first.

    Args:
        pending: of an all-gather.
        op: of any rows, each by itself; of others; into tensors of as many rows; and of scalars.
        others: its further tensors, which have no such rows.
        scalars: its last arguments.
        widths: columns of what it writes; None for what is not wanted.

    Raises:
        RuntimeError: as `start_all_reduce`.
    """

    def product(rows: Tensor, *made: Tensor | None) -> None:
        op(rows, *others, *made, *scalars)

    if not isinstance(pending.arriving, _overlap.Gathering):
        (every,) = wait(pending)
        return every, *_products((every,), product, widths)
    with _named(pending.place):
        return pending.arriving.products(product, widths)


def require_same(place: Place, own: Tensor) -> None:
    """Refuse what is not the same on all ranks, where it is, so that the host need not wait.

    Raises:
        RuntimeError: it is not; on a GPU an assertion on the device fails.  Or as
            `start_all_reduce`.
    """
    (every,) = wait(start_all_gather(place, (own,)))
    same = (every.view(-1, *own.shape) == own).all()
    torch._assert_async(
        same,
        f"{place.cell}: {place.step}: expected copies by one scale on all ranks of "
        f"{place.keyword}, got others; quantise with `quantize_input` of this module",
    )


def _products(
    rows: Sequence[Tensor], product: Callable[..., object], widths: tuple[int | None, ...]
) -> tuple[Tensor | None, ...]:
    """What `product` writes for rows that are all there, the first of them in the module's type."""
    made = tuple(None if width is None else _of_rows(rows[0], width) for width in widths)
    product(*rows, *made)
    return made


def _of_rows(rows: Tensor, width: int) -> Tensor:
    """An empty tensor of as many rows, like a view: sizes that PyTorch 2.11's compiler traces as
    numbers between a collective and an op would be results of the module's graph."""
    view = rows[..., :1].expand(*(-1,) * (rows.dim() - 1), width)
    return torch.empty_like(view, memory_format=torch.contiguous_format)


def _require_rows(place: Place, source: Tensor | None, dims: int) -> None:
    if source is not None and source.dim() < dims:
        raise RuntimeError(
            f"{place.cell}: {place.step}: expected {dims} dimensions or more, the first of them of "
            f"tokens, which ranks have some of each, got shape {tuple(source.shape)}"
        )
    require_alike(place, (source,))


def _refuse_unequal(place: Place, source: Tensor) -> None:
    ranks = place.ranks.size()
    if source.shape[0] % ranks:
        raise RuntimeError(
            f"{place.cell}: {place.keyword}: expected a first dimension that {ranks} ranks "
            f"have equal parts of, got {source.shape[0]}; pad the tokens"
        )


@contextmanager
def _named(place: Place) -> Iterator[None]:
    """An error of a collective says which one it was, and on which rank."""
    try:
        yield
    except RuntimeError as error:
        rank = torch.distributed.get_rank(place.group)
        raise RuntimeError(
            f"{place.words} failed on rank {rank} of {place.ranks.size()}: {error}"
        ) from error
