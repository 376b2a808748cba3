"""The tests of quantise kernels on the GPU: every output bit against the reference.

Those of tests/compile run on emulated kernels; here the same tests get the built ones: Hopper's,
and those for sm_80, which the driver compiles. On top come larger tensors, the hardware's
conversions of all 2^32 floats, and its larger magnitude of all pairs.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import common
import torch

from kernels import build

sys.path.insert(0, str(build.COMPILE_TESTS.parent))

# Packages without types: tests are not checked as part of one.
tests: Any = importlib.import_module(f"{build.COMPILE_TESTS.name}.test_quantize_kernels")
sums: Any = importlib.import_module(f"{build.COMPILE_TESTS.name}.test_group_sum")
harness: Any = importlib.import_module(f"{build.COMPILE_TESTS.name}.quantize_harness")

Check = tuple[str, Callable[[Any], None]]  # a name, and what raises AssertionError
FORMATS = ("e4m3", "e5m2", "e2m1")
MOST_MESSAGES = 25
GROUPS, TOKENS = 128, 2900
# Shape, whether it is in groups, dtype.
LARGE = (
    ((3000, 1048), True, torch.bfloat16),
    ((1025, 520), False, torch.float16),
    ((2, 648, 1032), False, torch.bfloat16),
)


# ---- the tests, by what pytest has marked them with


def _names(marked: str | Sequence[str]) -> list[str]:
    return [word.strip() for word in marked.split(",")] if isinstance(marked, str) else [*marked]


def _choices(mark: Any) -> list[dict[str, Any]]:
    """The arguments that one parametrize mark stands for."""
    names, values = _names(mark.args[0]), mark.args[1]
    if len(names) == 1:
        return [{names[0]: value} for value in values]
    return [dict(zip(names, value, strict=True)) for value in values]


def _calls(function: Any) -> Iterator[dict[str, Any]]:
    """Every combination of a test's parameters."""
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    for combination in itertools.product(*map(_choices, marks)):
        yield {name: value for choice in combination for name, value in choice.items()}


def _call(function: Any, arguments: dict[str, Any], kernels: Any) -> None:
    function(kernels=kernels, **arguments)


def _test(function: Any, arguments: dict[str, Any]) -> Check:
    words = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"{function.__name__}({words})", partial(_call, function, arguments)


def _tests() -> Iterator[Check]:
    for name, function in (*vars(tests).items(), *vars(sums).items()):
        if name.startswith("test_") and "kernels" in inspect.signature(function).parameters:
            for arguments in _calls(function):
                yield _test(function, arguments)


# ---- what only a GPU is fast enough for


def _sizes() -> list[int]:
    weights = torch.rand(GROUPS, generator=torch.Generator().manual_seed(9)) ** 2
    return [int(size) for size in weights / weights.sum() * TOKENS]


def _check_large(
    recipe: str, shape: tuple[int, ...], ragged: bool, dtype: torch.dtype, kernels: Any
) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    exponents = torch.randint(-10, 10, (*shape[:-1], 1), generator=generator).float()
    x = (torch.randn(shape, generator=generator) * exponents.exp2()).to(dtype)
    case = harness.Case(x, torch.tensor(_sizes()) if ragged else None)
    token_major = recipe.startswith("block_1x128") and len(shape) == 2
    run = harness.Run(kernels, harness.RECIPES[recipe], case)
    outputs = run.quantize(**tests._arguments(recipe, case), sums=True, token_major=token_major)
    harness.check(outputs, f"{recipe} {shape}")


def _large() -> Iterator[Check]:
    for recipe, sizes in itertools.product(harness.RECIPES, LARGE):
        yield f"large({recipe}, {sizes[0]})", partial(_check_large, recipe, *sizes)


def _agrees(function: str, what: str, chosen: tuple[int, ...], kernels: Any) -> None:
    """Call what counts differences on the GPU; there must be none."""
    differences = torch.zeros(1, dtype=torch.int64, device="cuda")
    example = torch.zeros(1, dtype=torch.int32, device="cuda")
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (differences, example)]
    code = getattr(kernels._library, function)(*chosen, *pointers)
    assert code == 0, f"{what}: error {code}"
    found, bits = int(differences), int(example) & 0xFFFFFFFF
    assert found == 0, f"{what}: {found} differ, one is {bits:#010x}"


def _exhaustive() -> Iterator[Check]:
    for fmt, name in enumerate(FORMATS):
        check = f"every float of {name}"
        yield check, partial(_agrees, "run_every_float", check, (fmt,))
    for half, nan in itertools.product((0, 1), repeat=2):
        check = f"every pair of {'float16' if half else 'bfloat16'}{', NaN kept' if nan else ''}"
        yield check, partial(_agrees, "run_every_pair", check, (half, nan))


# ---- running them


def _holds(kernels: Any, check: Check, messages: list[str]) -> bool:
    """Whether a check holds; an error of CUDA ends everything, since it poisons the context."""
    name, run = check
    try:
        run(kernels)
        if kernels.device == "cuda":
            torch.cuda.synchronize()
    except AssertionError as error:
        messages.append(f"FAILED {name}: {str(error)[:300]}")
        if len(messages) <= MOST_MESSAGES:
            print(messages[-1], flush=True)
        return False
    return True


def _kernels(device: str) -> Iterator[tuple[str, Any]]:
    """Which kernels are checked, by name."""
    if device == "cpu":
        print(build.build_quantize_emulation(), flush=True)
        yield "", harness.Kernels(build.quantize_library(device), device)
        return
    for name, code in (("", build.Code.HOPPER), (" of sm_80's code", build.Code.AMPERE_PTX)):
        print(build.build_quantize(code), flush=True)
        yield name, harness.Kernels(build.quantize_library(device, code), device)


def run(device: str = "cuda", *, quick: bool = False) -> list[common.Row]:
    """Check every quantise kernel; the rows say how many checks of each sort hold.

    Raises:
        SystemExit: a check does not hold.
    """
    messages, rows = list[str](), list[common.Row]()
    for which, kernels in _kernels(device):
        sorts: dict[str, Iterator[Check]] = {"tests": _tests()}
        if device == "cuda":
            sorts["all operands"] = _exhaustive()
            if not quick:
                sorts["large tensors"] = _large()
        for sort, checks in sorts.items():
            held = [_holds(kernels, check, messages) for check in checks]
            print(f"{sort}{which}: {sum(held)} of {len(held)} hold", flush=True)
            rows.append(common.row(sort + which, common.OURS, "checks that hold", [sum(held)]))
    if messages:
        raise SystemExit(f"{len(messages)} checks do not hold")
    return rows
