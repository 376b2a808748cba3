"""Printed CUDA, compiled as plain C++ with the shipped `math.cuh`, against printed PyTorch."""

from __future__ import annotations

import ctypes
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusegen.math import Program, backward_program, parse, to_cuda, to_torch

_ROOT = Path(__file__).parents[2]
_MODULE = runpy.run_path(str(_ROOT / "tests" / "pointwise_cases.py"))
CASES = {**_MODULE["ACTIVATIONS"], **_MODULE["EXTRAS"]}
RUNTIME_VALUES = _MODULE["RUNTIME_VALUES"]
COUNT = 50_000
EPS = 2.0**-23


def _program(name: str) -> Program:
    text, operands, attributes = CASES[name]
    return backward_program(parse(text, operands, attributes), operands, recompute="y")


def _function(name: str, program: Program) -> str:
    """A C function that runs the printed lines over arrays: inputs, attributes, outputs, count."""
    inputs = [f"const float {n} = inputs[{i}][at];" for i, n in enumerate(program.operands)]
    scalars = [f"const float {n} = attributes[{i}];" for i, n in enumerate(program.attributes)]
    outputs = [f"outputs[{i}][at] = {n};" for i, (n, _) in enumerate(program.results)]
    body = "\n    ".join([*scalars, *inputs, *to_cuda(program), *outputs])
    return f"""
extern "C" void case_{name}(const float* const* inputs, [[maybe_unused]] const float* attributes,
                       float* const* outputs, long count) {{
  for (long at = 0; at < count; ++at) {{
    {body}
  }}
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "this test compiles C++: install g++"
    folder = tmp_path_factory.mktemp("pointwise")
    source = folder / "pointwise.cpp"
    functions = [_function(name, _program(name)) for name in CASES]
    source.write_text('#include "fusegen/pointwise/math.cuh"\n' + "".join(functions))
    include = _ROOT / "templates" / "static" / "csrc"
    output = folder / "pointwise.so"
    # Without contraction every line is the sequence of roundings that PyTorch performs.
    strict = ["-ffp-contract=off", "-Wall", "-Wextra", "-Wdouble-promotion", "-Werror"]
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", *strict, f"-I{include}"]
    subprocess.run([*command, str(source), "-o", str(output)], check=True)
    return ctypes.CDLL(str(output))


def _run(library: ctypes.CDLL, name: str, program: Program, env: dict[str, Tensor]) -> list[Tensor]:
    outputs = [torch.empty(COUNT) for _ in program.results]
    pointer = ctypes.c_void_p
    inputs = (pointer * len(program.operands))(*(env[n].data_ptr() for n in program.operands))
    results = (pointer * len(outputs))(*(t.data_ptr() for t in outputs))
    values = [RUNTIME_VALUES[n] for n in program.attributes]
    attributes = (ctypes.c_float * max(1, len(values)))(*values)
    getattr(library, f"case_{name}")(inputs, attributes, results, ctypes.c_long(COUNT))
    return outputs


def _torch(program: Program, env: dict[str, Tensor]) -> list[Tensor]:
    namespace: dict[str, object] = {"torch": torch, **env, **RUNTIME_VALUES}
    exec("\n".join(to_torch(program)), namespace)
    values = [namespace[name] for name, _ in program.results]
    return [value for value in values if isinstance(value, Tensor)]


def _random(program: Program) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(7)
    return {n: torch.randn(COUNT, generator=rng) * 4.0 for n in program.operands}


def _edges(program: Program) -> dict[str, Tensor]:
    magnitudes = [
        0.0,
        1e-40,
        1e-30,
        0.5,
        2.0,
        7.0,
        20.0,
        89.0,
        100.0,
        1e30,
        3.4028234e38,
        torch.inf,
    ]
    values = torch.tensor([*magnitudes, *(-m for m in magnitudes), torch.nan])
    rng = torch.Generator().manual_seed(11)
    pick = [torch.randint(len(values), (COUNT,), generator=rng) for _ in program.operands]
    return {n: values[p] for n, p in zip(program.operands, pick, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_cuda_and_torch_agree_to_a_few_ulps(library: ctypes.CDLL, name: str) -> None:
    """The two math libraries differ by a unit in exp, tanh and erf; all else is the same."""
    program = _program(name)
    env = _random(program)
    others = torch.ones(COUNT)
    for operand in program.operands[1:]:
        others = others * (1.0 + env[operand].abs())
    for got, want in zip(_run(library, name, program, env), _torch(program, env), strict=True):
        error = (got.double() - want.double()).abs()
        assert bool((error <= 8 * EPS * (want.abs() + others)).all()), float(error.max())


# Cancels nowhere, so that its size is the measure of its gradients' errors once it saturates.
SATURATING = (*_MODULE["ACTIVATIONS"], "gelu_erf", "mish")


@pytest.mark.parametrize("name", SATURATING)
def test_saturated_gradients_are_those_of_float64(library: ctypes.CDLL, name: str) -> None:
    """To 2^-16 of themselves, as for the printed PyTorch: from 4 on no slope passes through 0."""
    text, operands, attributes = CASES[name]
    program = backward_program(parse(text, operands, attributes), operands, recompute="y")
    grid = torch.cat((torch.linspace(4.0, 130.0, COUNT // 4), torch.logspace(2, 5, COUNT // 4)))
    for operand in operands:
        env = {n: torch.full((COUNT,), 0.75) for n in program.operands}
        env[operand] = torch.cat((grid, -grid))
        got = _run(library, name, program, env)
        wide = _torch(program, {n: t.double() for n, t in env.items()})
        for mine, want in zip(got[: len(operands)], wide[: len(operands)], strict=True):
            error = (mine.double() - want).abs()
            assert bool((error <= 2.0**-16 * want.abs() + 1e-35).all()), operand


@pytest.mark.parametrize("name", CASES)
def test_cuda_and_torch_agree_on_infinities_and_nan(library: ctypes.CDLL, name: str) -> None:
    program = _program(name)
    env = _edges(program)
    for got, want in zip(_run(library, name, program, env), _torch(program, env), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        # A product that rounds to the last binade in one library may overflow in the other.
        near_overflow = torch.minimum(got.abs(), want.abs()) > 1e38
        assert bool(((got.isinf() == want.isinf()) | near_overflow).all())
        assert bool((got.sign() == want.sign())[want.isinf()].all())
