"""`quantize/math.cuh` and `quantize/places.cuh` as plain C++, bit for bit against the reference."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .quantize_harness import CSRC, RECIPES, reference

FORMATS = ("e4m3", "e5m2", "e2m1")
FP32_MAX = torch.finfo(torch.float32).max


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "this test compiles C++: install g++"
    output = tmp_path_factory.mktemp("quantize_math") / "quantize_math.so"
    source = Path(__file__).with_name("quantize_math.cpp")
    # Without contraction every line is the sequence of roundings that PyTorch performs.
    strict = ["-ffp-contract=off", "-Wall", "-Wextra", "-Wdouble-promotion", "-Werror"]
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", *strict, f"-I{CSRC}"]
    subprocess.run([*command, str(source), "-o", str(output)], check=True)
    return ctypes.CDLL(str(output))


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _sixteen_bits(dtype: torch.dtype) -> Tensor:
    """Every value of a type of 16 bits, as fp32."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()


def _any_bits(count: int) -> Tensor:
    """fp32 of random bits: all exponents, subnormals, infinities, NaN."""
    rng = torch.Generator().manual_seed(11)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=rng)
    return bits.to(torch.int32).view(torch.float32)


def _around_grid(fmt: str) -> Tensor:
    """Every value of a format, midpoints between neighbours, and fp32 next to each."""
    codes = torch.arange(2 ** (4 if fmt == "e2m1" else 8), dtype=torch.uint8)
    values = reference._decode(codes, fmt)
    values = values[values.isfinite()].sort().values
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    infinite = torch.tensor(torch.inf)
    return torch.cat((points, points.nextafter(infinite), points.nextafter(-infinite)))


def _amaxes() -> Tensor:
    """Non-negative fp32 without NaN: all of bf16 and fp16, and random bits."""
    parts = (_sixteen_bits(torch.bfloat16), _sixteen_bits(torch.float16), _any_bits(100_000))
    values = torch.cat(parts).abs()
    return values[~values.isnan()].contiguous()


def _inputs(fmt: str) -> Tensor:
    plain = [_sixteen_bits(torch.bfloat16), _sixteen_bits(torch.float16), _any_bits(300_000)]
    rng = torch.Generator().manual_seed(5)
    near = torch.randn(300_000, generator=rng) * reference.MAX[fmt] / 3
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    return torch.cat((*plain, near, near * 2.0**-9, _around_grid(fmt), special)).contiguous()


@pytest.mark.parametrize("fmt", FORMATS)
def test_encode(library: ctypes.CDLL, fmt: str) -> None:
    values = _inputs(fmt)
    codes = torch.empty(len(values), dtype=torch.uint8)
    getattr(library, f"encode_{fmt}")(_pointer(values), _pointer(codes), ctypes.c_long(len(values)))
    wanted = reference._encode(values, fmt, None)
    assert torch.equal(codes, wanted), values[codes != wanted][:8]


@pytest.mark.parametrize("fmt", FORMATS)
def test_decode(library: ctypes.CDLL, fmt: str) -> None:
    count = 16 if fmt == "e2m1" else 256
    values = torch.empty(count)
    getattr(library, f"decode_{fmt}")(_pointer(values))
    wanted = reference._decode(torch.arange(count, dtype=torch.uint8), fmt)
    torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values.signbit()[~wanted.isnan()], wanted.signbit()[~wanted.isnan()])


