"""Bundles that are generated for the GPU run alone, each from the cells that it is to hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from entries import LedgerError

from fusegen import api
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.passes.draft import NotPossible
from fusegen.passes.pipeline import resolve_module
from fusegen.spec.editions import CURRENT
from fusegen.spec.load import SpecSet


def plan_of(specs: SpecSet, arch: str, cell: Cell) -> ModulePlan | None:
    """The plan of a cell, or None where it cannot be made."""
    try:
        return resolve_module(specs, cell, arch)
    except NotPossible:
        return None


def specs_of(out: Path) -> Path:
    """Where the targets of the bundles of a folder lie, and what specs are made for them."""
    return out / "specs"


def generate(out: Path, cells: Mapping[str, Iterable[Cell]], specs: Sequence[Path]) -> None:
    """Bring the bundles of a folder up to the specs; `specs_of(out)` gets their targets.

    Args:
        out: the folder, named as the kind of its bundles in `bundles.FURTHER`.
        cells: what each is to hold, by architecture.
        specs: folders of specs that the cells need besides the built-in ones.

    Raises:
        LedgerError: somebody edited one.
    """
    targets = write_targets(specs_of(out), out.name, cells)
    folders = api.Folders(specs=tuple(dict.fromkeys((*specs, specs_of(out)))))
    done = api.generate(api.Request(out=out, targets=targets, folders=folders))
    if done.refused:
        raise LedgerError(f"{done.refused[0].bundle}: edited by hand; remove that folder")


def write_targets(
    folder: Path, prefix: str, cells: Mapping[str, Iterable[Cell]]
) -> tuple[str, ...]:
    """Write a target per architecture, module and options below a folder of specs; their names.

    Args:
        folder: of specs.
        prefix: what the names begin with.
        cells: by architecture.
    """
    grouped: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for arch, wanted in sorted(cells.items()):
        for cell in wanted:
            grouped.setdefault((arch, cell.module, cell.options), []).append(cell.recipe)
    names = tuple(f"{prefix}_{index}" for index in range(len(grouped)))
    for name, ((arch, module, options), recipes) in zip(names, grouped.items(), strict=True):
        target = {"edition": CURRENT, "target": name, "summary": "Cells for the GPU run alone"}
        chosen = {"archs": [arch], "modules": [module], "recipes": recipes}
        path = folder / "targets" / f"{name}.yaml"
        write_yaml(path, {**target, **chosen, "options": list(options)})
    return names


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """One spec; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")
