"""A hand edit carried over into new output: a three-way merge whose base is what fusegen wrote."""

from __future__ import annotations

import re

from ..emit.polish import split_header
from .git import GitError, merge_file

_MINE = "yours"
_CONFLICT = re.compile(rb"^<{7} ", re.MULTILINE)


def conflicted(content: bytes) -> bool:
    """Whether a file holds a conflict that a merge left in it, one of ours or of branches."""
    return _CONFLICT.search(content) is not None


def merge(mine: bytes, base: bytes, new: bytes, versions: tuple[str, str]) -> bytes:
    """What a person changed in `base`, changed in `new`; conflicts stand inline, all three texts.

    Headers take no part: they hold a checksum, which differs whenever the text does. The result
    has the new one, if the edited file still has one. Line ends are those of the edited file.

    Args:
        versions: of fusegen, that wrote `base` and that wrote `new`.

    Raises:
        GitError: git is missing, or the edited file is not text.
    """
    try:
        text = mine.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GitError(f"is not UTF-8 ({error.reason} at byte {error.start})") from None
    ends = "\r\n" if "\r\n" in text else "\n"
    header, body = split_header(text.replace("\r\n", "\n"))
    old, fresh = base.decode("utf-8"), new.decode("utf-8")
    fresh_body = split_header(fresh)[1]
    labels = (_MINE, f"as fusegen {versions[0]} wrote it", f"new, fusegen {versions[1]}")
    merged = merge_file(body, split_header(old)[1], fresh_body, labels)
    opening = fresh.removesuffix(fresh_body) if header else ""
    return (opening + merged).replace("\n", ends).encode("utf-8")
