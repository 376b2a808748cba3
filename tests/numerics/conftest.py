"""Collects the oracle tests only where their wheels were fetched; nowhere are they skipped.

They compare with TransformerEngine and torchao as published.  To run them:

    pip download --no-deps -d ORACLES torchao==0.18.0 transformer_engine==2.20.2
    FUSEGEN_ORACLES=ORACLES pytest -m oracle tests/numerics
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

_HAVE_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore_glob = [] if _HAVE_TORCH else ["test_*.py"]
collect_ignore = [] if os.environ.get("FUSEGEN_ORACLES") else ["test_oracles.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "oracle: compares with other libraries' published wheels")
