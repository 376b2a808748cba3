"""Names of specs, and the letter that tells them from the words of generated text around them."""

from __future__ import annotations

MARK = "\u01c2"
"""In front of a name while a text is laid out; ``fusegen.emit.hygiene`` takes it out again.

Names are ASCII, and no text of a spec has this letter.
"""


def mark(name: str) -> str:
    """A name that is not mistaken for a word of the text around it."""
    return name if name.startswith(MARK) else f"{MARK}{name}"


def plain(text: str) -> str:
    """A text as people will read it, for what depends on its length."""
    return text.replace(MARK, "")


def prefixed(prefix: str, name: str) -> str:
    """A name derived from another, marked where that is."""
    return mark(f"{prefix}{name[1:]}") if name.startswith(MARK) else f"{prefix}{name}"
