"""Pages of docs that are followed as a reader would: block by block, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .walk import ROOT, has_toolchain

FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL, ON_NVCC, PYTHON, YAML = "", "sh nvcc", "python", "yaml"
"""Languages of blocks that are followed; others, as `text`, are shown only."""
AUTHOR = {
    f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}


def steps(page: Path) -> Iterator[str]:
    """A shell script for every block that is followed, in their order."""
    for language, text in FENCED.findall(page.read_text("utf-8")):
        if language == SHELL or (language == ON_NVCC and has_toolchain()):
            yield text
        elif language == PYTHON:
            yield f"python - <<'END'\n{text}END\n"
        elif language == YAML:
            path = shlex.quote(text.splitlines()[0].removeprefix("# "))
            yield f"mkdir -p $(dirname {path})\ncat > {path} <<'END'\n{text}END\n"


def follow(page: Path, folder: Path) -> str:
    """Follow a page in a folder; fails where a block does.

    `fusegen` and `python` are those of this run.  A file that a block of YAML shows is named by its
    first line, a comment.

    Returns:
        what the blocks printed.
    """
    python = shlex.quote(sys.executable)
    head = f'set -e\npython() {{ {python} "$@"; }}\nfusegen() {{ {python} -m fusegen "$@"; }}\n'
    path = os.pathsep.join(filter(None, (str(ROOT / "generator"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        ["bash", "-c", head + "set -x\n" + "".join(steps(page))],
        cwd=folder,
        env={**os.environ, **AUTHOR, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
