"""Delayed scaling, random numbers, layouts of scales, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from inputs import normal
from subject import quantization, reference
from torch import Tensor

DELAYED = quantization("fp8_delayed", "input")
GRADIENT = quantization("nvfp4", "grad_output")


def update(history: Tensor, scale: Tensor, amax: list[float], **rest: Any) -> tuple[Tensor, Tensor]:
    q = rest.pop("q", DELAYED)
    result: tuple[Tensor, Tensor] = reference.delayed_update(
        history, scale, torch.tensor(amax), q, **rest
    )
    return result


# Delayed scaling


def test_state_starts_neutral() -> None:
    history, scale = reference.delayed_state(DELAYED, 3)
    assert history.shape == (1024, 3) and history.dtype == torch.float32 and not history.any()
    assert scale.tolist() == [1.0, 1.0, 1.0]


def test_history_rolls_and_forgets() -> None:
    """Slot 0 is free between steps, the newest amax lies last, and the oldest falls out."""
    q = quantization("fp8_delayed", "input", history=4)
    history, scale = reference.delayed_state(q)
    seen = []
    for amax in (7.0, 1.0, 2.0, 3.5, 0.5):
        history, scale = update(history, scale, [amax], q=q)
        seen.append((history.flatten().tolist(), scale.item()))
    assert seen == [
        ([0.0, 0.0, 0.0, 7.0], 64.0),
        ([0.0, 0.0, 7.0, 1.0], 64.0),
        ([0.0, 7.0, 1.0, 2.0], 64.0),
        ([0.0, 1.0, 2.0, 3.5], 64.0),
        ([0.0, 2.0, 3.5, 0.5], 128.0),
    ]


def test_scale_edges() -> None:
    history, scale = torch.zeros(1024, 5), torch.tensor([3.0, 3.0, 3.0, 3.0, 3.0])
    amax = [0.0, math.inf, math.nan, 1e-40, 448.0]
    _, new = update(history, scale, amax)
    assert new.tolist() == [3.0, 3.0, 3.0, torch.finfo(torch.float32).max, 1.0]


def test_margin_halves() -> None:
    q = quantization("fp8_delayed", "input", margin=3)
    _, scale = update(*reference.delayed_state(q), [7.0], q=q)
    assert scale.tolist() == [8.0]


def test_only_groups_that_saw_something_roll() -> None:
    history, scale = update(*reference.delayed_state(DELAYED, 2), [7.0, 3.5], grouped=True)
    history, scale = update(history, scale, [1.0, 0.0], grouped=True)
    assert history[-2:].tolist() == [[7.0, 0.0], [1.0, 3.5]]
    assert scale.tolist() == [64.0, 128.0]
    dense, _ = update(history, scale, [1.0, 0.0])
    assert dense[-3:].tolist() == [[7.0, 0.0], [1.0, 3.5], [1.0, 0.0]]


def test_state_is_not_mutated() -> None:
    history, scale = reference.delayed_state(DELAYED)
    update(history, scale, [7.0])
    assert not history.any() and scale.tolist() == [1.0]


def test_quantised_with_the_scale_before() -> None:
    x = torch.tensor([[1.0, -1000.0]])
    got = reference.quantize(x, DELAYED, scale=torch.tensor([2.0])).rowwise
    assert got.data.float()[0, :2].tolist() == [2.0, -448.0]
    assert got.scale.tolist() == [0.5] and got.amax.tolist() == [1000.0]


# Stochastic rounding


def draw(values: Tensor, seed: int, columnwise: bool = False) -> Tensor:
    """Dequantised without a tensor scale other than 1: amax is fixed so that codes are values."""
    q = quantization("nvfp4", "grad_output", hadamard=None)
    state = torch.tensor([seed, 0])
    copies = reference.quantize(
        values, q, rowwise=not columnwise, columnwise=columnwise, rng_state=state
    )
    result: Tensor = reference.dequantize(copies.columnwise if columnwise else copies.rowwise)
    return result


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("value", [0.1, 0.3, 0.9, 1.3, 1.9, 2.2, 3.7, 4.4, 5.9, -2.6, -0.05])
def test_mean_is_the_value(value: float, columnwise: bool) -> None:
    """The expectation is the value rounded down to 1/256 of a step, so at most step / 256 low.

    One element in 16 is 6, which fixes the block's scale at 448 and the factor at 1.  Of n draws
    between neighbours a step apart the mean has a standard error of at most step / (2 sqrt(n));
    five of them fail by chance once in 1.7 million, and the seed is fixed.
    """
    n = 1 << 16
    x = torch.full((n // 16, 16), value)
    x[:, 0] = 6.0
    x = x.T.contiguous() if columnwise else x
    got = draw(x, seed=2024, columnwise=columnwise)
    got = (got.T if columnwise else got)[:, 1:]
    size = abs(value)
    step = 0.5 if size < 2 else 1.0 if size < 4 else 2.0
    assert len(got.unique()) == 2
    error = 5 * step / (2 * math.sqrt(got.numel()))
    shrink = abs(value) - float(got.mean()) * math.copysign(1, value)
    assert -error < shrink < step / 256 + error


def test_values_of_the_grid_stay() -> None:
    x = torch.tensor([[0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]])
    for seed in range(20):
        state = torch.tensor([seed, 0])
        got = reference.quantize(x, GRADIENT, rng_state=state).rowwise
        data = bytes(got.data.view(torch.uint8)[0, :8].tolist())
        assert data.hex() == "1032547698badcfe"


def test_seed_and_offset_decide() -> None:
    x = normal((64, 64), torch.bfloat16)

    def codes(seed: int, offset: int) -> list[np.ndarray]:
        copies = reference.quantize(
            x, GRADIENT, columnwise=True, rng_state=torch.tensor([seed, offset])
        )
        return [copy.data.view(torch.uint8).numpy() for copy in copies]

    first = codes(1, 0)
    assert all(np.array_equal(a, b) for a, b in zip(first, codes(1, 0), strict=True))
    for other in (codes(2, 0), codes(1, 1), codes(1 + (1 << 32), 0)):
        assert all((a != b).mean() > 0.1 for a, b in zip(first, other, strict=True))


def test_streams_differ() -> None:
    """The two copies of a symmetric tensor draw different numbers."""
    x = normal((64, 64), torch.float32)
    q = quantization("nvfp4", "grad_output", hadamard=None)
    copies = reference.quantize(x + x.T, q, columnwise=True, rng_state=torch.tensor([3, 0]))
    rowwise, columnwise = (copy.data.view(torch.uint8) for copy in copies)
    assert (rowwise != columnwise).float().mean() > 0.1


def test_advance() -> None:
    assert reference.advance(torch.tensor([9, 4]), 2).tolist() == [9, 6]


# Layouts of scales


ATOMS = reference.Layout(align=128, atoms=True)


def _atom_place(scale: Tensor, row: int, block: int) -> int:
    """The byte at a row and a block of one matrix of atoms."""
    at = (row // 128, block // 4, row % 32, row % 128 // 32, block % 4)
    return int(scale.view(torch.uint8)[at])


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize(
    ("recipe", "role"), [("mxfp8", "input"), ("nvfp4", "input"), ("nvfp4", "weight")]
)
def test_atoms_are_the_formula(recipe: str, role: str, columnwise: bool) -> None:
    """Of rows in groups, of which every one begins an atom; what is in no block is 0."""
    q = quantization(recipe, role)
    x, sizes = normal((150, 136), torch.bfloat16), [9, 0, 130]
    splits = torch.tensor(sizes) if role == "input" else None
    rows = splits.tolist() if splits is not None else [150]
    wanted = {"rowwise": not columnwise, "columnwise": columnwise, "group_sizes": splits}
    logical = reference.quantize(x, q, **wanted)[columnwise]
    placed = reference.quantize(x, q, **wanted, layout=ATOMS)[columnwise]
    size = 32 if recipe == "mxfp8" else 16
    of_rows, of_columns = q.blocks(columnwise)
    scales = logical.scale.view(torch.uint8)
    taken, begin = 0, 0
    for group, count in enumerate(rows):
        first = 128 * (begin // 128 + group)
        for row in range(count):
            block = row // of_rows + (begin // of_rows + group if of_rows > 1 else begin)
            for column in range(136):
                expected = int(scales[block, column // of_columns])
                at = (
                    (column, (first + row) // size) if columnwise else (first + row, column // size)
                )
                assert _atom_place(placed.scale, *at) == expected
        lines, across = (136, -(-count // size)) if columnwise else (count, -(-136 // size))
        taken += lines * across
        begin += count
    assert int((placed.scale.view(torch.uint8) != 0).sum()) <= taken
    assert torch.equal(
        reference.dequantize(placed, group_sizes=splits),
        reference.dequantize(logical, group_sizes=splits),
    )


def test_a_longer_block_has_several_bytes() -> None:
    """A power of two for 128 elements, read as one for each 32 of them."""
    q = quantization("fp8_block", "input")
    exponents = quantization("fp8_block", "input", scale_dtype="e8m0")
    x = normal((40, 300), torch.bfloat16)
    plain = reference.quantize(x, q).rowwise
    placed = reference.quantize(x, exponents, layout=ATOMS).rowwise
    codes = placed.scale.view(torch.uint8)
    assert codes.shape == (1, 3, 32, 4, 4)
    for row in range(40):
        for block in range(12):
            value = 2.0 ** (_atom_place(placed.scale, row, block) - 127)
            assert value == float(plain.scale[row, block // 4])
    assert torch.equal(placed.data.view(torch.uint8), plain.data.view(torch.uint8))
    assert torch.equal(reference.dequantize(placed), reference.dequantize(plain))


def test_token_major() -> None:
    scale = torch.arange(12.0).view(6, 2) + 2
    got = reference.token_major(scale, torch.tensor([3, 0, 2]), align=4)
    expected = torch.ones(2, 16)
    expected[:, :3], expected[:, 8:10] = scale[:3].T, scale[3:5].T
    assert torch.equal(got, expected)


@pytest.mark.parametrize("sizes", [None, [3, 0, 2], [9, 40, -3, 2], [0, 0]])
def test_row_major_is_the_way_back(sizes: list[int] | None) -> None:
    scale = torch.rand(7, 3) + 0.5
    splits = None if sizes is None else torch.tensor(sizes)
    stored = reference.token_major(scale, splits, align=4)
    assert stored.shape == (3, 4 * (7 // 4 + (1 if sizes is None else len(sizes))))
    used = 7 if sizes is None else min(sum(max(size, 0) for size in sizes), 7)
    expected = torch.cat([scale[:used], torch.ones(7 - used, 3)])
    assert torch.equal(reference.row_major(stored, 7, splits, align=4), expected)


# What is refused


def test_arguments_that_do_not_fit() -> None:
    x = normal((32, 16), torch.bfloat16)
    current, sizes = quantization("fp8_current", "input"), torch.tensor([4])
    cases: list[tuple[str, Tensor, Any, dict[str, Any]]] = [
        ("got torch.float64", x.double(), current, {}),
        ("got rank 1", x[0], current, {}),
        ("in an x of rank 2", x.view(2, 16, 16), current, {"group_sizes": sizes}),
        ("for source 'history'", x, current, {"scale": torch.ones(1)}),
        ("for source 'history'", x, DELAYED, {}),
        ("needs rng_state", x, GRADIENT, {}),
        (
            "are transposed",
            x,
            quantization("nvfp4", "weight"),
            {"columnwise": True, "layout": reference.Layout(transposed=False)},
        ),
        (
            "alignment of a multiple",
            x,
            quantization("nvfp4", "input"),
            {"layout": reference.Layout(align=8)},
        ),
    ]
    for message, tensor, q, rest in cases:
        with pytest.raises(ValueError, match=message):
            reference.quantize(tensor, q, **rest)


def test_reduced_amax_takes_the_place_of_its_own() -> None:
    x = normal((32, 16), torch.bfloat16)
    q = quantization("fp8_current", "input")
    got = reference.quantize(x, q, rowwise_amax=torch.tensor([448.0])).rowwise
    assert got.scale.tolist() == [1.0] and got.amax.tolist() == [448.0]
    q = quantization("nvfp4", "input")
    own = reference.group_amax(x, q, columnwise=True)
    a = reference.quantize(x, q, rowwise=False, columnwise=True, columnwise_amax=own).columnwise
    b = reference.quantize(x, q, rowwise=False, columnwise=True).columnwise
    assert own.tolist() == b.amax.tolist()
    assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
