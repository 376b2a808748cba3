"""The pages that lead through fusegen, followed block by block."""

from __future__ import annotations

import re
from pathlib import Path

from .pages import follow
from .walk import ROOT, has_toolchain

DOCS = ROOT / "docs"


def test_the_quick_start(tmp_path: Path) -> None:
    """Somebody who has never seen the project has a model that trains, and an edit that lasts."""
    said = follow(DOCS / "quickstart.md", tmp_path)
    assert "a conflict, as listed" in said and "which status shows, too" in said
    edited = tmp_path / "third_party" / "experts" / "cpu" / "grouped_mlp_sreglu__bf16.py"
    text = edited.read_text("utf-8")
    assert '\n"""Our expert MLP of a mixture' in text and "<<<<" not in text
    assert "The expert MLP of all our models." in text, "what does not conflict is merged"
    assert "1 edited by hand and kept so" in said.rpartition("fusegen upgrade")[2]


def test_extending(tmp_path: Path) -> None:
    """Each of the five is made, and its tests pass; what the text says of `explain` is there."""
    said = follow(DOCS / "extending.md", tmp_path)
    assert " emulated " in said and "pointwise_quantize: h, probs" in said
    before, after = (
        said.split("+ fusegen explain gated_block bf16 cpu --specs my_specs\n")[number]
        for number in (1, 2)
    )
    kept = "\n  a           2 T F bytes    if need_dfc2_weight"
    assert kept in before and kept not in after.partition("+ fusegen")[0]
    assert "rule activation_again" in after and "rule activation_again" not in before
    bundles = {path.parent for path in tmp_path.glob("*/*/fusegen.lock")}
    assert {path.name for path in bundles} == {"cpu", "sm_80", "sm_86", "sm_90a"}
    assert "does not fit" in (tmp_path / "my_specs/archs/sm_86.yaml").read_text("utf-8")
    if has_toolchain():
        built = {path.parents[1].relative_to(tmp_path) for path in tmp_path.glob("*/*/lib/*.so")}
        assert {str(path) for path in built} == {
            "recipe/sm_90a",
            "activation_gpu/sm_90a",
            "gpu/sm_86",
        }


def test_vendoring(tmp_path: Path) -> None:
    follow(DOCS / "vendoring.md", tmp_path)
    assert (tmp_path / "third_party/experts/cpu/ejected/silu__bf16/silu__bf16.py").exists()


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text("utf-8")
    linked = set(re.findall(r"\]\(([^)#]+\.md)\)", index))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"README.md"}
    assert linked == pages
