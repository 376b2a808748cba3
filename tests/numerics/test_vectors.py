"""Vectors computed by hand, and published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import naive
import pytest
import torch
import yaml
from subject import quantization, reference

VECTORS = yaml.safe_load((Path(__file__).parent / "vectors.yaml").read_text(encoding="utf-8"))

# Known answers of Random123 (tests/kat_vectors, philox4x32 10): counter, key, result.
PHILOX = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
)  # fmt: skip

# The transform of a column of 16 ones: row i of H16 has (-1)^popcount(i & j) in column j, so row 0
# sums the signs, of which 6 are + and 10 are -: -4, and a quarter of it is -1.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_hand_computed(vector: dict[str, Any]) -> None:
    q = quantization(vector["recipe"], vector["role"], **vector.get("changes", {}))
    x = torch.tensor([vector["x"]]).to(getattr(torch, vector.get("dtype", "float32")))
    got = reference.quantize(x, q).rowwise
    codes = bytes.fromhex(vector["codes"])
    data = bytes(got.data.view(torch.uint8)[0].tolist())
    assert data.hex(" ") == codes.ljust(len(data), b"\0").hex(" ")
    if "scale" in vector:
        assert got.scale.flatten().tolist() == vector["scale"]
    else:
        scale_codes = bytes(got.scale.view(torch.uint8).flatten().tolist())
        assert scale_codes == bytes.fromhex(vector["scale_codes"])
    if "amax" in vector:
        assert got.amax.tolist() == vector["amax"]


@pytest.mark.parametrize(("counter", "key", "result"), PHILOX)
def test_philox_known_answers(counter: str, key: str, result: str) -> None:
    assert naive.philox(words(counter), words(key)) == words(result)
    counters = tuple(torch.tensor([word, word]) for word in words(counter))
    keys = tuple(torch.tensor(word) for word in words(key))
    assert reference.philox(counters, keys).tolist() == [words(result)] * 2


def test_transform_of_ones() -> None:
    q = quantization("nvfp4", "input")
    x = torch.ones(16, 1, dtype=torch.bfloat16)
    values, _ = reference._values(x, q, True, None)
    sums = [
        sum(sign * (-1) ** (i & j).bit_count() for j, sign in enumerate(SIGNS)) for i in range(16)
    ]
    assert sums[0] == -4
    assert values.flatten().tolist() == [total / 4 for total in sums]


def test_bytes_of_a_run_are_little_endian() -> None:
    """Counter (block, 0, stream, offset), key = seed: block 0 of seed 0 is the first answer."""
    drawn = reference._random_bytes(torch.tensor(0), False, torch.tensor([0, 0]))
    expected = [0xD5, 0xE8, 0x27, 0x66, 0x8D, 0xC5, 0x69, 0xE1]
    assert drawn[:8].tolist() == expected


@pytest.mark.parametrize(
    ("fmt", "code", "value"),
    [
        ("e4m3", 0x7E, 448.0),
        ("e4m3", 0x01, 2.0**-9),
        ("e4m3", 0x08, 2.0**-6),
        ("e5m2", 0x7B, 57344.0),
        ("e5m2", 0x01, 2.0**-16),
        ("e2m1", 0x1, 0.5),
        ("e2m1", 0xF, -6.0),
    ],
)
def test_values_of_codes(fmt: str, code: int, value: float) -> None:
    assert naive.decode(code, fmt) == value
    assert reference._decode(torch.tensor([code], dtype=torch.uint8), fmt).tolist() == [value]


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m1"])
def test_every_code_decodes_to_itself(fmt: str) -> None:
    nan = naive.FORMATS[fmt][3]
    codes = [code for code in range(2 * naive.SIGN_BIT[fmt]) if code & ~naive.SIGN_BIT[fmt] < nan]
    if fmt == "e5m2":
        codes = [code for code in codes if code & 0x7F <= 0x7B]
    values = reference._decode(torch.tensor(codes, dtype=torch.uint8), fmt)
    assert values.tolist() == [naive.decode(code, fmt) for code in codes]
    assert reference._encode(values, fmt, None).tolist() == codes
