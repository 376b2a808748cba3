"""Compile the kernels of every module, recipe and option, and hold each unit against its contract.

    python tests/compile/compile_all.py [ARCH...] [--sample] [--unit TEXT]... [--record] [--jobs N]

Without architectures, all that have kernels. `--sample` takes the cells that stand for the others
(`SAMPLE`), `--unit` the units whose names hold a text, such as those of a family that was changed;
`--record` keeps what was found for docs/architectures.md, after every few units, so that a run
which is ended loses next to nothing: its objects are cached, and the next run goes on with what
they lack.
Exit code 1 if a contract is broken; of a unit that breaks its own it is recorded what it breaks.
What calls kernels is compiled with the committed bundles, by `make test-kernels`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from fusegen.build.compilation import commands
from fusegen.build.compilation import compile_all as compile_units
from fusegen.build.contracts import Code, Promise, code_of, promises
from fusegen.build.library import default_jobs
from fusegen.build.objcache import CachedObject, ObjectCache, default_root
from fusegen.build.progress import Progress, Silent
from fusegen.build.sources import CellUnits, Sources
from fusegen.build.toolchain import Toolchain, dotted, find_toolchain
from fusegen.checks.load import load
from fusegen.emit.bundle import render_kernels
from fusegen.emit.polish import polish
from fusegen.ir.naming import Cell, default_namespace
from fusegen.ir.plan import ModulePlan
from fusegen.options import OPTIONS
from fusegen.passes.draft import NotPossible
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.inputs import Inputs, derivations
from fusegen.publish.paths import builtin_specs
from fusegen.publish.selection import DEFAULT_PREFIX
from fusegen.spec.cells import product, with_options
from fusegen.spec.load import SpecSet
from fusegen.spec.offers import not_offered

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "architectures.json"
SAMPLE = ("grouped_mlp", "linear", "quantize")
"""Modules that stand for the others: they have GEMMs of all operands, grouped and dense, and every
way to quantise."""
AT_ONCE = 16
"""Units that are compiled before what was found is recorded."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Unit:
    """A unit that was compiled, as the page shows it.

    Attributes:
        family: of its kernels.
        registers: of a thread, of the kernel that has most.
        most_registers: that its contract allows.
        shared_memory: bytes of a CTA, static ones and those of its launch.
        opcodes: that its contract asks for, as the machine code has them.
        cpu_seconds: of the compiler; None of an object that an older cache kept.
        mebibytes: of the compiler.
        kilobytes: of the object.
    """

    family: str
    registers: int
    most_registers: int
    shared_memory: int
    opcodes: tuple[str, ...]
    cpu_seconds: float | None
    mebibytes: int
    kilobytes: int


@dataclass(frozen=True)
class Compiled:
    """An architecture.

    Attributes:
        toolkit: CUDA version of the compiler.
        complete: whether every unit of every cell was compiled, whatever it keeps of its contract.
        cells: how many were planned.
        whole: number of units that all cells have; None where they were not all planned.
        names: of these units; none where they were not all planned, and none of what is read.
        units: those that keep their contracts, by name.
        broken: what of their contracts the others do not keep, by name.
    """

    toolkit: str
    complete: bool
    cells: int
    whole: int | None
    units: Mapping[str, Unit]
    broken: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: frozenset[str] = frozenset()


def cells_of(specs: SpecSet, *, sample: bool) -> Iterator[Cell]:
    """Every module under every recipe, plain first, then with every choice by itself.

    Units are compiled in the order in which cells need them: a run that is ended has those that
    most cells use.
    """
    if sample:
        yield from product(SAMPLE, specs.recipes)
        return
    yield from product(specs.modules, specs.recipes)
    for word in (word for option in OPTIONS for word in option.further):
        for name, module in specs.modules.items():
            if not_offered(word, module, specs.ops) is None:
                yield from with_options(specs, product([name], specs.recipes), [word])


def plans_of(specs: SpecSet, arch: str, cells: Iterable[Cell]) -> Iterator[ModulePlan]:
    """Those that can be made."""
    known = derivations()
    for cell in cells:
        try:
            yield resolve_module(specs, cell, arch, known)
        except NotPossible:
            continue


