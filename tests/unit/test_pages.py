"""Pages of the documentation that are printed, and the schemas that have the same words."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner, Result

from fusegen import cli
from fusegen.cli import exits
from fusegen.cli.verbs import VERBS
from fusegen.spec import meanings, schema
from fusegen.spec.kinds import SpecKind
from fusegen.spec.load import adapter
from fusegen.steps import SHIPPED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SPECS = (DOCS / "specs.md").read_text(encoding="utf-8")


def run(*words: str) -> Result:
    result = CliRunner().invoke(cli.program, list(words))
    print(result.exit_code, result.stderr)
    return result


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in an empty folder outside the checkout."""
    monkeypatch.chdir(tmp_path)


def load_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pages", DOCS / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = load_pages()


def test_the_printed_pages_are_current() -> None:
    assert pages.main(["--check"]) == 0, "run: python docs/pages.py"


@pytest.mark.slow
def test_a_page_that_is_out_of_date_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pages.main(["--check"], tmp_path) == 1
    assert "specs.md is out of date; run: python docs/pages.py" in capsys.readouterr().err
    assert pages.main([], tmp_path) == pages.main(["--check"], tmp_path) == 0
    (tmp_path / "specs.md").write_text("old", encoding="utf-8")
    assert pages.main(["--check"], tmp_path) == 1


def test_what_units_came_to_stands_behind_their_contracts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = {"family": "quantize", "registers": 80, "shared_memory": 24016, "cpu_seconds": 12.34}
    more = {**unit, "registers": 105, "cpu_seconds": None, "mebibytes": 190, "kilobytes": 70}
    units = {"a": {**unit, "mebibytes": 200, "kilobytes": 653}, "b": more}
    facts = {"toolkit": "13.0", "complete": False, "cells": 9, "whole": None, "broken": {}}
    facts["units"] = units
    monkeypatch.setattr(pages, "RECORD", tmp_path / "record.json")
    further = {"sm_89": {**facts, "whole": 30}, "sm_120a": {**facts, "complete": True}}
    further["sm_90a"] = {**facts, "complete": True, "broken": {"c": ["`k<4>`: 8 bytes", "a | b"]}}
    (tmp_path / "record.json").write_text(json.dumps({"sm_80": facts, **further}))
    text = "\n".join(pages.architectures())
    assert "- Compiled: 2 units of 30 that all cells have, with CUDA 13.0" in text
    assert "- Compiled: all 2 units of all 9 cells, with CUDA 13.0" in text
    assert "- Compiled: 2 units of 9 cells with CUDA 13.0, a part of all" in text
    assert "- Compiled: all 3 units of all 9 cells, with CUDA 13.0" in text
    assert text.count("- Breaks its contract: ") == 1 and "contract: `c`, " in text
    assert (
        r"| `quantize` | 2 | 128 where `e2m1_nv_1x16`, 80 \| 105 | 48 \| 23.5 |  | 40 \| 12.3 |"
        r" 768 \| 200 | 653 |"
    ) in text
    assert "- Compiled: not on record" in text, "of sm_100a"
    monkeypatch.setattr(pages, "RECORD", tmp_path / "none.json")
    assert "a part of all" not in "\n".join(pages.architectures())


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    lines = page.read_text(encoding="utf-8").splitlines()
    return {anchor(line.lstrip("#")) for line in lines if line.startswith("#")}


@pytest.mark.parametrize("name", [*pages.PAGES, "promises.md", "troubleshooting.md"])
def test_links_lead_somewhere(name: str) -> None:
    text, anchors = (DOCS / name).read_text(encoding="utf-8"), anchors_of(DOCS / name)
    links = re.findall(r"\]\(([^)]+)\)", text)
    for link in links:
        file, _, part = link.partition("#")
        assert not file or (DOCS / file).exists(), link
        assert not part or part in (anchors_of(DOCS / file) if file else anchors), link
    assert links


# The reference of specs


def objects(kind: SpecKind) -> Iterator[tuple[str, dict[str, Any]]]:
    """A kind of spec and every object in it, with the keys that YAML has for them."""
    found = adapter(kind.spec).json_schema()
    yield kind.key, found
    yield from ((n, node) for n, node in found.get("$defs", {}).items() if "properties" in node)


@pytest.mark.parametrize("kind", SpecKind, ids=lambda kind: kind.key)
def test_every_key_of_every_kind_is_in_the_reference(kind: SpecKind) -> None:
    section = SPECS.partition(f"\n## {kind.folder}: ")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    keys = [key for key, *_ in rows]
    wanted = [key for _, node in objects(kind) for key in node["properties"]]
    assert sorted(keys) == sorted(wanted)
    required = [key for _, node in objects(kind) for key in node.get("required", [])]
    assert sorted(key for key, _, absent, _ in rows if absent == "must be there") == sorted(
        required
    )
    assert all(len(meaning) > 5 for *_, meaning in rows)
    assert re.search(rf"```yaml\nedition: 2\n{kind.key}: \w+\n", section)


def test_what_an_enum_or_a_bound_allows_is_in_the_reference() -> None:
    for row in (
        "| `round` | `none`, `pow2_down`, `pow2_up` | `none` |",
        "| `size` | an integer from 2 to 256 | must be there |",
        "| `gemm` | a number between 0 and 1 | must be there |",
        "| `shape` | list of an integer or an expression of dimensions, such as `2 * D` |",
        "| `differentiable` | `true` or `false` | `true` |",
        "| `edition` | `2` | must be there |",
    ):
        assert f"\n{row} " in SPECS, row


