"""`fusegen report`: the page says what `explain` says, and text of others is no markup in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from plans import SPECS
from report_pages import Element, Page

from fusegen import api, cli
from fusegen.commands.records import evidence, measured_tables, records
from fusegen.commands.reporting import BEGINNING
from fusegen.emit.text.quantities import in_bytes, with_prefix
from fusegen.ir.naming import Cell

ROOT = Path(__file__).parents[2]
SIZES = "T=8192,E=8,H=1024,F=512"
PAGE = Path("fusegen-report.html")


def run(*words: str | Path) -> Result:
    result = CliRunner().invoke(cli.program, list(map(str, words)))
    print(result.exit_code, result.stderr)
    return result


def vendor(folder: Path, arch: str, recipe: str, *modules: str) -> None:
    names = [word for module in modules for word in ("--module", module)]
    words = ("--arch", arch, *names, "--recipe", recipe, "--namespace", "acme")
    assert run("vendor", folder, *words).exit_code == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bundles with an expert MLP each, of which one has a cell more, and a small one."""
    folder = tmp_path_factory.mktemp("made")
    vendor(folder / "experts", "sm_90a", "fp8_block", "grouped_mlp")
    vendor(folder / "experts", "cpu", "bf16", "grouped_mlp", "silu")
    vendor(folder / "small", "cpu", "bf16", "silu")
    return folder


