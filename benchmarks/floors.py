"""The least time that a module's plan allows: each step's operations and bytes at measured rates.

Every recipe is held against its own plan. GEMMs take the longer of their operations, at the rate
that a dense GEMM of the same formats and accumulation has in the same run, and of their bytes;
all other steps take their bytes, each operand read and each result written once, at a copy's rate.
A scale that is known only after all of a tensor was read asks for reading it again, which is not
counted. Whole tiles, and what must pass through the L2 cache, are no part of the floor: the bytes
that the shipped tiles load are stated beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fusegen import api
from fusegen.families.wgmma import WgmmaConfig
from fusegen.ir import dtypes
from fusegen.ir.buffers import size_in_bytes
from fusegen.ir.dtypes import DType
from fusegen.ir.kernel import GemmKind, Store
from fusegen.ir.kernel_set import KernelSet
from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.ir.program import Program
from fusegen.ir.shapes import evaluate
from fusegen.ir.step import Step
from fusegen.passes.pipeline import resolve_module
from fusegen.steps import is_gemm
from fusegen.tuning.cases import Case

QUANTISED = (DType.E4M3, DType.E5M2)


@dataclass(frozen=True)
class Mode:
    """What the rate of a GEMM depends on.

    Attributes:
        formats: of the operands in FP8, a's and b's; none: 16 bits.
        fast: whether sums stay in the instruction's own accumulator.
    """

    formats: tuple[DType, ...] = ()
    fast: bool = False

    def __str__(self) -> str:
        words = [each.value for each in self.formats]
        return "_".join([*words, "fast" if self.fast else "split"]) if words else "bf16"


@dataclass(frozen=True)
class Rates:
    """Measured in one run: operations per second by mode, and bytes of a copy per second."""

    gemms: Mapping[Mode, float]
    copy: float


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


def modes(plan: ModulePlan) -> set[Mode]:
    """Whose rates a floor needs."""
    sets = _sets(plan)
    steps = (step for program in _programs(plan) for step in program.steps)
    return {_mode(sets, step) for step in steps if is_gemm(step)}


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
    l2_bytes, sets = 0, _sets(plan)
    for program in _programs(plan):
        for step in program.steps:
            if not _runs(plan, step):
                continue
            moved = _bytes(plan, program, step, sets, lengths)
            seconds, crossing = moved / rates.copy, moved
            if is_gemm(step):
                assert step.flops is not None
                operations = evaluate(step.flops, lengths)
                seconds = max(seconds, operations / rates.gemms[_mode(sets, step)])
                crossing = _tile_bytes(plan, step, sets, lengths, splits)
            times[_part(step)] += 1e3 * seconds
            l2_bytes += crossing
    return Floor(**times, l2_bytes=l2_bytes)


def _programs(plan: ModulePlan) -> tuple[Program, Program]:
    return plan.forward, plan.backward


def _sets(plan: ModulePlan) -> dict[str, KernelSet]:
    return {each.name: each for each in plan.kernel_sets}


def _part(step: Step) -> str:
    if is_gemm(step):
        return "gemms"
    return "activation" if step.pointwise is not None else "quantise"


def _mode(sets: Mapping[str, KernelSet], step: Step) -> Mode:
    variant = None if step.kernels is None else sets[step.kernels].units[0].variant
    if variant is None or not set(variant.formats) <= set(QUANTISED):
        return Mode()
    return Mode(variant.formats, "fast" in variant.traits) if variant.formats else Mode()


def _unwanted(plan: ModulePlan) -> set[str]:
    """Flags of gradients of parameters that are absent: biases."""
    absent = (p.buffer for p in plan.parameters if plan.buffer(p.buffer).optional)
    return {f"need_d{name}" for name in absent}


def _runs(plan: ModulePlan, step: Step) -> bool:
    return not step.when or not set(step.when) <= _unwanted(plan)


def _bytes(
    plan: ModulePlan,
    program: Program,
    step: Step,
    sets: Mapping[str, KernelSet],
    lengths: Mapping[str, int],
) -> int:
    names = {name for name in step.loads if not plan.buffer(name).optional}
    names |= set(_results(plan, program, step))
    read_too = [step.writes[0]] if _adds(sets, step) else []
    return sum(evaluate(size_in_bytes(plan.buffer(n)), lengths) for n in (*names, *read_too))


def _adds(sets: Mapping[str, KernelSet], step: Step) -> bool:
    """Whether a GEMM is added to what its result holds."""
    variant = None if step.kernels is None else sets[step.kernels].units[0].variant
    return variant is not None and variant.store in (Store.ADD, Store.ADD_IO)


def _results(plan: ModulePlan, program: Program, step: Step) -> Iterator[str]:
    """What a step leaves to others: not its own scratch, nor what nobody asks for."""
    left = {result.buffer for each in _programs(plan) for result in each.results}
    left |= {name for other in program.steps if other is not step for name in other.loads}
    left |= set(step.mutates)
    flags = {result.buffer: result.when for result in step.output_when}
    for name in step.writes:
        wanted = flags.get(name, ())
        if name in left and not (wanted and set(wanted) <= _unwanted(plan)):
            yield name


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
    return loaded + stored * (2 if _adds(sets, step) else 1)


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
