"""`build`: the library of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..build.library import BuildReport
from ..build.library import build as build_bundle
from ..build.progress import Progress
from ..build.sources import read_sources
from ..build.toolchain import Toolchain, find_toolchain


def find_tools(bundles: Sequence[Path]) -> Toolchain:
    """The compilers and headers a build of these bundles would use.

    Raises:
        BuildError: one of the bundles has nothing to build, or a tool is missing.
    """
    for bundle in bundles:
        read_sources(bundle / "csrc" / "sources.cmake")
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