def test_round_to_bfloat16(library: ctypes.CDLL) -> None:
    values = torch.cat((_any_bits(300_000), _sixteen_bits(torch.bfloat16) * 1.00390625))
    rounded = torch.empty_like(values)
    library.to_bfloat16(_pointer(values), _pointer(rounded), ctypes.c_long(len(values)))
    wanted = values.bfloat16().float()
    torch.testing.assert_close(rounded, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    [n for n, r in RECIPES.items() if r.quantization.rule == "max_over_amax"],
)
def test_ratio_scale(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    q = RECIPES[name].quantization
    amaxes = _amaxes()
    scales = torch.empty_like(amaxes)
    library.ratio_scales(
        _pointer(amaxes),
        _pointer(scales),
        ctypes.c_long(len(amaxes)),
        ctypes.c_float(reference.MAX[q.format]),
        ctypes.c_float(q.epsilon),
        ctypes.c_float(reference._largest(q, dtype)),
        int(q.round == "pow2_down"),
    )
    wanted = reference._ratio_scale(amaxes.clamp(min=q.epsilon), q, dtype)
    assert torch.equal(scales, wanted)


@pytest.mark.parametrize("name", [n for n, r in RECIPES.items() if r.quantization.rule == "mx"])
def test_mx_scale(library: ctypes.CDLL, name: str) -> None:
    q = RECIPES[name].quantization
    amaxes = _amaxes()
    codes = torch.empty(len(amaxes), dtype=torch.int32)
    factors = torch.empty_like(amaxes)
    library.mx_scales(
        _pointer(amaxes),
        _pointer(codes),
        _pointer(factors),
        ctypes.c_long(len(amaxes)),
        ("e4m3", "e5m2", "e2m1").index(q.format),
        int(q.round == "pow2_down"),
    )
    wanted = reference._mx_exponent(amaxes, q)
    assert torch.equal(codes.long(), wanted)
    assert torch.equal(factors, reference._power_of_two(254 - wanted))


def test_e8m0_values(library: ctypes.CDLL) -> None:
    values = torch.empty(256)
    library.e8m0_values(_pointer(values))
    wanted = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)


def test_nvfp4_scale(library: ctypes.CDLL) -> None:
    amaxes = _amaxes()
    rng = torch.Generator().manual_seed(3)
    tensor = amaxes[torch.randperm(len(amaxes), generator=rng)].contiguous()
    codes, factors = torch.empty(len(amaxes), dtype=torch.uint8), torch.empty_like(amaxes)
    count = ctypes.c_long(len(amaxes))
    pointers = [_pointer(t) for t in (amaxes, tensor, codes, factors)]
    library.nvfp4_scales(*pointers, count)
    scale = reference._tensor_encode(tensor).unsqueeze(1)
    wanted_factors, wanted_codes = reference._nvfp4_scale(amaxes.unsqueeze(1), scale)
    assert torch.equal(codes, wanted_codes.flatten())
    assert torch.equal(factors, wanted_factors.flatten())


def _philox(library: ctypes.CDLL, counters: Tensor, keys: Tensor) -> Tensor:
    """int64 words in and out; the library takes 32 bits of each."""
    narrow = [(t & 0xFFFFFFFF).to(torch.uint32).contiguous() for t in (counters, keys)]
    words = torch.empty(len(counters), 4, dtype=torch.uint32)
    count = ctypes.c_long(len(counters))
    library.random_words(_pointer(narrow[0]), _pointer(narrow[1]), _pointer(words), count)
    return words.to(torch.int64)


