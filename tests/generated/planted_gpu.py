"""A pytest plugin: for fat bundles that tests import, tensors on the CPU count as those on a GPU.

They then run the reference of the architecture's bundle, by its ops.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

CAPABILITY = "PLANTED_CAPABILITY"
"""Environment variable with major and minor version, such as `9.0`."""


def plant(devices: ModuleType, capability: tuple[int, int]) -> None:
    """Make a GPU of a compute capability of the CPU."""
    vars(devices).update(is_gpu=lambda _: True, capability_of=lambda _: capability)


def pytest_collection_finish(session: pytest.Session) -> None:
    found = [module for name, module in sys.modules.items() if name.endswith("._devices")]
    assert found or not session.items
    major, minor = os.environ[CAPABILITY].split(".")
    for devices in found:
        plant(devices, (int(major), int(minor)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the bundles in a fat one that calls went to."""
    cells = (name.split(".") for name in sys.modules if "__" in name.rsplit(".", 1)[-1])
    archs = {words[-2] for words in cells if len(words) > 1 and words[-2].startswith("sm_")}
    terminalreporter.write_line(f"ran as: {' '.join(sorted(archs))}")
