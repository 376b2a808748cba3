"""JSON Schemas of the specs, for completion in editors: printed from the dataclasses.

They are derived files of the checkout: a plain `fusegen generate` in it writes them, `fusegen
check` compares them.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from .files import named
from .kinds import SCHEMA_FOLDER, SpecKind
from .meanings import described


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """One schema file that is not what the dataclasses say.

    Attributes:
        path: of the file.
        before: text on disk, None where there is no file.
        after: text it should hold, None where the file belongs to no kind of spec.
    """

    path: Path
    before: str | None
    after: str | None

    @property
    def kind(self) -> str:
        """`missing`, `extra` or `changed`."""
        if self.before is None:
            return "missing"
        return "extra" if self.after is None else "changed"

    def diff(self) -> str:
        """What writing would change, as a patch."""
        before = (self.before or "").splitlines(keepends=True)
        after = (self.after or "").splitlines(keepends=True)
        name = self.path.name
        return "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))


def render() -> dict[str, str]:
    """Text of every schema by file name, one per kind of spec."""
    return {file_of(kind.key): _text(kind) for kind in SpecKind}


def file_of(key: str) -> str:
    """Name of the schema of a kind of spec, such as recipe."""
    return f"{key}.schema.json"


def editor_line(key: str) -> str:
    """The comment by which editors find the schema of a spec in a folder of its kind."""
    return f"# yaml-language-server: $schema=../{SCHEMA_FOLDER}/{file_of(key)}"


def _text(kind: SpecKind) -> str:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **described(kind),
        "title": f"fusegen {kind.key}",
    }
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def diff(specs: Path) -> tuple[SchemaChange, ...]:
    """The schema files below a spec folder that differ from the dataclasses."""
    folder = specs / SCHEMA_FOLDER
    wanted = render()
    present = {path.name: path for path in folder.glob("*.schema.json")}
    changes = [
        SchemaChange(folder / name, _read(folder / name), wanted.get(name))
        for name in sorted({*wanted, *present})
    ]
    return tuple(change for change in changes if change.before != change.after)


def write(specs: Path) -> tuple[SchemaChange, ...]:
    """Bring the schema files below a spec folder up to date, and say what changed."""
    changes = diff(specs)
    for change in changes:
        if change.after is None:
            change.path.unlink()
        else:
            change.path.parent.mkdir(parents=True, exist_ok=True)
            with named(change.path):
                change.path.write_bytes(change.after.encode("utf-8"))
    return changes


def _read(path: Path) -> str | None:
    return path.read_bytes().decode("utf-8") if path.is_file() else None
