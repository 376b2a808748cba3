"""Products of the rows of one rank at a time, while those of others are on their way.

PyTorch's pipeline does it: copies between GPUs by copy engines, through symmetric memory of the
group, and products on two streams.  A row has the bits that it has among others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import _symmetric_memory

_symmetric: Any = _symmetric_memory  # not public, and not typed alike in all versions
Product = Callable[[Tensor], Tensor]


def gathered(rows: Tensor, product: Product, width: int, name: str, ranks: int) -> Tensor:
    """The product of the rows of all ranks, in their order.

    Args:
        rows: [T, ...], this rank's, as many on all.
        product: of rows of one rank.
        width: columns of it.
        name: of the group.
        ranks: how many are in it.
    """
    count, *others = rows.shape
    every = rows.new_empty(count * ranks, *others)
    out = rows.new_empty(count * ranks, *others[:-1], width)

    def consume(part: Tensor, rank: int) -> None:
        out[rank * count : (rank + 1) * count].copy_(product(part))

    _symmetric._pipelined_all_gather_and_consume(rows, consume, every, name, ag_out_needed=False)
    return out