def test_every_kind_of_step_is_in_the_reference() -> None:
    section = SPECS.partition("\n## Kinds of steps\n")[2]
    for step in SHIPPED:
        (row,) = re.findall(rf"^\| `{step.name}` \|.*$", section, re.MULTILINE)
        assert all(f"`{word}`" in row for word in (*step.kinds, *step.slots))
        assert row.endswith("| passes |" if step.of_passes else "| ops |")


def test_a_key_that_no_docstring_explains_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meanings, "_entries", lambda text: iter(()))
    with pytest.raises(KeyError, match="no docstring says what"):
        meanings.described(SpecKind.RECIPES)


# Schemas for editors


@pytest.mark.parametrize("kind", SpecKind, ids=lambda kind: kind.key)
def test_a_schema_says_what_each_key_means(kind: SpecKind) -> None:
    done = run("schema", kind.key)
    data = json.loads(done.stdout)
    assert done.stdout == schema.render()[f"{kind.key}.schema.json"]
    assert data["title"] == f"fusegen {kind.key}"
    for _, node in objects(kind):
        described = (
            data if node.get("title") == kind.spec.__name__ else data["$defs"][node["title"]]
        )
        assert "Attributes:" not in described["description"]
        assert described["properties"].keys() == node["properties"].keys()
        assert all(each["description"] for each in described["properties"].values())
    assert json.loads(run("schema", kind.key, "--json").stdout)["schema"] == data


def test_schemas_are_written_where_new_specs_look_for_them() -> None:
    assert run("schema", "--specs", "mine").exit_code == cli.ExitCode.SPEC
    Path("mine").mkdir()
    done = run("schema", "--specs", "mine")
    files = [f"mine/schema/{kind.key}.schema.json" for kind in SpecKind]
    assert done.stdout.split() == sorted(files)
    assert run("validate", "--specs", "mine").exit_code == 0
    written = json.loads(run("schema", "--specs", "mine", "--json").stdout)
    assert written["files"] == sorted(files)
    for words in ([], ["recipe", "--specs", "mine"], ["recipes"]):
        assert run("schema", *words).exit_code == cli.ExitCode.USAGE


# The command line


CLI = (DOCS / "cli.md").read_text(encoding="utf-8")
TROUBLE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
FAILURES = [
    *(found for _, found in exits.known_errors()),
    *(exits.EXTENSION, exits.INTERNAL, exits.INTERRUPTED),
]


@pytest.mark.parametrize("verb", VERBS)
def test_every_parameter_of_every_verb_is_in_the_reference(verb: str) -> None:
    section = CLI.partition(f"\n## fusegen {verb}\n")[2].partition("\n## ")[0]
    command = cli.program.get_command(click.Context(cli.program), verb)
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert f"| `{parameter.opts[0]}" in section
        else:
            assert parameter.make_metavar(click.Context(command)) in section
    assert f"\nfusegen {verb}" in section.rpartition("```\n")[0]


def test_every_exit_code_and_kind_of_error_is_told() -> None:
    assert exits.MEANINGS.keys() == {*cli.ExitCode}
    headings = re.findall(r"^## (.+)$", TROUBLE, re.MULTILINE)
    assert {each.kind for each in FAILURES} | {"drift", "At run time"} == {*headings}
    assert len(headings) == len({*headings})
    for each in FAILURES:
        row = re.search(rf"^\| {int(each.code)} \|.*$", TROUBLE, re.MULTILINE)
        assert row is not None and f"[{each.kind}](#{each.kind})" in row[0]
        assert f"[`{each.kind}`](troubleshooting.md#{each.kind})" in CLI


def test_commands_of_the_page_exist() -> None:
    named = re.findall(r"`fusegen\s+([a-z]+)((?:\s+-*\w[\w-]*)*)`", TROUBLE)
    assert len(named) > 10
    for verb, words in named:
        assert verb in VERBS
        command = cli.program.get_command(click.Context(cli.program), verb)
        assert command is not None
        known = {opt for parameter in command.params for opt in parameter.opts}
        assert {word for word in words.split() if word.startswith("--")} <= known, (verb, words)


def test_messages_that_the_page_quotes_are_those_of_the_code() -> None:
    items = [line for line in TROUBLE.splitlines() if line.startswith("- *")]
    quoted = [message for line in items for message in re.findall(r"\*([^*]+)\*", line)]
    folders = (ROOT / "generator" / "fusegen", ROOT / "templates")
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".j2")]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))
    for message in quoted:
        parts = re.split(r"\.\.\.|'[^']*'|\d+\.\d+|\S+/\S+", message)
        longest = max((part.strip() for part in parts), key=len)
        assert len(longest) > 7 and longest in code, message
    assert len(quoted) > 12


@pytest.mark.parametrize("shell", pages.SHELLS)
def test_the_line_that_turns_completion_on_is_clicks(shell: str) -> None:
    found = get_completion_class(shell)
    assert found is not None
    variable, _, instruction = re.findall(r"(_\w+)(=)(\w+) fusegen", pages.SHELLS[shell][1])[0]
    assert (variable, instruction) == ("_FUSEGEN_COMPLETE", f"{shell}_source")
    complete = found(cli.program, {}, "fusegen", variable)
    assert complete.source_template and complete.func_name == "_fusegen_completion"
    assert pages.SHELLS[shell][1].replace("|", "\\|") in CLI
