"""Operands of steps that do what several others do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..ir.step import Operand


def numbered(operands: Sequence[Operand], number: int) -> Iterator[Operand]:
    """Operands of a part, whose slots are told from those of the others by its number."""
    for operand in operands:
        yield Operand(f"{operand.slot}_{number}", operand.buffer)
