"""`schema`: the JSON Schemas of specs, for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..spec import schema
from ..spec.diagnostics import SpecError
from ..spec.kinds import SCHEMA_FOLDER
from ..spec.load import no_folder


def schema_of(kind: str) -> str:
    """The schema of a kind of spec, such as recipe, as text."""
    return schema.render()[schema.file_of(kind)]


def data_of(kind: str) -> dict[str, Any]:
    """The same as data."""
    data: dict[str, Any] = json.loads(schema_of(kind))
    return data


def write(specs: Path) -> tuple[Path, ...]:
    """Bring the schemas below a spec folder up to date; all of them, in sorted order.

    Raises:
        SpecError: there is no such folder.
    """
    if not specs.is_dir():
        raise SpecError([no_folder(specs)])
    schema.write(specs)
    return tuple(specs / SCHEMA_FOLDER / name for name in sorted(schema.render()))
