"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def aligned(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Rows, all of one length, with columns aligned, empty columns and trailing blanks left out."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        columns = [text.ljust(width) for text, width in zip(row, widths, strict=True) if width]
        yield "  ".join(columns).rstrip()
