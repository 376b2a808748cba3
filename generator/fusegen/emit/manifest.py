"""The manifest of a bundle: cells of which it has no files, each by a digest of what they would be.

A change of a cell shows in one line, where nobody would read all of its files again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from ..passes.pipeline import Plan
from ..spec.arch import ArchSpec
from .bundle import render_bundle
from .fileset import Artifact, ArtifactKind, FileSet
from .render import Renderer

MANIFEST = "manifest.json"
"""Its name in a bundle."""
_UNSUPPORTED = "unsupported: "


def render_manifest(
    plan: Plan, arch: ArchSpec, namespace: str, renderer: Renderer, owners: tuple[str, ...]
) -> Artifact:
    """The manifest of cells: the status and the digest of each, or why it cannot be made.

    Args:
        plan: of these cells alone.
        arch: what they are for.
        namespace: of their ops.
        renderer: templates.
        owners: cells of the bundle, which has the manifest as long as it has them.
    """
    files = render_bundle(plan.modules, arch, namespace, renderer) if plan.modules else FileSet()
    digests = dict(_digests(files, (module.cell for module in plan.modules)))
    rows = {each.cell: f"{each.status.value} {digests[each.cell]}" for each in plan.modules}
    rows |= {each.cell: f"{_UNSUPPORTED}{each.reason}" for each in plan.unsupported}
    text = json.dumps({"cells": rows}, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    inputs = {name for artifact in files.values() for name in artifact.inputs}
    return Artifact(text, ArtifactKind.JSON, owners, tuple(sorted(inputs)))


def _digests(files: FileSet, cells: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Of each cell, over its own files.

    The module states the digest of all that decides its results, so what cells share counts, too.
    """
    own: dict[str, list[str]] = {cell: [] for cell in cells}
    for path in files:
        cell = PurePosixPath(path).stem.removeprefix("test_")
        if cell in own:
            own[cell].append(path)
    for cell, paths in own.items():
        found = hashlib.sha256()
        for path in paths:
            found.update(f"{path}\0{hashlib.sha256(files[path].data).hexdigest()}\n".encode())
        yield cell, found.hexdigest()


def differing(before: bytes | None, after: bytes | None) -> tuple[str, ...]:
    """Cells that two manifests say other things of, sorted; of one that cannot be read, all."""
    first, second = _read(before), _read(after)
    return tuple(sorted(cell for cell in {*first, *second} if first.get(cell) != second.get(cell)))


def _read(data: bytes | None) -> Mapping[str, object]:
    try:
        cells = json.loads(data or b"{}")["cells"]
        return cells if isinstance(cells, dict) else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
