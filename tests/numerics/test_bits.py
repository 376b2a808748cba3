"""Every bit of every buffer against the implementation that works element by element."""

from __future__ import annotations

from typing import Any

import naive
import numpy as np
import pytest
import torch
from inputs import DTYPES, INPUTS, SIZES, TRAILING, heavy_tailed, normal
from subject import RECIPES, ROLES, quantization, reference
from torch import Tensor

VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "current_pow2_epsilon": ("fp8_current", "input", {"round": "pow2_down", "epsilon": 1e-3}),
    "rowwise_epsilon": ("fp8_rowwise", "input", {"epsilon": 0.5}),
    "rowwise_pow2": ("fp8_rowwise", "input", {"round": "pow2_down"}),
    "block_fp32_scales": ("fp8_block", "input", {"round": "none"}),
    "block_epsilon": ("fp8_block", "grad_output", {"epsilon": 0.5}),
    "block_32_epsilon": ("fp8_block", "weight", {"epsilon": 0.5, "block": (32, 16)}),
    "mxfp8_hybrid": ("mxfp8", "grad_output", {"format": "e5m2"}),
    "mxfp8_floor": ("mxfp8", "input", {"round": "pow2_down"}),
    "mxfp8_floor_e5m2": ("mxfp8", "input", {"round": "pow2_down", "format": "e5m2"}),
    "mxfp8_32x32": ("mxfp8", "weight", {"block": (32, 32)}),
    "mxfp4": ("mxfp8", "input", {"format": "e2m1"}),
    "nvfp4_plain": ("nvfp4", "input", {"hadamard": None}),
    "nvfp4_nearest": ("nvfp4", "grad_output", {"rounding": "nearest"}),
    "nvfp4_one_level": ("nvfp4", "input", {"tensor_scale": False, "hadamard": None}),
    "nvfp4_stochastic_weight": ("nvfp4", "weight", {"rounding": "stochastic"}),
}
QUANTIZATIONS = {
    **{f"{recipe}.{role}": quantization(recipe, role) for recipe in RECIPES for role in ROLES},
    **{
        name: quantization(recipe, role, **changes)
        for name, (recipe, role, changes) in VARIANTS.items()
    },
}
# Roles that are quantised alike are one case, under the name of the first.
_NAMES = {q: name for name, q in reversed(QUANTIZATIONS.items())}
DISTINCT = {name: q for q, name in reversed(_NAMES.items())}
STATE = (0x1234_5678_9ABC_DEF0, 0x7_0000_0003)


def raw(x: Tensor) -> np.ndarray:
    if x.dtype == torch.float32:
        return x.numpy().view(np.uint32)
    return x.view(torch.uint8).numpy()


def expect(operand: Any, expected: naive.Buffers, name: str) -> None:
    """Same bits and shapes of data, scales and, where there is one, amax."""
    assert np.array_equal(raw(operand.data), expected.data), f"{name}: data"
    if operand.scale.dtype == torch.float32:
        scale = expected.scale.astype(np.float32).view(np.uint32)
    else:
        scale = expected.scale.astype(np.uint8)
    assert operand.scale.shape == scale.shape, f"{name}: shape of scales"
    assert np.array_equal(raw(operand.scale), scale), f"{name}: scales"
    if operand.amax is not None:
        assert np.array_equal(raw(operand.amax), expected.amax.view(np.uint32)), f"{name}: amax"


def check(x: Tensor, q: Any, sizes: list[int] | None, layout: Any = reference.LAYOUT) -> None:
    groups = 1 if sizes is None else len(sizes)
    scale = None
    if q.source == "history":
        scale = torch.linspace(0.5, 3.0, groups)
    got = reference.quantize(
        x,
        q,
        columnwise=True,
        group_sizes=None if sizes is None else torch.tensor(sizes),
        layout=layout,
        scale=scale,
        rng_state=torch.tensor(STATE) if q.rounding == "stochastic" else None,
    )
    with np.errstate(all="ignore"):
        for operand in got:
            expected = naive.quantize_tokens(
                x.float().numpy(),
                q,
                str(x.dtype).removeprefix("torch."),
                operand.columnwise,
                sizes,
                scale=None if scale is None else scale.tolist(),
                rng_state=STATE,
                transposed=layout.transposed,
                align=layout.align,
                pitch=layout.pitch,
            )
            expect(operand, expected, "columnwise" if operand.columnwise else "rowwise")


@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.parametrize("kind", INPUTS)
def test_dense(name: str, kind: str) -> None:
    for dtype in DTYPES:
        check(INPUTS[kind]((18, 40), dtype), DISTINCT[name], None)


@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_ragged(name: str, dtype: torch.dtype) -> None:
    tokens = sum(max(size, 0) for size in SIZES) + TRAILING
    x = heavy_tailed((tokens, 24), dtype)
    x[-TRAILING:] = torch.nan
    x[5, 3], x[9, 4], x[100, 5] = torch.nan, torch.inf, -0.0
    check(x, DISTINCT[name], SIZES)


@pytest.mark.parametrize("name", DISTINCT)
def test_splits_past_the_end(name: str) -> None:
    """Sizes that add up to more rows than there are end at the last row."""
    check(normal((50, 8), torch.bfloat16), DISTINCT[name], [20, -1, 2**62, 7])


@pytest.mark.parametrize("name", ["fp8_block.input", "fp8_block.weight"])
def test_several_blocks_across(name: str) -> None:
    check(heavy_tailed((130, 264), torch.bfloat16), DISTINCT[name], None)


@pytest.mark.parametrize("align", [16, 64, 128])
@pytest.mark.parametrize("name", ["fp8_block.input", "nvfp4.grad_output"])
def test_alignment_of_groups(name: str, align: int) -> None:
    layout = reference.Layout(align=align, pitch=32)
    check(normal((200, 24), torch.bfloat16), DISTINCT[name], [3, 100, 0, 90], layout)


@pytest.mark.parametrize("name", ["mxfp8.input", "fp8_block.input", "fp8_current.grad_output"])
def test_untransposed(name: str) -> None:
    layout = reference.Layout(transposed=False)
    check(normal((70, 40), torch.bfloat16), DISTINCT[name], [3, 33, 0, 30], layout)


@pytest.mark.parametrize("name", DISTINCT)
def test_stack_is_its_matrices(name: str) -> None:
    """A weight [E, N, K] is quantised matrix by matrix; only random numbers tell them apart."""
    q = DISTINCT[name]
    if q.rounding == "stochastic":
        q = quantization("nvfp4", "weight")
    x = heavy_tailed((3, 40, 24), torch.bfloat16)
    scale = torch.tensor([0.5, 1.0, 3.0]) if q.source == "history" else None
    stack = reference.quantize(x, q, columnwise=True, scale=scale)
    for index in range(3):
        own = None if scale is None else scale[index : index + 1]
        one = reference.quantize(x[index], q, columnwise=True, scale=own)
        for whole, part in zip(stack, one, strict=True):
            assert np.array_equal(raw(whole.data)[index], raw(part.data))
            scales = raw(whole.scale)[index]
            assert np.array_equal(scales if scales.ndim else scales[None], raw(part.scale))
            if part.amax is not None:
                assert whole.amax[index] == part.amax[0]


@pytest.mark.parametrize("name", DISTINCT)
def test_no_rows(name: str) -> None:
    x = torch.zeros(0, 24, dtype=torch.bfloat16)
    check(x, DISTINCT[name], None)
    check(x, DISTINCT[name], [0, 4])
