"""Text of specs in the languages that it is printed in: the one place that escapes it.

Specs hold printable lines alone (``model.specs.Line``), so no text here has a line break.
"""

from __future__ import annotations

import re

_MARKDOWN = re.compile(r"[\\`*\[\]<>|#~&$!]|\b_|_\b", re.ASCII)
_CMAKE = re.compile(r"[A-Za-z0-9_=,.+/-]+")


def docstring(text: str) -> str:
    """Inside of a Python string in triple quotes, which reads back as the text."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def comment(text: str) -> str:
    """Behind ``//`` or ``#``: a backslash at the end of a line would continue it."""
    return f"{text}." if text.endswith("\\") else text


def markdown(text: str) -> str:
    """Plain words within a line of Markdown: no markup, HTML, mathematics or table cell."""
    return _MARKDOWN.sub(r"\\\g<0>", text)


def cmake(text: str) -> str:
    """One argument of CMake, in quotes where it needs them: no variable, command or list."""
    if _CMAKE.fullmatch(text):
        return text
    escaped = re.sub(r'[\\"$@]', r"\\\g<0>", text)
    return f'"{escaped}"'
