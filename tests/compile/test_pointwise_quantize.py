"""Kernels that quantise an expression, on the CPU: the bits that two kernels give, one by one."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusegen.checks.load import load
from fusegen.emit.kernels.units import unit_context
from fusegen.emit.render import Renderer
from fusegen.ir.kernel_set import KernelUnit
from fusegen.ir.naming import Cell
from fusegen.ir.step import Access, PointwiseOperand
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.paths import builtin_specs, builtin_templates

from .quantize_harness import CSRC, Buffer, Case, Kernels, _Step, address, compile_for_cpu
from .test_quantize_kernels import Step

MATHS = (
    ("silu", "forward"),
    ("clamped_swiglu", "forward"),  # scalars
    ("scaled_swiglu", "forward"),
    ("scaled_srelu", "backward"),  # a sum over rows, one whole result
    ("scaled_swiglu", "backward"),  # and one of two halves
)
RECIPES = (
    "current_e4m3",
    "delayed_e4m3",
    "row",
    "block_1x128",
    "block_1x64",
    "mx_1x32",
    "nv_1x16",
    "nv_1x16_both",
)
# Rows, columns of a half, splits.
CASES: dict[str, tuple[int, int, list[int] | None]] = {
    "ragged": (200, 136, [0, 5, 130, 0, 33]),
    "whole tiles": (150, 256, [1, 2] * 20 + [90]),
    "one tile": (128, 128, None),
    "narrow": (40, 8, [17, 0, 3]),
    "dense": (135, 24, None),
    "no rows": (64, 24, [0, 0]),
    "nothing": (0, 40, [0, 3]),
}


class _Expression(ctypes.Structure):
    _fields_ = [
        ("operands", ctypes.c_void_p * 8),
        ("results", ctypes.c_void_p * 8),
        ("scalars", ctypes.c_float * 8),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group_sizes", ctypes.c_void_p),
        ("groups", ctypes.c_int64),
        ("clears", ctypes.c_bool),
    ]


class _Merged(ctypes.Structure):
    _fields_ = [
        ("expression", _Expression),
        ("step", _Step),
        ("row_partials", ctypes.c_void_p),
        ("quantizes", ctypes.c_bool),
    ]


@cache
def _unit(module: str, direction: str) -> KernelUnit:
    plan = resolve_module(load([builtin_specs()]), Cell(module, "bf16"), "sm_90a")
    return next(unit for unit in plan.units if f"_{direction}_" in f"{unit.name}_")


def _without_launch_sizes(folder: Path) -> Path:
    """The kernels' header, where memory that a launch sizes has the size that it asks for."""
    shutil.copytree(CSRC / "fusegen", folder / "fusegen")
    header = folder / "fusegen" / "pointwise" / "pointwise_quantize.cuh"
    text = header.read_text()
    sized = "extern __shared__ uint2 parked[];"
    assert text.count(sized) == 1
    fixed = "__shared__ uint2 parked[Source::kSharedBytes / sizeof(uint2)];"
    header.write_text(text.replace(sized, fixed))
    return header


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pointwise_quantize")
    renderer = Renderer([builtin_templates()])
    text, cases = "", ""
    for i, (module, direction) in enumerate(MATHS):
        context = unit_context(_unit(module, direction), "")
        math = renderer.render("csrc/expression.cu.j2", context)
        costed = f"struct Costed : Math {{ static constexpr int cost = {context.cost}; }};"
        text += f"namespace math_{i} {{\n{math}\n{costed}\n}}\n"
        cases += f"    case {i}: return launch(math_{i}::Costed());\n"
    text += f"""
template <class Launch>
Status with_math(int math, Launch launch) {{
  switch (math) {{
{cases}    default: return {{cudaErrorInvalidValue, "no such expression"}};
  }}
}}
"""
    (folder / "expressions.inc").write_text(text)
    header = folder / "merged.cuh"
    header.write_text(
        f'#define KERNELS "{_without_launch_sizes(folder)}"\n'
        f'#define EXPRESSIONS "{folder}/expressions.inc"\n'
        '#include "pointwise_quantize_kernels.cuh"\n'
    )
    return compile_for_cpu(str(header), folder)


