"""Selection rules: the C++ that is compiled decides as the object does."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from fusegen.ir.predicate import Comparison, Condition, Predicate, SizeVariable, parse_predicate

SIZES = (0, 1, 63, 64, 65, 128, 3_000_000_000)
PREDICATES = (
    Predicate(()),
    *(
        Predicate((Condition(SizeVariable.TOKENS, comparison, value),))
        for comparison in Comparison
        for value in (1, 64, 2_999_999_999)
    ),
    parse_predicate({"tokens": {"ge": 64, "lt": 512}, "columns": {"multiple_of": 64}}),
    parse_predicate({"columns": {"eq": 64, "le": 64}, "tokens": {"gt": 0}}),
)
PROGRAM = """
#include <cstdint>
#include <cstdio>
int main() {{
  const int64_t sizes[] = {{{sizes}}};
  for (int64_t tokens : sizes) {{
    for (int64_t columns : sizes) {{
      (void)tokens; (void)columns;
      {lines}
    }}
  }}
}}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a C++ compiler makes of every predicate, over the grid of sizes."""
    folder: Path = tmp_path_factory.mktemp("predicates")
    lines = "\n".join(f"std::putchar(({p.to_cpp()}) ? '1' : '0');" for p in PREDICATES)
    sizes = ", ".join(f"INT64_C({size})" for size in SIZES)
    (folder / "p.cpp").write_text(PROGRAM.format(sizes=sizes, lines=lines), encoding="utf-8")
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "p.cpp", "-o", "p"]
    subprocess.run(command, cwd=folder, check=True)
    text = subprocess.run([folder / "p"], capture_output=True, check=True, text=True).stdout
    return [text[i : i + len(PREDICATES)] for i in range(0, len(text), len(PREDICATES))]


def test_cpp_decides_as_the_object_does(compiled: list[str]) -> None:
    expected = [
        "".join(
            str(int(p.holds({SizeVariable.TOKENS: tokens, SizeVariable.COLUMNS: columns})))
            for p in PREDICATES
        )
        for tokens, columns in itertools.product(SIZES, SIZES)
    ]
    assert compiled == expected
    assert {"0", "1"} <= set("".join(expected))


def test_words() -> None:
    predicate = parse_predicate({"mean_group_tokens": {"ge": 64}, "k": {"multiple_of": 128}})
    assert str(predicate) == "mean_group_tokens >= 64 and k % 128 == 0"
    assert predicate.to_cpp() == "mean_group_tokens >= 64 && k % 128 == 0"
    assert (str(Predicate(())), Predicate(()).to_cpp()) == ("always", "true")


@pytest.mark.parametrize(
    "when",
    [
        {"tokenz": {"lt": 1}},
        {"tokens": {"less": 1}},
        {"tokens": {"lt": -1}},
        {"rows": {"multiple_of": 0}},
    ],
)
def test_what_cannot_be_meant_is_refused(when: dict[str, dict[str, int]]) -> None:
    with pytest.raises(ValueError, match=r"not a valid|not negative"):
        parse_predicate(when)
