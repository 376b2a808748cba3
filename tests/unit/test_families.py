"""The table of what device code can do, against that code and against what architectures list."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fusegen.checks.load import load
from fusegen.families.table import _SHARED_BYTES, FAMILIES, PITCH, Family
from fusegen.ir.kernel import GemmKind, PointSpec, Schedule
from fusegen.ir.naming import Cell
from fusegen.ir.quantization import Accumulation, HadamardSpec, Orientation, QuantizationSpec, Role
from fusegen.passes.pipeline import resolve
from fusegen.paths import builtin_specs, builtin_templates
from fusegen.spec.arch import FamilySpec

SPECS = load([builtin_specs()])
CSRC = builtin_templates() / "static" / "csrc" / "fusegen"
COOPERATIVE, PINGPONG = Schedule.COOPERATIVE, Schedule.PINGPONG


def constant(file: str, name: str) -> int:
    found = re.search(rf"\b{name} = (\d+);", (CSRC / file).read_text(encoding="utf-8"))
    assert found, name
    return int(found[1])


def test_numbers_are_those_of_the_device_code() -> None:
    assert constant("config_sm90.cuh", "kSharedBytes") == _SHARED_BYTES
    fp8 = FAMILIES["gemm_fp8_sm90"]
    assert fp8.token_alignments == (constant("gemm_fp8.h", "kTokenAlignment"),)
    for family in ("quantize_sm90", "pointwise_quantize_sm90"):
        assert FAMILIES[family].most_history == constant("quantize.h", "kMostSlots")
    assert "pitch % 16 != 0" in (CSRC / "quantize_config.cuh").read_text(encoding="utf-8")
    assert PITCH == 16


def test_every_template_of_kernels_has_a_row() -> None:
    templates = {
        path.name.removesuffix(".cu.j2") for path in (builtin_templates() / "csrc").glob("*.cu.j2")
    }
    assert templates - {*FAMILIES} == {"decode", "expression"}, "parts of others"
    assert {*FAMILIES} <= templates


def test_families_of_launch_cuh_need_its_instructions() -> None:
    for name, family in FAMILIES.items():
        assert family.cannot_run_on("sm_80", (8, 0)), name
        assert not family.cannot_run_on("sm_90a", (9, 0)), name
        assert bool(family.cannot_run_on("sm_100a", (10, 0))) == name.startswith("gemm_")


def problems(
    family: str, *tile: int, cluster: tuple[int, int] = (2, 1), schedule: Schedule = COOPERATIVE,
    kind: GemmKind = GemmKind.FPROP, split: bool = False, scalings: tuple[str, ...] = ("tensor",),
) -> list[str]:  # fmt: skip
    known: Family = FAMILIES[family]
    way = Accumulation.SPLIT_128 if split else Accumulation.FAST
    spec = FamilySpec(known.implements, scalings=scalings, accumulations=(way,))
    rows, columns, depth = tile
    return list(
        known.point_problems(kind, spec, PointSpec((rows, columns, depth), cluster, schedule))
    )


def test_points_that_compile_are_accepted() -> None:
    plain, fp8 = "gemm_sm90", "gemm_fp8_sm90"
    assert not problems(plain, 256, 192, 64)
    assert not problems(plain, 192, 256, 64)
    assert not problems(plain, 64, 256, 64, schedule=PINGPONG)
    assert not problems(fp8, 128, 256, 128, split=True, kind=GemmKind.WGRAD)
    assert not problems(fp8, 192, 128, 128, split=True, scalings=("block_1x128",))


@pytest.mark.parametrize(
    ("tile", "given", "word"),
    [
        ((128, 256, 128), {}, "depth of 64"),
        ((64, 128, 64), {}, "128, 192 or 256 rows"),
        ((192, 128, 64), {"schedule": PINGPONG}, "64 or 128 rows"),
        ((128, 320, 64), {}, "columns"),
        ((128, 128, 64), {"cluster": (1, 2)}, "cluster"),
        ((128, 128, 64), {"cluster": (4, 1)}, "cluster"),
        ((256, 256, 64), {}, "accumulators"),
    ],
)
def test_points_that_do_not_compile_are_refused(
    tile: tuple[int, int, int], given: dict[str, object], word: str
) -> None:
    found = problems("gemm_sm90", *tile, **given)  # type: ignore[arg-type]
    assert any(word in problem for problem in found), found


# What the names of formats and scalings do not say


def reasons(recipe: str, module: str = "linear", **roles: QuantizationSpec | None) -> list[str]:
    """Of a recipe with some roles changed, on Hopper."""
    spec = SPECS.recipes[recipe]
    changed = {**spec.roles, **{Role(name): role for name, role in roles.items() if role}}
    specs = replace(SPECS, recipes={"toy": replace(spec, recipe="toy", roles=changed)})
    specs = replace(specs, sources={**SPECS.sources, **_sources("toy", recipe)})
    plan = resolve(specs, "sm_90a", [Cell(module, "toy")])
    return [cell.reason for cell in plan.unsupported]


def _sources(name: str, origin: str) -> dict[object, object]:
    from fusegen.spec.kinds import SpecKind

    return {(SpecKind.RECIPES, name): SPECS.source(SpecKind.RECIPES, origin)}


def test_operands_that_scale_otherwise_than_a_product_reads_them() -> None:
    """Each scaling is among the family's, but its kernels read one pair of scalings only."""
    tensor = SPECS.recipes["fp8_current"].roles
    row = SPECS.recipes["fp8_rowwise"].roles
    block = SPECS.recipes["fp8_block"].roles
    assert reasons("fp8_current") == []
    assert reasons("fp8_current", weight=row[Role.WEIGHT]) == [
        "sm_90a has no kernels for fprop of tensor of input and row of weight"
    ]
    assert reasons("fp8_current", grad_output=row[Role.GRAD_OUTPUT], weight=row[Role.WEIGHT])
    assert reasons("fp8_block", weight=block[Role.INPUT]) == [
        "sm_90a has no kernels for fprop of block_1x128 of input and block_1x128 of weight"
    ]
    assert reasons("fp8_block", input=block[Role.WEIGHT])
    assert reasons("fp8_rowwise", input=tensor[Role.INPUT])


def test_a_longer_history_than_kernels_keep() -> None:
    role = SPECS.recipes["fp8_delayed"].roles[Role.INPUT]
    longer = replace(role, scale=replace(role.scale, history=1025))
    (reason,) = reasons("fp8_delayed", input=longer)
    assert reason.startswith("sm_90a has no kernels for a history of 1025 amaxes")


def test_a_transform_that_kernels_do_not_have() -> None:
    changed = {
        role.value: replace(
            SPECS.recipes["mxfp8"].roles[role], hadamard=HadamardSpec(16, Orientation.COLUMNWISE)
        )
        for role in (Role.INPUT, Role.GRAD_OUTPUT)
    }
    (reason,) = reasons("mxfp8", **changed)
    assert "a transform before mx_1x32" in reason


def test_a_scale_of_several_rows_is_no_scale_of_a_row() -> None:
    role = SPECS.recipes["fp8_rowwise"].roles[Role.WEIGHT]
    assert role.scaling == "row"
    assert replace(role, block=(4, role.block[1])).scaling == "block_4xall"