@dataclass
class Expression:
    """Operands of an expression, and what its own kernel gives of them."""

    library: Path
    number: int
    rows: int
    columns: int
    splits: Tensor | None

    def __post_init__(self) -> None:
        math = _unit(*MATHS[self.number]).pointwise
        assert math is not None
        self.math = math
        rng = torch.Generator().manual_seed(self.rows + self.columns)
        given = {o.buffer: self._empty(o, math.operands) for o in math.operands}
        self.operands = {n: torch.randn(t.shape, generator=rng).to(t) * 3 for n, t in given.items()}
        self.results = {r.buffer: self._empty(r, math.results) for r in math.results}
        self.kernels = Kernels(self.library, "cpu")
        self.kernels.call("run_expression", self.number, self.arguments(self.results))
        self.sums = next((r.buffer for r in math.results if r.access is Access.ROW), None)
        (self.quantized,) = (r for name, r in self.results.items() if name != self.sums)

    def _empty(self, own: PointwiseOperand, others: tuple[PointwiseOperand, ...]) -> Tensor:
        dtype = torch.float32 if own.dtype.value == "float32" else torch.bfloat16
        halves = len({o.access for o in others if o.buffer == own.buffer})
        shape = (self.rows,) if own.access is Access.ROW else (self.rows, halves * self.columns)
        return torch.empty(shape, dtype=dtype)

    def arguments(self, results: dict[str, Tensor] | dict[str, Buffer]) -> _Expression:
        made = _Expression(rows=self.rows, columns=self.columns)
        for i, operand in enumerate(self.math.operands):
            made.operands[i] = self.operands[operand.buffer].data_ptr()
        for i, result in enumerate(self.math.results):
            made.results[i] = address(results.get(result.buffer))
        for i, _ in enumerate(self.math.attributes):
            made.scalars[i] = 1.25 + i
        return made

    def merged(self, step: _Step, config: int, quantizes: bool = True) -> None:
        """Runs the one kernel, and checks the sum that it leaves."""
        tiles = -(-self.columns // 128)
        sums, partials = Buffer(4 * self.rows, "cpu"), Buffer(4 * tiles * self.rows, "cpu")
        results = {self.sums: sums} if self.sums else {}
        merged = _Merged(self.arguments(results), step, None, quantizes)
        merged.step.quantize.input = None
        if self.sums:
            merged.row_partials = partials.pointer()
        self.kernels.call("run_merged", self.number, config, merged)
        partials.bytes()
        if self.sums:
            wanted = self.results[self.sums].clone()
            if self.splits is not None:
                wanted[int(self.splits.clamp(0, self.rows).sum()) :] = 0
            torch.testing.assert_close(sums.floats(), wanted, rtol=1e-4, atol=1e-3)


class MergedKernels(Kernels):
    """Runs the merged kernel where a quantise step is asked for."""

    def __init__(self, expression: Expression) -> None:
        super().__init__(expression.library, "cpu")
        self.expression = expression

    def call(self, name: str, *args: object) -> None:
        if name != "run_step":
            super().call(name, *args)
            return
        _, config, step = args
        self.expression.merged(step, config)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("number", range(len(MATHS)), ids=["_".join(each) for each in MATHS])
def test_the_bits_of_both_kernels(library: Path, number: int, recipe: str, case: str) -> None:
    rows, columns, splits = CASES[case]
    sizes = None if splits is None else torch.tensor(splits)
    expression = Expression(library, number, rows, columns, sizes)
    data = Case(expression.quantized, sizes)
    alone = ((True, False), (False, True)) if case == "ragged" else ()
    for rowwise, columnwise in ((True, True), *alone):
        Step(MergedKernels(expression), recipe, data, update=True).launch(rowwise, columnwise)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_sum_alone(library: Path, recipe: str) -> None:
    """Nothing is quantised, so nothing that a copy needs has to be there."""
    expression = Expression(library, len(MATHS) - 1, 200, 136, torch.tensor([0, 5, 130, 0, 33]))
    step = Step(
        MergedKernels(expression), recipe, Case(expression.quantized, expression.splits), True
    )
    bare = _Step(quantize=step.run.arguments())
    expression.merged(bare, step.run.recipe.config, quantizes=False)
