"""Kernel families, against the device code they describe and against what architectures list."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from plans import SPECS
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from fusegen.checks import archs
from fusegen.emit.kernels.units import unit_context
from fusegen.families import registry, scalings
from fusegen.families.family import Config, Demand, Family, offers
from fusegen.families.limits import hardware_limits
from fusegen.families.registry import FAMILIES, known_family
from fusegen.families.scalings import BLOCK_1X128
from fusegen.families.wgmma import Schedule, WgmmaConfig
from fusegen.ir.dtypes import DType
from fusegen.ir.fields import STRICT, Positive
from fusegen.ir.kernel import GemmKind, Store
from fusegen.ir.kernel_set import Variant
from fusegen.ir.naming import Cell
from fusegen.ir.quantization import (
    Accumulation,
    Extent,
    HadamardSpec,
    Orientation,
    QuantizationSpec,
    Role,
    ScaleRule,
    Scaling,
)
from fusegen.passes.pipeline import Plan, resolve
from fusegen.publish.paths import builtin_templates
from fusegen.spec import points
from fusegen.spec.arch import Every, FamilySpec, capability_of
from fusegen.spec.offered import offered
from fusegen.steps import definition
from fusegen.steps.launch import Origin

from .device_code import CSRC, constant, traits

COOPERATIVE, PINGPONG = Schedule.COOPERATIVE, Schedule.PINGPONG


def known(name: str) -> Family:
    family = known_family(name)
    assert family is not None, name
    return family


def test_numbers_are_those_of_the_device_code() -> None:
    layout = known("gemm_fp8_sm90").layout
    assert layout and layout.token_alignments == (constant("gemm/gemm_fp8.h", "kTokenAlignment"),)
    assert constant("gemm/gemm_fp8.h", "kScaleBlock") == BLOCK_1X128.columns
    for family in ("quantize", "quantize_several", "pointwise_quantize"):
        assert known(family).most_history == constant("quantize/quantize.h", "kMostSlots")
    assert known("quantize_several").most_parts == constant("quantize/several.h", "kMost")
    pitches = {family.layout.pitch for family in FAMILIES if family.layout}
    assert pitches == {constant("common/rows.h", "kPitch")}
    alignments = {family.row_alignment for family in FAMILIES}
    assert alignments == {1, constant("common/rows.h", "kRowAlignment")}


def test_scalings_are_those_of_the_device_code() -> None:
    """The blocks that `Scaling` can be instantiated for, and names of `Fp8Scaling` and its sums."""
    bounds = re.search(
        r"kLeastBlock = (\d+), kMostBlock = (\d+);",
        (CSRC / "quantize/config.cuh").read_text(encoding="utf-8"),
    )
    assert bounds
    least, most = map(int, bounds.groups())
    sizes = [n for n in range(least, most + 1) if n & (n - 1) == 0]
    assert [*scalings.BLOCKS] == sizes
    blocks = [each for each in scalings.ALL if each.columns is not Extent.ALL]
    assert {each.extents for each in blocks} == {(r, n) for n in sizes for r in (1, n)}
    rules = {each.rule for each in scalings.ALL}
    assert len(enumerators("quantize/config.cuh", "Rule")) == len(rules) == len(ScaleRule)
    fp8 = known("gemm_fp8_sm90")
    words = {fp8.enumerator(word) for word in fp8.scalings}
    assert enumerators("gemm/gemm_fp8.h", "Fp8Scaling") == words
    ways = {fp8.enumerator(way.value) for way in fp8.accumulations}
    assert enumerators("gemm/gemm_fp8.h", "Accumulation") == ways


def enumerators(file: str, name: str) -> set[str]:
    found = re.search(rf"enum class {name} {{(.*?)}}", (CSRC / file).read_text("utf-8"), re.S)
    assert found, name
    return {*re.findall(r"\w+", re.sub(r"//.*", "", found[1]))}


@pytest.mark.parametrize("recipe", SPECS.recipes)
def test_scalings_of_recipes_are_what_families_know(recipe: str) -> None:
    """A name says extents, rule, format and second level: those of the recipe and of the family."""
    by_name = {each.name: each for each in scalings.ALL}
    for spec in SPECS.recipes[recipe].roles.values():
        assert by_name[spec.scaling] == spec.shares
        assert Scaling.parse(spec.scaling) == spec.shares


def test_words_that_are_no_scaling() -> None:
    for word in ("rows", "block_1", "block_1xall", "mx_32", "nv_axb", ""):
        assert Scaling.parse(word) is None


PARTS = {"constants", "decode", "epilogue", "epilogue_headers", "expression", "plain"}


def test_every_template_of_kernels_has_a_family() -> None:
    templates = {
        path.name.removesuffix(".cu.j2") for path in (builtin_templates() / "csrc").glob("*.cu.j2")
    }
    names = [family.name for family in FAMILIES]
    assert len({*names}) == len(names)
    own = {family.name for family in FAMILIES if not family.device}
    assert templates - own == PARTS, "parts of others"
    assert own <= templates


def test_every_family_stands_in_a_file_of_its_name() -> None:
    folder = Path(inspect.getfile(registry)).parent
    for family in FAMILIES:
        module = importlib.import_module(f"fusegen.families.{family.name}")
        assert getattr(module, family.name.upper()) is family
        assert (folder / f"{family.name}.py").is_file()


def test_every_family_has_a_word_for_each_thing_it_accepts() -> None:
    for family in FAMILIES:
        assert family.implements and family.formats and family.stores
        assert {*family.transformed} <= {*family.converts}
        assert (family.layout is None) == (not family.scalings)
        assert {*family.enumerators} <= {*family.scalings, *(a.value for a in family.accumulations)}


def test_families_run_where_their_instructions_are() -> None:
    """Device code without a suffix, and that of mma.sync, runs from 8.0 on; of FP8 from 8.9 on."""
    for family in FAMILIES:
        word = family.name.rpartition("_")[2]
        own = {"sm90": "sm_90a", "tcgen05": "sm_100a"}.get(word)
        refuses = {"sm_75", *(["sm_80"] if family.name == "gemm_fp8_mma" else [])}
        for arch in ("sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"):
            capability = capability_of(arch)
            assert capability
            refused = arch in refuses or own not in (None, arch)
            assert bool(family.cannot_run_on(arch, capability)) == refused, (family.name, arch)
    assert known("gemm_fp8_mma").cannot_run_on("sm_86", (8, 6))


def test_an_architecture_offers_no_more_than_its_families() -> None:
    """What the plan asks of a listed family, the family itself accepts or refuses by one rule."""
    for arch in SPECS.archs.values():
        for name, spec in arch.kernels.items():
            family = known(spec.template or name)
            for demand in demands(family):
                if offers(spec, demand):
                    assert offers(family, demand)


def demands(family: Family) -> Iterator[Demand]:
    words = family.scalings or ("",)
    ways = tuple(each.value for each in family.accumulations) or ("",)
    for primitive, store in product(family.implements, family.stores):
        for format, scaling, way in product(family.formats, words, ways):
            variant = Variant(
                (format,), (scaling,) if scaling else (), (way,) if way else (), store
            )
            yield Demand(primitive, variant=variant)


def test_a_family_says_what_it_has_no_code_for() -> None:
    fp8, quantize = known("gemm_fp8_sm90"), known("quantize")
    blocks = ("block_1x128", "block_128x128")

    def gemm_of(scaled: tuple[str, ...], way: str, kind: GemmKind) -> str | None:
        variant = Variant((DType.E4M3,), scaled, (way,))
        return fp8.accepts(Demand("gemm", kind, variant))

    def quantised(scaling: str, *traits: str, history: int = 0) -> str | None:
        variant = Variant((DType.E2M1,), (scaling,), traits)
        return quantize.accepts(Demand("quantize", None, variant, history))

    assert gemm_of(blocks, "split_128", GemmKind.FPROP) is None
    assert gemm_of(blocks[:1] * 2, "split_128", GemmKind.WGRAD) is None
    assert gemm_of(blocks, "fast", GemmKind.FPROP) == "fprop of block_1x128 in fast sums"
    assert gemm_of(blocks, "split_128", GemmKind.WGRAD) == (
        "wgrad of block_1x128 of grad_output and block_128x128 of input"
    )
    assert quantised("nv_1x16", "hadamard") is None
    assert quantised("mx_1x32", "hadamard") == (
        "a transform before mx_1x32, quantize has it before nv_1x16"
    )
    assert quantised("tensor", history=1024) is None
    assert "a history of 1025" in str(quantised("tensor", history=1025))
    assert quantised("block_1x64") is None
    assert quantised("block_1x256") == "quantize of e2m1_block_1x256"
    assert quantised("block_64x128") == "quantize of e2m1_block_64x128"


def test_what_an_architecture_has_in_words() -> None:
    assert offered("quantize", ARCH) == (
        "it has quantize of e4m3, e5m2, e2m1 by tensor, row, block_1xN, pow2_1xN, mx_1xN, nv_1xN,"
        " block_NxN, pow2_NxN, mx_NxN, nv_NxN, N one of 16, 32, 64, 128"
    )
    assert offered("gemm", ARCH) == (
        "it has gemm of what is not quantised; gemm of e4m3, e5m2 by tensor, row in fast sums;"
        " gemm of e4m3, e5m2 by tensor, row in split_128 sums;"
        " gemm of e4m3, e5m2 by block_1x128, block_128x128 in split_128 sums; gemm of bfloat16"
    )
    bare = replace(ARCH, kernels={"group_sum": ARCH.kernels["group_sum"]})
    assert offered("gemm", bare) == "it has column_sum, group_sum"
    assert offered("gemm", replace(ARCH, kernels={})) == "it has none"
    own = FamilySpec(("quantize",), (DType.E4M3,), Every.ANY, template="mine")
    assert "nv_NxN" in offered("quantize", replace(ARCH, kernels={"own": own}))


# Launches


def test_launches_of_steps_are_those_of_their_families() -> None:
    """The struct that a launcher fills is the one that dispatch headers and units take."""
    cells = [Cell(m, r) for m in ("grouped_mlp", "grouped_linear") for r in ("bf16", "fp8_delayed")]
    cells += [Cell("linear", "nvfp4", ("debug",)), Cell("grouped_linear_swiglu", "bf16")]
    found = set()
    for plan in resolve(SPECS, "sm_90a", [c for c in cells if c.module in SPECS.modules]).modules:
        templates = {each.name: each.template for each in plan.kernel_sets}
        for step in plan.steps:
            launch = definition(step.primitive).launch
            if launch is not None:
                family = known(templates[step.kernels or ""])
                own = launch(step)  # what an epilogue reads has a default in the struct
                fields = tuple(each for each in own.fields if each.origin is not Origin.EPILOGUE)
                assert replace(own, fields=fields) == family.launch, step
                found.add(family.name)
    assert len(found) > 6


def test_structs_are_declared_by_the_headers_that_launches_name() -> None:
    for family in FAMILIES:
        text = (CSRC / family.launch.header).read_text(encoding="utf-8")
        assert f"struct {family.launch.arguments} {{" in text
        if family.device:
            device = (CSRC / family.device).read_text(encoding="utf-8")
            assert f"launch_{family.name}(const {family.launch.arguments}& in" in device


def test_only_grids_of_gemms_know_how_many_multiprocessors_there_are() -> None:
    """Which CTA computes a tile depends on that number, and no result does: see the schedule."""
    grids = (Origin.MULTIPROCESSORS, Origin.PRODUCT)
    asking = {
        family.name
        for family in FAMILIES
        for launch in (family.launch, family.launch.base)
        if launch and any(field.origin in grids for field in launch.fields)
    }
    assert asking == {name for name in (f.name for f in FAMILIES) if name.startswith("gemm_")}
    lines = [
        line.split("//")[0].strip()
        for path in CSRC.rglob("*.cuh")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "sm_count" in line
    ]
    assert lines[0] == "const int64_t clusters = int64_t(in.sm_count) * T::kCtas / Config::cluster;"
    assert all("clusters < 1" in line for line in lines[1:])


# Constants that units state


def test_units_state_what_families_derive() -> None:
    """Every number of a configuration, in the unit that is compiled for it."""
    cells = [Cell("grouped_linear", recipe) for recipe in ("bf16", "fp8_block", "mxfp8", "nvfp4")]
    seen: set[str] = set()
    limits_of = {
        "sm_90a": "<232448, 65536>",
        "sm_80": "<166912, 65536>",
        "sm_100a": "<232448, 65536>",
        "sm_120a": "<101376, 65536>",
    }
    for arch, limits in limits_of.items():
        for plan in resolve(SPECS, arch, cells).modules:
            for unit in (unit for kernels in plan.kernel_sets for unit in kernels.units):
                context = unit_context(unit, "ns")
                stated = dict(context.constants)
                seen |= {*stated}
                if unit.point:
                    tile = points.as_spec(points.parse_point(unit.point))["tile"]
                    assert [stated["tile_m"], stated["tile_n"], stated["tile_k"]] == tile
                    assert context.config.endswith(f"fusegen::Limits{limits}")
    assert seen == compared()


def compared() -> set[str]:
    """Constants that device code holds against its own, each with its name in the message."""
    found = set()
    for path in CSRC.rglob("*.*h"):
        claims = r"static_assert\(Stated::(\w+) == [^;]*?\"(\w+): unit against"
        for name, said in re.findall(claims, path.read_text(encoding="utf-8"), re.S):
            assert name == said
            found.add(name)
    return found


# Resources


ARCH = SPECS.archs["sm_90a"]


CONFIGURATIONS = [
    (name, kind, point, store, pair)
    for name, spec in ARCH.kernels.items()
    for kind, each in spec.kinds.items()
    for point in each.points
    for store in (Store.IO, Store.UNARY, Store.BINARY, Store.FP32, Store.ADD)
    for pair in known(spec.template or name).multiplies or (None,)
    if pair is None or spec.scales(pair.tokens.name)
]


def test_resources_are_what_the_device_code_computes() -> None:
    """Two derivations of stages, buffers, bytes, threads and registers, for every configuration."""
    assert len(CONFIGURATIONS) > 100
    for name, kind, point, store, pair in CONFIGURATIONS:
        family = known(ARCH.kernels[name].template or name)
        configured = family.configured
        assert configured
        fp8 = DType.E4M3 in family.formats
        blocks = pair is not None and pair.tokens == BLOCK_1X128
        rows, columns, _ = point.tile
        extra = 4 * (rows + (columns if kind is GemmKind.WGRAD else 0)) if blocks else 0
        control = 1024 if fp8 and kind is not GemmKind.WGRAD else 2048
        loads = store in (Store.BINARY, Store.ADD)
        device = traits(point, 1 if fp8 else 2, loads, extra, control, ARCH.limits)
        variant = Variant(family.formats[:1], pair.of(kind) if pair else (), (), store)
        got = dict(configured.constants(point, kind, variant, ARCH.limits))
        assert got["stages"] == device["kStages"] >= 3
        assert got["store_buffers"] == device["kBuffers"] >= 1
        assert got["shared_bytes"] == device["kUsedBytes"] <= ARCH.limits["shared_memory"]
        assert got["threads"] == device["kThreads"]
        assert got["loader_registers"] == device["kLoaderRegisters"]
        assert got["math_registers"] == device["kMathRegisters"]
        assert got["accumulators"] == device["kWaves"] * columns // 2 <= 192
        math = got["math_warpgroups"] * got["math_registers"]
        assert 128 * (got["loader_registers"] + math) <= ARCH.limits["registers"]


def test_limits_are_what_the_hardware_has() -> None:
    for arch in SPECS.archs.values():
        limits = hardware_limits(arch.capability)
        assert dict(arch.limits) == limits
        assert bool(limits) == arch.has_kernels
    assert not hardware_limits((7, 5)) and not hardware_limits(None)


@pytest.mark.parametrize(
    ("name", "capability", "gencode", "kib"),
    [
        ("sm_80", (8, 0), "arch=compute_80,code=[sm_80,compute_80]", 99),
        ("sm_80", (8, 0), "arch=compute_80,code=sm_80", 99),
        ("sm_87", (8, 7), "arch=compute_87,code=sm_87", 99),
        ("sm_86", (8, 6), "arch=compute_86,code=[sm_86,compute_86]", 99),
        ("sm_90", (9, 0), "arch=compute_90,code=sm_90", 227),
        ("sm_90", (9, 0), "arch=compute_90,code=[sm_90,compute_90]", 99),
        ("sm_90a", (9, 0), "arch=compute_90a,code=sm_90a", 227),
        ("sm_100a", (10, 0), "arch=compute_100a,code=sm_100a", 227),
    ],
)
def test_the_least_that_code_can_meet(
    name: str, capability: tuple[int, int], gencode: str, kib: int
) -> None:
    """Own memory where the code is tied to one GPU, or no later one that runs it has less."""
    limits = hardware_limits(capability)
    arch = replace(SPECS.archs["sm_80"], arch=name, gencode=gencode, limits=limits)
    assert arch.capability == capability
    assert arch.least_limits == {"shared_memory": kib * 1024, "registers": 65536}
    assert replace(arch, limits={}).least_limits == {}
    for family in FAMILIES:
        assert family.configured is None or {*family.configured.limits} == {*ARCH.limits}


def problems(
    family: str, *tile: int, cluster: tuple[int, int] = (2, 1), schedule: Schedule = COOPERATIVE,
    kind: GemmKind = GemmKind.FPROP, split: bool = False, scaling: str = "tensor",
) -> list[str]:  # fmt: skip
    configured = known(family).configured
    assert configured
    way = Accumulation.SPLIT_128 if split else Accumulation.FAST
    variant = Variant((), (scaling, scaling), (way.value,))
    rows, columns, k = tile
    point = WgmmaConfig(schedule, (rows, columns, k), cluster)
    return list(configured.problems(point, kind, variant, ARCH.limits))


@validated(frozen=True, slots=True, config=STRICT)
class WarpConfig:
    """What another family may have: tiles of warps, and stages of a ring."""

    tile: tuple[Positive, Positive, Positive]
    warps: Positive
    stages: Positive

    @property
    def name(self) -> str:
        tile = "x".join(map(str, self.tile))
        return f"warps_{tile}_{self.warps}_{self.stages}"

    @classmethod
    def parse(cls, name: str) -> WarpConfig:
        word, tile, warps, stages = name.split("_")
        m, n, k = map(int, tile.split("x"))
        if word != "warps":
            raise ValueError(f"point {name!r}: expected one like warps_128x128x32_4_3")
        return cls((m, n, k), int(warps), int(stages))

    def cpp(self, limits: Mapping[str, int]) -> str:
        return ", ".join(map(str, (*self.tile, self.warps, self.stages, limits["shared_memory"])))


def test_points_are_of_the_type_that_a_family_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields say which type a point is of; one that is another family's is refused."""
    monkeypatch.setattr(points, "CONFIGS", (WgmmaConfig, WarpConfig))
    adapter: TypeAdapter[Config] = TypeAdapter(points.Point)
    monkeypatch.setattr(points, "_ADAPTER", adapter)
    said = {"tile": [128, 64, 32], "warps": 4, "stages": 3}
    point = points.point_of(said)
    assert point == WarpConfig((128, 64, 32), 4, 3)
    assert points.as_spec(point) == said
    assert points.parse_point(point.name) == point
    own = WgmmaConfig(COOPERATIVE, (128, 256, 64), (2, 1))
    assert points.parse_point(own.name) == own
    assert {"WgmmaConfig", "WarpConfig"} <= {*adapter.json_schema()["$defs"]}
    family, spec = known("gemm_sm90"), ARCH.kernels["gemm_sm90"]
    assert family.configured
    variants = archs.variants_of(GemmKind.FPROP, "gemm_sm90", spec, family)
    (problem,) = archs.point_problems(
        family.configured, GemmKind.FPROP, point, variants, ARCH.limits
    )
    assert problem == "its points say schedule, tile, cluster; this one is another family's"
    with pytest.raises(ValueError, match="expected one like cooperative_128x256x64_2x1"):
        points.parse_point("sideways_1_2_3")


