"""`build`: the library of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..build.library import BuildReport
from ..build.library import build as build_bundle
from ..build.progress import Progress
from ..build.sources import read_sources
from ..build.toolchain import BuildError, Toolchain, find_toolchain
from ..publish.lock import LOCK_NAME
from ..publish.selection import find_bundles
from ..spec.usage import UsageError

SOURCES = Path("csrc", "sources.cmake")
_NOTHING = "it has nothing to build and runs as it is (`fusegen list archs` shows those of GPUs)"


def with_kernels(folders: Sequence[Path]) -> tuple[Path, ...]:
    """The bundles to build: a folder of bundles stands for those of them that have kernels.

    A folder that is neither stands for itself: a module that was ejected has kernels and no lock.

    Raises:
        UsageError: a folder does not exist.
        BuildError: it has nothing to build.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.exists():
            raise UsageError(f"{folder} does not exist; name a bundle, or a folder of bundles")
        if (folder / LOCK_NAME).exists() and not (folder / SOURCES).exists():
            raise BuildError(f"{folder}: is a bundle for cpu; {_NOTHING}")
        below = () if (folder / SOURCES).exists() else find_bundles(folder)
        compiled = [bundle for bundle in below if (bundle / SOURCES).exists()]
        if below and not compiled:
            raise BuildError(f"{folder}: its bundles are for cpu; {_NOTHING}")
        found |= dict.fromkeys(compiled or [folder])
    return tuple(found)


def find_tools(bundles: Sequence[Path]) -> Toolchain:
    """The compilers and headers a build of these bundles would use.

    Raises:
        BuildError: one of the bundles has nothing to build, or a tool is missing.
    """
    for bundle in bundles:
        read_sources(bundle / SOURCES)
    return find_toolchain()


def build(
    bundle: Path,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    toolchain: Toolchain | None = None,
) -> BuildReport:
    """Compile and link the library of one bundle; see `fusegen.build.library.build`."""
    return build_bundle(bundle, jobs=jobs, progress=progress, toolchain=toolchain)