def compiled(
    specs: SpecSet,
    arch: str,
    cells: Iterable[Cell],
    *,
    whole: bool = False,
    units: Sequence[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Compiled]:
    """Render the kernels of cells, compile them and look at what came of it.

    Args:
        specs: that have the architecture.
        arch: its name.
        cells: of which those that cannot be made are left out.
        whole: whether they are all that there are.
        units: parts of names of units, of which those to compile hold one; all without.
        jobs: units compiled at a time.
        progress: hears of every unit.

    Yields:
        What was found so far, after every few units; the last one is all of it.

    Raises:
        BuildError: one does not compile.
    """
    tools = find_toolchain()
    spec = specs.archs[arch]
    tools.require(spec.isa)
    promised: dict[str, Promise] = {}
    families: dict[str, str] = {}
    count = 0

    def seen() -> Iterator[ModulePlan]:
        nonlocal count
        for plan in plans_of(specs, arch, cells):
            count += 1
            promised.update(promises([plan], spec))
            units = (each for kernels in plan.kernel_sets for each in kernels.units)
            families.update({f"kernels/{each.name}.cu": each.template for each in units})
            yield plan

    namespace = default_namespace(DEFAULT_PREFIX, arch)
    files = polish(render_kernels(seen(), spec, namespace, Inputs().renderer(())))
    wanted = tuple(n for n in families if any(part in Path(n).stem for part in units or ("",)))
    every = frozenset(Path(name).stem for name in families) if whole else frozenset()
    found = Compiled(
        dotted(tools.version), False, count, len(families) if whole else None, {}, names=every
    )
    print(f"{arch}: {len(wanted)} units of {count} cells", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="fusegen-") as folder:
        root = Path(folder).resolve()
        for path, artifact in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(artifact.data)
        for start in range(0, len(wanted), AT_ONCE):
            names = wanted[start : start + AT_ONCE]
            sources = Sources(namespace, spec.gencode or "", {"all": CellUnits("", names)})
            objects = _compile(root, sources, tools, jobs or default_jobs(), progress or Silent())
            for name in names:
                found = _with(found, name, families[name], promised[name], objects[name])
            yield replace(found, complete=len(found.units) + len(found.broken) == found.whole)


def _compile(
    root: Path, sources: Sources, tools: Toolchain, jobs: int, progress: Progress
) -> dict[str, CachedObject]:
    scratch = root / "objects"
    scratch.mkdir(exist_ok=True)
    every = commands(root / "csrc", sources, tools, scratch, strict=True, lineinfo=False)
    kernels = [each for each in every if each.name.endswith(".cu")]
    return compile_units(kernels, scratch, ObjectCache(default_root()), jobs, progress)


def _with(
    found: Compiled, name: str, family: str, promise: Promise, compiled: CachedObject
) -> Compiled:
    """What was found, and one more unit, or what it breaks."""
    stem, code = Path(name).stem, code_of(promise, compiled)
    if breaches := tuple(promise.breaches(compiled.report, code)):
        return replace(found, broken={**found.broken, stem: breaches})
    unit = _unit(family, promise, compiled, code)
    return replace(found, units={**found.units, stem: unit})


def _unit(family: str, promise: Promise, compiled: CachedObject, code: Code) -> Unit:
    report, seconds = compiled.report, compiled.report.cpu_seconds
    return Unit(
        family=family,
        registers=max(kernel.registers for kernel in report.kernels),
        most_registers=promise.registers,
        shared_memory=max(promise.memory(kernel) for kernel in report.kernels),
        opcodes=promise.contract.found_in({each for found in code.values() for each in found}),
        cpu_seconds=None if seconds is None else round(seconds, 1),
        mebibytes=report.peak_bytes >> 20,
        kilobytes=compiled.path.stat().st_size // 1000,
    )


# ---- what is kept, and what is said


def read(path: Path = RECORD) -> dict[str, Compiled]:
    """What is on record, by architecture."""
    if not path.exists():
        return {}
    data = json.loads(path.read_text("utf-8"))
    return {
        arch: Compiled(
            toolkit=found["toolkit"],
            complete=found["complete"],
            cells=found["cells"],
            whole=found["whole"],
            units={
                name: Unit(**{**unit, "opcodes": tuple(unit["opcodes"])})
                for name, unit in found["units"].items()
            },
            broken={name: tuple(what) for name, what in found["broken"].items()},
        )
        for arch, found in data.items()
    }


def joined(before: Compiled | None, found: Compiled) -> Compiled:
    """What is on record, with what was found now in the place of the same units.

    Units of which nothing was found stay, but for those that no cell has, where all were planned.
    """
    if before is None or found.complete:
        return found
    there = found.names or {*before.units, *before.broken}
    units = _replaced(before.units, found.units, there - {*found.broken})
    broken = _replaced(before.broken, found.broken, there - {*found.units})
    merged = replace(found, units=units, broken=broken)
    if found.names:
        return replace(merged, complete={*units, *broken} == found.names)
    return replace(
        merged,
        complete=before.complete and {*found.units, *found.broken} <= there,
        cells=max(before.cells, found.cells),
        whole=before.whole,
    )


def _replaced(
    before: Mapping[str, Found], found: Mapping[str, Found], kept: Collection[str]
) -> dict[str, Found]:
    """What was found, and what was there before of the names that are kept."""
    return {name: each for name, each in before.items() if name in kept} | {**found}


def dump(found: Mapping[str, Compiled]) -> str:
    """JSON with a line for every unit."""
    archs = []
    for arch, each in sorted(found.items()):
        units = ",\n".join(
            f"    {json.dumps(name)}: {json.dumps(asdict(unit))}"
            for name, unit in sorted(each.units.items())
        )
        facts = {
            "toolkit": each.toolkit,
            "complete": each.complete,
            "cells": each.cells,
            "whole": each.whole,
            "broken": {name: _told(each.broken[name]) for name in sorted(each.broken)},
        }
        head = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items())
        archs.append(f'  {json.dumps(arch)}: {{{head}, "units": {{\n{units}\n  }}}}')
    return "{\n" + ",\n".join(archs) + "\n}\n"


