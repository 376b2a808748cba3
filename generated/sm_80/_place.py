"""Where ranks communicate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup


class Place(NamedTuple):
    """Where a module communicates.

    Attributes:
        cell: the module.
        step: what it does there, for messages.
        keyword: of the group in the module.
        group: the ranks; None for all.
    """

    cell: str
    step: str
    keyword: str
    group: ProcessGroup | None

    @property
    def ranks(self) -> Any:
        """The group, as functional collectives know it.

        Raises:
            RuntimeError: there are no ranks; the message says how to form a group.
        """
        if self.group is None and not torch.distributed.is_initialized():
            raise RuntimeError(
                f"{self.cell}: {self.keyword}: expected a process group, got none; call "
                f"torch.distributed.init_process_group() before the first step, or set "
                f"{self.keyword}"
            )
        return torch.distributed.group.WORLD if self.group is None else self.group

    @property
    def words(self) -> str:
        """Of messages."""
        return f"{self.cell}: {self.step} over {self.keyword}"
