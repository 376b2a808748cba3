"""Collects the GPU tests only where a built bundle runs on the device; nowhere are they skipped."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import torch
from bundles import bundles_to_test, compiled_bundles, load_bundle
from gpu_support import DEVICE

# What needs neither streams, graphs, the profiler nor large memory runs on the CPU reference too.
_DEVICE_ONLY = ["test_device.py", "test_graphs.py", "test_kernels.py", "test_large.py"]


def _folders() -> list[Path]:
    if DEVICE == "cpu":
        return compiled_bundles()
    if not torch.cuda.is_available():
        return []
    return bundles_to_test(torch.cuda.get_device_capability())


FOLDERS = _folders()
collect_ignore_glob = [] if FOLDERS else ["test_*.py"]
collect_ignore = _DEVICE_ONLY if DEVICE == "cpu" else []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU that runs one of the built bundles")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", params=FOLDERS, ids=lambda folder: str(folder.name))
def folder(request: pytest.FixtureRequest) -> Path:
    """A bundle's folder."""
    path: Path = request.param
    return path


@pytest.fixture(scope="session")
def bundle(folder: Path) -> ModuleType:
    """That bundle, loaded by path."""
    return load_bundle(folder)
