"""Generic code knows no recipe, architecture, activation or input by name."""

from __future__ import annotations

import io
import re
import token
import tokenize
from collections.abc import Iterator
from pathlib import Path

import fusegen

PACKAGE = Path(fusegen.__file__).parent
ROOMS = ("ir", "passes", "emit")
SPECIFIC = re.compile(r"sm_?[0-9]+|fp8|nvfp4|swiglu|split_sizes")
TEXT = {token.NAME, token.STRING, getattr(token, "FSTRING_MIDDLE", token.STRING)}

ALLOWED = {
    ("ir/dtypes.py", '"__nv_fp8_e4m3"'): "CUDA's name of a type",
    ("ir/dtypes.py", '"__nv_fp8_e5m2"'): "CUDA's name of a type",
    ("ir/quantization.py", '"nvfp4"'): "a rule of scales, as recipes name it",
    ("emit/kernels/units.py", '"nvfp4"'): "the same rule, as device code names it",
    ("ir/naming.py", '"split_sizes"'): "a keyword of the public function `quantize`",
}
"""Where such a word stands all the same, and why."""


def docstrings(code: str) -> set[tuple[int, int]]:
    """Where strings begin that are statements of their own."""
    found, fresh = set(), True
    for each in tokenize.generate_tokens(io.StringIO(code).readline):
        if each.type == token.STRING and fresh:
            found.add(each.start)
        if each.type not in (token.NL, token.COMMENT):
            fresh = each.type in (token.NEWLINE, token.INDENT, token.DEDENT)
    return found


def specific(code: str) -> Iterator[str]:
    """Words of the code, comments and docstrings left out, that name something specific."""
    prose = docstrings(code)
    for each in tokenize.generate_tokens(io.StringIO(code).readline):
        if each.type in TEXT and each.start not in prose and SPECIFIC.search(each.string):
            yield each.string


def test_generic_code_names_nothing_specific() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), word)
        for room in ROOMS
        for path in (PACKAGE / room).rglob("*.py")
        for word in specific(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED.keys()


CODE = '''"""About fp8."""
if arch == "sm_90a":  # sm_80
    """A swiglu."""
    fp8_x = text(f"{y} sm90")
'''


def test_words_of_code_are_found_and_prose_is_not() -> None:
    found = [SPECIFIC.findall(word) for word in specific(CODE)]
    assert found == [["sm_90"], ["fp8"], ["sm90"]]
