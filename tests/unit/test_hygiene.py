"""Names of specs are theirs to choose: any that loads generates the same numbers."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusegen.bundle import render_bundle
from fusegen.fileset import ArtifactKind, FileSet
from fusegen.hygiene import settle
from fusegen.load import SpecSet, load
from fusegen.model.names import MARK
from fusegen.model.source import SpecError
from fusegen.naming import Cell
from fusegen.paths import builtin_specs, builtin_templates
from fusegen.polish import polish
from fusegen.render import Renderer
from fusegen.resolve import resolve

RENDERER = Renderer([builtin_templates()])
SPECS = load([builtin_specs()])
NUMBERS = itertools.count()

Renaming = Mapping[str, str]


def renamed_op(op: dict[str, Any], names: Renaming) -> dict[str, Any]:
    """An op with other names for symbols, keywords, tensors, halves and scalars."""

    def new(name: str) -> str:
        if name in names:
            return names[name]
        return f"d{names[name[1:]]}" if name[:1] == "d" and name[1:] in names else name

    def text(value: str) -> str:
        return re.sub(r"[A-Za-z]\w*", lambda m: new(m[0]), value)

    def tensor(spec: dict[str, Any]) -> dict[str, Any]:
        shape = [text(dim) if isinstance(dim, str) else dim for dim in spec["shape"]]
        halves = {"halves": [new(name) for name in spec["halves"]]} if "halves" in spec else {}
        return {**spec, "shape": shape, **halves}

    changed = dict(op)
    changed["dims"] = {new(symbol): new(word) for symbol, word in op["dims"].items()}
    for section in ("inputs", "outputs", "parameters", "internal"):
        if section in op:
            changed[section] = {new(name): tensor(spec) for name, spec in op[section].items()}
    if "attributes" in op:
        changed["attributes"] = {new(name): spec for name, spec in op["attributes"].items()}
    if "pointwise" in op:
        changed["pointwise"] = {new(name): text(line) for name, line in op["pointwise"].items()}
    for section in ("forward", "backward"):
        if section in op:
            changed[section] = [
                {slot: v if slot in ("step", "kind") else new(v) for slot, v in step.items()}
                for step in op[section]
            ]
    return changed


def renamed_module(module: dict[str, Any], names: Renaming) -> dict[str, Any]:
    """A module in the names of its renamed ops, and with other names of its own."""
    changed = renamed_op({"dims": {}, **module}, names) if "chain" in module else dict(module)
    if "chain" in module:
        changed["chain"] = [renamed_item(item, names) for item in module["chain"]]
    return changed


def renamed_item(item: dict[str, Any], names: Renaming) -> dict[str, Any]:
    changed = dict(item)
    for key in ("as", "out"):
        if key in item:
            changed[key] = names.get(item[key], item[key])
    if "with" in item:
        changed["with"] = {names.get(k, k): names.get(v, v) for k, v in item["with"].items()}
    if "attributes" in item:
        changed["attributes"] = {names.get(k, k): v for k, v in item["attributes"].items()}
    if "dims" in item:
        changed["dims"] = {
            names.get(symbol, symbol): re.sub(
                r"[A-Za-z]\w*", lambda m: names.get(m[0], m[0]), str(expr)
            )
            for symbol, expr in item["dims"].items()
        }
    return changed


def contents(kind: str) -> dict[str, dict[str, Any]]:
    folder = builtin_specs() / kind
    return {p.stem: yaml.safe_load(p.read_text("utf-8")) for p in sorted(folder.glob("*.yaml"))}


def used_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Every name and every symbol of the built-in ops and modules."""
    names: dict[str, None] = {}
    for spec in (*contents("ops").values(), *contents("modules").values()):
        for section in ("inputs", "outputs", "parameters", "internal", "attributes", "dims"):
            names |= dict.fromkeys(spec.get(section, ()))
        names |= dict.fromkeys(spec.get("dims", {}).values())
        for tensor in spec.get("inputs", {}).values():
            names |= dict.fromkeys(tensor.get("halves", ()))
        for item in spec.get("chain", ()):
            names |= dict.fromkeys(item[key] for key in ("as", "out") if key in item)
    return (
        tuple(name for name in names if name[0].islower()),
        tuple(name for name in names if name[0].isupper()),
    )


NAMES, SYMBOLS = used_names()


def write(folder: Path, names: Renaming) -> SpecSet:
    """All specs with other names, loaded and so validated."""
    for kind in ("recipes", "archs", "fusions", "targets"):
        (folder / kind).mkdir(parents=True)
        for path in (builtin_specs() / kind).glob("*.yaml"):
            (folder / kind / path.name).write_bytes(path.read_bytes())
    for kind, rename in (("ops", renamed_op), ("modules", renamed_module)):
        (folder / kind).mkdir()
        for name, content in contents(kind).items():
            text = yaml.safe_dump(rename(content, names), sort_keys=False)
            (folder / kind / f"{name}.yaml").write_text(text, encoding="utf-8")
    return load([folder])
