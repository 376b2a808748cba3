"""`eject`: a module of a bundle that becomes its owner's own.

Its files, as they lie there, move to ``ejected/<cell>`` with a copy of everything that they import
and include, so that what fusegen later does to the bundle cannot break them: a package with kernels
and tests of its own, in the namespace that its ops have always had. ``<cell>.py`` stays, and
imports from there. The lock names none of this.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import __version__
from ..emit.fileset import Artifact, FileSet
from ..emit.polish import disown
from ..ir.naming import Cell
from ..publish.changes import ChangeKind, Changes, Edit, diff, read_file
from ..publish.folders import BUILTIN, Folders
from ..publish.inputs import Inputs
from ..publish.publish import PublishError, RefusedError, generating, recover
from ..publish.remedies import is_fat, whole
from ..publish.selection import bundles_at, without
from ..spec.usage import UsageError, command_line, known
from .edits import OnEdit, decide
from .generate import require_inside, write_bundle
from .rendering import compare
from .report import BundleReport
from .request import Job, recorded_jobs, selection_of

FOLDER = "ejected"
_PACKAGE = '"""Modules that were ejected from this bundle, each a package of its own."""\n'


@dataclass(frozen=True, slots=True)
class Ejected:
    """A module that is its owner's now.

    Attributes:
        bundle: that it is no longer part of.
        cell: its name.
        compiled: whether it has kernels to build.
    """

    bundle: Path
    cell: Cell
    compiled: bool

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.bundle / FOLDER / str(self.cell)

    def to_json(self) -> dict[str, object]:
        """Where it was and where it is."""
        return {
            "bundle": str(self.bundle),
            "cell": str(self.cell),
            "folder": str(self.folder),
            "compiled": self.compiled,
        }


def eject(folder: Path, module: str, folders: Folders = BUILTIN) -> tuple[Ejected, ...]:
    """Take a module out of bundles and leave it to their owner, in all of them or in none.

    Args:
        folder: a bundle, or a folder of bundles.
        module: a cell, such as ``silu__bf16``, or a module, which stands for all its cells.
        folders: to read besides the built-in and the recorded ones.

    Raises:
        SpecError, RenderError, LockError: as `check`.
        UsageError: no bundle has the module.
        RefusedError: a file in the way, or with conflicts; nothing was written.
        PublishError: a bundle is not what this fusegen writes.
    """
    bundles = bundles_at(folder)
    require_inside(folder, bundles)
    for bundle in bundles:
        _require_one_arch(bundle)
    with generating(bundles[0].parent):
        for bundle in bundles:
            recover(bundle)
        inputs = Inputs()
        chosen = _chosen(bundles, module, folder)
        jobs = recorded_jobs(list(chosen), folders)
        planned = [_Ejection.of(job, chosen[job.bundle], inputs) for job in jobs]
        for each in planned:
            if each.report.changes.refused:
                raise RefusedError(each.report.changes)
        return tuple(ejected for each in planned for ejected in each.carry_out())


def _require_one_arch(bundle: Path) -> None:
    """Refuse a bundle that chooses among those of architectures, and those in it.

    Raises:
        UsageError: naming it.
    """
    if is_fat(whole(bundle)):
        raise UsageError(
            f"{whole(bundle)}: is a bundle for all architectures, whose modules are one class for "
            "all of them; to own one, vendor it for one architecture and eject it there"
        )


def _chosen(bundles: Sequence[Path], module: str, folder: Path) -> dict[Path, tuple[Cell, ...]]:
    """The cells to eject, by bundle."""
    cells = {bundle: selection_of(bundle).cells for bundle in bundles}
    names = {name for each in cells.values() for cell in each for name in (str(cell), cell.module)}
    word = known(f"module of {folder}", module, sorted(names))
    found = {
        bundle: tuple(cell for cell in each if word in (str(cell), cell.module))
        for bundle, each in cells.items()
    }
    return {bundle: each for bundle, each in found.items() if each}


@dataclass(frozen=True, slots=True)
class _Ejection:
    """What is to be done to one bundle.

    Attributes:
        report: the bundle without the modules, and its files decided.
        files: that it is to have.
        edits: files that are its owner's, or go.
        parts: the files of every ejected cell.
    """

    report: BundleReport
    files: FileSet
    edits: Mapping[str, Edit]
    parts: Mapping[Cell, FileSet]

    @classmethod
    def of(cls, job: Job, cells: Sequence[Cell], inputs: Inputs) -> _Ejection:
        rest = replace(job, selection=without(job.selection, cells, job.bundle))
        alone = [replace(job, selection=replace(job.selection, cells=(cell,))) for cell in cells]
        (whole, all_files), (report, files), *parts = compare(
            [job, rest, *alone], inputs, prune=True, accept_format=False, verify=False
        )
        _require_current(whole)
        by_cell = {cell: part for cell, (_, part) in zip(cells, parts, strict=True)}
        edits = _what_stays(report.changes.accepting_format(), all_files)
        edits |= dict(_own(job.bundle, by_cell, all_files))
        if not files:
            edits |= dict(_package(job.bundle, all_files))
        changes = diff(files, job.bundle, edits=edits).accepting_format()
        return cls(replace(report, changes=changes), files, edits, by_cell)

    def carry_out(self) -> Iterator[Ejected]:
        write_bundle(self.report, self.files, edits=self.edits)
        for cell, files in self.parts.items():
            yield Ejected(self.report.bundle, cell, _has_kernels(files))


def _require_current(report: BundleReport) -> None:
    """Refuse a bundle of which this fusegen would write something else, edits apart.

    Raises:
        PublishError: naming the commands that bring it up to date.
    """
    changes = report.changes
    if not changes.lock_current or report.selection_changed or changes.of(ChangeKind.UPDATE):
        raise PublishError(
            f"{report.bundle}: is not what this fusegen writes, so it cannot tell what a module "
            f"needs there; bring it up to date first: {command_line('upgrade', report.bundle)}"
        )
    if changes.of(ChangeKind.CONFLICT, ChangeKind.OUTSIDE):
        raise RefusedError(changes)


def _what_stays(changes: Changes, whole: FileSet) -> dict[str, Edit]:
    """The bundle's own edited files: what is kept of them without the modules.

    Those that only the modules need go; their content is in the copy.
    """
    pristine = {path: artifact.data for path, artifact in whole.items()}
    edits = {
        change.path: Edit(change.before, None)
        for change in changes.of(ChangeKind.EDITED)
        if change.after is None
    }
    return {**decide(changes, OnEdit.MERGE, pristine).edits, **edits}


def _own(bundle: Path, parts: Mapping[Cell, FileSet], whole: FileSet) -> Iterator[tuple[str, Edit]]:
    """The files that are to be the owner's."""
    if not (bundle / FOLDER / "__init__.py").exists():
        yield f"{FOLDER}/__init__.py", Edit(None, _PACKAGE.encode())
    for cell, files in parts.items():
        home = f"{FOLDER}/{cell}"
        for path, artifact in files.items():
            same = path in whole and whole[path].data == artifact.data
            content = _on_disk(bundle, path, artifact) if same else artifact.data
            yield f"{home}/{path}", Edit(None, _disowned(content))
        yield f"{home}/README.md", Edit(None, _readme(cell, files).encode())
        module = f"{cell}.py"
        text = _on_disk(bundle, module, whole[module])
        yield module, Edit(read_file(bundle / module), _forwarding(cell, text).encode())


