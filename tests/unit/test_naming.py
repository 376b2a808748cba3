"""Derived names: each is read back, and no two things share one."""

from __future__ import annotations

import itertools
import string
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import SPECS, stand_for_others

from fusegen.families.mma_sync import MmaConfig
from fusegen.families.wgmma import Schedule, WgmmaConfig
from fusegen.ir.dtypes import IO_DTYPES, DType
from fusegen.ir.kernel import GemmKind
from fusegen.ir.kernel_set import KernelUnit
from fusegen.ir.naming import (
    Cell,
    ElementKernel,
    GemmKernel,
    GemmUnit,
    camel,
    default_namespace,
    gradient,
    need,
    parameter_argument,
)
from fusegen.ir.plan import ModulePlan
from fusegen.passes.pipeline import resolve
from fusegen.spec.diagnostics import Loc
from fusegen.spec.points import parse_point

WORD = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=6).filter(
    lambda word: word[0] not in string.digits
)
NAME = st.lists(WORD, min_size=1, max_size=3).map("_".join)
EXTENT = st.integers(1, 512)
POINT = st.builds(
    WgmmaConfig,
    tile=st.tuples(*[EXTENT] * 3),
    cluster=st.tuples(*[st.integers(1, 4)] * 2),
    schedule=st.sampled_from(Schedule),
) | st.builds(
    MmaConfig,
    tile=st.tuples(*[EXTENT] * 3),
    warps=st.tuples(*[EXTENT] * 2),
    stages=EXTENT,
    ctas=EXTENT,
)


EVERYTHING = "sm_90a"


@cache
def plans() -> list[ModulePlan]:
    """Every built-in module on one architecture, and one of every form on the others."""
    return [
        plan
        for arch in SPECS.archs
        for plan in resolve(
            SPECS,
            arch,
            [
                Cell(module, recipe)
                for module in (SPECS.modules if arch == EVERYTHING else stand_for_others())
                for recipe in SPECS.recipes
            ],
        ).modules
    ]


@given(NAME, NAME, st.lists(NAME, max_size=3))
def test_cells_are_read_back(module: str, recipe: str, options: list[str]) -> None:
    cell = Cell(module, recipe, tuple(options))
    assert Cell.parse(str(cell)) == cell


@given(POINT)
def test_points_are_read_back(point: WgmmaConfig | MmaConfig) -> None:
    assert type(point).parse(point.name) == point
    assert parse_point(point.name) == point


VARIANT = st.sampled_from(("", "e4m3_e4m3_tensor_fast", "e5m2_e4m3_block_1x128_block_128x128"))


@given(NAME, st.sampled_from(GemmKind), st.sampled_from(IO_DTYPES), POINT, VARIANT)
def test_gemm_kernels_are_read_back(
    family: str, kind: GemmKind, dtype: DType, point: WgmmaConfig | MmaConfig, variant: str
) -> None:
    unit = GemmUnit(f"{family}_sm90", kind, point.name, variant)
    assert GemmUnit.parse(str(unit)) == unit
    kernel = GemmKernel(unit, dtype)
    assert GemmKernel.parse(str(kernel)) == kernel


@given(NAME, st.sampled_from(DType))
def test_element_kernels_are_read_back(base: str, dtype: DType) -> None:
    assert ElementKernel.parse(str(ElementKernel(base, dtype))) == ElementKernel(base, dtype)


@given(NAME, st.integers(1, 10**6), st.integers(1, 10**4))
def test_places_are_read_back(file: str, line: int, column: int) -> None:
    place = Loc(f"specs/ops/{file}.yaml", line, column)
    assert Loc.parse(str(place)) == place


