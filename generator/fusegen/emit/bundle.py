"""All files of one bundle, rendered from the plans of its cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..ir.kernel_set import KernelSet, KernelUnit
from ..ir.plan import ModulePlan
from ..options.weight_cache import CACHED
from ..spec.arch import ArchSpec
from .devices import DevicesText, Inner, choice_of, devices_text
from .digests import Tree, cell_digest, sources_digest
from .fileset import Artifact, ArtifactKind, FileSet
from .hygiene import marked, settle
from .kernels.units import (
    CellSources,
    DispatchContext,
    SourcesContext,
    UnitContext,
    dispatch_context,
    unit_context,
)
from .launcher.program import launcher_context
from .python.adapters import AdaptersContext, adapters_context
from .python.cell import CellContext, cell_context
from .python.checkpoints import CheckpointsContext, checkpoints_context
from .python.conversions import QuantizeContext, quantize_context
from .python.experts import ExpertsContext, experts_context, spreads_over_ranks
from .python.sharding import sharding_context
from .reference.cell import reference_context
from .render import Renderer
from .tests.cell import TestContext, test_context
from .text.escape import cmake, markdown
from .text.explain import explain
from .text.readme import ExampleText, SignatureText, example_text, signature_texts

_KINDS = {
    ".py": ArtifactKind.PYTHON,
    ".md": ArtifactKind.MARKDOWN,
    ".cmake": ArtifactKind.CMAKE,
    ".cpp": ArtifactKind.CUDA,
    ".cu": ArtifactKind.CUDA,
    ".h": ArtifactKind.CUDA,
}

_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
_IMPORT = re.compile(r"^from \.\.?(\w*) import (\w+(?:, \w+)*)", re.MULTILINE)
_BUILD_FILES = {"CMakeLists.txt", "exports.map", "digests.cpp"}

_SOURCES = "csrc/sources.cmake"

_UNSTAMPED = "0" * 64
"""What the templates print where a cell's digest is to stand."""


@dataclass(frozen=True, slots=True)
class CellRow:
    """A line of the README's table of modules."""

    cell: str
    class_name: str
    recipe: str
    status: str
    gradients: str


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A line of the README's table of kernels."""

    name: str
    condition: str
    kernels: str


@dataclass(frozen=True, slots=True)
class BundleContext:
    """What the files that speak of the whole bundle state.

    Attributes:
        libraries: pattern of what is built; empty where nothing is.
        layers: cells whose experts ranks may share out.
        split: cells of which each rank has a part.
        cached: cells whose copies of weights ranks may gather.
        devices: of a fat bundle.
    """

    namespace: str
    arch: str
    arch_summary: str
    compiled: bool
    libraries: str
    toolkit: str
    rows: tuple[CellRow, ...]
    signatures: tuple[SignatureText, ...]
    example: ExampleText
    kernel_rows: tuple[KernelRow, ...]
    experts: ExpertsContext | None
    checkpoints: CheckpointsContext | None
    adapters: AdaptersContext | None
    layers: tuple[str, ...]
    split: tuple[str, ...]
    cached: tuple[str, ...]
    integrated: bool
    sources: tuple[str, ...]
    devices: DevicesText | None


def render_bundle(
    plans: tuple[ModulePlan, ...],
    arch: ArchSpec,
    namespace: str,
    renderer: Renderer,
    inner: Sequence[Inner] = (),
) -> FileSet:
    """Every file of a bundle.

    Args:
        plans: of its cells, sorted.
        arch: what they are for.
        namespace: of their ops.
        renderer: templates.
        inner: bundles in this one, which its calls may go to.
    """
    owners = tuple(plan.cell for plan in plans)
    context = _context(plans, arch, namespace, inner)
    files = list(_shared(context, owners, renderer))
    named = tuple(map(marked, plans))
    for plan, own in zip(plans, named, strict=True):
        files += _cell(own, tuple(explain(plan)), renderer, inner)
    files += _integrations(context, renderer)
    files += _statics(renderer, "runtime", files, owners, imported, set(), target="")
    files += _statics(renderer, "reference", files, owners, imported, {"__init__.py"})
    files += _statics(renderer, "sharding", files, owners, imported, {"__init__.py"})
    if arch.has_kernels:
        files += _compiled(named, context, arch, renderer)
        files += _statics(renderer, "csrc", files, owners, _INCLUDE.findall, _BUILD_FILES)
    digests = _digests(plans, files, arch)
    if arch.has_kernels:
        cells = tuple(
            CellSources(plan.cell, digests[plan.cell], _units(plan)) for plan in plans if plan.ops
        )
        sources = SourcesContext(namespace, cmake(arch.gencode or ""), cells)
        files.append(_render(renderer, _SOURCES, f"{_SOURCES}.j2", sources, owners, ()))
    return FileSet(_stamped(path, artifact, digests) for path, artifact in files)


