"""Where the buffers of a call lie: `layout.h`, compiled for the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from .quantize_harness import compile_for_cpu

MOST, MOST_REGIONS = 12, 3  # as in lay_out.h
WORKSPACE = MOST_REGIONS
UNWANTED = -1

Buffer = tuple[int, int, int]  # bytes, first step, last step
Region = tuple[int, int]  # bytes, step before which buffers may lie there
Place = tuple[int, int]  # region, offset
LayOut = Callable[..., tuple[list[Place], int]]


@pytest.fixture(scope="module")
def lay_out(tmp_path_factory: pytest.TempPathFactory) -> LayOut:
    """Places of buffers, given the regions that they may have, and the bytes of the workspace."""
    library = compile_for_cpu("lay_out.h", tmp_path_factory.mktemp("layout"))
    function = ctypes.CDLL(str(library)).lay_out_buffers
    function.restype = ctypes.c_int64

    def call(buffers: Sequence[Buffer], regions: Sequence[Region] = ()) -> tuple[list[Place], int]:
        rest: list[Buffer] = [(UNWANTED, 1, 1)] * (MOST - len(buffers))
        columns = list(zip(*(*buffers, *rest), strict=True))
        sizes = (ctypes.c_int64 * MOST)(*columns[0])
        steps = [(ctypes.c_int * MOST)(*column) for column in columns[1:]]
        absent: list[Region] = [(0, 1)] * (MOST_REGIONS - len(regions))
        region_sizes, ends = zip(*(*regions, *absent), strict=True)
        given_regions = [
            (ctypes.c_int64 * MOST_REGIONS)(*region_sizes),
            (ctypes.c_int * MOST_REGIONS)(*ends),
        ]
        found, offsets = (ctypes.c_int64 * MOST)(), (ctypes.c_int64 * MOST)()
        total: int = function(sizes, *steps, *given_regions, found, offsets)
        return list(zip(found, offsets, strict=True))[: len(buffers)], total

    return call


def meet(one: Buffer, other: Buffer) -> bool:
    return one[1] <= other[2] and other[1] <= one[2]


def least(buffers: Sequence[Buffer]) -> int:
    """What lives at the fullest step."""
    steps = range(1, 1 + max((last for _, _, last in buffers), default=0))
    return max(
        (sum(max(b, 0) for b, f, last in buffers if f <= step <= last) for step in steps), default=0
    )


@st.composite
def buffers_of_a_call(draw: st.DrawFn) -> list[Buffer]:
    sizes = st.integers(0, 9).map(lambda n: 256 * n) | st.just(UNWANTED)
    steps = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted)
    drawn = draw(st.lists(st.tuples(sizes, steps), min_size=1, max_size=MOST))
    return [(size, first, last) for size, (first, last) in drawn]


# Results have any bytes, also fewer than a buffer's 256, and none where nobody asked for them.
REGIONS = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 9)), max_size=MOST_REGIONS)


@given(buffers=buffers_of_a_call(), regions=REGIONS)
@example(buffers=[(512, 1, 2), (512, 2, 3)], regions=[(512, 3), (512, 4)])
@example(buffers=[(512, 1, 1), (512, 2, 2), (512, 2, 2)], regions=[(1024, 3)])
@example(buffers=[(768, 1, 1), (768, 1, 2), (512, 2, 2), (512, 2, 2)], regions=[(4096, 3)])
def test_buffers_that_live_together_do_not_overlap(
    lay_out: LayOut, buffers: list[Buffer], regions: list[Region]
) -> None:
    places, total = lay_out(buffers, regions)
    for (one, (region, at)), (other, (elsewhere, there)) in combinations(
        zip(buffers, places, strict=True), 2
    ):
        if region == elsewhere and min(one[0], other[0]) > 0 and meet(one, other):
            assert at + one[0] <= there or there + other[0] <= at
    for (size, _, last), (region, offset) in zip(buffers, places, strict=True):
        assert offset % 256 == 0 and offset >= 0
        if region == WORKSPACE:
            assert offset + size <= total
        else:
            assert size > 0 and offset + size <= regions[region][0]
            assert last < regions[region][1], "a step writes the result while the buffer is needed"
    rest = [buffer for buffer, place in zip(buffers, places, strict=True) if place[0] == WORKSPACE]
    assert least(rest) <= total <= sum(max(size, 0) for size, _, _ in rest)


@given(buffers=buffers_of_a_call(), regions=REGIONS)
def test_what_stays_in_the_workspace_has_no_region(
    lay_out: LayOut, buffers: list[Buffer], regions: list[Region]
) -> None:
    """Nothing that a region has place for beside all others of it."""
    places, _ = lay_out(buffers, regions)
    for number, (bytes_, before) in enumerate(regions):
        held = sum(b[0] for b, p in zip(buffers, places, strict=True) if p[0] == number)
        for (size, _, last), (region, _) in zip(buffers, places, strict=True):
            if size > 0 and region == WORKSPACE:
                assert last >= before or size > bytes_ - held


@given(buffers=buffers_of_a_call())
def test_rooms_of_no_use_change_nothing(lay_out: LayOut, buffers: list[Buffer]) -> None:
    """Of results that nobody asked for, and of one that the first step writes."""
    assert lay_out(buffers, [(0, 9), (1 << 40, 1), (255, 9)]) == lay_out(buffers)


def test_buffers_that_never_meet_share_memory(lay_out: LayOut) -> None:
    """An expert MLP that makes its activation again: a, da and, twice as large, dh."""
    a, da, dh = (1024, 1, 3), (1024, 2, 4), (2048, 4, 6)
    places, total = lay_out([a, da, dh])
    assert total == least([a, da, dh]) == 3072
    assert places == [(WORKSPACE, 0), (WORKSPACE, 2048), (WORKSPACE, 0)]


def test_gradients_have_room_for_what_comes_before_them(lay_out: LayOut) -> None:
    """The same: step 5 writes dx, and step 6 dfc1_weight, which reads dh."""
    a, da, dh = (1024, 1, 3), (1024, 2, 4), (2048, 4, 6)
    places, total = lay_out([a, da, dh], [(1792, 5), (4096, 6)])
    assert total == least([dh]) == 2048
    assert places == [(0, 0), (1, 0), (WORKSPACE, 0)]
    places, total = lay_out([a, da, dh], [(2048, 5)])
    assert places == [(0, 0), (0, 1024), (WORKSPACE, 0)] and total == 2048
    places, total = lay_out([a, da, dh], [(1024, 4)])
    assert places == [(0, 0), (WORKSPACE, 2048), (WORKSPACE, 0)] and total == 3072
    places, total = lay_out([a, da, dh], [(4096, 3)])
    assert {region for region, _ in places} == {WORKSPACE} and total == 3072


def test_what_is_not_wanted_takes_nothing(lay_out: LayOut) -> None:
    places = [(WORKSPACE, 0)] * 3
    assert lay_out([(UNWANTED, 1, 9), (512, 2, 3), (0, 1, 9)]) == (places, 512)
