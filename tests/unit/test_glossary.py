"""The glossary: a word a line, in order, and none that nothing uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
ENTRY = re.compile(r"- \*\*([a-z][a-z ]*)\*\*: \S.*[^.]\.")
ENTRIES = [line for line in LINES if line.startswith(("-", " ", "*"))]
WORDS = [match[1] for line in ENTRIES if (match := ENTRY.fullmatch(line))]


def text_elsewhere() -> str:
    """All code of the generator, all specs and all other pages, in small letters."""
    files = [
        *(ROOT / "generator").rglob("*.py"),
        *(ROOT / "specs").rglob("*.yaml"),
        *(page for page in (ROOT / "docs").rglob("*.md") if page.name != "glossary.md"),
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in files).lower()


def test_every_entry_is_one_line_and_they_are_in_order() -> None:
    assert [line for line in ENTRIES if not ENTRY.fullmatch(line)] == []
    assert sorted(set(WORDS)) == WORDS
    assert len(WORDS) >= 40


@pytest.fixture(scope="module")
def elsewhere() -> str:
    return text_elsewhere()


@pytest.mark.parametrize("word", WORDS)
def test_every_word_is_used(word: str, elsewhere: str) -> None:
    spelled = word.replace(" ", r"[\s_]*")
    assert re.search(rf"(?<![a-z]){spelled}(?![a-z])", elsewhere), word
