"""Where buffers lie in a workspace: `layout.h`, compiled for the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .quantize_harness import compile_for_cpu

MOST = 12  # as in lay_out.h
UNWANTED = -1

Buffer = tuple[int, int, int]  # bytes, first step, last step
LayOut = Callable[[Sequence[Buffer]], tuple[list[int], int]]


@pytest.fixture(scope="module")
def lay_out(tmp_path_factory: pytest.TempPathFactory) -> LayOut:
    """Offsets of the buffers, and the bytes of all."""
    library = compile_for_cpu("lay_out.h", tmp_path_factory.mktemp("layout"))
    function = ctypes.CDLL(str(library)).lay_out_buffers
    function.restype = ctypes.c_int64

    def call(buffers: Sequence[Buffer]) -> tuple[list[int], int]:
        rest: list[Buffer] = [(UNWANTED, 1, 1)] * (MOST - len(buffers))
        columns = list(zip(*(*buffers, *rest), strict=True))
        sizes = (ctypes.c_int64 * MOST)(*columns[0])
        steps = [(ctypes.c_int * MOST)(*column) for column in columns[1:]]
        offsets = (ctypes.c_int64 * MOST)()
        total: int = function(sizes, *steps, offsets)
        return list(offsets)[: len(buffers)], total

    return call


def meet(one: Buffer, other: Buffer) -> bool:
    return one[1] <= other[2] and other[1] <= one[2]


def least(buffers: Sequence[Buffer]) -> int:
    """What lives at the fullest step."""
    steps = range(1, 1 + max((last for _, _, last in buffers), default=0))
    return max(sum(max(b, 0) for b, f, last in buffers if f <= step <= last) for step in steps)


@st.composite
def buffers_of_a_call(draw: st.DrawFn) -> list[Buffer]:
    sizes = st.integers(0, 9).map(lambda n: 256 * n) | st.just(UNWANTED)
    steps = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted)
    drawn = draw(st.lists(st.tuples(sizes, steps), min_size=1, max_size=MOST))
    return [(size, first, last) for size, (first, last) in drawn]


@given(buffers=buffers_of_a_call())
def test_buffers_that_live_together_do_not_overlap(lay_out: LayOut, buffers: list[Buffer]) -> None:
    offsets, total = lay_out(buffers)
    for (one, at), (other, there) in combinations(zip(buffers, offsets, strict=True), 2):
        if min(one[0], other[0]) > 0 and meet(one, other):
            assert at + one[0] <= there or there + other[0] <= at
    for (size, _, _), offset in zip(buffers, offsets, strict=True):
        assert offset % 256 == 0 and offset >= 0 and offset + size <= total
    assert least(buffers) <= total <= sum(max(size, 0) for size, _, _ in buffers)


def test_buffers_that_never_meet_share_memory(lay_out: LayOut) -> None:
    """An expert MLP that makes its activation again: a, da and, twice as large, dh."""
    a, da, dh = (1024, 1, 3), (1024, 2, 4), (2048, 4, 6)
    offsets, total = lay_out([a, da, dh])
    assert total == least([a, da, dh]) == 3072
    assert offsets == [0, 2048, 0]


def test_what_is_not_wanted_takes_nothing(lay_out: LayOut) -> None:
    assert lay_out([(UNWANTED, 1, 9), (512, 2, 3), (0, 1, 9)]) == ([0, 0, 0], 512)
