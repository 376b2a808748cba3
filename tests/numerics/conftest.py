"""Collects the oracle tests only where their wheels were fetched; nowhere are they skipped.

They compare with TransformerEngine and torchao as published.  To run them:

    pip download --no-deps -d ORACLES torchao==0.18.0 transformer_engine==2.20.2
    FUSEGEN_ORACLES=ORACLES pytest -m oracle tests/numerics
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_HAVE_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore_glob = [] if _HAVE_TORCH else ["test_*.py"]
collect_ignore = [] if os.environ.get("FUSEGEN_ORACLES") else ["test_oracles.py"]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are tiny; threads that wait for each other cost more than they do."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
