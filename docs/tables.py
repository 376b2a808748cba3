"""Tables of the documentation that are printed from the code: `python docs/tables.py [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fusegen.passes.pipeline import PASSES

PAGE = Path(__file__).parent / "architecture.md"
BEGIN = "<!-- passes: written by docs/tables.py -->"
END = "<!-- end of passes -->"


def passes() -> Iterator[str]:
    """The table of all passes in their order."""
    yield "| | pass | what it does | where chosen |"
    yield "|---|---|---|---|"
    for number, each in enumerate(PASSES, 1):
        words = ", ".join(f"`{word}`" for word in each.options)
        yield f"| {number} | `{each.name}` | {each.summary} | {words} |"


def replaced(page: str, path: Path) -> str:
    """The page with the table between its markers."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        sys.exit(f"{path} has no lines {BEGIN} and {END}, once each, for the table of passes")
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return "\n".join((f"{head}{BEGIN}", *passes(), f"{END}{tail}"))


def main(words: Sequence[str], path: Path = PAGE) -> int:
    """Write the table, or with ``--check`` say whether it is as it would be written."""
    page = path.read_text(encoding="utf-8")
    wanted = replaced(page, path)
    if wanted == page:
        return 0
    if "--check" in words:
        print(f"{path.name} is out of date; run: python docs/tables.py", file=sys.stderr)
        return 1
    path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
