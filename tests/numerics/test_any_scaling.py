"""Formats, blocks, scales and rules that no recipe has, drawn at random: every bit of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import naive
import numpy as np
import pytest
import torch
from inputs import INPUTS
from subject import reference
from test_bits import check

DRAWS = range(60)
EXTENTS = (1, 2, 5, 16, 32, 48, 64, 100, 128, 256, None)
RULES = (
    ("max_over_amax", "float32", ("none", "pow2_down"), ("e4m3", "e5m2", "e2m1")),
    ("mx", "e8m0", ("pow2_up", "pow2_down"), ("e4m3", "e5m2", "e2m1")),
    ("nvfp4", "e4m3", ("none",), ("e2m1",)),
)


@dataclass(frozen=True)
class Draw:
    """A quantisation and a tensor for it."""

    q: Any
    kind: str
    rows: int
    columns: int
    sizes: list[int] | None
    align: int


def drawn(seed: int) -> Draw:
    """Rows are no multiples of a block; groups are empty, short, or want more than there are."""
    of = random.Random(seed)
    rule, stored, rounds, formats = RULES[seed % 2 if seed % 5 else 2]
    rows, columns = of.choice(EXTENTS), of.choice(EXTENTS)
    if rule != "max_over_amax":  # of blocks alone
        rows, columns = rows or 1, columns or 32
    if rows is None:
        columns = None
    q = reference.Quantization(
        of.choice(formats), (rows, columns), stored, rule, round=of.choice(rounds),
        epsilon=of.choice((0.0, 1e-3)) if rule == "max_over_amax" else 0.0,
        tensor_scale=rule == "nvfp4", rounding="stochastic" if seed % 15 == 0 else "nearest",
    )  # fmt: skip
    sizes = [of.choice((0, 0, 1, 15, 33, 64, 129, -2)) for _ in range(of.randint(1, 7))]
    wanted = sum(max(size, 0) for size in sizes)
    return Draw(
        q=q,
        kind=of.choice(sorted(INPUTS)),
        rows=max(wanted + of.choice((-7, 0, 6)), 8),
        columns=8 * of.randint(1, 9),
        sizes=sizes if of.random() < 0.75 else None,
        align=of.choice((16, 32, 128)),
    )


@pytest.mark.parametrize("seed", DRAWS)
def test_copies(seed: int) -> None:
    draw = drawn(seed)
    x = INPUTS[draw.kind]((draw.rows, draw.columns), torch.bfloat16)
    check(x, draw.q, draw.sizes, reference.Layout(align=draw.align))


def test_draws_reach_every_rule_and_layout() -> None:
    draws = [drawn(seed) for seed in DRAWS]
    assert {draw.q.rule for draw in draws} == {rule for rule, *_ in RULES}
    assert {draw.q.format for draw in draws} == {"e4m3", "e5m2", "e2m1"}
    assert {None, 1, 64} <= {extent for draw in draws for extent in draw.q.block}
    assert any(draw.sizes is None for draw in draws) and any(draw.sizes for draw in draws)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("seed", DRAWS[::3])
def test_copies_stand_for_code_times_scale(seed: int, columnwise: bool) -> None:
    """In float64, element by element; zero past the groups and in rows that no group has."""
    draw = drawn(seed)
    q = replace(draw.q, rounding="nearest")
    x = INPUTS["heavy_tailed"]((draw.rows, draw.columns), torch.bfloat16)
    sizes = [draw.rows] if draw.sizes is None else draw.sizes
    groups = torch.tensor(sizes)
    made = reference.quantize(x, q, columnwise=True, group_sizes=groups)
    found = reference.dequantize(
        made.columnwise if columnwise else made.rowwise, group_sizes=groups
    )
    wanted = np.zeros((draw.rows, draw.columns))
    at = 0
    for size in sizes:
        end = min(at + max(size, 0), draw.rows)
        with np.errstate(all="ignore"):
            group = naive.quantize_group(
                x[at:end].float().numpy(), q, "bfloat16", columnwise, None, None
            )
        wanted[at:end] = decoded(group, q, columnwise, draw.columns)
        at = end
    assert torch.allclose(found.double(), torch.from_numpy(wanted), rtol=2e-7, atol=0)


def decoded(group: naive.Group, q: Any, columnwise: bool, columns: int) -> np.ndarray:
    """Values of a group's codes, its tensor scale included."""
    of_rows, of_columns = reversed(q.block) if columnwise else q.block
    height, width = of_rows or max(len(group.codes), 1), of_columns or columns
    whole = 1.0
    if q.tensor_scale and group.amax != 0:
        whole = float(group.amax) / (448 * 6)
    values = np.zeros(group.codes.shape)
    for (r, c), code in np.ndenumerate(group.codes):
        scale = value_of(group.scales[r // height, c // width], q.rule)
        values[r, c] = naive.decode(int(code), q.format) * scale * whole
    return values


def value_of(stored: float, rule: str) -> float:
    """Of a stored scale, a code where it is no fp32 number."""
    if rule == "mx":
        return 2.0 ** (int(stored) - 127)
    return naive.decode(int(stored), "e4m3") if rule == "nvfp4" else float(stored)
