"""Pages of the documentation that are printed, and the schemas that have the same words."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fusegen import cli
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


def test_a_page_that_is_out_of_date_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pages.main(["--check"], tmp_path) == 1
    assert "specs.md is out of date; run: python docs/pages.py" in capsys.readouterr().err
    assert pages.main([], tmp_path) == pages.main(["--check"], tmp_path) == 0
    (tmp_path / "specs.md").write_text("old", encoding="utf-8")
    assert pages.main(["--check"], tmp_path) == 1


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("name", pages.PAGES)
def test_links_lead_somewhere(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    anchors = {anchor(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")}
    links = re.findall(r"\]\(([^)]+)\)", text)
    for link in links:
        file, _, part = link.partition("#")
        assert part in anchors if not file else (DOCS / file).exists(), link
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
    assert re.search(rf"```yaml\nedition: 1\n{kind.key}: \w+\n", section)


def test_what_an_enum_or_a_bound_allows_is_in_the_reference() -> None:
    for row in (
        "| `round` | `none`, `pow2_down`, `pow2_up` | `none` |",
        "| `size` | an integer from 2 to 256 | must be there |",
        "| `gemm` | a number between 0 and 1 | must be there |",
        "| `shape` | list of an integer or an expression of dimensions, such as `2 * D` |",
        "| `differentiable` | `true` or `false` | `true` |",
        "| `edition` | `1` | must be there |",
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
