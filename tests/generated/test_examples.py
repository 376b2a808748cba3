"""The examples run, and do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_moe_layer_learns() -> None:
    words = [sys.executable, str(EXAMPLES / "moe_layer.py")]
    result = subprocess.run(words, capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr
    ratio = re.search(r"fell to (\d+)%", result.stdout)
    assert ratio and int(ratio[1]) < 60, result.stdout
