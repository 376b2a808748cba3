"""What fusegen can do, as functions that return dataclasses.

The command line parses, calls one of these, prints what came back and sets the exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .generation import BundleReport, Generated, Policy, Request, check, generate
from .queries import (
    Entry,
    Explanation,
    PlanRow,
    Query,
    draft_after,
    explain,
    list_specs,
    plan,
    validate,
)
from .sources import BUILTIN, Sources, load_specs

if TYPE_CHECKING:
    from .build.library import BuildReport, Progress
    from .build.toolchain import Toolchain

__all__ = [
    "BUILTIN",
    "BundleReport",
    "Entry",
    "Explanation",
    "Generated",
    "PlanRow",
    "Policy",
    "Query",
    "Request",
    "Sources",
    "build",
    "check",
    "draft_after",
    "explain",
    "find_tools",
    "generate",
    "list_specs",
    "load_specs",
    "plan",
    "validate",
]


def find_tools(bundles: Sequence[Path]) -> Toolchain:
    """The compilers and headers a build of these bundles would use.

    Raises:
        BuildError: one of the bundles has nothing to build, or a tool is missing.
    """
    from .build.library import read_sources
    from .build.toolchain import find_toolchain

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
    """Compile and link the library of one bundle; see `fusegen.build.build`."""
    from .build.library import build as build_bundle

    return build_bundle(bundle, jobs=jobs, progress=progress, toolchain=toolchain)
