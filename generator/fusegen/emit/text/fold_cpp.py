"""C++ within the width of a page, laid out as clang-format does in Google's style.

A line that is too long is cut where the fewest brackets are open: behind commas and opening
brackets, before the signs of conditions, behind an assignment.  What is still too long is cut
further in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from .fold import LINE_LENGTH, fold

_FURTHER_IN = 4
_COMMENT = re.compile(r"( *)// (\S.*)")
_TRAILING = re.compile(r"(.*\S)  // (\S.*)")
_ITEM = re.compile(r"\d+\. ")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|\|\||&&|<<|->|\w+|\s+|.')
_BEFORE = ("?", ":", "||", "&&")


def fold_cpp(text: str) -> str:
    """C++ whose lines fit, but for a word that is longer than a line; directives stay."""
    return "\n".join(folded for line in text.split("\n") for folded in _line(line))


def _line(line: str) -> Iterator[str]:
    if len(line) <= LINE_LENGTH or line.lstrip().startswith("#"):
        yield line
    elif match := _COMMENT.fullmatch(line):
        yield from _comment(*match.groups())
    elif match := _TRAILING.fullmatch(line):
        indent = " " * (len(line) - len(line.lstrip(" ")))
        yield from _comment(indent, match[2])
        yield from _line(match[1])
    else:
        yield from _code(line)


def _comment(indent: str, words: str) -> Iterator[str]:
    """A comment; the lines of an item of a list stand under its words."""
    further_in = len(item[0]) if (item := _ITEM.match(words)) else 0
    for part in fold(words, further_in, LINE_LENGTH - len(indent) - 3):
        yield f"{indent}// {part}"


def _code(line: str) -> Iterator[str]:
    """A statement: what is cut within more brackets goes on further in."""
    base = len(line) - len(line.lstrip(" "))
    least = depth = 0
    for number in count():
        cut = _best(line, depth) if len(line) > LINE_LENGTH else None
        if cut is None:
            break
        yield line[: cut.place].rstrip(" ")
        depth = cut.depth
        least = min(least, depth) if number else depth
        indent = base + _FURTHER_IN * (1 + depth - least)
        line = " " * indent + line[cut.place :].lstrip(" ")
    yield line


@dataclass(frozen=True, slots=True)
class _Cut:
    """A place where a line may go on in the next one, and how many brackets are open there."""

    place: int
    depth: int
    sign: str


def _best(line: str, depth: int) -> _Cut | None:
    """The last place of those with the fewest open brackets that fits.

    A line without any is cut between words.
    """
    words = len(line) - len(line.lstrip(" "))
    cuts = [cut for cut in _cuts(line, depth) if words + _FURTHER_IN < cut.place]
    fitting = [cut for cut in cuts if len(line[: cut.place].rstrip(" ")) <= LINE_LENGTH]
    fitting = [cut for cut in fitting if cut.sign != " "] or fitting
    if not fitting:  # a word is longer than a line
        return next(iter(cuts), None)
    fewest = min(cut.depth for cut in fitting)
    found = [cut for cut in fitting if cut.depth == fewest]
    questions = [cut for cut in cuts if cut.depth == fewest and cut.sign == "?"]
    return _of_condition(found, questions) or found[-1]


def _of_condition(fitting: list[_Cut], questions: list[_Cut]) -> _Cut | None:
    """Both results of a condition begin a line; of one in another's place, each second result."""
    if len(questions) == 1 and questions[0] in fitting:
        return questions[0]
    second = [cut for cut in fitting if cut.sign == ":"]
    return second[-1] if len(questions) > 1 and second else None


def _cuts(line: str, depth: int) -> Iterator[_Cut]:
    """Places where a line may be cut that begins within brackets."""
    previous = ""
    for match in _TOKEN.finditer(line):
        token = match[0]
        if token in ("(", "[", "{") or (token == "<" and _is_template(line, match.start())):
            depth += 1
            if token in ("(", "{") and line[match.end() : match.end() + 1] not in (")", "}"):
                yield _Cut(match.end(), depth, token)
        elif token in (")", "]", "}") or (token == ">" and previous != " " and depth):
            depth -= 1
        elif token == ",":
            yield _Cut(match.end(), depth, token)
        elif (token in _BEFORE and previous.isspace()) or token.isspace():
            yield _Cut(match.start(), depth, token[0])
        elif token == "=" and previous.isspace() and line[match.end() :].startswith(" "):
            yield _Cut(match.end(), depth, token)
        previous = token


def _is_template(line: str, place: int) -> bool:
    """Whether a sign opens arguments of a template: numbers are compared between blanks."""
    return line[place - 1 : place] != " " and line[place + 1 : place + 2] not in (" ", "=")
