"""Kernels that quantise norms of rows, on the CPU: the bits that two kernels give, one by one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from .quantize_harness import Buffer, Case, Kernels, Pointer, _Step, address, compile_for_cpu
from .test_norm import EPS, KINDS, _Norm
from .test_quantize_kernels import Step

RECIPES = ("delayed_e4m3", "block_1x128", "block_1x64", "mx_1x32")
SIZES = (
    (200, 136), (128, 128), (40, 8), (135, 520), (257, 72), (0, 40), (16, 1032), (5, 4104),
    (130, 2056), (3, 16384), (3, 16392),
)  # fmt: skip
"""Rows and columns: tiles that are whole and not, several rows to a block and one to several."""


class _Merged(ctypes.Structure):
    _fields_ = [
        ("norm", _Norm),
        ("step", _Step),
        ("statistics", Pointer),
        ("quantizes", ctypes.c_bool),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_for_cpu("norm_quantize_kernels.cuh", tmp_path_factory.mktemp("norm_quantize"))


class Norm:
    """Operands of a norm, and what its own kernel gives of them."""

    def __init__(self, library: Path, kind: str, rows: int, columns: int) -> None:
        self.kernels = Kernels(library, "cpu")
        self.kind, self.rows, self.columns = kind, rows, columns
        rng = torch.Generator().manual_seed(rows + columns)
        self.x = (torch.randn(rows, columns, generator=rng) * 3 + 1).bfloat16()
        self.x[::7] = 0  # of these a layer norm gives its bias, and others zeros with signs
        self.x[1::7, ::3] *= -0.0
        self.weight = torch.randn(columns, generator=rng).bfloat16() if kind != "l2" else None
        self.bias = torch.randn(columns, generator=rng).bfloat16() if kind == "layer" else None
        self.y = torch.empty_like(self.x)
        self.statistics = self.results()
        arguments = self.arguments(self.statistics)
        arguments.y = address(self.y)
        self.kernels.call("run_norm", arguments)

    def results(self) -> tuple[Buffer, Buffer]:
        return Buffer(4 * self.rows, "cpu"), Buffer(4 * self.rows, "cpu")

    def arguments(self, statistics: tuple[Buffer, Buffer] | None) -> _Norm:
        made = _Norm(
            x=address(self.x), weight=address(self.weight), bias=address(self.bias),
            rows=self.rows, columns=self.columns, eps=EPS, zero_centered=self.rows % 2 == 0,
            kind=KINDS.index(self.kind),
        )  # fmt: skip
        if statistics:
            made.mean, made.rstd = map(address, statistics)
        return made

    def merged(self, step: _Step, config: int, *, asked: bool, quantizes: bool = True) -> None:
        """Runs the one step, and checks the statistics that it leaves where they are asked for."""
        found, scratch = self.results(), Buffer(4 * (2 * self.rows + self.rows // 128 + 1), "cpu")
        merged = _Merged(self.arguments(found if asked else None), step, None, quantizes)
        merged.statistics = scratch.pointer()
        merged.step.quantize.input = None
        self.kernels.call("run_merged", config, merged)
        scratch.bytes()
        for own, wanted in zip(found, self.statistics, strict=True):
            assert not asked or torch.equal(own.bytes(), wanted.bytes())


class MergedKernels(Kernels):
    """Runs the merged step where a quantise step is asked for."""

    def __init__(self, library: Path, norm: Norm, *, asked: bool) -> None:
        super().__init__(library, "cpu")
        self.norm, self.asked = norm, asked

    def call(self, name: str, *args: object) -> None:
        if name != "run_step":
            super().call(name, *args)
            return
        _, config, step = args
        self.norm.merged(step, config, asked=self.asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_both_kernels(
    library: Path, kind: str, recipe: str, rows: int, columns: int
) -> None:
    norm = Norm(library, kind, rows, columns)
    data = Case(norm.y, None)
    alone = ((True, False), (False, True)) if columns == 136 else ()
    for asked, (rowwise, columnwise) in enumerate(((True, True), *alone)):
        kernels = MergedKernels(library, norm, asked=asked != 1)
        Step(kernels, recipe, data, update=True).launch(rowwise, columnwise)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_alone(library: Path, kind: str) -> None:
    """Nothing is quantised, so nothing that a copy needs has to be there."""
    norm = Norm(library, kind, 200, 136)
    kernels = MergedKernels(library, norm, asked=True)
    step = Step(kernels, "mx_1x32", Case(norm.y, None), True)
    bare = _Step(quantize=step.run.arguments())
    norm.merged(bare, step.run.recipe.config, asked=True, quantizes=False)
