"""Quantise kernels, and those around them, against the device's copy bandwidth of the same run.

Rates count every byte once that must be read or written: the input, codes and scales of each copy,
partial sums and, of what has no codes, the results. The columnwise copy of ragged groups has places
between them, which a quantise kernel writes too, since GEMMs read them. A step is all that a
recipe launches for a tensor; where scales span more than a tile, its input counts twice.

The update of delayed scaling is shorter than its launch from Python takes, so that a CUDA graph
launches it many times, each time on the states of another module, which are not in the cache.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import common
import torch
from common import OURS, Case, Row
from torch import Tensor

from kernels import build

sys.path.insert(0, str(build.COMPILE_TESTS.parent))

harness: Any = importlib.import_module(f"{build.COMPILE_TESTS.name}.quantize_harness")

TOKENS, COLUMNS = 16384, 8192  # 256 MiB of bf16: larger than the cache
GROUPS = 128
ALIGNMENT = 32  # of groups in columnwise copies
SLOTS = 1024  # of an amax history
UPDATED_GROUPS = (8, 32, 128, 256)
UPDATED_STATES = 4  # in one launch: those of a forward of GroupedMLP
LEAST_UPDATES = 64  # in a graph
CACHED_BYTES = 2**27  # more than the cache holds
DEVICE = "cuda"
HALF = 0  # bf16


@dataclass(frozen=True, slots=True)
class Recipe:
    """A kernel of quantize_kernels.cuh and what it is timed with.

    Attributes:
        name: in results.
        config: its number there.
        bits: of a code.
        scale_bytes: of scales per element of a copy; 0 where there are few.
        copies: which copies are made: "rowwise", "columnwise" or "both".
        column_amax: whether the columnwise copy reads an amax per column.
        token_major: whether rowwise scales lie as GEMMs read them.
        extras: further buffers that are read or written, by the argument's name.
    """

    name: str
    config: int
    bits: int = 8
    scale_bytes: float = 0
    copies: tuple[str, ...] = ("rowwise", "columnwise", "both")
    column_amax: bool = False
    token_major: bool = False
    extras: tuple[tuple[str, ...], ...] = ((),)


RECIPES = (
    Recipe("tensor", 0),
    Recipe("tensor", 0, copies=("both",), extras=(("scale", "folded_amax"),)),
    Recipe("row", 2, column_amax=True),
    Recipe("block_1x128", 3, scale_bytes=4 / 128, token_major=True),
    Recipe(
        *("block_1x128", 3),
        scale_bytes=4 / 128,
        copies=("both",),
        token_major=True,
        extras=(("row_sums",),),
    ),
    Recipe("block_128x128", 4, copies=("both",)),
    Recipe("mx_1x32", 5, scale_bytes=1 / 32, copies=("both",)),
    Recipe("nv_1x16", 8, bits=4, scale_bytes=1 / 16, copies=("both",)),
    Recipe("nv_16x16", 9, bits=4, copies=("both",)),
    Recipe("nv_1x16_both", 12, bits=4, scale_bytes=1 / 16, copies=("both",)),
)
STEPS = ("tensor", "row", "nv_1x16", "nv_16x16", "nv_1x16_both")  # recipes that read amaxes first


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor [TOKENS, COLUMNS] and buffers that are long enough for every recipe."""

    name: str
    splits: Tensor | None
    x: Tensor
    codes: Tensor = field(default_factory=lambda: _empty(4 * TOKENS * COLUMNS, torch.uint8))
    row_scales: Tensor = field(default_factory=lambda: _empty(TOKENS * (COLUMNS // 16 + 64)))
    column_scales: Tensor = field(default_factory=lambda: _empty((TOKENS // 16 + GROUPS) * COLUMNS))
    sums: Tensor = field(default_factory=lambda: _empty((TOKENS // 128 + 2 * GROUPS + 1) * COLUMNS))
    amax: Tensor = field(
        default_factory=lambda: torch.ones(TOKENS + GROUPS * COLUMNS, device=DEVICE)
    )
    scale: Tensor = field(default_factory=lambda: torch.ones(GROUPS, device=DEVICE))
    random: Tensor = field(default_factory=lambda: torch.tensor([1, 2], device=DEVICE))

    @property
    def groups(self) -> int:
        """How many groups of rows."""
        return 1 if self.splits is None else GROUPS

    @property
    def padded_rows(self) -> int:
        """Length of a row of the columnwise copy."""
        if self.splits is None:
            return TOKENS
        return ALIGNMENT * (TOKENS // ALIGNMENT + GROUPS)

    @property
    def segment_sums(self) -> int:
        """Bytes of partial sums of tiles of 128 rows; groups cut tiles, each into two at most."""
        return 4 * COLUMNS * (TOKENS // 128 + (self.groups if self.splits is not None else 0))

    def sizes(self) -> dict[str, int]:
        """What all launches are told."""
        return {"rows": TOKENS, "columns": COLUMNS, "groups": self.groups}


@dataclass(frozen=True, slots=True)
class Work:
    """One launch to time.

    Attributes:
        case: its name in results.
        run: launches it.
        bytes: that it must read and write.
        count: how often `run` launches it; times are those of one.
    """

    case: str
    run: Callable[[], None]
    bytes: int
    count: int = 1


def _empty(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(count, device=DEVICE, dtype=dtype)


def _inputs() -> Iterator[Input]:
    """Dense and ragged; one after the other, since each has buffers of its own."""
    x = common.normal(TOKENS, COLUMNS)
    yield Input("dense", None, x)
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(GROUPS, generator=generator) + 0.2
    sizes = (weights / weights.sum() * TOKENS).long()
    sizes[0] += TOKENS - sizes.sum()
    yield Input(f"ragged{GROUPS}", sizes.to(DEVICE), x)


# ---- quantise


def _pitch(elements: int, bits: int) -> int:
    return int(harness.round_up(elements * bits // 8, 16))


def _rowwise(data: Input, recipe: Recipe) -> Any:
    pointers = data.codes.data_ptr(), data.row_scales.data_ptr()
    return harness._Copy(*pointers, _pitch(COLUMNS, recipe.bits), data.amax.data_ptr())


def _columnwise(data: Input, recipe: Recipe) -> Any:
    codes = data.codes[2 * TOKENS * COLUMNS :].data_ptr()
    amax = data.amax[TOKENS:] if recipe.column_amax else data.amax
    pitch = _pitch(data.padded_rows, recipe.bits)
    return harness._Copy(codes, data.column_scales.data_ptr(), pitch, amax.data_ptr())


def _arguments(data: Input, recipe: Recipe, copies: str, extras: tuple[str, ...]) -> Any:
    arguments = harness._Quantize(
        input=data.x.data_ptr(),
        group_sizes=harness.address(data.splits),
        **data.sizes(),
        row_align=ALIGNMENT,
        power_of_two=True,
        rng_state=data.random.data_ptr(),
    )
    if copies != "columnwise":
        arguments.rowwise = _rowwise(data, recipe)
        if recipe.token_major:
            arguments.token_pitch = harness.round_up(data.padded_rows, 16)
    if copies != "rowwise":
        arguments.columnwise = _columnwise(data, recipe)
    buffers = {"scale": data.scale, "folded_amax": data.amax, "row_sums": data.sums}
    for name in extras:
        setattr(arguments, name, buffers[name].data_ptr())
    return arguments


def _quantize_works(kernels: Any, data: Input) -> Iterator[Work]:
    for recipe in RECIPES:
        for copies in recipe.copies:
            for extras in recipe.extras:
                words = " ".join([recipe.name, copies, *extras])
                arguments = _arguments(data, recipe, copies, extras)
                moved = data.x.nbytes + _written(data, recipe, copies)
                moved += data.segment_sums if "row_sums" in extras else 0
                run = partial(kernels.call, "run_quantize", HALF, recipe.config, arguments)
                yield Work(f"{words}, {data.name}", run, moved)


def _written(data: Input, recipe: Recipe, copies: str) -> int:
    """Bytes of codes and scales."""
    rows = TOKENS if copies != "columnwise" else 0
    places = data.padded_rows if copies != "rowwise" else 0
    return int((rows + places) * COLUMNS * (recipe.bits / 8 + recipe.scale_bytes))


def _step_work(kernels: Any, data: Input, recipe: Recipe) -> Work:
    """Both copies, with all that comes before them."""
    amax = data.amax.data_ptr()
    arguments = harness._Step(
        quantize=_arguments(data, recipe, "both", ()),
        amax=amax,
        partial_amax=data.sums.data_ptr(),
        row_amax=amax,
        column_amax=data.amax[TOKENS:].data_ptr(),
        rowwise_amax=amax,
        columnwise_amax=data.amax[data.groups :].data_ptr(),
        rng_state=data.random.data_ptr() if recipe.name.endswith("both") else None,
        update=True,
    )
    run = partial(kernels.call, "run_step", HALF, recipe.config, arguments)
    moved = 2 * data.x.nbytes + _written(data, recipe, "both")
    return Work(f"{recipe.name} step, {data.name}", run, moved)


def _step_works(kernels: Any, data: Input) -> Iterator[Work]:
    wanted = {recipe.name: recipe for recipe in reversed(RECIPES) if recipe.name in STEPS}
    for name in STEPS:
        yield _step_work(kernels, data, wanted[name])


# ---- what goes before and after


def _amax_works(kernels: Any, data: Input) -> Iterator[Work]:
    for what in ("of_group", "of_row", "of_column", "of_transformed_group"):
        arguments = harness._Amax(
            data.x.data_ptr(),
            harness.address(data.splits),
            **data.sizes(),
            row_align=ALIGNMENT,
        )
        setattr(arguments, what, data.sums.data_ptr())
        run = partial(kernels.call, "run_amax", HALF, arguments)
        yield Work(f"amax {what}, {data.name}", run, data.x.nbytes)


def _row_sum_work(kernels: Any, data: Input) -> Work:
    arguments = harness._RowSums(
        data.sums.data_ptr(),
        data.column_scales.data_ptr(),
        harness.address(data.splits),
        **data.sizes(),
        row_align=128,
    )
    moved = data.segment_sums + 4 * COLUMNS * data.groups
    return Work(f"row sums, {data.name}", partial(kernels.call, "run_row_sums", arguments), moved)


def _clear_work(kernels: Any, data: Input) -> Work:
    arguments = harness._Clear()
    arguments.buffers[0], arguments.counts[0] = data.sums.data_ptr(), data.sums.numel()
    run = partial(kernels.call, "run_clear", arguments)
    return Work(f"clear, {data.name}", run, data.sums.nbytes)


def _works(kernels: Any, data: Input, quick: bool) -> Iterator[Work]:
    yield from _quantize_works(kernels, data)
    yield from _step_works(kernels, data)
    if quick:
        return
    # Clearing comes last: what it zeroes nobody reads after it.
    yield from _amax_works(kernels, data)
    yield _row_sum_work(kernels, data)
    yield _clear_work(kernels, data)


# ---- the update of delayed scaling


def _update_work(kernels: Any, groups: int) -> Work:
    """States of dense tensors, whose histories roll after a step without an amax, too."""
    moved = 4 * UPDATED_STATES * 2 * (SLOTS + 1) * groups
    count = max(LEAST_UPDATES, CACHED_BYTES // (moved // 2))
    states = torch.ones(count, UPDATED_STATES, SLOTS + 1, groups, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for joined in states:
            kernels.call("run_delayed", _due(joined))
    case = f"delayed update, {UPDATED_STATES} states of {groups} groups"
    return Work(case, partial(_replay, graph, states), moved, count)


def _due(joined: Tensor) -> Any:
    arguments = harness.Delayed(count=len(joined))
    for number, state in enumerate(joined):
        pointers = state.data_ptr(), state[SLOTS].data_ptr()
        arguments.states[number] = harness.DelayedState(*pointers, SLOTS, state.shape[1], 448.0)
    return arguments


def _replay(graph: Any, states: Tensor) -> None:
    """Replay a graph of launches that read and write these states."""
    graph.replay()


# ---- timing


def _measure(work: Work, copy_rate: float) -> list[Row]:
    found = common.compare({OURS: lambda _: work.run()})[OURS]
    times = common.Samples((each / work.count for each in found), found.readings)
    rate = work.bytes / statistics.median(times) * 1e3
    row = common.row(
        work.case,
        OURS,
        "ms",
        times,
        floor=1e3 * work.bytes / copy_rate,
        rate=rate / 1e12,
        rate_unit="TB/s",
        fraction=rate / copy_rate,
        extra={"copy_tb_per_s": copy_rate / 1e12},
    )
    print(f"{work.case:48} {row.median:8.4f} ms, {row.fraction:.3f} of a copy's rate", flush=True)
    return [row]


def run(*, quick: bool = False) -> Iterator[Case]:
    """Time every quantise kernel, dense and in groups; quick: not those before and after them."""
    print(build.build_quantize(), flush=True)
    kernels = harness.Kernels(build.quantize_library("cuda"), "cuda", early=True)
    copy_rate = common.copy_rate()
    for data in _inputs():
        for work in _works(kernels, data, quick):
            yield Case(work.case, partial(_measure, work, copy_rate))
    for groups in () if quick else UPDATED_GROUPS:
        work = _update_work(kernels, groups)
        yield Case(work.case, partial(_measure, work, copy_rate))