def test_problems_of_a_point_are_told_of_the_type_that_most_keys_are_of() -> None:
    for said, field in (
        ({"schedule": "pingpong", "tile": [64, 128, 64], "cluster": "2"}, "cluster"),
        ({"tile": [64, 128, 64], "warps": [2], "stages": 3, "ctas": 2}, "warps"),
        ({"tile": [64, 128, 64], "warps": [2, 2], "stages": 3, "ctas": 2, "clutser": 1}, "clutser"),
    ):
        with pytest.raises(ValidationError) as caught:
            points.point_of(said)
        assert {error["loc"][0] for error in caught.value.errors()} == {field}


def test_points_that_compile_are_accepted() -> None:
    plain, fp8 = "gemm_sm90", "gemm_fp8_sm90"
    assert not problems(plain, 256, 192, 64)
    assert not problems(plain, 192, 256, 64)
    assert not problems(plain, 64, 256, 64, schedule=PINGPONG)
    assert not problems(fp8, 128, 256, 128, split=True, kind=GemmKind.WGRAD)
    assert not problems(fp8, 192, 128, 128, split=True, scaling="block_1x128")


@pytest.mark.parametrize(
    ("tile", "given", "word"),
    [
        ((128, 256, 128), {}, "64 elements along K"),
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
    """Why a recipe with some roles changed cannot be on Hopper."""
    return [cell.reason for cell in changed(recipe, module, roles).unsupported]


def changed(recipe: str, module: str, roles: Mapping[str, QuantizationSpec | None]) -> Plan:
    """The plan of a recipe with some roles changed, on Hopper."""
    spec = SPECS.recipes[recipe]
    given = {**spec.roles, **{Role(name): role for name, role in roles.items() if role}}
    specs = replace(SPECS, recipes={"toy": replace(spec, recipe="toy", roles=given)})
    specs = replace(specs, sources={**SPECS.sources, **_sources("toy", recipe)})
    return resolve(specs, "sm_90a", [Cell(module, "toy")])


def _sources(name: str, origin: str) -> dict[object, object]:
    from fusegen.spec.kinds import SpecKind

    return {(SpecKind.RECIPES, name): SPECS.source(SpecKind.RECIPES, origin)}


def emulated(recipe: str, **roles: QuantizationSpec | None) -> str:
    """Why GEMMs of a recipe with some roles changed read decoded operands, if they do."""
    plan = changed(recipe, "linear", roles)
    assert not plan.unsupported
    (module,) = plan.modules
    return module.reason.removesuffix("; operands are decoded to bfloat16")


def test_operands_that_scale_otherwise_than_a_gemm_reads_them() -> None:
    """Each scaling is among the family's, but its kernels read one pair of scalings only."""
    tensor = SPECS.recipes["fp8_current"].roles
    row = SPECS.recipes["fp8_rowwise"].roles
    block = SPECS.recipes["fp8_block"].roles
    assert emulated("fp8_current") == "compiled kernels"
    assert emulated("fp8_current", weight=row[Role.WEIGHT]) == (
        "sm_90a has no kernels for fprop of tensor of input and row of weight"
    )
    assert emulated("fp8_current", grad_output=row[Role.GRAD_OUTPUT], weight=row[Role.WEIGHT])
    assert emulated("fp8_block", weight=block[Role.INPUT]) == (
        "sm_90a has no kernels for fprop of block_1x128 of input and block_1x128 of weight"
    )
    assert emulated("fp8_block", input=block[Role.WEIGHT])
    assert emulated("fp8_rowwise", input=tensor[Role.INPUT])


@pytest.mark.parametrize("block", [(1, 64), (64, 64), (1, 16), (16, 16)])
def test_blocks_that_no_gemm_reads_are_decoded(block: tuple[int, int]) -> None:
    for recipe in ("fp8_block", "mxfp8"):
        roles = {
            role.value: replace(spec, block=block)
            for role, spec in SPECS.recipes[recipe].roles.items()
        }
        name = roles["input"].scaling
        for module in ("linear", "grouped_linear", "grouped_mlp", "quantize"):
            assert not changed(recipe, module, roles).unsupported
        assert emulated(recipe, **roles).startswith(
            f"sm_90a has no kernels for gemm of e4m3_e4m3_{name}_"
        )


@pytest.mark.parametrize("block", [(1, 8), (1, 256), (1, 96), (64, 128), (2, 2), (4, Extent.ALL)])
def test_blocks_that_no_kernel_has_are_refused_with_those_there_are(
    block: tuple[int | Extent, int | Extent],
) -> None:
    roles = {
        role.value: replace(spec, block=block)
        for role, spec in SPECS.recipes["fp8_block"].roles.items()
    }
    for module in ("linear", "grouped_linear", "quantize"):
        (reason,) = reasons("fp8_block", module, **roles)
        assert reason == (
            f"sm_90a has no kernels for quantize of e4m3_{roles['input'].scaling};"
            f" {offered('quantize', ARCH)}"
        )


def test_a_longer_history_than_kernels_keep() -> None:
    role = SPECS.recipes["fp8_delayed"].roles[Role.INPUT]
    longer = replace(role, scale=replace(role.scale, history=1025))
    (reason,) = reasons("fp8_delayed", input=longer)
    assert reason.startswith("sm_90a has no kernels for a history of 1025 amaxes")


def test_a_transform_that_kernels_do_not_have() -> None:
    transformed = {
        role.value: replace(
            SPECS.recipes["mxfp8"].roles[role], hadamard=HadamardSpec(16, Orientation.COLUMNWISE)
        )
        for role in (Role.INPUT, Role.GRAD_OUTPUT)
    }
    (reason,) = reasons("mxfp8", **transformed)
    assert "a transform before mx_1x32" in reason


def test_a_scale_of_several_rows_is_no_scale_of_a_row() -> None:
    role = SPECS.recipes["fp8_rowwise"].roles[Role.WEIGHT]
    assert role.scaling == "row"
    assert replace(role, block=(4, role.block[1])).scaling == "block_4xall"