def test_philox_known_answers(library: ctypes.CDLL) -> None:
    """The vectors that the authors publish with Random123."""
    ones = 0xFFFFFFFF
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    counters = torch.tensor([[0] * 4, [ones] * 4, pi])
    keys = torch.tensor([[0, 0], [ones, ones], [0xA4093822, 0x299F31D0]])
    wanted = torch.tensor(
        [
            [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ]
    )
    assert torch.equal(_philox(library, counters, keys), wanted)


def test_philox_is_the_references(library: ctypes.CDLL) -> None:
    rng = torch.Generator().manual_seed(2)
    counters = torch.randint(0, 2**32, (1000, 4), generator=rng)
    keys = torch.randint(0, 2**32, (1000, 2), generator=rng)
    wanted = reference.philox(counters.unbind(1), keys.unbind(1))
    assert torch.equal(_philox(library, counters, keys), wanted)


def test_stochastic_rounding(library: ctypes.CDLL) -> None:
    values = torch.cat((_around_grid("e2m1"), torch.linspace(-7, 7, 2003), _any_bits(1000)))
    noise = torch.arange(256.0).repeat(len(values))
    values = values.repeat_interleave(256)
    codes = torch.empty(len(values), dtype=torch.uint8)
    bytes_ = noise.to(torch.uint8)
    count = ctypes.c_long(len(values))
    library.stochastic_codes(_pointer(values), _pointer(bytes_), _pointer(codes), count)
    assert torch.equal(codes, reference._encode_e2m1(values, noise / 256))


@pytest.mark.parametrize("function", ["transform_runs", "transform_runs_to_pairs"])
def test_hadamard(library: ctypes.CDLL, function: str) -> None:
    rng = torch.Generator().manual_seed(4)
    plain = torch.randn(4000, 16, generator=rng).bfloat16().float()
    wild = _sixteen_bits(torch.bfloat16)[torch.randint(0, 2**16, (4000, 16), generator=rng)]
    small = (plain * 2.0**-126).bfloat16().float()
    huge = (plain * 2.0**125).bfloat16().float()
    runs = torch.cat(
        (plain, small, huge, wild, torch.zeros(1, 16), -torch.zeros(1, 16))
    ).contiguous()
    wanted = reference._butterflies(runs.unsqueeze(-1) * reference._signs(runs.device)).squeeze(-1)
    wanted = wanted.bfloat16().float()
    getattr(library, function)(_pointer(runs), ctypes.c_long(len(runs)))
    torch.testing.assert_close(runs, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(runs.signbit()[wanted == 0], wanted.signbit()[wanted == 0])


SPLITS = {
    "one": [300],
    "exact": [128, 256, 128],
    "empty groups": [0, 0, 5, 0, 200, 0],
    "negative": [-7, 130, -(2**62), 40],
    "too many": [100, 2**62, 2**62, 50],
    "rows left": [31, 33, 1],
    "forty": [7] * 40,
    "more groups than rows": [0] * 300 + [1] * 70,
}


@pytest.mark.parametrize("align", [16, 32, 128])
@pytest.mark.parametrize("name", SPLITS)
def test_every_row_and_place_has_one_slice(library: ctypes.CDLL, name: str, align: int) -> None:
    splits, rows = torch.tensor(SPLITS[name]), 512 if name != "too many" else 260
    groups = len(splits)
    row_owner = torch.zeros(rows, dtype=torch.long)
    place_owner = torch.zeros(align * (rows // align + groups), dtype=torch.long)
    block_owner = torch.zeros(rows // 16 + groups, dtype=torch.long)
    belongs = reference._rows((rows, 8), splits, splits.device)
    places = belongs.places(align)[0]
    found = torch.empty(8, 8, dtype=torch.int32)
    for tile in range(library.count_tiles(_pointer(splits), rows, groups, align)):
        library.find_slices(_pointer(splits), rows, groups, tile, align, _pointer(found))
        for i, slice_ in enumerate(found.tolist()):
            group, begin, length, row, place, owned, block, owns_block = slice_
            assert place == 128 * tile + 16 * i
            first, count = begin + row, max(0, min(16, length - row))
            row_owner[first : first + count] += 1
            place_owner[place : place + max(0, min(16, owned))] += 1
            if owns_block:
                block_owner[block] += 1
            own = torch.arange(first, first + count)
            assert torch.equal(belongs.valid[own], torch.full((count,), group < groups))
            if group < groups:
                assert torch.equal(places[own], torch.arange(place, place + count))
    assert (row_owner == 1).all() and (place_owner == 1).all() and (block_owner == 1).all()


def test_scale_of_nothing_is_one(library: ctypes.CDLL) -> None:
    amaxes = torch.tensor([0.0, torch.inf])
    scales = torch.empty(2)
    arguments = [ctypes.c_float(v) for v in (448.0, 0.0, FP32_MAX)]
    library.ratio_scales(_pointer(amaxes), _pointer(scales), ctypes.c_long(2), *arguments, 0)
    assert scales.tolist() == [1.0, 1.0]
