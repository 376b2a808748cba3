"""Kernels that quantise rows of tokens, on the CPU: the bits of rows that were copied before."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from .quantize_harness import (
    Case,
    Delayed,
    Kernels,
    Long,
    Pointer,
    _Step,
    address,
    check,
    compile_for_cpu,
)
from .test_quantize_kernels import Step

RECIPES = (
    *("current_e4m3", "delayed_e4m3", "row", "block_1x128"),
    *("mx_1x32", "nv_1x16", "nv_1x16_both"),
)


@dataclass(frozen=True)
class Routes:
    """Tokens, choices of each, experts, columns, and what share of slots has no row."""

    tokens: int
    choices: int
    experts: int
    columns: int
    dropped: float = 0.0


CASES = {
    "ragged": Routes(70, 3, 5, 136),
    "one choice": Routes(130, 1, 3, 24),
    "dropped": Routes(50, 4, 6, 264, 0.4),
    "panels": Routes(40, 2, 3, 648),
    "all dropped": Routes(20, 2, 3, 8, 1.0),
    "many experts": Routes(33, 8, 64, 40),
    "whole tiles": Routes(128, 2, 2, 256),
    "nothing": Routes(0, 4, 3, 40),
}


class _Gather(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("x", "row_slot", "slot_row", "y")),
        *((name, Long) for name in ("tokens", "choices", "columns")),
    ]


class _Merged(ctypes.Structure):
    _fields_ = [("gather", _Gather), ("step", _Step), ("quantizes", ctypes.c_bool)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gather_quantize")
    return compile_for_cpu("gather_quantize_kernels.cuh", folder)


class Gathered:
    """Tokens, the slot of each row, and the rows of these as a copy has them."""

    def __init__(self, routes: Routes) -> None:
        rng = torch.Generator().manual_seed(routes.tokens + routes.columns)
        slots = routes.tokens * routes.choices
        exponents = torch.randint(-12, 12, (routes.tokens, 1), generator=rng).float()
        self.routes = routes
        self.x = torch.randn(routes.tokens, routes.columns, generator=rng) * exponents.exp2()
        self.x = self.x.bfloat16()
        expert = torch.randint(0, routes.experts, (slots,), generator=rng)
        kept = torch.rand(slots, generator=rng) >= routes.dropped
        order = expert.where(kept, routes.experts).argsort(stable=True)
        used = int(kept.sum())
        self.splits = expert[kept].bincount(minlength=routes.experts)
        self.row_slot = torch.full((slots,), -1, dtype=torch.int32)
        self.row_slot[:used] = order[:used].int()
        self.slot_row = torch.full((slots,), -1, dtype=torch.int32)
        self.slot_row[order[:used]] = torch.arange(used, dtype=torch.int32)
        self.y = torch.zeros(slots, routes.columns, dtype=torch.bfloat16)
        self.y[:used] = self.x[order[:used] // routes.choices]

    @property
    def case(self) -> Case:
        return Case(self.y, self.splits)

    def merged(self, step: _Step, *, quantizes: bool = True) -> _Merged:
        routes = self.routes
        made = _Merged(_Gather(), step, quantizes)
        made.gather.x, made.gather.row_slot = address(self.x), address(self.row_slot)
        made.gather.slot_row = address(self.slot_row)
        made.gather.tokens, made.gather.choices = routes.tokens, routes.choices
        made.gather.columns = routes.columns
        made.step.quantize.input = None
        return made


class MergedKernels(Kernels):
    """Runs the merged step where a quantise step is asked for."""

    def __init__(self, library: Path, gathered: Gathered) -> None:
        super().__init__(library, "cpu")
        self.gathered = gathered

    def call(self, name: str, *args: object) -> None:
        if name != "run_step":
            super().call(name, *args)
            return
        _, config, step = args
        super().call("run_merged", config, self.gathered.merged(step))  # type: ignore[arg-type]


class RowsAlone(Step):
    """A step that makes the rowwise copy and no sums, which may be of tokens."""

    def prepare(self, *args: bool | Delayed, moves_states: bool) -> None:
        super().prepare(*args, moves_states=moves_states)  # type: ignore[arg-type]
        self.arguments.sums = None

    def check(self) -> None:
        check({name: (made.bytes(), wanted) for name, (made, wanted) in self.outputs.items()}, "")
        self._check_state(*self.kept)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_rows_that_were_copied(library: Path, recipe: str, case: str) -> None:
    gathered = Gathered(CASES[case])
    kernels = MergedKernels(library, gathered)
    alone = ((True, False), (False, True)) if case == "dropped" else ()
    for wanted in ((True, True), *alone):
        Step(kernels, recipe, gathered.case, update=True).launch(*wanted)
    RowsAlone(kernels, recipe, gathered.case, update=True).launch(True, False)


def test_what_is_no_slot_is_zeros(library: Path) -> None:
    """A map with numbers that are none reads nothing elsewhere."""
    gathered = Gathered(CASES["ragged"])
    wrong = torch.tensor([gathered.y.shape[0], -(2**31), 2**31 - 1, -2], dtype=torch.int32)
    gathered.row_slot[3:7] = wrong
    gathered.y[3:7] = 0
    gathered.slot_row[(gathered.slot_row >= 3) & (gathered.slot_row < 7)] = 2**31 - 1
    kernels = MergedKernels(library, gathered)
    Step(kernels, "block_1x128", gathered.case, update=True).launch(True, True)
    RowsAlone(kernels, "block_1x128", gathered.case, update=True).launch(True, False)


def test_nothing_where_no_copy_is_wanted(library: Path) -> None:
    gathered = Gathered(CASES["ragged"])
    kernels = MergedKernels(library, gathered)
    step = Step(kernels, "mx_1x32", gathered.case, True)
    bare = gathered.merged(_Step(quantize=step.run.arguments()), quantizes=False)
    Kernels.call(kernels, "run_merged", step.run.recipe.config, bare)


def test_more_rows_than_a_map_names_are_refused(library: Path) -> None:
    gathered = Gathered(CASES["ragged"])
    kernels = MergedKernels(library, gathered)
    step = Step(kernels, "mx_1x32", gathered.case, True)
    merged = gathered.merged(_Step(quantize=step.run.arguments()))
    merged.gather.tokens = 2**30
    with pytest.raises(Exception, match=r"fewer than 2\^31 choices"):
        Kernels.call(kernels, "run_merged", step.run.recipe.config, merged)
