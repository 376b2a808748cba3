"""Tables of the documentation are as they would be printed; what they count keeps its limits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fusegen.passes.pipeline import PASSES

ROOT = Path(__file__).parents[2]


def load_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tables"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tables = load_tables()
each_addition = pytest.mark.parametrize("each", tables.ADDITIONS, ids=lambda each: each.folder)


def test_the_tables_of_the_documentation_are_current() -> None:
    assert tables.main(["--check"]) == 0, "run: python docs/tables.py"


def test_a_table_that_is_out_of_date_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    markers = (
        f"<!-- {name}: written by docs/tables.py -->\nold\n<!-- end of {name} -->\n"
        for name in tables.TABLES
    )
    page.write_text("\n".join(("Before", *markers, "After")), encoding="utf-8")
    assert tables.main(["--check"], page) == 1
    assert "is out of date; run: python docs/tables.py" in capsys.readouterr().err
    assert tables.main([], page) == 0
    assert tables.main(["--check"], page) == 0
    lines = page.read_text(encoding="utf-8").splitlines()
    assert "old" not in lines
    assert lines[0] == "Before"
    assert lines[-1] == "After"
    rows = [line.split("`")[1] for line in lines if line.split("|")[1:2] and line[2].isdigit()]
    assert rows == [each.name for each in PASSES]
    page.write_text("no markers", encoding="utf-8")
    with pytest.raises(SystemExit, match="has no lines"):
        tables.main([], page)


# What it takes to add something


@each_addition
def test_an_addition_touches_no_more_files_than_it_may(each: Any) -> None:
    found = tables.touched(tables.WALKTHROUGHS / each.folder)
    assert 0 < len(found) <= each.most
    assert all(found.values()), "a file of comments alone"


@each_addition
def test_a_walk_through_has_a_page_that_names_its_files(each: Any) -> None:
    folder = tables.WALKTHROUGHS / each.folder
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert [name for name in tables.touched(folder) if f"`{name}`" not in page] == []
    assert "\nfusegen " in page


def test_every_walk_through_is_counted() -> None:
    folders = {path.parent.name for path in tables.WALKTHROUGHS.glob("*/README.md")}
    assert {each.folder for each in tables.ADDITIONS} == folders


def test_blank_lines_and_comments_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("of no suffix that is counted\n")
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "a.yaml").write_text("# why\n\na: 1  # one\nb: 2\n")
    assert tables.touched(tmp_path) == {"specs/a.yaml": 2}
    (tmp_path / "changes.patch").write_text(
        "--- a/generator/b.py\n+++ b/generator/b.py\n@@ -1,2 +1,4 @@\n import re\n-old = 1\n"
        "+new = 1\n+\n+# why\n--- a/c.h\n+++ b/c.h\n@@ -1 +1,2 @@\n a\n+// why\n+int c;\n"
    )
    assert tables.touched(tmp_path) == {"specs/a.yaml": 2, "generator/b.py": 2, "c.h": 1}


@pytest.mark.parametrize("patterns", tables.OWN.values(), ids=tables.OWN)
def test_every_pattern_of_what_is_an_architectures_own_finds_something(
    patterns: tuple[str, ...],
) -> None:
    assert all(any(ROOT.glob(pattern)) for pattern in patterns)
