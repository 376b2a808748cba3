"""`build`: the library of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..build.gpu import NATIVE, arch_named
from ..build.library import BuildReport
from ..build.library import build as build_bundle
from ..build.progress import Progress
from ..build.sources import read_sources
from ..build.toolchain import BuildError, Toolchain, find_toolchain
from ..publish.folders import BUILTIN, load_specs
from ..publish.lock import LOCK_NAME
from ..publish.remedies import is_fat
from ..publish.selection import find_bundles, read_selection
from ..spec.diagnostics import did_you_mean
from ..spec.usage import UsageError

SOURCES = Path("csrc", "sources.cmake")
_NOTHING = "it has nothing to build and runs as it is (`fusegen list archs` shows those of GPUs)"


def with_kernels(folders: Sequence[Path], archs: Sequence[str] = ()) -> tuple[Path, ...]:
    """The bundles to build: a folder of bundles stands for those of them that have kernels.

    So does a fat bundle.  A folder that is neither stands for itself: a module that was ejected has
    kernels and no lock.

    Args:
        archs: of the bundles to build, `native` for that of the visible GPU; empty for all.

    Raises:
        UsageError: a folder does not exist, or has no bundle for an architecture.
        BuildError: it has nothing to build.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.exists():
            raise UsageError(f"{folder} does not exist; name a bundle, or a folder of bundles")
        found |= dict.fromkeys(_compiled_at(folder))
    return _of_archs(tuple(found), archs) if archs else tuple(found)


def _compiled_at(folder: Path) -> tuple[Path, ...]:
    """The bundles that a folder stands for; itself, where there is none.

    Raises:
        BuildError: none of them has kernels.
    """
    if (folder / SOURCES).exists():
        return (folder,)
    is_bundle = (folder / LOCK_NAME).exists()
    bundles = (folder,) if is_bundle else find_bundles(folder)
    below = [each for one in bundles for each in (find_bundles(one) if is_fat(one) else (one,))]
    compiled = tuple(bundle for bundle in below if (bundle / SOURCES).exists())
    if bundles and not compiled:
        what = "is a bundle" if is_bundle else "its bundles are"
        raise BuildError(f"{folder}: {what} for cpu; {_NOTHING}")
    return compiled or (folder,)


def _of_archs(bundles: Sequence[Path], archs: Sequence[str]) -> tuple[Path, ...]:
    """Those of these architectures.

    Raises:
        UsageError: there is none for one of them.
    """
    by_arch: dict[str, list[Path]] = {}
    for bundle in bundles:
        recorded = read_selection(bundle)
        if recorded is not None:
            by_arch.setdefault(recorded.arch, []).append(bundle)
    specs = load_specs(BUILTIN) if NATIVE in archs else None
    wanted = [arch_named(arch, specs) if specs and arch == NATIVE else arch for arch in archs]
    for arch in wanted:
        if arch not in by_arch:
            raise UsageError(
                f"--arch {arch}: there is no bundle for it to build, but for "
                f"{', '.join(sorted(by_arch)) or 'none'}{did_you_mean(arch, by_arch)}"
            )
    return tuple(bundle for arch in dict.fromkeys(wanted) for bundle in by_arch[arch])


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
