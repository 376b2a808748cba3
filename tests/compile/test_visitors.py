"""What becomes of a GEMM's sums between their accumulation and their storing, on the CPU.

A fragment's coordinates, the loop over its parts and every visitor are those that kernels use; they
know no architecture. Results are compared with plain arithmetic on whole matrices, bit for bit.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from enum import IntEnum

import pytest
import torch
from torch import Tensor

from .quantize_harness import CSRC, Buffer, Kernels, Pointer, address, compile_for_cpu

Int = ctypes.c_int32
GROUPS = 3
BEGIN, TOKENS = 40, 101  # of the tile's group
UNWRITTEN = -12345.0
ROOMS = ("fragment", "sink", "tile_source", "visit")
HOPPER = re.compile(r"#include \".*\.sm\d+\.cuh\"|\basm\b")


class Gemm(IntEnum):
    """Kinds and stores, as visit_values.cuh counts them."""

    FPROP = 0
    FPROP_SCALED_BIAS = 1
    DGRAD = 2
    WGRAD = 3


class Scales(IntEnum):
    NONE = 0
    TENSORS = 1
    ROWS_AND_COLUMNS = 2
    AMAXES = 3


@dataclass(frozen=True, slots=True)
class Extents:
    """Of a warp's fragment: strips of 16 rows, and how far apart they are."""

    columns: int
    strips: int = 1
    step: int = 16

    def rows(self, first: int) -> list[int]:
        return [first + strip * self.step + i for strip in range(self.strips) for i in range(16)]


EXTENTS = (Extents(64), Extents(128, 4), Extents(192, 2, 64))


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("tile", Int * 8),
        ("place", Int * 2),
        ("group_sizes", Pointer),
        ("shape", Int * 6),  # the last one fills a word
        ("scales", Int),
        ("per_group", Int),
        ("half", Int),
        ("sums", Pointer),
        ("results", Pointer),
        ("scale_a", Pointer),
        ("scale_b", Pointer),
        ("bias", Pointer),
        ("row_scales", Pointer),
    ]


@dataclass(frozen=True, slots=True)
class Place:
    """A tile, and where the warp's fragment begins in it."""

    name: str
    rows: int
    columns: int  # of the result
    row: int = 0  # the fragment's first
    column: int = 0  # the tile's first
    group: int = 1
    k: int = 512


PLACES = (
    Place("inside", 200, 256),
    Place("edges", 73, 136, row=16, column=64),
    Place("no rows of the warp", 30, 64, row=48),
    Place("no contraction", 128, 256, k=0),
    Place("rows that no group has", 128, 200, group=GROUPS, k=0),
)
TILE_ROW = 8  # the tile's first, counted from its group's


@dataclass(frozen=True, slots=True)
class Case:
    gemm: Gemm
    scales: Scales
    place: Place
    per_group: bool = True
    bias: torch.dtype | None = None
    """None: none is given."""

    @property
    def name(self) -> str:
        each = "" if self.per_group else "one "
        bias = "" if self.bias is None else f" {self.bias}"
        return f"{self.gemm.name} {each}{self.scales.name}{bias} {self.place.name}".lower()


def _cases() -> list[Case]:
    scaled = [
        Case(gemm, scales, place)
        for gemm in (Gemm.FPROP, Gemm.DGRAD, Gemm.WGRAD)
        for scales in Scales
        for place in PLACES
        if gemm is not Gemm.WGRAD or place.group < GROUPS
    ]
    biased = [
        Case(gemm, scales, place, bias=dtype)
        for gemm in (Gemm.FPROP, Gemm.FPROP_SCALED_BIAS)
        for scales in (Scales.NONE, Scales.ROWS_AND_COLUMNS)
        for place in PLACES
        for dtype in (torch.bfloat16, torch.float16)
    ]
    without = Case(Gemm.FPROP_SCALED_BIAS, Scales.NONE, PLACES[0])
    return [*scaled, *biased, without, Case(Gemm.FPROP, Scales.TENSORS, PLACES[0], False)]


