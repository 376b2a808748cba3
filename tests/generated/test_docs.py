"""The examples in docs run as they stand, against a bundle made as they say."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for room in ("features", "integrations") for page in DOCS.glob(f"{room}/*.md"))
FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEAVY = ("megatron", "torchtitan")
"""Pages of libraries that not everybody installs for tests."""


def blocks(page: Path, language: str) -> list[str]:
    """Texts of the page's fenced blocks of one language; "" is a shell."""
    return [body for found, body in FENCED.findall(page.read_text("utf-8")) if found == language]


def write_files(page: Path, folder: Path) -> None:
    """Files that the page shows: blocks of YAML begin with a comment that says where they stand."""
    for block in blocks(page, "yaml"):
        path = folder / block.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block, "utf-8")


def test_there_are_pages() -> None:
    assert len(PAGES) > 5
    assert all(blocks(page, "python") or blocks(page, "") for page in PAGES)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem
)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    if page.stem in HEAVY and importlib.util.find_spec(page.stem) is None:
        pytest.skip(f"{page.stem} is not installed")
    write_files(page, tmp_path)
    commands = [line for block in blocks(page, "") for line in block.splitlines()]
    for line in commands:
        words = shlex.split(line, comments=True)
        assert words[0] == "fusegen" and words[1] in ("generate", "vendor", "export"), line
        subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, check=True)
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks(page, "python")), "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
