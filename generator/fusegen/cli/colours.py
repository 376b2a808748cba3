"""Colours of `explain`, where its answer goes to a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import click

from ..emit.text.fold import LINE_LENGTH

_ROW = re.compile(r"^(  )(\d+\. \w+(?: \w+)?|\w+)(?=  |$|:)")
"""The name that a row of a table begins with: of a step, or of a buffer."""
_STATUS = {"native": "green", "emulated": "yellow", "unsupported": "red"}
_HEAD = re.compile(r"(.+?)( on \S+: )(" + "|".join(_STATUS) + ")")
_OUTCOME = re.compile(r"(?<!not )applied$|not applied: .*$")
_UNIT = re.compile(r"\b[\d.]+ (?:[kMGTPE]?(?:B|FLOP)|[num]s)\b")


def coloured(lines: Iterable[str]) -> Iterator[str]:
    """Lines of `explain`: heads bold, names of rows in cyan, what was not done dim.

    click takes colours out where stdout is no terminal, or where nobody wants them.
    """
    for number, line in enumerate(lines):
        head = _HEAD.match(line) if number == 0 else None
        if head:
            status = click.style(head[3], fg=_STATUS[head[3]], bold=True)
            yield click.style(head[1], bold=True) + head[2] + status + line[head.end() :]
        elif line and not line.startswith(" "):
            yield click.style(line, bold=True)
        else:
            line = _UNIT.sub(lambda match: click.style(match[0], fg="green"), line)
            line = _ROW.sub(lambda match: match[1] + click.style(match[2], fg="cyan"), line, 1)
            yield _OUTCOME.sub(_outcome, line)


def _outcome(match: re.Match[str]) -> str:
    text = match[0]
    return click.style(text, fg="green") if text == "applied" else click.style(text, dim=True)


def fitted(lines: Iterable[str]) -> Iterator[str]:
    """Lines whose long names are cut behind underscores, where a page has no place for them."""
    for line in lines:
        while len(line) > LINE_LENGTH:
            indent = len(line) - len(line.lstrip(" "))
            cut = line.rfind("_", indent + 1, LINE_LENGTH) + 1
            if cut <= indent + 1:
                break
            yield line[:cut]
            line = " " * (indent + 2) + line[cut:]
        yield line
