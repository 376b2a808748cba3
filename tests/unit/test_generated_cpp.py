"""Printed C++ as its readers see it: lines that fit, conditions with names, nothing unused."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from plans import SPECS

from fusegen.emit.bundle import render_bundle
from fusegen.emit.fileset import ArtifactKind, FileSet
from fusegen.emit.polish import polish
from fusegen.emit.render import Renderer
from fusegen.emit.text.fold import LINE_LENGTH
from fusegen.emit.text.fold_cpp import fold_cpp
from fusegen.ir.naming import Cell
from fusegen.passes.pipeline import resolve
from fusegen.publish.paths import builtin_templates
from fusegen.spec.cells import target_cells
from fusegen.spec.offers import words_of

LONGEST_NAME = "grouped_mlp_clamped_qgeglu"


@pytest.fixture(scope="module")
def texts() -> Mapping[str, str]:
    """All C++ that is printed for the target's cells, and for every option."""
    words = words_of(SPECS.modules[LONGEST_NAME], SPECS.ops)
    cells = {*target_cells(SPECS, SPECS.targets)["sm_90a"].every}
    cells |= {Cell(LONGEST_NAME, "fp8_delayed", (word,)) for word in words}
    plan = resolve(SPECS, "sm_90a", cells)
    files = render_bundle(
        plan.modules, SPECS.archs["sm_90a"], "text", Renderer([builtin_templates()])
    )
    printed = ((p, a) for p, a in files.items() if a.kind is ArtifactKind.CUDA)
    polished = polish(FileSet(printed))
    assert len(polished) > 2 * len(plan.modules)
    return {path: artifact.text for path, artifact in polished.items()}


def functions(texts: Mapping[str, str]) -> list[tuple[str, str]]:
    """Functions of launchers that are ops, and their places."""
    op = re.compile(
        r"^\S[^\n]*\b(?:forward|backward|refresh|wgrad|quantize_\w+)\(\n.*?^}", re.M | re.S
    )
    found = [(p, f) for p, t in texts.items() if "kernels/" not in p for f in op.findall(t)]
    assert len(found) > 80
    return found


@pytest.mark.slow
def test_lines_fit(texts: Mapping[str, str]) -> None:
    """All but those of one word or name: kernels' and ranges' say everything about them."""
    word = re.compile(r' *(?:[?:] )?\w+\(?|#include "dispatch/\w+\.h"| *"[^"]+"\);')
    long = [
        f"{path}:{row}"
        for path, text in texts.items()
        for row, line in enumerate(text.split("\n"), 1)
        if len(line) > LINE_LENGTH and not word.fullmatch(line)
    ]
    assert not long


@pytest.mark.slow
def test_no_condition_is_spelled_out_twice(texts: Mapping[str, str]) -> None:
    flags = re.compile(r"need_\w+(?:\s+\|\|\s+need_\w+)+")
    for path, function in functions(texts):
        spelled = [" ".join(found.split()) for found in flags.findall(function)]
        assert len(spelled) == len(set(spelled)), path


@pytest.mark.slow
def test_what_is_declared_is_used(texts: Mapping[str, str]) -> None:
    declared = re.compile(
        r"^ +(?:bool|double|const int\w*|const ScalarType|const bool) (\w+)", re.M
    )
    for path, function in functions(texts):
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", function)
        for name in declared.findall(code):
            assert len(re.findall(rf"\b{name}\b", code)) > 1, f"{path}: {name}"
    assert not [path for path, text in texts.items() if "maybe_unused" in text]


@pytest.mark.slow
def test_no_size_has_a_bracket_to_spare(texts: Mapping[str, str]) -> None:
    """A word within brackets, or a product behind a product."""
    spare = re.compile(r"(?<!if )(?<![\w>])\(\w+\)|\* \(\w+(?: \* \w+)*\)")
    for path, function in functions(texts):
        assert not spare.findall(re.sub(r'//[^\n]*|"[^"]*"', "", function)), path


@pytest.mark.parametrize(
    ("line", "folded"),
    [
        (
            "  const Tensor columnwise = need_first ? empty({E, F, H}, ScalarType::Float8_e4m3fn,"
            " x) : empty({0}, io, x);",
            "  const Tensor columnwise = need_first\n"
            "      ? empty({E, F, H}, ScalarType::Float8_e4m3fn, x) : empty({0}, io, x);",
        ),
        (
            "  const int64_t F = first_of_many ? extent(*first_of_many, -2) : second_of_many ?"
            " extent(*second_of_many, -1) / 2 : 0;",
            "  const int64_t F = first_of_many ? extent(*first_of_many, -2)\n"
            "      : second_of_many ? extent(*second_of_many, -1) / 2 : 0;",
        ),
        (
            "  // 1. gemm fprop: " + "operand_of_some_length, " * 4 + "another -> result",
            "  // 1. gemm fprop: " + "operand_of_some_length, " * 3 + "\n"
            "  //    operand_of_some_length, another -> result",
        ),
        (
            "      {need_first ? padded(H * align(32 * (T / 32 + E), 16)) : kUnwanted, 1, 3},"
            "  // the_columnwise_copy",
            "      // the_columnwise_copy\n"
            "      {need_first ? padded(H * align(32 * (T / 32 + E), 16)) : kUnwanted, 1, 3},",
        ),
        ("#define " + "A" * 100, "#define " + "A" * 100),
        ("x" * 101, "x" * 101),
        (
            "status::Value " + "f" * 90 + "(const Arguments& in, Stream& stream);",
            "status::Value\n    " + "f" * 90 + "(\n        const Arguments& in, Stream& stream);",
        ),
    ],
)
def test_long_lines_go_on(line: str, folded: str) -> None:
    assert fold_cpp(line) == re.sub(r" +\n", "\n", folded)


def test_strings_stay_whole() -> None:
    text = f'  check(kCell, "{"a, " * 24}", given(x), "{"b, " * 20}");'
    assert [re.sub(r"\s+", "", fold_cpp(text))] == [re.sub(r"\s+", "", text)]
    assert all(line.count('"') % 2 == 0 for line in fold_cpp(text).split("\n"))
