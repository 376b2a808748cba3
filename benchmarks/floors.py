"""The least time that a module's plan allows, at rates that were measured in the same run.

As ``fusegen.tuning.floors`` has it, at the rate that a dense GEMM of the same formats and
accumulation has, and at that of a copy. Whole tiles, and what must pass through the L2 cache, are
no part of the floor: the bytes that the shipped tiles load are stated beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fusegen import api
from fusegen.families.wgmma import WgmmaConfig
from fusegen.ir import dtypes
from fusegen.ir.buffers import size_in_bytes
from fusegen.ir.kernel import GemmKind
from fusegen.ir.kernel_set import KernelSet
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.shapes import evaluate
from fusegen.ir.step import Step
from fusegen.passes.pipeline import resolve_module
from fusegen.steps import is_gemm
from fusegen.tuning.cases import Case
from fusegen.tuning.floors import Mode, Rates, adds, costs, modes

__all__ = ["Floor", "Mode", "Rates", "floor", "loads", "modes", "plan_of", "recipes"]


@dataclass(frozen=True)
class Floor:
    """Of one forward and backward.

    Attributes:
        gemms, quantise, activation: milliseconds; an activation that quantises what it gives is
            an activation.
        l2_bytes: what the GEMMs' tiles load and store, and the bytes of all other steps.
    """

    gemms: float
    quantise: float
    activation: float
    l2_bytes: int

    @property
    def total(self) -> float:
        """Milliseconds of all steps, one after another."""
        return self.gemms + self.quantise + self.activation


@lru_cache
def recipes() -> frozenset[str]:
    """Names of all recipes."""
    return frozenset(api.load_specs().recipes)


@lru_cache
def plan_of(cell: str, arch: str) -> ModulePlan:
    """The plan of a cell by the name of its file, such as grouped_mlp__fp8_block."""
    module, recipe, *options = cell.split("__")
    return resolve_module(api.load_specs(), Cell(module, recipe, tuple(options)), arch)


def floor(
    plan: ModulePlan, lengths: Mapping[str, int], splits: Sequence[int], rates: Rates
) -> Floor:
    """What a forward and backward with all gradients but those of biases cost at least.

    Args:
        plan: of a module whose GEMMs are grouped by `splits`.
        lengths: of every dimension by its symbol.
        splits: tokens of each group.
        rates: of the machine.
    """
    times = {"gemms": 0.0, "quantise": 0.0, "activation": 0.0}
    l2_bytes, sets = 0, {each.name: each for each in plan.kernel_sets}
    for cost in costs(plan, lengths):
        if cost.program.name not in _HALVES:
            continue
        times[_part(cost.step)] += 1e3 * cost.floor(rates)
        gemm = is_gemm(cost.step)
        l2_bytes += _tile_bytes(plan, cost.step, sets, lengths, splits) if gemm else cost.moved
    return Floor(**times, l2_bytes=l2_bytes)


_HALVES = ("forward", "backward")
"""Of a training step; weights that stay quantised are quantised anew outside of it."""


def _part(step: Step) -> str:
    if is_gemm(step):
        return "gemms"
    return "activation" if step.pointwise is not None else "quantise"


# ---- tiles


def _tile_bytes(
    plan: ModulePlan,
    step: Step,
    sets: Mapping[str, KernelSet],
    lengths: Mapping[str, int],
    splits: Sequence[int],
) -> int:
    """What the tiles of the point that the rules choose load and store."""
    assert step.kernels is not None and step.kind is not None
    kind, sizes = GemmKind(step.kind), dict(step.sizes)
    case = _case(kind, {name: evaluate(size, lengths) for name, size in sizes.items()}, splits)
    wanted = case.sizes(kind)
    point = sets[step.kernels].point(wanted)
    a, b = (_element_bytes(plan, step, slot) for slot in ("a", "b"))
    loaded = loads(kind, WgmmaConfig.parse(point), case, splits, (a, b))
    stored = evaluate(size_in_bytes(plan.buffer(step.writes[0])), lengths)
    return loaded + stored * (2 if adds(plan, step) else 1)


def _case(kind: GemmKind, sizes: Mapping[str, int], splits: Sequence[int]) -> Case:
    """The linear of which a GEMM has so many tokens, n and k."""
    return Case(len(splits), sizes["tokens"], sizes["n"], sizes["k"])


def _element_bytes(plan: ModulePlan, step: Step, slot: str) -> int:
    name = step.input(slot)
    assert name is not None
    return dtypes.bits(plan.buffer(name).dtype) // 8


def loads(
    kind: GemmKind, point: WgmmaConfig, case: Case, splits: Iterable[int], elements: tuple[int, int]
) -> int:
    """Bytes that tiles read through the L2 cache; what a cluster of two shares, once.

    As raster.cuh lays tiles out: a cluster takes two row blocks of a column block, and shares B;
    the last row block of an odd number takes two column blocks, and shares A.

    Args:
        elements: bytes to an element of A and of B.
    """
    columns = case.n if kind is GemmKind.FPROP else case.k
    total = 0
    for tokens in splits:
        rows, k = {
            GemmKind.FPROP: (tokens, case.k),
            GemmKind.DGRAD: (tokens, case.n),
            GemmKind.WGRAD: (case.n, tokens),
        }[kind]
        if tokens == 0:
            continue
        a, b = _blocks(-(-rows // point.tile[0]), -(-columns // point.tile[1]), point.cluster[0])
        of_a, of_b = point.tile[0] * elements[0], point.tile[1] * elements[1]
        total += k * (a * of_a + b * of_b)
    return total


def _blocks(rows: int, columns: int, cluster: int) -> tuple[int, int]:
    """How often a group's tiles load a block of A and one of B."""
    if cluster == 1:
        return rows * columns, rows * columns
    pairs, odd = columns // 2, rows % 2
    # Of two column blocks: whole pairs of row blocks twice, an odd last one once.
    a = pairs * (2 * (rows - odd) + odd)
    b = pairs * (rows - odd + 2 * odd)
    if columns % 2:
        a += rows
        b += (rows + 1) // 2
    return a, b