@pytest.mark.parametrize(
    "text", ["", "linear", "linear__", "__bf16", "Linear__bf16", "a__b__", "a__../b"]
)
def test_what_is_no_cell_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not <module>__<recipe>"):
        Cell.parse(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (WgmmaConfig.parse, "cooperative_128x256_2x1"),
        (MmaConfig.parse, "mma_128x128x32_2x2_4"),
        (MmaConfig.parse, "warps_128x128x32_2x2_4_2"),
        (WgmmaConfig.parse, "sideways_128x256x64_2x1"),
        (GemmUnit.parse, "gemm_sm90_fprop"),
        (GemmUnit.parse, "gemm_sm90_fprop_x"),
        (GemmUnit.parse, "gemm_sm90_fprop_cooperative_1x1x1_1x1_bfloat16"),
        (GemmKernel.parse, "gemm_sm90_fprop_cooperative_1x1x1_1x1"),
        (GemmKernel.parse, "gemm_sm90_fprop_bfloat16"),
        (GemmKernel.parse, "gemm_sm90_fprop_bfloat16_x"),
        (GemmKernel.parse, "gemm_sm90_sum_bfloat16_cooperative_1x1x1_1x1"),
        (ElementKernel.parse, "group_sum"),
        (ElementKernel.parse, "group_sum_bf16"),
    ],
)
def test_what_is_no_name_is_refused(parse: object, text: str) -> None:
    assert callable(parse)
    with pytest.raises(ValueError, match=r"is not|not a valid|expected one like"):
        parse(text)


@pytest.mark.slow
def test_every_name_of_every_plan_is_read_back() -> None:
    gemms = elements = 0
    for plan in plans():
        assert str(Cell.parse(plan.cell)) == plan.cell
        for unit in plan.units:
            assert unit.kernels, unit.name
            if not unit.point:
                elements += 1
                for kernel in unit.kernels:
                    assert ElementKernel.parse(kernel.name) == ElementKernel(
                        unit.name, kernel.dtype
                    )
                continue
            gemms += 1
            parsed = GemmUnit.parse(unit.name)
            assert str(parsed) == unit.name
            assert (parsed.kind, parsed.point) == (unit.kind, unit.point)
            assert parse_point(unit.point).name == unit.point
            for kernel in unit.kernels:
                assert GemmKernel.parse(kernel.name) == GemmKernel(parsed, kernel.dtype)
                assert str(GemmKernel(parsed, kernel.dtype)) == kernel.name
    assert gemms > 5
    assert elements > 5


@pytest.mark.slow
def test_no_two_things_share_a_name() -> None:
    everything = plans()
    units = {unit.name: unit for plan in everything for unit in plan.units}
    for unit in (unit for plan in everything for unit in plan.units):
        assert _device_code(units[unit.name]) == _device_code(unit)
    kernels = [kernel.name for unit in units.values() for kernel in unit.kernels]
    assert len(set(kernels)) == len(kernels)
    cells = [(plan.arch, plan.cell) for plan in everything]
    assert len(set(cells)) == len(cells)
    for plan in everything:
        names = [buffer.name for buffer in plan.buffers]
        words = [*names, *(attribute.name for attribute in plan.attributes)]
        words += [
            *plan.forward.flags,
            *(f for f in plan.backward.flags if f not in plan.forward.flags),
        ]
        assert len(set(words)) == len(words), plan.cell
        keywords = [dim.keyword for dim in plan.dims]
        assert len(set(keywords)) == len(keywords)


def _device_code(unit: KernelUnit) -> object:
    """What a unit is made of; the buffers that a module gives its kernels are no part of it."""
    math = unit.pointwise
    values = (*math.operands, *math.results) if math else ()
    signature = tuple((value.symbol, value.access, value.dtype) for value in values)
    named = (unit.template, unit.variant, unit.kernels, unit.kind, unit.point)
    return named, signature, (math.attributes, math.cuda) if math else ()


def test_derived_words() -> None:
    assert default_namespace("fusegen", "sm_90a") == "fusegen_sm_90a"
    assert (gradient("x"), need("x")) == ("dx", "need_dx")
    assert parameter_argument("fc1.weight") == "fc1_weight"
    assert camel("grouped_linear") == "GroupedLinear"
    words = ("x", "weight", "fc1_weight")
    assert len({f(word) for f, word in itertools.product((gradient, need), words)}) == 6
