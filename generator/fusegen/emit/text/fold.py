"""Text within the width of a page: what is too long goes on in the next line, further in."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator

LINE_LENGTH = 100
_FURTHER_IN = 4
_COMMENT = re.compile(r"( *)# (\S.*)")
_ITEM = re.compile(r"\d+\. ")
_ENTRY = re.compile(r"[\w.]+: ")


def fold(line: str, further_in: int = _FURTHER_IN, width: int = LINE_LENGTH) -> Iterator[str]:
    """A line cut between words; an arrow stays with what it leads to.

    Args:
        line: with its indentation.
        further_in: how many more blanks all lines but the first begin with.
        width: the most letters of a line; a single word may be longer.
    """
    indent = len(line) - len(line.lstrip(" "))
    while len(line) > width:
        cuts = [match.start() for match in re.finditer(r"(?<=\S)(?<!->) +(?=\S)", line)]
        fitting = [cut for cut in cuts if cut <= width and line[:cut].strip()]
        cut = fitting[-1] if fitting else cuts[0] if cuts else None
        if cut is None:
            break
        yield line[:cut]
        line = " " * (indent + further_in) + line[cut:].lstrip(" ")
    yield line


def fold_python(text: str) -> str:
    """Python whose comments and docstrings fit; nothing else is changed.

    What ruff's formatter leaves as it is: it wraps code alone.
    """
    lines = text.split("\n")
    too_long = [row for row, line in enumerate(lines, 1) if len(line) > LINE_LENGTH]
    if not too_long:
        return text
    folded: dict[int, list[str]] = {}
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.start[0] > too_long[-1]:
            break
        first, last = token.start[0], token.end[0]
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].isspace():
            folded[first] = list(_comment(lines[first - 1]))
        elif token.type == tokenize.STRING and before in _STATEMENT_ENDS:
            indent = token.start[1]
            for row in range(first, last + 1):
                folded[row] = list(_docstring_line(lines[row - 1], indent))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return "\n".join(line for row, own in enumerate(lines, 1) for line in folded.get(row, [own]))


_STATEMENT_ENDS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


def _comment(line: str) -> Iterator[str]:
    """A comment; the lines of an item of a list stand under its words."""
    match = _COMMENT.fullmatch(line)
    if match is None:
        yield line
        return
    indent, words = match.groups()
    further_in = len(item[0]) if (item := _ITEM.match(words)) else 0
    for part in fold(words, further_in, LINE_LENGTH - len(indent) - 2):
        yield f"{indent}# {part}"


def _docstring_line(line: str, indent: int) -> Iterator[str]:
    """A line of a docstring; an entry of a section goes on further in, a paragraph does not."""
    words = line.lstrip(" ")
    entry = len(line) - len(words) > indent and _ENTRY.match(words)
    return fold(line, _FURTHER_IN if entry else 0)
