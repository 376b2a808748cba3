"""What fusegen can do, as functions that return dataclasses.

The command line parses, calls one of these, prints what came back and sets the exit code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .generation import BundleReport, Generated, Policy, Request, check, generate
from .gpu import arch_named, arch_of, visible_capability
from .queries import (
    Entry,
    Explanation,
    OptionEntry,
    PlanRow,
    Query,
    explain,
    list_options,
    list_specs,
    plan,
    validate,
)
from .sources import BUILTIN, Sources, load_specs

if TYPE_CHECKING:
    from .build.library import BuildReport, Progress
    from .build.toolchain import Toolchain
    from .demo.run import DemoResult

__all__ = [
    "BundleReport",
    "DemoBundle",
    "Entry",
    "Explanation",
    "Generated",
    "OptionEntry",
    "PlanRow",
    "Policy",
    "Query",
    "Request",
    "Sources",
    "build",
    "check",
    "demo",
    "demo_folder",
    "explain",
    "find_tools",
    "generate",
    "list_options",
    "list_specs",
    "load_specs",
    "plan",
    "prepare_demo",
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


# demo

DEMO_MODULE, DEMO_RECIPE = "grouped_mlp", "bf16"


def demo_folder() -> Path:
    """Where `demo` keeps its bundles: in the user's cache folder, so that nothing is littered."""
    from .build.objcache import default_root

    return default_root() / "demo"


@dataclass(frozen=True, slots=True)
class DemoBundle:
    """A bundle that the demo can run, and the architecture it is for."""

    folder: Path
    arch: str


def prepare_demo(
    arch: str | None = None,
    *,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
    sources: Sources = BUILTIN,
) -> DemoBundle:
    """Generate the module of the demo and, if its architecture has kernels, build it.

    Args:
        arch: architecture; by default that of the visible GPU, and `cpu` where there is none or
            where its kernels cannot be built.
        out: folder for the bundle; `demo_folder()` by default.
        say: hears what is being done.
        progress: hears of the build.

    Raises:
        UsageError: an unknown arch, or `native` without a GPU.
        BuildError: a named arch cannot be built.
        RefusedError: the bundle was edited by hand.
    """
    from .build.toolchain import BuildError

    specs = load_specs(sources)
    folder = out or demo_folder()
    chosen = arch_named(arch, specs) if arch else arch_of(visible_capability(), specs) or "cpu"
    bundle = _demo_bundle(chosen, folder, sources, say)
    if not specs.archs[chosen].has_kernels:
        return DemoBundle(bundle, chosen)
    try:
        tools = find_tools([bundle])
        say(f"building with {tools.describe()}")
        build(bundle, toolchain=tools, progress=progress)
    except BuildError as error:
        if arch:
            raise
        say(f"the kernels for {chosen} cannot be built, so the demo runs on the CPU: {error}")
        return DemoBundle(_demo_bundle("cpu", folder, sources, say), "cpu")
    return DemoBundle(bundle, chosen)


def demo(
    ready: DemoBundle,
    *,
    steps: int | None = None,
    output: Path = Path("demo.png"),
    as_json: bool = False,
) -> DemoResult:
    """Train with a prepared bundle; shows progress and prints the comparison.

    Raises:
        DemoError: PyTorch or the GPU is missing, or the output cannot be drawn.
    """
    from .demo.run import run_demo

    return run_demo(ready.folder, ready.arch, steps=steps, output=output, as_json=as_json)


def _demo_bundle(arch: str, folder: Path, sources: Sources, say: Callable[[str], None]) -> Path:
    from .publish.publish import RefusedError

    request = Request(
        out=folder,
        archs=(arch,),
        modules=(DEMO_MODULE,),
        recipes=(DEMO_RECIPE,),
        sources=sources,
    )
    done = generate(request)
    if done.refused:
        raise RefusedError(done.refused[0].changes)
    say(f"generated {done.bundles[0].bundle}")
    return done.bundles[0].bundle
