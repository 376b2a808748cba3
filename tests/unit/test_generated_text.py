"""Generated Python as its readers see it: lines that fit, names for what is asked often."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace

import pytest
from plans import SPECS

from fusegen.emit.bundle import render_bundle
from fusegen.emit.fileset import FileSet
from fusegen.emit.polish import polish
from fusegen.emit.python.conditions import Conditions, named_conditions
from fusegen.emit.render import Renderer
from fusegen.emit.text.fold import LINE_LENGTH, fold, fold_python
from fusegen.ir.naming import Cell
from fusegen.passes.pipeline import resolve, resolve_module
from fusegen.publish.paths import builtin_templates
from fusegen.spec.offers import words_of

LONGEST_NAME = "grouped_mlp_clamped_qgeglu"
OF_EVERY_KIND = ("linear", "grouped_linear", "grouped_mlp_srelu", "quantize")
"""Modules that quantise, one of those that differ in their activation."""
CELLS = {
    "cpu": [
        Cell(module, recipe)
        for module in SPECS.modules
        for recipe in SPECS.recipes
        if recipe == "bf16" or module in (*OF_EVERY_KIND, LONGEST_NAME)
    ],
    "sm_90a": [
        Cell(LONGEST_NAME, "fp8_delayed", (word,))
        for word in words_of(SPECS.modules[LONGEST_NAME], SPECS.ops)
    ],
}


@pytest.fixture(scope="module", params=CELLS)
def texts(request: pytest.FixtureRequest) -> Mapping[str, str]:
    """All Python of a bundle, by path: of every module and every recipe, or of every option."""
    arch = SPECS.archs[request.param]
    plan = resolve(SPECS, request.param, CELLS[request.param])
    files = render_bundle(plan.modules, arch, "text", Renderer([builtin_templates()]))
    python = polish(FileSet((p, a) for p, a in files.items() if p.endswith(".py")))
    assert len(python) > 3 * len(plan.modules)
    return {path: artifact.text for path, artifact in python.items()}


@pytest.mark.slow
def test_lines_fit(texts: Mapping[str, str]) -> None:
    long = [
        f"{path}:{row}"
        for path, text in texts.items()
        for row, line in enumerate(text.split("\n"), 1)
        if len(line) > LINE_LENGTH
    ]
    assert not long


@pytest.mark.slow
def test_no_condition_is_spelled_out_twice_in_a_function(texts: Mapping[str, str]) -> None:
    for path, text in texts.items():
        if path.startswith("tests/"):
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                spelled = [ast.dump(node) for node in ast.walk(function) if _flags(node)]
                assert len(spelled) == len(set(spelled)), (path, function.name)


def _flags(node: ast.AST) -> bool:
    """Whether a node is ``need_dx or need_dweight``."""
    return isinstance(node, ast.BoolOp) and all(
        isinstance(value, ast.Name) and value.id.startswith("need_") for value in node.values
    )


def test_conditions_are_called_after_what_they_decide_on() -> None:
    plan = resolve_module(SPECS, Cell("grouped_mlp", "fp8_delayed"), "cpu")
    flags = tuple(plan.backward.flags)
    inner = next(step.when for step in plan.backward.steps if "da" in step.writes)
    called = "need_fc2_weight_copies"  # the first that is made under it

    def found(*whens: tuple[str, ...]) -> Conditions:
        return named_conditions(plan.backward, lambda names: map(names.text, whens))

    assert found(inner, inner).lines == (f"{called} = {' or '.join(inner)}",)
    assert found(inner, inner).text(inner) == called
    assert found(flags, flags, inner).lines == (f"need_any = {' or '.join(flags)}",)
    assert found(inner).lines == ()  # asked once
    assert found(flags[:1], flags[:1]).lines == ()  # has a name


def test_a_condition_is_never_called_like_a_flag() -> None:
    backward = resolve_module(SPECS, Cell("linear", "bf16"), "cpu").backward
    both = ("need_dx", "need_dweight")
    steps = tuple(replace(s, when=both) if "dx" in s.writes else s for s in backward.steps)
    names = named_conditions(replace(backward, steps=steps), lambda names: [names.text(both)] * 2)
    assert names.lines == ("need_dx_or_dweight = need_dx or need_dweight",)


@pytest.mark.parametrize(
    ("line", "folded"),
    [
        ("short", ["short"]),
        ("  ab cd ef gh", ["  ab cd", "      ef", "      gh"]),
        ("ab cd -> ef", ["ab cd", "    -> ef"]),
        ("abcdefghijklm", ["abcdefghijklm"]),
        ("abcdefghijklm no", ["abcdefghijklm", "    no"]),
    ],
)
def test_fold(line: str, folded: list[str]) -> None:
    assert list(fold(line, width=9)) == folded


def test_comments_and_docstrings_are_folded_and_strings_are_not() -> None:
    long = "word " * 30
    text = (
        f'"""Of the module: {long}."""\n\n'
        f'TEXT = """\n{long}.\n"""\n\n\n'
        "def f(x):\n"
        f'    """Of the function.\n\n    Args:\n        x: {long}.\n    """\n'
        f"    # 1. step: {long}.\n"
        f"    return x + 1  # {long}.\n"
    )
    done = fold_python(text)
    assert ast.literal_eval(ast.parse(done).body[1].value) == f"\n{long}.\n"  # type: ignore[attr-defined]
    lines = done.split("\n")
    assert [len(line) > LINE_LENGTH for line in lines].count(True) == 2  # TEXT, and behind code
    assert any(line.startswith("            word") for line in lines)  # further in than "x:"
    assert any(line.startswith("    #    word") for line in lines)  # under "step"
    assert fold_python(done) == done
