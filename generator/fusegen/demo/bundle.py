"""The bundle that the demo trains with: generated and, where its kernels can be built, built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..api import BUILTIN, Folders, Request, build, find_tools, generate, load_specs
from ..build.gpu import arch_named, visible_capability
from ..build.objcache import default_root
from ..build.progress import Progress
from ..build.toolchain import BuildError
from ..publish.publish import RefusedError
from ..spec.serving import arch_of

ROUTER, EXPERTS, RECIPE = "router_mixtral", "moe_layer", "bf16"


@dataclass(frozen=True, slots=True)
class DemoBundle:
    """A bundle that the demo can run, and the architecture it is for."""

    folder: Path
    arch: str


def default_folder() -> Path:
    """Where the demo keeps its bundles: in the user's cache folder, so that nothing is littered."""
    return default_root() / "demo"


def prepare(
    arch: str | None = None,
    *,
    out: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
    folders: Folders = BUILTIN,
) -> DemoBundle:
    """Generate the modules of the demo and, if its architecture has kernels, build it.

    Args:
        arch: architecture; by default that of the visible GPU, and `cpu` where there is none or
            where its kernels cannot be built.
        out: folder for the bundle; `default_folder()` by default.
        say: hears what is being done.
        progress: hears of the build.

    Raises:
        UsageError: an unknown arch, or `native` without a GPU.
        BuildError: a named arch cannot be built.
        RefusedError: the bundle was edited by hand.
    """
    specs = load_specs(folders)
    folder = out or default_folder()
    chosen = arch_named(arch, specs) if arch else arch_of(visible_capability(), specs) or "cpu"
    bundle = generated(chosen, folder, folders=folders)
    say(f"generated {bundle}")
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
        return DemoBundle(generated("cpu", folder, folders=folders), "cpu")
    return DemoBundle(bundle, chosen)


def generated(
    arch: str,
    folder: Path,
    recipe: str = RECIPE,
    options: Sequence[str] = (),
    folders: Folders = BUILTIN,
) -> Path:
    """The bundle with the modules of the demo below a folder, beside what it has.

    Recipe and options are those of the experts: recipes leave routers alone.

    Raises:
        RefusedError: the bundle was edited by hand.
    """
    router = Request(folder, (), (arch,), (ROUTER,), (RECIPE,), folders=folders)
    experts = replace(router, modules=(EXPERTS,), recipes=(recipe,), options=tuple(options))
    for request in (router, experts):
        done = generate(request)
        if done.refused:
            raise RefusedError(done.refused[0].changes)
    return done.bundles[0].bundle