def _package(bundle: Path, whole: FileSet) -> Iterator[tuple[str, Edit]]:
    """What makes a package of a bundle that holds nothing any more but ejected modules."""
    path = "__init__.py"
    content = _disowned(_on_disk(bundle, path, whole[path]))
    yield path, Edit(read_file(bundle / path), content)


def _on_disk(bundle: Path, path: str, artifact: Artifact) -> bytes:
    """A file as it lies there, with its edits; as it would be written where it is missing."""
    content = read_file(bundle / path)
    return artifact.data if content is None else content


def _disowned(content: bytes) -> bytes:
    try:
        return disown(content.decode("utf-8"), __version__).encode("utf-8")
    except UnicodeDecodeError:
        return content


def _forwarding(cell: Cell, text: bytes) -> str:
    """The module that stays in the bundle: it has the public names of the one that went.

    Raises:
        PublishError: that one was edited and does not parse.
    """
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise PublishError(f"{cell}.py: does not parse: {error}; mend it, then eject it") from None
    names = sorted(name for node in body for name in _defined(node) if not name.startswith("_"))
    imports = "".join(f"    {name},\n" for name in names)
    exports = "".join(f'    "{name}",\n' for name in names)
    return (
        f'"""{cell}, ejected from fusegen {__version__}: its files are yours, in {FOLDER}/."""\n\n'
        f"from .{FOLDER}.{cell}.{cell} import (\n{imports})\n\n__all__ = [\n{exports}]\n"
    )


def _defined(node: ast.stmt) -> list[str]:
    """Names that a statement of a module gives it, imports apart."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [each.id for each in getattr(node, "targets", ()) if isinstance(each, ast.Name)]


def _has_kernels(files: FileSet) -> bool:
    return any(path.startswith("csrc/") for path in files)


def _readme(cell: Cell, files: FileSet) -> str:
    build = (
        "\nBuild its kernels: `fusegen build <this folder>`, or without fusegen\n"
        "`cmake -S csrc -B build -G Ninja && cmake --build build`.\n"
    )
    return (
        f"# {cell}\n\n"
        f"Ejected from fusegen {__version__}: every file in this folder is yours, and fusegen"
        " neither\nchecks nor changes any.  It is a package of its own, with copies of all that it"
        f" imports and includes;\n`{cell}.py` in the bundle imports from here.\n"
        + (build if _has_kernels(files) else "")
        + "\nTest it: `python -m pytest tests` in this folder.\n"
    )