def _digests(
    plans: tuple[ModulePlan, ...], files: list[tuple[str, Artifact]], arch: ArchSpec
) -> dict[str, str]:
    """The digest of every cell that has ops."""
    contents = {path: artifact.data for path, artifact in files}
    bundle, csrc = Tree(contents.get), Tree(lambda path: contents.get(f"csrc/{path}"))
    return {
        plan.cell: cell_digest(
            bundle,
            plan.cell,
            sources_digest(csrc, _units(plan), arch.gencode) if arch.gencode else "",
        )
        for plan in plans
        if plan.ops
    }


def _stamped(path: str, artifact: Artifact, digests: Mapping[str, str]) -> tuple[str, Artifact]:
    """The file with its cell's digest, where it states one."""
    digest = digests.get(path.removesuffix(".py"))
    if digest is None:
        return path, artifact
    return path, replace(artifact, text=artifact.text.replace(_UNSTAMPED, digest))


def _units(plan: ModulePlan) -> tuple[str, ...]:
    """What a cell is compiled from, below `csrc`."""
    units = {unit.name for kernels in plan.kernel_sets for unit in kernels.units}
    return (f"{plan.cell}.cpp", *(f"kernels/{name}.cu" for name in sorted(units)))


def _statics(
    renderer: Renderer,
    folder: str,
    files: list[tuple[str, Artifact]],
    owners: tuple[str, ...],
    named: Callable[[str], Iterable[str]],
    always: set[str],
    target: str | None = None,
) -> Iterator[tuple[str, Artifact]]:
    """The files of a static folder that the rendered files next to them need, and no others.

    They come to a folder of the same name, unless another target is given.
    """
    target = f"{folder}/" if target is None else target
    texts = [artifact.text for path, artifact in files if path.startswith(target)]
    wanted = always | _reachable(renderer.static(folder), texts, named)
    yield from _copies(renderer, folder, target, owners, wanted)


def _context(
    plans: tuple[ModulePlan, ...], arch: ArchSpec, namespace: str, inner: Sequence[Inner]
) -> BundleContext:
    experts, adapters = experts_context(plans), adapters_context(plans)
    return BundleContext(
        namespace=namespace,
        arch=arch.name,
        arch_summary=markdown(arch.summary),
        compiled=arch.has_kernels,
        libraries="*/lib/*.so" if inner else "lib/*.so" if arch.has_kernels else "",
        toolkit=markdown(arch.toolkit or ""),
        rows=tuple(_row(plan, inner) for plan in plans),
        signatures=signature_texts(plans),
        example=example_text(plans),
        kernel_rows=tuple(row for kernels in _kernel_sets(plans) for row in _kernel_rows(kernels)),
        checkpoints=checkpoints_context(plans),
        experts=experts,
        adapters=adapters,
        layers=tuple(plan.cell for plan in plans if spreads_over_ranks(plan)),
        split=tuple(plan.cell for plan in plans if plan.split),
        cached=tuple(plan.cell for plan in plans if CACHED in plan.options),
        integrated=experts is not None or adapters is not None,
        sources=tuple(sorted({markdown(source) for plan in plans for source in plan.sources})),
        devices=devices_text(plans, inner),
    )


def _row(plan: ModulePlan, inner: Sequence[Inner]) -> CellRow:
    gradients = ", ".join(plan.differentiated)
    status = "[by device](#architectures)" if inner else plan.status.value
    return CellRow(plan.cell, plan.class_name, plan.recipe, status, gradients)


def _kernel_rows(kernels: KernelSet) -> Iterator[KernelRow]:
    for rule in kernels.rules:
        chosen = " or ".join(rule.points) or f"{kernels.name}_<dtype>"
        yield KernelRow(kernels.name, rule.words, chosen)


