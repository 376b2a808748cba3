"""Collects the GPU tests only where a built bundle runs on the device.

There nothing is skipped but what needs two GPUs and finds one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bundles import (
    BUNDLE_VARIABLE,
    DEVICE,
    TWIN,
    bundles_to_test,
    compiled_bundles,
    has_shipped,
    kind_of,
    load_bundle,
    quantized_bundles,
)

HERE = Path(__file__).parent

# What needs neither streams, graphs, the profiler nor large memory runs on the CPU reference too.
_DEVICE_ONLY = [
    "test_chunks.py",
    "test_device.py",
    "test_graphs.py",
    "test_kernels.py",
    "test_large.py",
    "test_main_grad.py",
    "test_memory.py",
    "test_norm_quantize.py",
    "test_quantized_device.py",
    "test_training.py",
]
_QUANTIZED = ["test_quantized.py", "test_quantized_device.py"]
# Every other file runs shipped modules under bf16.
_PLAIN = [path.name for path in HERE.glob("test_*.py") if path.name not in _QUANTIZED]
# Twins have other kernels of GEMMs, and few modules around these.
_OF_GEMMS = [
    *_QUANTIZED,
    "test_device.py",
    "test_epilogues.py",
    "test_graphs.py",
    "test_kernels.py",
    "test_main_grad.py",
    "test_numerics.py",
    "test_operands.py",
    "test_training.py",
]
_BESIDE_GEMMS = [path.name for path in HERE.glob("test_*.py") if path.name not in _OF_GEMMS]
_EPILOGUES = ["test_epilogues.py"]  # of modules that not every twin has
# What loads specs too, for which a machine that only runs bundles lacks the packages.
_OF_FUSEGEN = [
    "test_collective_graphs.py",
    "test_fat.py",
    "test_four_devices.py",
    "test_memory.py",
    "test_one_device.py",
    "test_rows_of_ranks.py",
    "test_two_devices.py",
]
_OF_TRANSFORMERS = ["test_experts_of_models.py"]


def _folders() -> list[Path]:
    if importlib.util.find_spec("torch") is None:
        return []
    if DEVICE == "cpu":
        wanted = os.environ.get(BUNDLE_VARIABLE)
        return [Path(wanted).resolve()] if wanted else compiled_bundles()
    import torch

    if not torch.cuda.is_available():
        return []
    return bundles_to_test(torch.cuda.get_device_capability())


FOLDERS = _folders()
collect_ignore_glob = [] if FOLDERS else ["test_*.py"]
collect_ignore = _DEVICE_ONLY if DEVICE == "cpu" else []
collect_ignore += [] if quantized_bundles() else _QUANTIZED
collect_ignore += [] if all(map(has_shipped, FOLDERS)) else _PLAIN
collect_ignore += _BESIDE_GEMMS if any(kind_of(each) == TWIN for each in FOLDERS) else []
collect_ignore += (
    [] if all((f / "linear_residual__bf16.py").exists() for f in FOLDERS) else _EPILOGUES
)
collect_ignore += [] if importlib.util.find_spec("pydantic") else _OF_FUSEGEN
collect_ignore += [] if importlib.util.find_spec("transformers") else _OF_TRANSFORMERS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
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