@pytest.fixture(autouse=True)
def elsewhere(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs beside them, outside the checkout; the small one is a copy."""
    shutil.copytree(made / "small", tmp_path / "small")
    Path(tmp_path, "experts").symlink_to(made / "experts")
    monkeypatch.chdir(tmp_path)


def page(*words: str | Path) -> Page:
    """The page of a run that has succeeded."""
    done = run("report", *words)
    assert done.exit_code == 0, done.output
    return Page(Path(done.stdout.strip()).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def numbered(made: Path) -> Page:
    """The page of both bundles, with numbers."""
    file = made / "numbered.html"
    done = run("report", made / "experts", "--sizes", SIZES, "--out", file)
    assert done.exit_code == 0
    file = Path(file)
    text = file.read_text(encoding="utf-8")
    file.unlink()
    return Page(text)


def the(elements: Any) -> Element:
    (found,) = elements
    assert isinstance(found, Element)
    return found


def cell(found: Page, name: str) -> Element:
    cells = found.root.all("details", "cell")
    return the(each for each in cells if each.attributes["id"].endswith(f"-{name}"))


# The page


@pytest.mark.slow
def test_the_page_is_sound(numbered: Page) -> None:
    assert numbered.problems == []
    assert len([*numbered.root.all("details", "cell")]) == 3
    headings = [e.tag for e in numbered.root.all() if re.fullmatch(r"h\d", e.tag)]
    assert headings[0] == "h1" and headings.count("h1") == 1
    levels = [int(tag[1]) for tag in headings]
    assert all(below - above <= 1 for above, below in pairwise(levels))
    assert {e.tag for e in numbered.root.all()} >= {"main", "header", "nav", "footer", "title"}


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("<p>", "is not closed"),
        ('<a href="https://example.org">x</a>', "leads out of the page"),
        ('<a href="#nowhere">x</a>', "nothing is 'nowhere'"),
        ('<b id="main"></b><b id="main"></b>', "twice"),
        ('<b onclick="x()"></b>', "has a script"),
        ('<div class="scroll"></div>', "by keyboard"),
        ("<table><tr><th>x</th></tr></table>", "no scope"),
        ("<svg></svg>", "no name"),
        ("<details></details>", "no summary"),
        ("</b>", "</b> where"),
    ],
)
def test_faults_of_a_page_are_noticed(fault: str, problem: str) -> None:
    assert any(problem in each for each in Page(fault).problems)


def test_a_page_loads_nothing() -> None:
    run("report", "small")
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(BEGINNING)
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|<link|<img|<iframe", text)
    assert "default-src 'none'" in text
    assert len(text) < 200_000


@pytest.mark.slow
def test_pages_are_the_same_every_time(tmp_path: Path) -> None:
    run("report", "small", "--sizes", "T=64")
    first = PAGE.read_bytes()
    code = "from fusegen.cli import main; main()"
    words = ("report", "small", "--sizes", "T=64", "--out", "other.html")
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT / "generator")}
    subprocess.run([sys.executable, "-c", code, *words], env=env, check=True, capture_output=True)
    assert Path("other.html").read_bytes() == first


# What it says


def rows(table: Element) -> list[list[str]]:
    body = the(table.all("tbody"))
    return [[item.text for item in row.children] for row in body.children]


def tables(found: Element) -> dict[str, Element]:
    return {each.children[0].text.split(":")[0]: each for each in found.all("details")}


@pytest.mark.parametrize(("arch", "recipe"), [("sm_90a", "fp8_block"), ("cpu", "bf16")])
def test_numbers_are_those_of_explain(numbered: Page, arch: str, recipe: str) -> None:
    done = run("explain", "grouped_mlp", recipe, arch, "--sizes", SIZES, "--json")
    data = json.loads(done.stdout)
    own = tables(cell(numbered, f"grouped_mlp__{recipe}"))
    shown = [row for name in ("forward", "backward") for row in rows(own[f"Steps of the {name}"])]
    wanted = data["numbers"]["steps"]
    running = [row for row in shown if row[1] != "not asked for"]
    # The page counts the steps of each op, where a direction has several.
    names = [row[0].partition(". ")[2] for row in running]
    assert names == [each["step"].partition(". ")[2] for each in wanted]
    for row, each in zip(running, wanted, strict=True):
        assert in_bytes(each["bytes"]) in row[3]
        assert not each["operations"] or with_prefix(each["operations"], "FLOP") in row[2]
    facts = cell(numbered, f"grouped_mlp__{recipe}").text
    assert in_bytes(data["numbers"]["saved"]) in facts
    assert in_bytes(data["numbers"]["parameters"]) in facts


def test_what_explain_says_of_steps_buffers_and_fusions_is_there(numbered: Page) -> None:
    done = run("explain", "grouped_mlp", "fp8_block", "sm_90a", "--json")
    data = json.loads(done.stdout)
    own = tables(cell(numbered, "grouped_mlp__fp8_block"))
    saved = [row[0] for row in rows(own["Saved for the backward"])]
    assert saved == list(data["saved"])
    text = re.sub(r"\s+", " ", "\n".join(data["text"]))
    for name in ("Steps of the forward", "Steps of the backward"):
        for row in rows(own[name]):
            formula = row[3].split("  ")[0] if "  " in row[3] else row[3]
            assert formula.removesuffix(" bytes").split(" + ")[0] in text
            assert row[4].partition(" (")[0] in text
    names = {b["name"] for b in data["plan"]["buffers"]}
    listed = {row[0] for row in rows(own["Tensors"])}
    assert listed <= names and {"x", "h", "dfc2_weight", "x_columnwise_scale"} <= listed
    fusions = {row[0]: row[2] for row in rows(own["Fusions"])}
    assert fusions["activation_quantize"] == "applied"
    assert fusions["norm_quantize"].startswith("not applied: ")


def test_every_kernel_of_a_step_is_explained(numbered: Page) -> None:
    own = cell(numbered, "grouped_mlp__fp8_block")
    links = [a for a in own.all("a") if a.attributes["href"].startswith("#b2-kernels-")]
    assert len(links) == 13
    anchors = {e.attributes.get("id") for e in numbered.root.all("tr")}
    assert {a.attributes["href"][1:] for a in links} <= anchors


def test_the_graph_says_what_the_tables_say(numbered: Page) -> None:
    graph = the(cell(numbered, "grouped_mlp__fp8_block").all("svg"))
    texts = [e.text for e in graph.all("text")]
    for title in ("1. quantize", "2. quantize_several", "grouped_gemm wgrad"):
        assert any(text.endswith(title) for text in texts)
    assert "one step by activation_gradient_quantize" in texts
    assert [t for t in texts if t == "saved for the backward"]


def test_support_says_what_there_is_and_what_could_be(numbered: Page) -> None:
    table = the(numbered.root.all("table", "support"))
    found = {row[0]: row[1:] for row in rows(table)}
    assert [e.text for e in the(table.all("thead")).all("th")] == ["module", "cpu", "sm_90a"]
    assert found["grouped_mlp__bf16"] == ["native", "not in the bundle; it would be native"]
    (_, gpu) = found["grouped_mlp__fp8_block"]
    assert gpu == "native, not built"
    assert found["silu__bf16"][0] == "native"


@pytest.mark.slow
def test_a_module_that_cannot_be_made_has_its_reason(tmp_path: Path) -> None:
    words = ("--arch", "sm_90a", "--module", "silu", "--recipe", "bf16", "--namespace", "acme")
    run("vendor", "other", *words)
    Path("mine/recipes").mkdir(parents=True)
    text = (ROOT / "specs/recipes/fp8_block.yaml").read_text("utf-8")
    text = text.replace("recipe: fp8_block", "recipe: odd").replace(
        "block: [1, 128]", "block: [1, 24]"
    )
    Path("mine/recipes/odd.yaml").write_text(text, "utf-8")
    words = ("--arch", "cpu", "--module", "grouped_linear", "--recipe", "odd")
    assert run("vendor", "other", *words, "--specs", "mine", "--namespace", "acme").exit_code == 0
    found = page("other", "--specs", "mine")
    shown = {row[0]: row[1:] for row in rows(the(found.root.all("table", "support")))}
    assert shown["grouped_linear__odd"][0] == "native"
    assert shown["grouped_linear__odd"][1].startswith(("unsupported: ", "not in the bundle; it"))


def test_a_bundle_that_was_changed_is_said_to_be(tmp_path: Path) -> None:
    file = Path("small/cpu/silu__bf16.py")
    file.write_text(file.read_text("utf-8") + "# mine\n", "utf-8")
    done = run("report", "small")
    assert done.exit_code == 0
    assert "small/cpu is not what its specs give" in done.stderr and "1 edited" in done.stderr
    found = Page(PAGE.read_text("utf-8"))
    assert any("1 edited" in e.text for e in found.root.all("p", "note"))
    assert "# mine" in file.read_text("utf-8")


def test_the_ledger_is_told_of_the_bundles_of_the_checkout_alone(numbered: Page) -> None:
    table = (ROOT / "README.md").read_text("utf-8").partition("| module | recipe |")[2]
    head, _, row, *_ = (line.split(" | ") for line in table.splitlines())
    recorded = row[2 + [name.strip(" |`") for name in head].index("sm_90a")]
    own = evidence(ROOT / "generated" / "sm_90a")
    module = row[0].strip(" |`")
    assert own.cells[f"{module}__bf16"] == recorded.strip(" |").removeprefix("native, ")
    assert own.run.startswith("ran on ") or own.run.startswith("compiled only")
    assert evidence(Path("experts/sm_90a")).cells == {}
    assert any("is not known of these bundles" in e.text for e in numbered.root.all("p", "note"))


@pytest.mark.slow
def test_a_library_that_is_not_of_the_sources_is_said_to_be(made: Path) -> None:
    shutil.copytree(made / "experts/sm_90a", "own/sm_90a")
    Path("own/sm_90a/lib").mkdir()
    Path("own/sm_90a/lib/acme_sm_90a.so").write_bytes(b"of another age")
    found = page("own")
    assert "1 it does not say from what" in the(found.root.all("article")).text
    assert "it does not say from what" in cell(found, "grouped_mlp__fp8_block").text
    ((_, support),) = rows(the(found.root.all("table", "support")))
    assert support == "native, it does not say from what"


# Measured


RECORD: Mapping[str, Any] = {
    "name": "mlp",
    "environment": {
        "date": "2026-01-02T03:04:05Z", "commit": "abc1234", "device": "NVIDIA H200",
        "torch": "2.11.0",
    },
    "rows": [
        {
            "case": "mixtral", "contender": who, "unit": "ms",
            "median": t, "low": t - 1, "high": t + 1,
        }
        for who, t in (
            ("torch compiled", 50.0), ("fusegen", 40.0), ("fusegen fp8_block", 25.0),
            ("fusegen fp8_block cached_weights", 24.0), ("fusegen fp8_delayed", 23.0),
        )
    ] + [{"case": "qwen3", "contender": "torch compiled", "error": "OutOfMemoryError"}],
}  # fmt: skip


def write_record(name: str, record: Any) -> None:
    Path("results").mkdir(exist_ok=True)
    text = record if isinstance(record, str) else json.dumps(record)
    Path("results", name).write_text(text, encoding="utf-8")


def measured(found: Page) -> dict[str, list[list[str]]]:
    section = [
        e for e in found.root.all("section") if e.attributes["aria-labelledby"] == "measured"
    ]
    return {e.children[0].text: rows(e) for s in section for e in s.all("details")}


@pytest.mark.slow
def test_records_of_the_modules_are_shown_with_where_and_when() -> None:
    write_record(
        "mlp_old.json", {**RECORD, "environment": {**RECORD["environment"], "date": "2025"}}
    )
    write_record("mlp.json", RECORD)
    write_record("norms.json", {**RECORD, "name": "norms"})
    found = measured(page("experts", "--results", "results"))
    ((caption, shown),) = found.items()
    assert caption == "mlp: NVIDIA H200, 2026-01-02, torch 2.11.0, at commit abc1234 (mlp.json)"
    assert shown == [
        ["mixtral", "torch compiled", "50 ms", "49 to 51 ms"],
        ["mixtral", "fusegen fp8_block", "25 ms", "24 to 26 ms"],
    ]


ENVIRONMENT = RECORD["environment"]
FP8 = "grouped_mlp__fp8_block"


@pytest.mark.parametrize(
    ("arch", "change", "count"),
    [
        ("sm_90a", {}, 1),
        ("cpu", {}, 0),
        ("sm_80", {}, 0),
        ("sm_80", {"environment": {**ENVIRONMENT, "device": "NVIDIA A100"}}, 1),
        ("sm_90a", {"environment": {**ENVIRONMENT, "device": "NVIDIA A100"}}, 0),
        ("sm_90a", {"environment": {**ENVIRONMENT, "device": "cpu"}}, 0),
        ("sm_90a", {"rows": RECORD["rows"][:2]}, 0),
        ("sm_90a", {"rows": RECORD["rows"][4:]}, 0),
    ],
)
def test_records_are_of_the_gpu_that_a_module_is_for(
    arch: str, change: dict[str, Any], count: int
) -> None:
    write_record("mlp.json", {**RECORD, **change})
    found = measured_tables(records(Path("results")), [(Cell.parse(FP8), SPECS.archs[arch])])
    assert len(found) == count


@pytest.mark.parametrize(
    "record", ["", "[]", "{}", '{"name": "mlp"}', "[" * 100_000,
               {**RECORD, "rows": [{**RECORD["rows"][0], "median": "fast"}]}],
    ids=range(6),
)  # fmt: skip
def test_what_is_no_record_is_refused(record: Any) -> None:
    write_record("bad.json", record)
    done = run("report", "small", "--results", "results")
    assert done.exit_code == cli.ExitCode.USAGE and not PAGE.exists()
    assert "results/bad.json: is no record of a benchmark" in done.stderr


# Names of others


HOSTILE = "<script>alert(1)</script> & \"quotes\" 'more' ${ c } <% x %> é \N{SNOWMAN}"
SPEC = """edition: 2
op: odd
summary: {summary}
dims: {{T: elements}}
inputs: {{x: {{shape: [T...]}}}}
outputs: {{y: {{shape: [T...]}}}}
pointwise: {{y: relu(x) ** 2}}
"""


def test_text_of_specs_and_names_of_folders_is_text() -> None:
    folder = Path("a \"b\" <i>&amp; 'c' é")
    (folder / "mine/ops").mkdir(parents=True)
    (folder / "mine/modules").mkdir()
    spec = SPEC.format(summary=json.dumps(HOSTILE, ensure_ascii=False))
    (folder / "mine/ops/odd.yaml").write_text(spec, encoding="utf-8")
    Path(folder, "mine/modules/odd.yaml").write_text(
        "edition: 2\nmodule: odd\nop: odd\nclass: Odd\n", encoding="utf-8"
    )
    words = ("--arch", "cpu", "--module", "odd", "--recipe", "bf16", "--specs", folder / "mine")
    assert run("vendor", folder / "experts", *words, "--namespace", "acme").exit_code == 0
    (folder / ".git").mkdir()  # whose specs are trusted
    found = page(folder / "experts", "--out", folder / "<b>.html")
    assert found.problems == []
    assert len([*found.root.all("script")]) == 1
    own = cell(found, "odd__bf16")
    assert the(own.all("span", "says")).text == HOSTILE
    assert "alert(1)" in own.attributes["data-words"]
    assert the(found.root.all("p", "place")).text == str(folder / "experts")


@pytest.mark.slow
def test_names_in_records_are_text() -> None:
    rows_ = [{**row, "case": f"{HOSTILE} x"} for row in RECORD["rows"][:4]]
    write_record("<b>.json", {**RECORD, "rows": rows_})
    found = page("experts", "--results", "results")
    assert found.problems == [] and len([*found.root.all("script")]) == 1
    ((caption, shown),) = measured(found).items()
    assert "(<b>.json)" in caption and shown[0][0] == f"{HOSTILE} x"


def test_a_folder_whose_name_is_no_text() -> None:
    name = os.fsdecode(b"odd\xff")
    try:
        shutil.copytree("small", name)
    except OSError:
        pytest.skip("this file system has names of UTF-8 alone")
    done = api.report([Path(name)], PAGE)
    assert "odd?" in PAGE.read_text("utf-8") and done.size > 1000


# Files and errors


def test_the_answer_as_data() -> None:
    done = run("report", "small", "--sizes", "T=64", "--json")
    data = json.loads(done.stdout)
    assert (data["version"], data["path"], data["size"]) == (1, str(PAGE), PAGE.stat().st_size)
    assert data["bundles"] == [{"bundle": "small/cpu", "cells": ["silu__bf16"], "unlike": None}]
    assert data["without_numbers"] == {}


@pytest.mark.slow
def test_a_module_without_its_sizes_has_formulas_alone() -> None:
    done = run("report", "experts", "--sizes", "T=8192")
    assert done.exit_code == 0
    assert (
        "grouped_mlp__bf16 has no numbers: --sizes lacks E (num_groups), H (hidden)" in done.stderr
    )
    found = Page(PAGE.read_text("utf-8"))
    assert "none: --sizes lacks E" in cell(found, "grouped_mlp__bf16").text
    heads = [e.text for e in cell(found, "silu__bf16").all("th") if e.attributes["scope"] == "col"]
    assert "floor" in heads


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "nowhere: is not a bundle, and no folder of bundles either"),
        (("experts", "--sizes", "Q=1"), "no module has a dimension 'Q'; known: "),
        (("experts", "--sizes", "E=1"), "no module has all of its sizes: grouped_mlp lacks T"),
        (("experts", "--sizes", "T=x"), "expected T=<number from 1 to 2^40>, got 'T=x'"),
        (("experts", "--sizes", "T=1,T=2"), "T is given twice"),
        (("experts", "--sizes", "T=1,tokens=2,E=1,H=1,F=1"), "tokens is given twice"),
        (("experts", "--sizes", ""), "expected sizes such as T=65536, got ''"),
        (("experts", "--gpu", "h200"), "--gpu goes with --sizes"),
        (("experts", "--sizes", SIZES, "--gpu", "a100"), "'a100' runs none of the modules; what"),
        (("experts", "--sizes", SIZES, "--gpu", "toaster"), "'toaster' runs none of the modules"),
        (("experts", "--out", "experts"), "--out experts: is a folder or a device; name a file"),
        (("experts", "--out", "no/a.html"), "there is no folder no; make it first"),
        (("experts", "--results", "nowhere"), "--results nowhere: there is no such folder"),
    ],
)
def test_what_cannot_be_reported(words: tuple[str, ...], message: str) -> None:
    done = run("report", *words)
    assert done.exit_code == cli.ExitCode.USAGE and message in done.stderr
    assert not PAGE.exists() and not [*Path.cwd().glob(".fusegen*")]


def test_only_a_report_is_written_over() -> None:
    lock = Path("small/cpu/fusegen.lock")
    before = lock.read_bytes()
    done = run("report", "small", "--out", lock)
    assert done.exit_code == cli.ExitCode.USAGE and lock.read_bytes() == before
    assert "exists and is no report of fusegen, so it is not written over" in done.stderr
    for _ in range(2):
        assert run("report", "small").exit_code == 0


def test_a_disk_that_is_full_leaves_the_page_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    PAGE.write_text(BEGINNING, encoding="utf-8")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(PAGE))

    monkeypatch.setattr(Path, "replace", full)
    done = run("report", "small")
    assert done.exit_code == cli.ExitCode.REFUSED and "No space left on device" in done.stderr
    assert PAGE.read_text("utf-8") == BEGINNING
    assert sorted(p.name for p in Path.cwd().iterdir()) == ["experts", str(PAGE), "small"]


@pytest.mark.slow
def test_a_page_in_a_bundle_is_its_owners() -> None:
    file = Path("small/cpu/report.html")
    assert run("report", "small", "--out", file).exit_code == 0
    assert run("status", "small").exit_code == 0 and file.is_file()
