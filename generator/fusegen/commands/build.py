"""`build`: the library of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..build.library import BuildReport
from ..build.library import build as build_bundle
from ..build.progress import Progress
from ..build.sources import read_sources
from ..build.toolchain import Toolchain, find_toolchain
from ..publish.selection import find_bundles

SOURCES = Path("csrc", "sources.cmake")


def with_kernels(folders: Sequence[Path]) -> tuple[Path, ...]:
    """The bundles to build: a folder of bundles stands for those of them that have kernels.

    A folder that is neither stands for itself: a module that was ejected has kernels and no lock.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        below = () if (folder / SOURCES).exists() else find_bundles(folder)
        compiled = [bundle for bundle in below if (bundle / SOURCES).exists()]
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