class Operands:
    """What the visitors of a case read, drawn at random: NaN where they must not."""

    def __init__(self, case: Case) -> None:
        rng = torch.Generator().manual_seed(7)
        place = case.place
        wgrad = case.gemm is Gemm.WGRAD
        rows = GROUPS * (TILE_ROW + place.rows) if wgrad else BEGIN + TOKENS + place.rows

        def drawn(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=rng) + 0.5

        self.sums = torch.randn(place.rows, place.columns, generator=rng)
        by_rows = case.scales is Scales.ROWS_AND_COLUMNS
        self.a = drawn(rows if by_rows else GROUPS)
        self.b = drawn(GROUPS, place.columns) if by_rows else drawn(GROUPS)
        if not case.per_group:
            self.a[1:], self.b[1:] = torch.nan, torch.nan
        self.row_scales = drawn(BEGIN + TOKENS)
        self.bias = None if case.bias is None else drawn(GROUPS, place.columns).to(case.bias)

    def expected(self, case: Case) -> Tensor:
        """The whole tile, visited in plain arithmetic."""
        place, values = case.place, self.sums.clone()
        group = place.group if case.per_group else 0
        if case.scales is not Scales.NONE and place.k == 0:
            values *= 0.0
        elif case.scales is Scales.TENSORS:
            values *= self.a[group] * self.b[group]
        elif case.scales is Scales.AMAXES:
            values *= self.a[group] * self.b[group] / (448.0 * 6.0) ** 2
        elif case.scales is Scales.ROWS_AND_COLUMNS:
            wgrad = case.gemm is Gemm.WGRAD
            first = TILE_ROW + (group * (TILE_ROW + place.rows) if wgrad else BEGIN)
            values *= self.a[first : first + place.rows, None]
            values *= self.b[group]
        if self.bias is not None and group < GROUPS:
            added = self.bias[group].float()
            if case.gemm is Gemm.FPROP_SCALED_BIAS:
                tokens = BEGIN + TILE_ROW + torch.arange(place.rows)
                scales = self.row_scales[tokens.clamp(max=BEGIN + TOKENS - 1)]
                values += scales[:, None] * added
            else:
                values += added
        return values


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    folder = tmp_path_factory.mktemp("visitors")
    return Kernels(compile_for_cpu("visit_values.cuh", folder), "cpu")


@pytest.mark.parametrize(
    "extents", EXTENTS, ids=lambda extents: f"{extents.columns}x{extents.strips}"
)
@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_against_plain_arithmetic(kernels: Kernels, case: Case, extents: Extents) -> None:
    """What the warp's fragment covers of the tile is stored, nothing else is."""
    place, operands = case.place, Operands(case)
    results = torch.full((place.rows, place.columns), UNWRITTEN)
    wgrad = case.gemm is Gemm.WGRAD
    n = TILE_ROW + place.rows if wgrad else place.columns
    k = place.columns if case.gemm in (Gemm.DGRAD, Gemm.WGRAD) else 24
    arguments = _Arguments(
        (place.group, TILE_ROW, place.rows, place.column, BEGIN, TOKENS, place.k, 0),
        (place.row, place.column), None, (BEGIN + TOKENS, GROUPS, n, k, GROUPS + 1),
        case.scales, case.per_group, case.bias == torch.float16,
        address(operands.sums), address(results),
        address(operands.a), address(operands.b), address(operands.bias),
        address(operands.row_scales),
    )  # fmt: skip
    kernels.call("run_visitors", case.gemm, EXTENTS.index(extents), arguments)
    rows = [row for row in extents.rows(place.row) if row < place.rows]
    columns = slice(place.column, min(place.column + extents.columns, place.columns))
    wanted = torch.full_like(results, UNWRITTEN)
    wanted[rows, columns] = operands.expected(case)[rows, columns]
    assert torch.equal(results, wanted)


def test_coordinates_are_those_of_an_mma(kernels: Kernels) -> None:
    """PTX ISA, matrix fragments of m16n8: c0, c1 in row lane / 4, c2, c3 in that row + 8."""
    rows, columns = (torch.empty(32, 2, 32, dtype=torch.int32) for _ in range(2))
    kernels.call("run_coordinates", *(ctypes.c_void_p(each.data_ptr()) for each in (rows, columns)))
    lane, strip, i = torch.meshgrid(*(torch.arange(size) for size in (32, 2, 32)), indexing="ij")
    assert torch.equal(rows, (strip * 64 + lane // 4 + 8 * (i % 4 >= 2)).int())
    assert torch.equal(columns, (i // 4 * 8 + lane % 4 * 2 + i % 2).int())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bfloat16", "float16"))
def test_pairs_are_rounded_to_nearest(kernels: Kernels, dtype: torch.dtype) -> None:
    values = torch.randn(512, generator=torch.Generator().manual_seed(1)) * 100
    old = torch.randn(512, generator=torch.Generator().manual_seed(2)).to(dtype)
    rounded, sums = Buffer(1024, "cpu"), Buffer(1024, "cpu")
    kernels.call(
        "run_round_pairs", int(dtype == torch.float16), ctypes.c_int64(256),
        *(ctypes.c_void_p(address(each)) for each in (values, old, rounded, sums)),
    )  # fmt: skip
    assert torch.equal(rounded.bytes().view(dtype), values.to(dtype))
    assert torch.equal(sums.bytes().view(dtype), old + values.to(dtype))


def test_what_has_no_suffix_uses_no_hopper() -> None:
    """A header's suffix says what hardware it may use: without one, nothing of these."""
    headers = [
        header
        for room in ROOMS
        for header in sorted((CSRC / "fusegen" / room).glob("*.cuh"))
        if header.name.count(".") == 1
    ]
    assert len(headers) > 8
    for header in headers:
        assert not HOPPER.search(header.read_text()), header


def test_tensor_memory_uses_no_warpgroup_mma() -> None:
    """What GPUs after Hopper share with it are loads, barriers and stores."""
    pending = {path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*.sm100.cuh")}
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        seen.add(name)
        text = (CSRC / name).read_text()
        assert "sm90_gmma" not in text, name
        pending |= {*re.findall(r'^#include "(fusegen/.+)"$', text, re.MULTILINE)} - seen
    assert len(seen) > 40
