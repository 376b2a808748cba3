"""Rotary embeddings on the CPU: both pairings, both directions, every number of heads.

Alone, and where packed rows become queries, keys and values.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from .launches import launches
from .quantize_harness import Buffer, Kernels, Long, Pointer, address

DTYPES = (torch.bfloat16, torch.float16)
FORWARD, INVERSE = 0, 1


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("x", Pointer),
        ("cos", Pointer),
        ("sin", Pointer),
        ("y", Pointer),
        ("rows", Long),
        ("columns", Long),
        ("pairs", Long),
        ("interleaved", ctypes.c_bool),
        ("kind", ctypes.c_int),
    ]


_QKV_SIZES = [
    ("rows", Long),
    ("columns", Long),
    ("key_values", Long),
    ("pairs", Long),
    ("queries_per_key", Long),
    ("interleaved", ctypes.c_bool),
]


class _QkvArguments(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("x", "cos", "sin", "queries", "keys", "values")),
        *_QKV_SIZES,
    ]


class _QkvGradArguments(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("queries", "keys", "values", "cos", "sin", "dx")),
        *_QKV_SIZES,
    ]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return launches(
        tmp_path_factory.mktemp("rotary"),
        "rotary",
        rotary="RotaryArguments",
        rotary_qkv="RotaryQkvArguments",
        rotary_qkv_grad="RotaryQkvGradArguments",
    )


def rotary(
    kernels: Kernels, x: Tensor, angles: Tensor, *, interleaved: bool, kind: int = FORWARD
) -> Tensor:
    """Of x [T, N] by angles [T, P]."""
    cos, sin, output = angles.cos(), angles.sin(), Buffer(2 * x.numel(), "cpu")
    arguments = _Arguments(
        address(x), address(cos), address(sin), address(output), *x.shape, angles.shape[1],
        interleaved, kind,
    )  # fmt: skip
    kernels.call("run_rotary", int(x.dtype == torch.float16), arguments)
    return output.bytes().view(x.dtype).view_as(x)


def exact(x: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """Each pair as a complex number, times that of its angle; products rounded to fp32."""
    pairs = angles.shape[1]
    heads = x.float().unflatten(1, (-1, pairs, 2) if interleaved else (-1, 2, pairs))
    one, other = heads.unbind(-1 if interleaved else -2)
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    rotated = torch.stack((one * c - other * s, other * c + one * s), -1 if interleaved else -2)
    return rotated.flatten(1).to(x.dtype)


def given(rows: int, heads: int, pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(heads)
    x = torch.randn(rows, 2 * heads * pairs, generator=rng).to(dtype)
    return x, 6 * torch.rand(rows, pairs, generator=rng)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("heads", (1, 3, 4, 9))
@pytest.mark.parametrize("pairs", (8, 24, 64))
def test_has_the_bits_of_the_formula(
    kernels: Kernels, pairs: int, heads: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """Rows that fill no block; heads that fill no thread."""
    x, angles = given(37, heads, pairs, dtype)
    y = rotary(kernels, x, angles, interleaved=interleaved)
    assert torch.equal(y, exact(x, angles, interleaved=interleaved))
    back = rotary(kernels, x, angles, interleaved=interleaved, kind=INVERSE)
    assert torch.equal(back, exact(x, -angles, interleaved=interleaved))
    assert not torch.equal(y, back)


@pytest.mark.parametrize("interleaved", (False, True))
def test_angles_of_0_change_nothing(kernels: Kernels, interleaved: bool) -> None:
    x, angles = given(5, 3, 8, torch.bfloat16)
    assert torch.equal(rotary(kernels, x, torch.zeros_like(angles), interleaved=interleaved), x)


@pytest.mark.parametrize(
    ("columns", "pairs", "message"),
    [
        (32, 12, "pairs of a head: a multiple of 8"),
        (32, 0, "pairs of a head: a multiple of 8"),
        (24, 8, "columns: a multiple of a head's"),
        (16 * 4 * 65536, 8, "heads: at most 262140"),
    ],
)
def test_sizes_that_no_kernel_has(kernels: Kernels, columns: int, pairs: int, message: str) -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    pointer = address(x)
    arguments = _Arguments(*[pointer] * 4, 1, columns, pairs, False, FORWARD)
    with pytest.raises(AssertionError, match=message):
        kernels.call("run_rotary", 0, arguments)


def test_no_rows(kernels: Kernels) -> None:
    x, angles = given(0, 2, 8, torch.float16)
    assert rotary(kernels, x, angles, interleaved=False).numel() == 0


# ---- packed rows

QUERIES_PER_KEY = (1, 3, 4)


def parted(
    kernels: Kernels, x: Tensor, angles: Tensor, ratio: int, *, interleaved: bool
) -> list[Tensor]:
    """Queries [T, R V], keys and values [T, V] of packed rows [T, (R + 2) V]."""
    rows, columns = x.shape
    width = columns // (ratio + 2)
    cos, sin = angles.cos(), angles.sin()
    widths = (ratio * width, width, width)
    outputs = [Buffer(2 * rows * each, "cpu") for each in widths]
    arguments = _QkvArguments(
        *map(address, (x, cos, sin, *outputs)),
        rows, columns, width, angles.shape[1], ratio, interleaved,
    )  # fmt: skip
    kernels.call("run_rotary_qkv", int(x.dtype == torch.float16), arguments)
    views = zip(outputs, widths, strict=True)
    return [output.bytes().view(x.dtype).view(rows, each) for output, each in views]


def packed(
    kernels: Kernels, parts: list[Tensor], angles: Tensor, ratio: int, *, interleaved: bool
) -> Tensor:
    """The gradient of packed rows, of those of their parts."""
    rows, width = parts[1].shape
    columns = (ratio + 2) * width
    cos, sin, output = angles.cos(), angles.sin(), Buffer(2 * rows * columns, "cpu")
    arguments = _QkvGradArguments(
        *map(address, (*parts, cos, sin, output)),
        rows, columns, width, angles.shape[1], ratio, interleaved,
    )  # fmt: skip
    half = parts[0].dtype == torch.float16
    kernels.call("run_rotary_qkv_grad", int(half), arguments)
    return output.bytes().view(parts[0].dtype).view(rows, columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("ratio", QUERIES_PER_KEY)
@pytest.mark.parametrize(("key_heads", "pairs"), [(1, 8), (2, 24), (3, 64), (4, 8)])
def test_queries_and_keys_are_rotated_and_values_are_copied(
    kernels: Kernels, key_heads: int, pairs: int, ratio: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """Both ways; threads whose heads are of one part, and of two or three."""
    x, angles = given(37, (ratio + 2) * key_heads, pairs, dtype)
    widths = [2 * pairs * key_heads * heads for heads in (ratio, 1, 1)]
    found = parted(kernels, x, angles, ratio, interleaved=interleaved)
    back = packed(kernels, found, angles, ratio, interleaved=interleaved)
    queries, keys, values = x.split(widths, 1)
    rotated = [exact(each, angles, interleaved=interleaved) for each in (queries, keys)]
    for got, wanted in zip(found, (*rotated, values), strict=True):
        assert torch.equal(got, wanted)
    returned = [exact(each, -angles, interleaved=interleaved) for each in rotated]
    assert torch.equal(back, torch.cat((*returned, values), 1))


@pytest.mark.parametrize(
    ("columns", "key_values", "ratio", "message"),
    [
        (64, 16, 0, "queries_per_key: at least 1"),
        (48, 24, 1, "key_values: a multiple of a head's"),
        (64, 16, 1, "columns: those of queries, of keys and of values"),
        (56, 16, 1, "columns: a multiple of a head's"),
    ],
)
def test_widths_that_make_no_row(
    kernels: Kernels, columns: int, key_values: int, ratio: int, message: str
) -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    for name, struct in (("", _QkvArguments), ("_grad", _QkvGradArguments)):
        arguments = struct(*[address(x)] * 6, 1, columns, key_values, 8, ratio, False)
        with pytest.raises(AssertionError, match=message):
            kernels.call(f"run_rotary_qkv{name}", 0, arguments)


def test_no_packed_rows(kernels: Kernels) -> None:
    x, angles = given(0, 3, 8, torch.float16)
    parts = parted(kernels, x, angles, 1, interleaved=False)
    assert [each.numel() for each in parts] == [0, 0, 0]
    assert packed(kernels, parts, angles, 1, interleaved=False).numel() == 0
