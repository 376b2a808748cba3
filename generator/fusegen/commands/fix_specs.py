"""`fusegen fix-specs`: specs of an older edition, rewritten in the current one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..publish.changes import patch
from ..spec import schema
from ..spec.diagnostics import Loc, Problem, SpecError
from ..spec.editions import CURRENT, Upgrade, edition_of, is_older, newer_problem, upgraded
from ..spec.edits import EditError, rewritten
from ..spec.files import named, resolve
from ..spec.kinds import SCHEMA_FOLDER, SpecKind
from ..spec.load import Source, display, no_folder, parse_yaml, read_text, spec_files
from ..spec.usage import UsageError


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A spec of an older edition.

    Attributes:
        path: of its file.
        edition: that the file states.
        removed: keys that go, as ``inputs.split_sizes.differentiable``.
        before: its text.
        after: its text in the current edition.
    """

    path: Path
    edition: int
    removed: tuple[str, ...]
    before: str
    after: str

    def diff(self) -> str:
        """What rewriting changes, as a patch."""
        return patch(self.path.as_posix().lstrip("/"), self.before.encode(), self.after.encode())

    def to_json(self) -> dict[str, object]:
        """Everything but the texts."""
        facts = {"path": str(self.path), "edition": self.edition, "to": CURRENT}
        return facts | {"removed": list(self.removed)}


def fix_specs(places: Sequence[Path], *, write: bool) -> tuple[Rewrite, ...]:
    """Rewrite every spec of an older edition; nothing of a file moves but what its edition changed.

    Args:
        places: spec folders, and single specs in the folder of their kind.
        write: whether to write files, or only to say what would be written.

    Returns:
        what was, or would be, rewritten, in the order of the places.

    Raises:
        UsageError: a place is neither.
        SpecError: with all that cannot be rewritten; nothing was written.
        OSError: a file cannot be read or written, or somebody else changes it at this moment.
    """
    problems: list[Problem] = []
    found: dict[Path, Rewrite] = {}
    for kind, path, name in _specs(places, problems):
        try:
            if path not in found and (rewrite := rewrite_of(kind, path, name)):
                found[path] = rewrite
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    for each in found.values() if write else ():
        _replace(each)
    return tuple(found.values())


def stale_schemas(places: Sequence[Path]) -> tuple[Path, ...]:
    """Spec folders among the places whose schemas for editors are not of the current edition."""
    kept = (place for place in places if (place / SCHEMA_FOLDER).is_dir())
    return tuple(place for place in kept if schema.diff(place))


def _specs(places: Sequence[Path], problems: list[Problem]) -> Iterator[tuple[SpecKind, Path, str]]:
    """Kind, file and name in messages of every spec at the places."""
    kinds = {kind.folder: kind for kind in SpecKind}
    for place in places:
        if resolve(place).name in kinds and any(place.glob("*.yaml")):
            raise UsageError(
                f"{place}: expected a spec folder or a spec, got a folder of {place.name} alone;"
                f" name the spec folder, {place.parent}"
            )
        if place.is_dir():
            for kind, path in spec_files(place, problems):
                yield kind, path, display(path, place)
        elif not place.exists():
            problems.append(no_folder(place))
        elif place.suffix == ".yaml" and resolve(place).parent.name in kinds:
            yield kinds[resolve(place).parent.name], place, str(place)
        else:
            folders = ", ".join(kinds)
            raise UsageError(f"{place}: a spec is a .yaml file in one of these folders: {folders}")


def rewrite_of(kind: SpecKind, path: Path, name: str) -> Rewrite | None:
    """What becomes of a file; None where it is of the current edition.

    Raises:
        SpecError: with why it cannot be rewritten.
    """
    try:
        text = read_text(path)
    except ValueError as error:
        raise SpecError([Problem(Loc(name, 1, 1), f"not a spec: {error}")]) from None
    content, source, problems = parse_yaml(text, name)
    if content is None or problems:
        raise SpecError(problems)
    if newer := newer_problem(content):
        raise SpecError([source.problem(newer, "edition")])
    if not is_older(content):
        return None
    upgrade = upgraded(kind, content)
    wrong = [source.problem(c.problem, *c.path) for c in upgrade.changes if c.problem]
    if wrong:
        raise SpecError(wrong)
    removed = [".".join(map(str, each.path)) for each in upgrade.changes if each.value is None]
    after = text_of(text, name, upgrade, source)
    return Rewrite(path, edition_of(content) or CURRENT, tuple(removed), text, after)


def text_of(text: str, name: str, upgrade: Upgrade, source: Source) -> str:
    """The text in the current edition, which says what the upgraded document does."""
    by_hand = "edit the file by hand: remove the key, or set the edition, as docs/specs.md says"
    try:
        after = rewritten(text, upgrade.changes)
    except EditError as error:
        raise SpecError([source.problem(f"{error}; {by_hand}", *error.path)]) from None
    if parse_yaml(after, name)[0] != upgrade.document:
        raise SpecError([source.problem(f"the text cannot be changed in place; {by_hand}")])
    return after


def _replace(rewrite: Rewrite) -> None:
    """Put the new text in the place of the file at once, unless it is another file by now."""
    target = resolve(rewrite.path)
    with named(target):
        descriptor, scratch = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        staged = Path(scratch)
        try:
            with open(descriptor, "wb") as file:
                file.write(rewrite.after.encode())
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(target, staged)
            if target.read_bytes() not in (rewrite.before.encode(), rewrite.after.encode()):
                message = "was changed at this moment; run the command again"
                raise OSError(None, message, str(target))
            os.replace(staged, target)
        finally:
            staged.unlink(missing_ok=True)
