"""Where bundles lie, which of them a device runs, and how one is loaded by path.

Nothing here imports torch before a bundle is loaded, so that reports work without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "generated"
BUILD = ROOT / "build"
RECORD = ROOT / "docs" / "architectures.json"
"""What `make compile-all` found."""

# Bundles that are generated for the GPU run alone, by the word that the ledger and `build` have for
# them: what each holds. There is one of each kind per architecture.
EVIDENCE = "evidence"
WRITTEN = "written"
WHOLE = "whole"
"""The bundle of an architecture of which the committed one holds a part (whole.py)."""
TWIN = "twin"
"""The bundle of an architecture that no GPU here runs, compiled for one that is here: with matrix
instructions in software, and all else as it is."""
TWINS = {"sm_100a": "sm_90a_tcgen05", "sm_120a": "sm_90a_twin"}
"""What the bundles of twins are called, by the architecture that each is of (twin.py)."""
FURTHER = {
    EVIDENCE: "further cells",
    WRITTEN: "specs of tests: chains, recipes, extension",
    WHOLE: "every module and recipe",
    TWIN: "matrix instructions in software",
}
MANIFEST = "manifest.json"
"""Of a bundle that has files of some cells, and digests of the others."""

# "cpu" runs the tests that need no GPU on the reference instead: a check of the tests themselves.
DEVICE = os.environ.get("FUSEGEN_TEST_DEVICE", "cuda")

# Restricts the GPU tests to one bundle folder; without it they run on every bundle that fits.
BUNDLE_VARIABLE = "FUSEGEN_TEST_BUNDLE"

_GENCODE = re.compile(
    r"set\(FUSEGEN_GENCODE \"?arch=compute_\w+,code=\[?sm_(\d+)(\d)([af]?)(,compute_\d+)?\b"
)


class Code(str, Enum):
    """What of a library a GPU runs."""

    SASS = "SASS"
    PTX = "PTX"  # which its driver compiles when the library is loaded
    TWIN = "twin"  # of another architecture's, but for its matrix instructions


def has_shipped(folder: Path) -> bool:
    """Whether a bundle has shipped modules under bf16, which one of users' specs need not have."""
    return (folder / "grouped_linear__bf16.py").exists()


def code_on(folder: Path, capability: tuple[int, int]) -> Code | None:
    """What of a bundle's library a device of this compute capability runs; None where nothing.

    A letter ties code to one capability; without it, later minor versions run the SASS and all
    later ones the PTX, where there is some (CUDA C++ programming guide, "Compute capabilities").
    """
    match = _GENCODE.search((folder / "csrc" / "sources.cmake").read_text("utf-8"))
    if match is None:
        return None
    own = int(match[1]), int(match[2])
    sass = Code.TWIN if kind_of(folder) == TWIN else Code.SASS
    if capability == own:
        return sass
    if match[3] or capability < own:
        return None
    if capability[0] == own[0]:
        return sass
    return Code.PTX if match[4] else None


def compiled_bundles() -> list[Path]:
    """Every bundle that has kernels, by name; the folder's name is its architecture."""
    return sorted(path.parents[1] for path in GENERATED.glob("*/csrc/sources.cmake"))


def is_representative(folder: Path) -> bool:
    """Whether a bundle stands for an architecture's others, of which it has digests."""
    return (folder / MANIFEST).is_file()


def further_bundles() -> list[Path]:
    """Every bundle for the GPU run alone that was generated here, by kind and name."""
    return [
        path.parents[1]
        for kind in FURTHER
        for path in sorted((BUILD / kind).glob("*/csrc/sources.cmake"))
    ]


def kind_of(folder: Path) -> str:
    """Which of `FURTHER` a bundle is; empty for every other bundle."""
    return next((kind for kind in FURTHER if folder.parent == BUILD / kind), "")


def key_of(folder: Path) -> str:
    """What the ledger calls a bundle: its architecture, and which of the further ones it is."""
    return f"{folder.name} {kind_of(folder)}".strip()


def folder_of(key: str) -> Path:
    """Inverse of `key_of`."""
    arch, _, kind = key.partition(" ")
    return (BUILD / kind if kind else GENERATED) / arch


def spec_folders(folder: Path) -> list[Path]:
    """Where the specs of a bundle lie: those that ship, and those that its lock names."""
    lock = json.loads((folder / "fusegen.lock").read_text("utf-8"))
    return [ROOT / "specs", *(folder / each for each in lock["selection"]["specs"])]


def library_of(folder: Path) -> Path | None:
    """The bundle's compiled library, or None where it was not built."""
    return next(iter(sorted(folder.glob("lib/*.so"))), None)


def bundles_to_test(capability: tuple[int, int]) -> list[Path]:
    """Built bundles that a device of this capability runs, or the one that is asked for.

    Those whose machine code it runs come first; one that is whole takes the place of its part.
    """
    wanted = os.environ.get(BUNDLE_VARIABLE)
    folders = [Path(wanted).resolve()] if wanted else [*map(_whole, compiled_bundles())]
    codes = {folder: code_on(folder, capability) for folder in folders if library_of(folder)}
    return [folder for code in Code for folder in folders if codes.get(folder) is code]


def _whole(folder: Path) -> Path:
    """The bundle of which this one is a part, where it has been built."""
    whole = BUILD / WHOLE / folder.name
    return whole if is_representative(folder) and library_of(whole) else folder


def quantized_bundles() -> list[Path]:
    """Bundles to test that have cells of quantised recipes."""
    folders = compiled_bundles()
    if os.environ.get(BUNDLE_VARIABLE):
        folders = [Path(os.environ[BUNDLE_VARIABLE]).resolve()]
    return [folder for folder in folders if quantized_cells(folder, "grouped_linear")]


def quantized_cells(folder: Path, module: str) -> list[str]:
    """Cells of a module under recipes other than bf16, without further choices, by name."""
    return [cell for cell in cells_of(folder, module) if not cell.endswith("__bf16")]


def cells_of(folder: Path, module: str, *, choices: bool = False) -> list[str]:
    """Cells of a module under every recipe, by name; with further choices only where asked for."""
    cells = sorted(path.stem for path in folder.glob(f"{module}__*.py"))
    return [cell for cell in cells if choices or cell.count("__") == 1]


def load_bundle(folder: Path, name: str | None = None) -> ModuleType:
    """Import a bundle by path, as somebody does who keeps it outside of sys.path.

    Args:
        folder: the bundle.
        name: the package name it gets in this process; by default made from the folder's name.
    """
    name = name or f"bundle_{folder.name}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder}: not a Python package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_cell(bundle: ModuleType, cell: str) -> ModuleType:
    """One module file of a loaded bundle, such as grouped_linear__bf16."""
    return importlib.import_module(f"{bundle.__name__}.{cell}")
