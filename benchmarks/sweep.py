"""Times every point of a kernel family on a GPU, for the selection rules of its architecture.

A GEMM's time is that of its kernel alone, as the profiler saw it, in the op it is part of: with
operands that this op has just quantised, where it does, and nothing else in the cache. Calls of a
point follow each other for a while, as in training: a card that is limited by power runs slower
then, and not with every tile alike. Grids, fits and the spec's new text are in `fusegen.tuning`.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import profiled
import shapes
from common import bundles

from fusegen import api
from fusegen.build import gpu
from fusegen.families.gpus import GPUS, Gpu, gpu_called
from fusegen.ir.kernel import GemmKind
from fusegen.publish import paths
from fusegen.spec.load import SpecSet
from fusegen.spec.serving import arch_called, arch_of
from fusegen.spec.usage import UsageError, known
from fusegen.tuning import tune, variants
from fusegen.tuning.cases import WIDTHS, Case, Measured, Sample, Timer, grid, measure

REPEATS = 5
BLOCK_SECONDS = 0.01  # of a point's calls in a turn
MOST_CALLS = 20  # in a turn: what takes less than half a millisecond loads no card
TOLERANCE = 1e-2

Times = dict[GemmKind, dict[str, float]]
TimerOf = Callable[[Sequence[variants.Variant], Mapping[str, frozenset[GemmKind]]], Timer]


@dataclass(frozen=True)
class Options:
    """How to sweep.

    Attributes:
        quick: a part of the grid.
        seconds: for measuring each family, None for as many as it takes.
        recorded: fit the newest measurements on record instead of measuring.
        dry_run: leave the specs as they are.
        results: folder of results; a sweep's go into its `sweeps`.
        model: name of a GPU whose model gives the times; nothing is measured, nothing recorded.
    """

    quick: bool = False
    seconds: float | None = None
    recorded: bool = False
    dry_run: bool = False
    results: Path = common.RESULTS
    model: str = ""


@dataclass(frozen=True)
class Swept:
    """What sweeps of several families found.

    Attributes:
        tuned: of every family.
        records: files written with the measurements.
        spec: of the architecture.
        difference: what the rules change in it, as a unified diff.
    """

    tuned: tuple[tune.Tuned, ...]
    records: tuple[Path, ...]
    spec: Path
    difference: str


def cases(*, quick: bool = False) -> tuple[Case, ...]:
    """The grid over the widths of models and some others."""
    widths = [(each.n, each.k) for each in (*shapes.GROUPED, *shapes.MORE_GROUPED)]
    return grid([*widths, *WIDTHS], quick=quick)


def models() -> tuple[Case, ...]:
    """GEMMs of models, whose cases count for more in a fit."""
    gemms = (*shapes.GROUPED, *shapes.MORE_GROUPED)
    return tuple(Case(each.groups, each.tokens, each.n, each.k) for each in gemms)


def sweep(
    families: Sequence[str], arch: str, options: Options, timer_of: TimerOf | None = None
) -> Swept:
    """Measure families, record it, and write the rules that lose least into the arch's spec.

    Args:
        timer_of: makes what times a case of the bundles that hold one point each.

    Raises:
        UsageError: an unknown family, one that no recipe runs on, or nothing on record.
        SpecError: the specs would not be valid with the new rules; they are unchanged.
    """
    specs = api.load_specs()
    for family in families:
        variants.family_named(specs.archs[arch], family)
    tuned, records = [], []
    for family in families:
        if options.model:
            gpu_meant = modelled_gpu(options.model)
            grid_of_all = cases(quick=options.quick)
            tuned.append(tune.tune_by_model(specs, arch, family, gpu_meant, grid_of_all, models()))
            continue
        if options.recorded:
            measured = recorded(family, options.results).measured
        else:
            measured = _measured(specs, arch, family, options, timer_of or GpuTimer)
        tuned.append(tune.tune(specs, arch, family, measured, models()))
        if not options.recorded:
            records.append(_record(tuned[-1], options.results))
    spec = paths.builtin_specs() / "archs" / f"{arch}.yaml"
    new = tune.rewritten(spec.read_bytes().decode(), tuned)
    difference = tune.difference(spec, new)
    if difference and not options.dry_run:
        tune.write(spec, new, paths.builtin_specs())
    return Swept(tuple(tuned), tuple(records), spec, difference)


def modelled_gpu(name: str) -> Gpu:
    """The GPU of a name, of which the data sheet is known.

    Raises:
        UsageError: there is none.
    """
    found = gpu_called(name)
    if found is None:
        known("GPU", name, [each.name for each in GPUS])
    assert found is not None
    return found


def _measured(
    specs: SpecSet, arch: str, family: str, options: Options, timer_of: TimerOf
) -> Measured:
    recipes = variants.recipes_of(specs, arch, family)
    todo = [(recipe, case) for case in cases(quick=options.quick) for recipe in recipes]

    def say(count: int) -> None:
        if count % 25 == 0 or count == len(todo):
            print(f"{family}: {count} of {len(todo)} cases", file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder:
        made = variants.write_variants(specs, arch, family, tuple(recipes), Path(folder))
        return measure(todo, timer_of(tuple(made), recipes), seconds=options.seconds, done=say)


SWEEPS = "sweeps"  # folder among the results


def _record(tuned: tune.Tuned, results: Path) -> Path:
    facts = common.gpu_environment()
    data = {"name": f"sweep_{tuned.family}", "environment": facts, **tuned.to_json()}
    samples = [sample.to_json() for sample in tuned.measured.samples]
    return common.save(data, results / SWEEPS, samples)


@dataclass(frozen=True)
class Recorded:
    """Measurements of a family on record, and the architecture they are of."""

    arch: str
    measured: Measured


def recorded(family: str, results: Path) -> Recorded:
    """The newest measurements of a family.

    Raises:
        UsageError: there are none.
    """
    found = [
        each
        for (name, _), each in common.newest(results / SWEEPS).items()
        if name == f"sweep_{family}"
    ]
    if not found:
        raise UsageError(f"no measurements of {family} in {results / SWEEPS}; measure it first")
    newest = max(found, key=lambda each: str(each["environment"]["date"]))
    samples = tuple(map(Sample.parse, newest["samples"]))
    return Recorded(newest["arch"], Measured(samples, int(newest["left_out"])))


def modelled_arch(name: str) -> str:
    """The architecture of the GPU of a name.

    Raises:
        UsageError: there is no such GPU, or no architecture of it.
    """
    found = modelled_gpu(name)
    arch = arch_called(found.name, api.load_specs())
    if arch is None:
        raise UsageError(f"--model: no architecture of the specs is that of {found.name}")
    return arch


def visible_arch() -> str | None:
    """The architecture of the visible GPU."""
    return arch_of(gpu.visible_capability(), api.load_specs())


# ---- timing


class GpuTimer:
    """Builds and loads the bundles, then times kernels case by case."""

    def __init__(
        self,
        made: Sequence[variants.Variant],
        recipes: Mapping[str, frozenset[GemmKind]],
    ) -> None:
        tools = api.find_tools([variant.folder for variant in made])
        self._variants = []
        for variant in made:
            print(f"building {variant.folder.parent.name}", file=sys.stderr)
            api.build(variant.folder, toolchain=tools)
            name = variant.folder.parent.name
            self._variants.append((variant, bundles.load_bundle(variant.folder, name)))
        self._recipes = recipes
        import torch

        # Written before every op: nothing of its operands stays in the cache.
        self._flush = torch.empty(4 * common.L2_BYTES, dtype=torch.uint8, device=common.DEVICE)

    def __call__(self, recipe: str, case: Case) -> Times:
        """Medians over rounds in which the points take turns.

        Raises:
            SystemExit: points disagree on a result, or one did not run where it should have.
        """
        import torch

        torch.manual_seed(1)
        steps = _steps(self._loaded(recipe), case, self._flush)
        self._check(f"{recipe}, {case}", steps)
        count = _calls(steps[0])
        samples: dict[GemmKind, dict[str, list[float]]] = {}
        with profiled.profiled() as ran:
            for turn in range(REPEATS):
                shift = turn % len(steps)
                for step in steps[shift:] + steps[:shift]:
                    for _ in range(count):
                        step()
        for kind, point, milliseconds in _launches(ran()):
            if kind in self._recipes[recipe]:
                samples.setdefault(kind, {}).setdefault(point, []).append(milliseconds)
        del steps
        torch.cuda.empty_cache()
        self._require_all(f"{recipe}, {case}", recipe, samples)
        return {
            kind: {point: statistics.median(times) for point, times in sorted(found.items())}
            for kind, found in samples.items()
        }

    def _loaded(self, recipe: str) -> list[Any]:
        cell = f"{variants.MODULE}__{recipe}"
        return [bundles.load_cell(package, cell) for _, package in self._variants]

    def _check(self, case: str, steps: Sequence[Callable[[], tuple[Any, ...]]]) -> None:
        """Every point's y, dx and dweight against the first one's; this warms up, too."""
        expected = steps[0]()
        for step in steps[1:]:
            for got, wanted in zip(step(), expected, strict=True):
                common.require_close(case, got, wanted, TOLERANCE)

    def _require_all(
        self, case: str, recipe: str, samples: Mapping[GemmKind, Mapping[str, object]]
    ) -> None:
        for kind in self._recipes[recipe]:
            wanted = {variant.points[kind] for variant, _ in self._variants}
            ran = set(samples.get(kind, {}))
            if ran != wanted:
                raise SystemExit(f"{case}: {kind.value} ran {sorted(ran)}, not {sorted(wanted)}")


def _calls(step: Callable[[], object]) -> int:
    """How many calls of a step are one turn."""
    return min(MOST_CALLS, common.calls_per_block(lambda _: step(), BLOCK_SECONDS))


def _steps(cells: Sequence[Any], case: Case, flush: Any) -> list[Callable[[], tuple[Any, ...]]]:
    """One step per cell, on the same operands, weights and state: y, dx, dweight."""
    sizes = shapes.splits(case.groups, case.tokens)
    x, dy = common.normal(case.tokens, case.k), common.normal(case.tokens, case.n)
    layers = [
        cell.GroupedLinear(case.groups, case.k, case.n, device=common.DEVICE) for cell in cells
    ]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())  # random state included
        layer.weight = layers[0].weight

    def step(layer: Any) -> tuple[Any, ...]:
        dgrad = _gradient(layer, x.detach().requires_grad_(), sizes, dy, flush, weight=False)
        wgrad = _gradient(layer, x.detach(), sizes, dy, flush, weight=True)
        return (*dgrad, wgrad[1])

    return [partial(step, layer) for layer in layers]


def _gradient(
    layer: Any, x: Any, sizes: Any, dy: Any, flush: Any, *, weight: bool
) -> tuple[Any, Any]:
    """y, and the gradient of the weight or of x: each op begins with an empty cache."""
    import torch

    layer.weight.requires_grad_(weight)
    flush.zero_()
    y = layer(x, sizes)
    flush.zero_()
    (gradient,) = torch.autograd.grad(y, [layer.weight if weight else x], dy)
    return y.detach(), gradient


def _launches(ran: Sequence[profiled.Ran]) -> Iterator[tuple[GemmKind, str, float]]:
    """GEMMs of ours among what ran: kind, point and milliseconds."""
    selection = importlib.import_module("selection")  # of tests/gpu, where kernel names are read
    for name, milliseconds in profiled.alone(ran):
        if launch := selection.launch_of(name):
            yield GemmKind(launch.kind), launch.point, milliseconds
