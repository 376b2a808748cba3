"""Files of tests/gpu, which import each other by their names alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

GPU = Path(__file__).parents[1] / "gpu"


def load(name: str) -> ModuleType:
    """A file of tests/gpu under a name of its own."""
    if str(GPU) not in sys.path:
        sys.path.insert(0, str(GPU))  # where its files find each other
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", GPU / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