def _kernel_sets(plans: tuple[ModulePlan, ...]) -> list[KernelSet]:
    """Kernel sets of all cells, each once, by name."""
    found = {kernels.name: kernels for plan in plans for kernels in plan.kernel_sets}
    return [found[name] for name in sorted(found)]


def _render(
    renderer: Renderer,
    path: str,
    template: str,
    context: object,
    owners: tuple[str, ...],
    sources: tuple[str, ...],
) -> tuple[str, Artifact]:
    kind = _KINDS[path[path.rindex(".") :]]
    inputs = (*sources, f"templates/{template}")
    text = settle(renderer.render(template, context), kind)
    return path, Artifact(text, kind, owners, inputs)


def _copies(
    renderer: Renderer, folder: str, target: str, owners: tuple[str, ...], wanted: set[str]
) -> Iterator[tuple[str, Artifact]]:
    """The wanted files of a static folder, byte for byte."""
    for name, text in renderer.static(folder).items():
        if name in wanted:
            source = (f"templates/static/{folder}/{name}",)
            yield f"{target}{name}", Artifact(text, ArtifactKind.STATIC, owners, source)


def imported(text: str) -> Iterator[str]:
    """Neighbours that a file of Python imports, or names of, which may be modules."""
    for module, names in _IMPORT.findall(text):
        yield from (module,) if module else names.split(", ")


def _reachable(
    static: Mapping[str, str], texts: Iterable[str], named: Callable[[str], Iterable[str]]
) -> set[str]:
    """Static files that texts refer to, and those that these refer to in turn."""
    found: set[str] = set()
    waiting = list(texts)
    while waiting:
        for name in named(waiting.pop()):
            path = next((p for p in (name, f"{name}.py") if p in static), None)
            if path is not None and path not in found:
                found.add(path)
                waiting.append(static[path])
    return found


def _shared(
    context: BundleContext, owners: tuple[str, ...], renderer: Renderer
) -> Iterator[tuple[str, Artifact]]:
    for name in ("_library.py", "__init__.py", *(["_devices.py"] if context.devices else [])):
        yield _render(renderer, name, f"bundle/{name}.j2", context, owners, ())
    yield _render(renderer, "README.md", "bundle/README.md.j2", context, owners, context.sources)
    for folder, target in (("bundle", ""), ("bundle_tests", "tests/")):
        yield from _copies(renderer, folder, target, owners, {*renderer.static(folder)})


def _cell(
    plan: ModulePlan, description: tuple[str, ...], renderer: Renderer, inner: Sequence[Inner]
) -> Iterator[tuple[str, Artifact]]:
    """The files of a cell whose plan has its names marked; the description is of the plain one."""
    module: CellContext | QuantizeContext = (
        quantize_context(plan, description) if plan.conversions else cell_context(plan, description)
    )
    module = replace(module, choice=choice_of(plan.cell, inner))
    tests: CellContext | QuantizeContext | TestContext = module
    if plan.is_identity:
        template = "identity"
    elif plan.conversions:
        template = "quantize"
    else:
        template, tests = "cell", test_context(plan, many_archs=bool(inner))

    def rendered(path: str, template: str, context: object) -> tuple[str, Artifact]:
        return _render(renderer, path, template, context, (plan.cell,), plan.sources)

    yield rendered(f"{plan.cell}.py", f"module/{template}.py.j2", module)
    yield rendered(f"tests/test_{plan.cell}.py", f"tests/test_{template}.py.j2", tests)
    if plan.ops:
        reference = reference_context(plan)
        yield rendered(f"reference/{plan.cell}.py", "reference/cell.py.j2", reference)
        sharding = sharding_context(plan)
        yield rendered(f"sharding/{plan.cell}.py", "sharding/cell.py.j2", sharding)


