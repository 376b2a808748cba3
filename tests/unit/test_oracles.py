"""What is handed to CUTLASS beside our GEMMs: operands, scales and pairs, on the CPU."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from torch import Tensor

from .gpu_files import load

oracles = load("oracles")
HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PARTS = {part.recipe: part for parts in oracles.PARTS.values() for part in parts}


def values(operand: oracles.Operand) -> Tensor:
    """float64 [rows, depth] of an operand, read as the instruction reads it."""
    codes, block = operand.codes, 32
    if codes.dtype is torch.float4_e2m1fn_x2:
        nibbles = torch.stack([codes.view(torch.uint8) & 15, codes.view(torch.uint8) >> 4], -1)
        table = torch.tensor([*HALVES, *(-each for each in HALVES)], dtype=torch.float64)
        found, block = table[nibbles.flatten(1).int()], 16
    else:
        found = codes.double()
    assert found.shape[1] == operand.depth
    if operand.atoms is None:
        return found * operand.factor
    scale = torch.zeros(found.shape[0], operand.depth // block, dtype=torch.float64)
    stored = operand.atoms.flatten().tolist()
    per_row = operand.atoms.shape[1]
    for m, b in itertools.product(*map(range, scale.shape)):
        atom = m // 128 * per_row + b // 4
        byte = stored[atom * 512 + m % 32 * 16 + m % 128 // 32 * 4 + b % 4]
        code = torch.tensor(byte, dtype=torch.uint8)
        scale[m, b] = 2.0 ** (byte - 127) if block == 32 else code.view(torch.float8_e4m3fn)
    return found * scale.repeat_interleave(block, 1) * operand.factor


def exact(a: oracles.Operand, b: oracles.Operand) -> Tensor:
    return values(a) @ values(b).t()


def compared(recipe: str, gemm: oracles.Gemm) -> list[oracles.Compared]:
    """The cells of the CPU bundle beside a GEMM."""
    layer, functions = (
        importlib.import_module(f"generated.cpu.{name}__{recipe}")
        for name in (oracles.MODULE, oracles.FUNCTIONS)
    )
    part = PARTS[recipe]
    return [*oracles.compare(part, layer, functions, gemm, part.backward and gemm)]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles.bundles, "DEVICE", "cpu")
    monkeypatch.setattr(oracles, "SPLITS", (0, 1, 40, 0))
    monkeypatch.setattr(oracles, "TOKENS", 42)
    monkeypatch.setattr(oracles, "K", 256)
    monkeypatch.setattr(oracles, "N", 128)
    monkeypatch.syspath_prepend(oracles.bundles.ROOT)


@pytest.mark.parametrize("recipe", PARTS)
def test_operands_are_those_that_our_gemms_read(recipe: str) -> None:
    found = compared(recipe, exact)
    kinds = ["fprop", "dgrad", "wgrad"] if PARTS[recipe].backward else ["fprop"]
    assert [each.name for each in found] == [f"{recipe} {kind}" for kind in kinds]
    for each in found:
        assert each.same and 0 < each.distance < oracles.TOLERANCE, each


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_scale_that_is_read_elsewhere_is_noticed(recipe: str) -> None:
    def swapped(a: oracles.Operand, b: oracles.Operand) -> Tensor:
        atoms = None if a.atoms is None else a.atoms.transpose(-1, -2).contiguous()
        return exact(oracles.Operand(a.codes, a.depth, atoms, a.factor), b)

    assert not any(each.same for each in compared(recipe, swapped))


def test_what_is_no_number_is_not_the_same() -> None:
    assert not oracles.Compared("a", float("nan"), 1.0).same


@pytest.mark.parametrize("arch", oracles.PARTS)
def test_every_part_has_a_format_and_every_format_is_used(arch: str) -> None:
    for part in oracles.PARTS[arch]:
        assert {part.forward, part.backward} - {None} <= {*oracles.FORMATS}
    used = {each for part in PARTS.values() for each in (part.forward, part.backward) if each}
    assert used == {*oracles.FORMATS}


def test_an_architecture_without_builders_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert oracles.main(["sm_89"]) == 0
    assert "CUTLASS's builders have no GEMM for it" in capsys.readouterr().out
