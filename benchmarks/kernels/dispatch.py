"""The FP8 GEMMs that a bundle ships, called as its ops call them: by the dispatch functions.

A bundle's library exports no kernels, so its FP8 units are linked once more, behind C functions.
They are compiled as the bundle's own are, so that a machine which built the bundle finds their
objects in its cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import common
from floors import plan_of
from torch import Tensor

from fusegen.build import library as bundle_build
from fusegen.build.sources import Sources, read_sources
from fusegen.ir.kernel import GemmKind
from fusegen.ir.kernel_set import KernelSet
from fusegen.tuning.cases import Case
from kernels import build
from kernels.build import Accumulation, Format, Kind, Scaling, Target, Tile
from kernels.fp8_kernels import Emulation, Gemm, Kernel
from kernels.fp8_operands import Operands, Problem

FOLDER = build.BUILT / "dispatch"
LAUNCHERS = "launch.cpp"
MODULE, RECIPES = "grouped_linear", ("fp8_delayed", "fp8_rowwise", "fp8_block")
"""fp8_current has the kernels of fp8_delayed."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """A kernel set of a bundle: one kind of GEMM in one mode.

    Attributes:
        kernels: with the rules that choose among its points.
        kind: of the GEMM.
        formats: of a and b.
        scaling, accumulation: see gemm_fp8.h.
    """

    kernels: KernelSet
    kind: Kind
    formats: tuple[Format, Format]
    scaling: Scaling
    accumulation: Accumulation

    @classmethod
    def of(cls, kernels: KernelSet) -> Shipped:
        """Read a kernel set of FP8 GEMMs."""
        variant = kernels.units[0].variant
        assert variant is not None and kernels.kind is not None
        a, b = (Format(each.value) for each in variant.formats)
        first = variant.scalings[0].partition("_")[0]
        fast = "fast" in variant.traits
        return cls(
            *(kernels, Kind(kernels.kind.value), (a, b), Scaling(first)),
            Accumulation.FAST if fast else Accumulation.SPLIT,
        )

    @property
    def mode(self) -> str:
        """What a case is called after its shape."""
        return f"{self.kind} {self.scaling} {self.accumulation}"

    def target(self, case: Case) -> Target:
        """The kernel that the rules choose for a grouped linear."""
        kind = GemmKind(self.kind.value)
        sizes = case.sizes(kind)
        tile = Tile.parse(self.kernels.point(sizes))
        return Target(self.kind, *self.formats, self.scaling, self.accumulation, tile)


def shipped(arch: str) -> list[Shipped]:
    """Every FP8 GEMM of the grouped linears of an architecture, each once."""
    found: dict[str, Shipped] = {}
    for recipe in RECIPES:
        for kernels in plan_of(f"{MODULE}__{recipe}", arch).kernel_sets:
            if kernels.kind is not None:
                found.setdefault(kernels.name, Shipped.of(kernels))
    return sorted(found.values(), key=lambda each: list(Kind).index(each.kind))


class Library:
    """The dispatch functions of a bundle's FP8 GEMMs."""

    def __init__(self, bundle: Path, sets: list[Shipped]) -> None:
        """Build what is not built, and load it.

        Raises:
            fusegen.errors.BuildError: a tool is missing, or a unit does not compile.
        """
        self._library = ctypes.CDLL(str(_built(bundle, [each.kernels.name for each in sets])))

    def gemm(self, shipped: Shipped, target: Target) -> Gemm:
        """What computes a GEMM of the set; the dispatch function chooses the tile."""
        return Kernel(target, getattr(self._library, f"launch_{shipped.kernels.name}"))


def _built(bundle: Path, names: list[str]) -> Path:
    """The library over a bundle's units, built where it is not of these sources."""
    csrc = FOLDER / "csrc"
    shutil.rmtree(csrc, ignore_errors=True)
    shutil.copytree(bundle / "csrc", csrc)
    sources = read_sources(csrc / "sources.cmake")
    units = [LAUNCHERS, *(each for each in sources.kernel_sources if _belongs(each, names))]
    (csrc / LAUNCHERS).write_text(_launchers(sources.namespace, names))
    (csrc / "exports.map").write_text("{ global: fusegen_digests; launch_*; local: *; };\n")
    (csrc / "sources.cmake").write_text(_cmake(sources, units))
    library = FOLDER / "lib" / f"{sources.namespace}.so"
    if not library.is_file() or bundle_build.stale_cells(FOLDER):
        bundle_build.build(FOLDER)
    return library


def _belongs(unit: str, names: list[str]) -> bool:
    """Whether a unit is a point of one of the sets, not of one whose name only begins alike."""
    schedules = r"(cooperative|pingpong)_\d"
    return any(re.match(rf"kernels/{name}_{schedules}", unit) for name in names)


def _launchers(namespace: str, names: list[str]) -> str:
    includes = "\n".join(f'#include "dispatch/{name}.h"' for name in names)
    functions = "\n".join(
        f"""FUSEGEN_LAUNCH int launch_{name}(const fusegen::Fp8GemmArguments* in,
    fusegen::Stream* stream, const char** call) {{
  const fusegen::Status status = {namespace}::{name}(fusegen::ScalarType::BFloat16, *in, *stream);
  *call = status.call;
  return status.code;
}}"""
        for name in names
    )
    export = '#define FUSEGEN_LAUNCH extern "C" __attribute__((visibility("default")))'
    return f"{includes}\n\n{export}\n\n{functions}\n"


def _cmake(sources: Sources, units: list[str]) -> str:
    """As a bundle's, with one cell."""
    values = {
        "NAMESPACE": sources.namespace,
        "GENCODE": sources.gencode,
        "CELLS": "dispatch",
        "DIGEST_dispatch": hashlib.sha256("\0".join(units).encode()).hexdigest(),
        "UNITS_dispatch": " ".join(units),
    }
    return "".join(f"set(FUSEGEN_{name} {value})\n" for name, value in values.items())


def require_right(
    case: str, shipped: Shipped, problem: Problem, operands: Operands, d: Tensor
) -> None:
    """The result's smallest group that is not empty against float64 of what it read.

    Raises:
        SystemExit: they differ by more than sums of 14 bits may.
    """
    lengths = {group: end - begin for group, (begin, end) in enumerate(problem.groups)}
    group = min((g for g, length in lengths.items() if length > 0), key=lambda g: lengths[g])
    begin, end = problem.groups[group]
    own = d[group] if shipped.kind is Kind.WGRAD else d[begin:end]
    wanted = Emulation(problem.target).of_group(problem, operands, group)
    common.require_close(case, own, wanted, tolerance=3e-2)