def _integrations(context: BundleContext, renderer: Renderer) -> Iterator[tuple[str, Artifact]]:
    """Files for other libraries and for ranks, each where cells are of use to it."""
    checkpoints, experts, adapters = context.checkpoints, context.experts, context.adapters
    files: list[tuple[str, Artifact]] = []
    if checkpoints is not None:
        owners = tuple(each.cell for each in checkpoints.cells)
        files += _integration(renderer, "checkpoints.py", "_parameters.py", checkpoints, owners)
    if experts is not None:
        owners = tuple(each.cell for each in experts.cells)
        files += _integration(renderer, "transformers.py", "_experts.py", experts, owners)
    if adapters is not None:
        owners = (*(c.cell for c in adapters.linears), *(c.cell for c in adapters.fused))
        files += _integration(renderer, "peft.py", "_adapters.py", adapters, owners)
    of_ranks = {
        "expert_parallel": context.layers,
        "tensor_parallel": context.split,
        "fsdp": context.cached,
    }
    static = renderer.static("integrations")
    owners_of: dict[str, tuple[str, ...]] = {}  # several may import a file
    for name, owners in of_ranks.items():
        if owners:
            for file in {f"{name}.py"} | _reachable(static, (static[f"{name}.py"],), imported):
                owners_of[file] = tuple(dict.fromkeys((*owners_of.get(file, ()), *owners)))
    for file, owners in owners_of.items():
        files += _copies(renderer, "integrations", "integrations/", owners, {file})
    owners = tuple(sorted({owner for _, artifact in files for owner in artifact.owners}))
    if files:
        yield from _copies(renderer, "integrations", "integrations/", owners, {"__init__.py"})
    yield from files


def _integration(
    renderer: Renderer,
    name: str,
    cells: str,
    context: CheckpointsContext | ExpertsContext | AdaptersContext,
    owners: tuple[str, ...],
) -> Iterator[tuple[str, Artifact]]:
    """A library's file, those that it imports, and the one that states its cells."""
    path = f"integrations/{cells}"
    stated = _render(renderer, path, f"{path}.j2", context, owners, ())
    yield stated
    static = renderer.static("integrations")
    texts = (static[name], stated[1].text)
    wanted = {name} | _reachable(static, texts, imported)
    yield from _copies(renderer, "integrations", "integrations/", owners, wanted)


def _compiled(
    plans: tuple[ModulePlan, ...], context: BundleContext, arch: ArchSpec, renderer: Renderer
) -> Iterator[tuple[str, Artifact]]:
    """What is compiled, of plans whose names are marked."""
    for plan in plans:
        if plan.ops:
            path = f"csrc/{plan.cell}.cpp"
            launcher = launcher_context(plan, arch, context.namespace)
            yield _render(
                renderer, path, "csrc/launcher.cpp.j2", launcher, (plan.cell,), plan.sources
            )
    for kernels in _kernel_sets(plans):
        owners, sources = _users(plans, kernels)
        dispatch: DispatchContext = dispatch_context(kernels, context.namespace)
        path = f"csrc/dispatch/{kernels.name}.h"
        yield _render(renderer, path, dispatch.template, dispatch, owners, sources)
        for unit in kernels.units:
            yield _unit(renderer, unit, context.namespace, owners, sources)


def render_kernels(
    plans: Iterable[ModulePlan], arch: ArchSpec, namespace: str, renderer: Renderer
) -> FileSet:
    """The kernel units of cells and the headers that they include, without what calls them.

    Args:
        plans: of cells, of which any number may share units; none is kept.
        arch, namespace, renderer: as of a bundle, whose units have the same bytes.
    """
    files: dict[str, Artifact] = {}
    for plan in plans:
        for kernels in plan.kernel_sets:
            if all(_unit_path(unit) in files for unit in kernels.units):
                continue
            _, sources = _users((plan,), kernels)
            for unit in marked(kernels).units:
                path, artifact = _unit(renderer, unit, namespace, (), sources)
                files.setdefault(path, artifact)
    units = [*files.items()]
    return FileSet((*units, *_statics(renderer, "csrc", units, (), _INCLUDE.findall, set())))


def _unit_path(unit: KernelUnit) -> str:
    return f"csrc/kernels/{unit.name}.cu"


def _unit(
    renderer: Renderer,
    unit: KernelUnit,
    namespace: str,
    owners: tuple[str, ...],
    sources: tuple[str, ...],
) -> tuple[str, Artifact]:
    context: UnitContext = unit_context(unit, namespace)
    return _render(renderer, _unit_path(unit), context.template, context, owners, sources)


def _users(
    plans: tuple[ModulePlan, ...], kernels: KernelSet
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Cells that use a kernel set, and the arch spec that it came from."""
    users = [plan for plan in plans if kernels.name in {each.name for each in plan.kernel_sets}]
    arch = next(
        s for plan in users for s in plan.sources if s.startswith("specs/archs/") or "/archs/" in s
    )
    return tuple(plan.cell for plan in users), (arch,)