def _told(breaches: Iterable[str]) -> list[str]:
    """Once each, without the kernels: in their names is a hash of where they were compiled."""
    return [*dict.fromkeys(re.sub(r"^_Z\w+: ", "", each) for each in breaches)]


def summary(arch: str, found: Compiled) -> Iterator[str]:
    """A table of families, and what is broken, for people."""
    yield (
        f"{arch}: {len(found.units)} units of {found.cells} cells, CUDA {found.toolkit},"
        f" {len(found.broken)} that break their contracts"
    )
    yield f"  {'family':<24} units  registers  shared bytes   cpu s      MiB  kB of an object"
    for family in sorted({unit.family for unit in found.units.values()}):
        units = [unit for unit in found.units.values() if unit.family == family]
        times = [unit.cpu_seconds for unit in units if unit.cpu_seconds is not None]
        yield (
            f"  {family:<24} {len(units):>5} {max(u.registers for u in units):>10}"
            f" {max(u.shared_memory for u in units):>13}"
            f" {max(times, default=float('nan')):>7.1f} {max(u.mebibytes for u in units):>8}"
            f" {max(u.kilobytes for u in units):>16}"
        )
    for name, breaches in found.broken.items():
        yield from (f"{arch} {name}: {what}" for what in breaches)


class Lines:
    """One line for every unit that was compiled."""

    def start(self, total: int) -> None:
        """Of a few units; they are told one by one."""

    def unit_done(self, name: str, *, cached: bool, seconds: float) -> None:
        if not cached:
            print(f"  {name}  {seconds:.1f} s", file=sys.stderr, flush=True)

    def link_done(self, library: Path, *, cached: bool) -> None:
        """Nothing is linked."""


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arch", nargs="*", help="such as sm_90a; by default every one of GPUs")
    parser.add_argument("--sample", action="store_true", help="cells that stand for the others")
    parser.add_argument(
        "--unit", action="append", default=[], metavar="TEXT", help="units whose names hold this"
    )
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--jobs", type=int, help="units compiled at a time")
    asked = parser.parse_args(words)
    specs = load([builtin_specs()])
    with_kernels = [name for name, spec in specs.archs.items() if spec.has_kernels]
    if unknown := sorted({*asked.arch} - {*with_kernels}):
        parser.error(f"no architecture {unknown[0]!r} with kernels; there are {with_kernels}")
    record, broken = read(), False
    for arch in asked.arch or with_kernels:
        before, found = record.get(arch), None
        for found in compiled(
            specs,
            arch,
            cells_of(specs, sample=asked.sample),
            whole=not asked.sample,
            units=asked.unit,
            jobs=asked.jobs,
            progress=Lines(),
        ):
            if asked.record:
                record[arch] = joined(before, found)
                RECORD.write_text(dump(record), "utf-8")
        if found is not None:
            print(*summary(arch, found), sep="\n", flush=True)
            broken = broken or bool(found.broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
