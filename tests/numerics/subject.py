"""The reference under test, as a bundle has it, and the committed recipes in its terms."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RECIPES = ("fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
ROLES = ("input", "weight", "grad_output")


def _load() -> ModuleType:
    path = ROOT / "templates" / "static" / "reference" / "_quantize.py"
    spec = importlib.util.spec_from_file_location("fusegen_reference_quantize", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference = _load()


def quantization(recipe: str, role: str, **changes: Any) -> Any:
    """A role of specs/recipes, with fields of ``Quantization`` replaced."""
    path = ROOT / "specs" / "recipes" / f"{recipe}.yaml"
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))["roles"][role]
    scale = dict(spec["scale"])
    fields = {
        "format": spec["format"],
        "block": tuple(None if extent == "all" else extent for extent in spec["block"]),
        "scale_dtype": scale.pop("dtype"),
        "tensor_scale": "tensor_scale" in spec,
        "rounding": spec.get("rounding", "nearest"),
        "hadamard": spec["hadamard"]["orientation"] if "hadamard" in spec else None,
        **scale,
        "source": "history" if scale.get("history") else "current",
        **changes,
    }
    return reference.Quantization(**fields)
