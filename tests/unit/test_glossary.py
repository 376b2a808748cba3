"""The glossary: a word a line, in order, and none that nothing uses.

Words that the field has are the field's everywhere else, too.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
ENTRY = re.compile(r"- \*\*([a-z][a-z ]*)\*\*: \S.*[^.]\.")
ROOMS = ("benchmarks", "docs", "examples", "generator", "specs", "templates", "tests")
SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".j2", ".md", ".py", ".txt", ".yaml"}
OTHER_WORDS = {
    "transposed": re.compile(r"(?<!re)turned(?![a-z])", re.IGNORECASE),
    "GEMM": re.compile(r"matrix[\s/#-]+products?(?![a-z])", re.IGNORECASE),
}
"""By a word of the field, what is not said in its place, in names or in prose."""
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


@pytest.mark.parametrize("word", OTHER_WORDS)
def test_words_of_the_field_are_used(word: str) -> None:
    """Not in this file, which names the others."""
    found = {
        (path.relative_to(ROOT).as_posix(), match[0])
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in SUFFIXES and path.is_file() and path != Path(__file__)
        for match in OTHER_WORDS[word].finditer(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert found == set()


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("transposed", "dequantize_e4m3_codes_turned"),
        ("transposed", "constexpr bool kTurned = true;"),
        ("transposed", "// codes are turned over"),
        ("GEMM", "the matrix products"),
        ("GEMM", "// a matrix\n// product"),
    ],
)
def test_other_words_are_found(word: str, text: str) -> None:
    assert OTHER_WORDS[word].search(text)


def test_words_that_hold_another_one_are_left_alone() -> None:
    plain = "what is returned, Returned and in turn; a dot product of a matrix's rows"
    assert not any(pattern.search(plain) for pattern in OTHER_WORDS.values())
