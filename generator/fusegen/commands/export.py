"""`export`: built bundles as a repository that the library `kernels` of Hugging Face loads.

Each bundle becomes ``build/<variant>``: the package as it lies there, its library included, sources
and tests left out, with ``metadata.json``. That has a digest of every file, by which a later export
knows a folder that nobody has touched since, and replaces no other.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..build.library import stale_cells
from ..build.link import read_record
from ..build.sources import Sources, check_files, read_sources
from ..build.toolchain import MIN_TORCH, BuildError
from ..publish.changes import PRISTINE_NAME
from ..publish.lock import LOCK_NAME
from ..publish.publish import PublishError, generating, recover
from ..publish.selection import bundles_at
from ..spec.files import named, read
from ..spec.usage import UsageError, command_line
from .build import SOURCES
from .request import selection_of

METADATA: Final = "metadata.json"
_STAGING: Final = ".fusegen.export"
_LICENSE: Final = "Apache-2.0"
_NAME: Final = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
_LEFT_OUT: Final = {"csrc", "tests", "__pycache__", PRISTINE_NAME, LOCK_NAME}
"""Files and folders that develop a bundle and do not run it; files that begin with a dot, too."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One bundle in a repository of kernels.

    Attributes:
        bundle: that was exported.
        folder: ``build/<variant>`` of the repository.
        name: of the kernel.
        version: of the kernel.
    """

    bundle: Path
    folder: Path
    name: str
    version: int

    def to_json(self) -> dict[str, object]:
        """What it is and where it lies."""
        return {
            "bundle": str(self.bundle),
            "folder": str(self.folder),
            "name": self.name,
            "version": self.version,
        }


@dataclass(frozen=True, slots=True)
class _Backend:
    """What a bundle runs on.

    Attributes:
        variant: name of its folder, which `kernels` chooses by.
        metadata: the same for ``metadata.json``.
    """

    variant: str
    metadata: Mapping[str, object]


def export_kernels(
    folder: Path, out: Path, *, name: str | None = None, version: int = 1
) -> tuple[Exported, ...]:
    """Write bundles as variants of one kernel, all of them or none.

    Args:
        folder: a bundle, or a folder of bundles.
        out: the repository; other files in it stay.
        name: of the kernel; the prefix of the bundles' namespaces by default.
        version: of the kernel.

    Raises:
        UsageError: no bundle, no name for a kernel, or two bundles of one variant.
        BuildError: a library is missing, is not of the sources that lie beside it, or was not
            linked by `fusegen build`.
        PublishError: a variant is there that no export wrote, or that was changed since.
    """
    bundles = bundles_at(folder)
    _require_one_arch(bundles)
    name = _checked_name(_default_name(bundles) if name is None else name, version)
    with generating(out):
        planned: dict[str, Exported] = {}
        backends: dict[str, _Backend] = {}
        for bundle in bundles:
            recover(bundle)
            backend = _backend_of(bundle)
            place = out / "build" / backend.variant
            _check_place(place, bundle, planned.get(backend.variant))
            planned[backend.variant] = Exported(bundle, place, name, version)
            backends[backend.variant] = backend
        _check_others(out, planned, name, version)
        _publish(out, {variant: (planned[variant], backends[variant]) for variant in planned})
    return tuple(planned.values())


def _require_one_arch(bundles: Sequence[Path]) -> None:
    for bundle in bundles:
        found = selection_of(bundle)
        if found.is_fat:
            inner = ", ".join(str(bundle / arch) for arch in found.archs)
            raise UsageError(
                f"{bundle}: is a bundle for all architectures, a variant of a kernel is of one; "
                f"export one of those in it: {inner}"
            )


def _default_name(bundles: Sequence[Path]) -> str:
    prefixes = sorted({selection_of(bundle).namespace for bundle in bundles})
    if len(prefixes) > 1:
        raise UsageError(f"--name: the bundles have several namespaces: {', '.join(prefixes)}")
    return prefixes[0].replace("_", "-")


def _checked_name(name: str, version: int) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name: expected a name such as acme-experts (small letters, digits and dashes, two "
            f"characters at least), got {name!r}"
        )
    if version < 0:
        raise UsageError(f"--version: expected 0 or more, got {version}")
    return name


# ---- what a bundle runs on


def _backend_of(bundle: Path) -> _Backend:
    """The variant of a bundle; it needs no build where it has no kernels.

    Raises:
        BuildError: a library is missing or stale.
    """
    for ejected in sorted((bundle / "ejected").glob(f"*/{SOURCES}")):
        _library_facts(ejected.parents[1])
    if not (bundle / SOURCES).exists():
        return _Backend("torch-cpu", {"type": "cpu"})
    sources, cuda, machine = _library_facts(bundle)
    torch = "".join(map(str, MIN_TORCH))
    variant = f"torch-stable-abi{torch}-cu{cuda.replace('.', '')}-{machine}-linux"
    return _Backend(variant, {"type": "cuda", "archs": [_capability(sources)]})


def _library_facts(bundle: Path) -> tuple[Sources, str, str]:
    """The sources of a library that is up to date, its CUDA version and its processor."""
    sources = read_sources(bundle / SOURCES)
    check_files(bundle / "csrc", sources)
    library = bundle / "lib" / f"{sources.namespace}.so"
    remedy = command_line("build", bundle)
    if not library.is_file():
        raise BuildError(f"{bundle}: the kernels are not compiled", remedy=remedy)
    stale = stale_cells(bundle)
    if stale:
        said = ", ".join(f"{cell} ({what})" for cell, what in stale.items())
        raise BuildError(f"{library}: was not built from what lies there: {said}", remedy=remedy)
    record = read_record(library)
    if record is None:
        raise BuildError(
            f"{library}: nothing says which CUDA toolkit it was linked with, as `fusegen build` "
            "writes it down",
            remedy=remedy,
        )
    return sources, record.cuda, record.machine


def _capability(sources: Sources) -> str:
    """The architecture as `kernels` has it: 9.0a, or 8.0+PTX where PTX serves later ones."""
    number, suffix = re.findall(r"^sm_([0-9]+)([af]?)$", sources.code)[0]
    ptx = "+PTX" if "compute_" in sources.gencode.partition(",")[2] else ""
    return f"{number[:-1]}.{number[-1]}{suffix}{ptx}"


# ---- what is there


def _check_place(place: Path, bundle: Path, other: Exported | None) -> None:
    """Refuse a variant of two bundles, one within its bundle, and one that an export did not write.

    Raises:
        UsageError, PublishError: saying what to do.
    """
    if other is not None:
        raise UsageError(
            f"{bundle} and {other.bundle} are both {place.name}, of which a repository has one: "
            "name one bundle, and export the other to a folder of its own"
        )
    if place.resolve().is_relative_to(bundle.resolve()):
        raise UsageError(f"--out: {place} lies in the bundle that would be copied there")
    if place.exists() and _recorded(place) != _digests(place):
        raise PublishError(
            f"{place}: was not written by `fusegen export`, or was changed since; move it away"
        )


def _check_others(out: Path, planned: Mapping[str, Exported], name: str, version: int) -> None:
    """A repository is one version of one kernel.

    Raises:
        PublishError: a variant of another is there, and would stay.
    """
    for path in sorted((out / "build").glob(f"*/{METADATA}")):
        if path.parent.name in planned:
            continue
        found = _metadata(path.parent)
        if (found.get("name"), found.get("version")) != (name, version):
            raise PublishError(
                f"{path}: is {found.get('name')} {found.get('version')}, and this would be {name} "
                f"{version}; remove {path.parent}, or export to a folder of its own"
            )


def _metadata(place: Path) -> dict[str, Any]:
    try:
        found = json.loads(read(place / METADATA))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _recorded(place: Path) -> object:
    digest = _metadata(place).get("digest")
    return digest.get("files") if isinstance(digest, dict) else None


# ---- files


def _files(folder: Path) -> Iterator[Path]:
    """What runs a bundle, relative to it, sorted."""
    for path in sorted(folder.iterdir()):
        if path.name in _LEFT_OUT or path.name.startswith(".") or path.name.endswith(".link.json"):
            continue
        if path.is_dir():
            yield from (Path(path.name, below) for below in _files(path))
        else:
            yield Path(path.name)


def _digests(place: Path) -> dict[str, str]:
    """Every file but the metadata and byte code, by its path, with its SHA-256 in base64."""
    found = {}
    for path in sorted(place.rglob("*")):
        below = path.relative_to(place)
        if path.is_file() and below != Path(METADATA) and "__pycache__" not in below.parts:
            with named(path):
                digest = hashlib.sha256(path.read_bytes()).digest()
            found[below.as_posix()] = base64.b64encode(digest).decode()
    return found


def _publish(out: Path, planned: Mapping[str, tuple[Exported, _Backend]]) -> None:
    """Put variants into their places, once all of them are complete.

    What a run that was killed has left is taken away by the next.
    """
    staging = out / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    for variant, (exported, backend) in planned.items():
        _stage(staging / variant, exported, backend)
    for variant, (exported, _) in planned.items():
        exported.folder.parent.mkdir(exist_ok=True)
        if exported.folder.exists():
            os.rename(exported.folder, staging / f"old-{variant}")
        os.rename(staging / variant, exported.folder)
    shutil.rmtree(staging)


def _stage(place: Path, exported: Exported, backend: _Backend) -> None:
    for path in _files(exported.bundle):
        target = place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with named(exported.bundle / path):
            shutil.copyfile(exported.bundle / path, target)
    files = _digests(place)
    content = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
    metadata = {
        # What it is called in `sys.modules`: another content is another module.
        "id": f"_{exported.name.replace('-', '_')}_{backend.metadata['type']}_{content}",
        "name": exported.name,
        "version": exported.version,
        "license": _LICENSE,
        "python-depends": [],
        "backend": backend.metadata,
        "digest": {"algorithm": "sha256", "files": files},
    }
    (place / METADATA).write_text(json.dumps(metadata, indent=2) + "\n", "utf-8")
