"""The ops on a device: where they write, when they wait, on which stream, what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import bundles
import gpu_support as support
import pytest
import torch
from gpu_support import Case, Operands
from torch import Tensor

CASE = Case("device", 500, 72, 136, (100, 0, 77, 1, 300))
LARGEST = 2**63 - 1
SPLITS = {
    "ragged": CASE.splits,
    "short": (3, 0, 0, 1, 20),
    "empty": (0,) * 5,
    "negative": (-1, 200, -(2**62), 200, -7),
    "oversized": (499, LARGEST, LARGEST, 2**40, 3),
}


def grouped(bundle: ModuleType) -> Callable[..., Tensor]:
    return support.function_of(bundle, "grouped_linear")


def operands_and_dy(splits: tuple[int, ...] = CASE.splits) -> tuple[Operands, Tensor]:
    operands = support.grouped_linear_operands(CASE, torch.bfloat16)
    operands["split_sizes"] = support.splits_tensor(splits)
    return operands, support.randn((CASE.tokens, CASE.n), torch.bfloat16, 9)


# ---- where they write


class Holes:
    """Free blocks of given sizes, each between two blocks that hold a pattern.

    The allocator gives a request the smallest free block that holds it, so results land in the
    holes; the blocks on both sides show every write that leaves a result's bounds. Holes hold NaN,
    so an element that nothing wrote shows too.
    """

    PATTERN = 0x5A

    def __init__(self, sizes: list[int]) -> None:
        self.guards: list[Tensor] = []
        self.places: dict[int, int] = {}
        holes = []
        for size in sizes:
            for _ in range(3):
                self.guards.append(self._block(size, self.PATTERN))
                holes.append(self._block(size, 0xFF))
                self.places[holes[-1].data_ptr()] = size
            self.guards.append(self._block(size, self.PATTERN))
        torch.cuda.synchronize()
        holes.clear()

    @staticmethod
    def _block(size: int, byte: int) -> Tensor:
        return torch.full((size,), byte, dtype=torch.uint8, device="cuda")

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor was put into one of the holes."""
        return tensor.data_ptr() in self.places

    def untouched(self) -> bool:
        """Whether every guard still holds the pattern."""
        return all(bool((guard == self.PATTERN).all()) for guard in self.guards)


POOLS: list[torch.cuda.MemPool] = []  # kept: results outlive the block that made them


@contextmanager
def own_pool() -> Iterator[None]:
    """Allocations of this thread come from a pool of their own, so that no other hole fits."""
    POOLS.append(torch.cuda.MemPool())
    with torch.cuda.use_mem_pool(POOLS[-1]):
        yield


def _bytes(*shape: int) -> int:
    return 2 * torch.Size(shape).numel()


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS.keys())
def test_every_element_is_written_and_none_outside(
    bundle: ModuleType, splits: tuple[int, ...]
) -> None:
    operands, dy = operands_and_dy(splits)
    x, weight, sizes, bias = (operands[key] for key in ("x", "weight", "split_sizes", "bias"))
    expected = support.exact("grouped_linear", operands, dy)
    forward = support.op_of(bundle, "grouped_linear__bf16_forward")
    backward = support.op_of(bundle, "grouped_linear__bf16_backward")
    wanted = [_bytes(*expected[key].shape) for key in ("y", "x", "weight", "bias")]
    with own_pool():
        holes = Holes(wanted)
        results = (
            forward(x, weight, sizes, bias),
            *backward(dy, x, sizes, weight, True, True, True),
        )
        torch.cuda.synchronize()
        assert all(holes.holds(result) for result in results)
        assert holes.untouched()
    for key, result in zip(("y", "x", "weight", "bias"), results, strict=True):
        assert support.relative_error(result, expected[key]) <= 4e-3, key


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS.keys())
def test_grouped_mlp_writes_inside_its_results(bundle: ModuleType, splits: tuple[int, ...]) -> None:
    operands = support.grouped_mlp_operands(CASE, torch.bfloat16)
    operands["split_sizes"] = support.splits_tensor(splits)
    dy = support.randn((CASE.tokens, CASE.k), torch.bfloat16, 9)
    forward = support.op_of(bundle, "grouped_mlp__bf16_forward")
    arguments = [
        operands[key]
        for key in ("x", "fc1_weight", "fc2_weight", "split_sizes", "probs", "fc1_bias", "fc2_bias")
    ]
    expected = support.exact("grouped_mlp", operands, dy)["y"]
    with own_pool():
        holes = Holes([_bytes(CASE.tokens, size) for size in (CASE.k, 2 * CASE.n, CASE.n)])
        results = forward(*arguments, *[True] * 5)
        torch.cuda.synchronize()
        assert all(holes.holds(result) for result in results)
        assert holes.untouched()
    assert all(bool(torch.isfinite(result).all()) for result in results)
    assert support.relative_error(results[0], expected) <= 1e-2


# ---- when they wait


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["grouped_linear", "grouped_mlp"])
def test_nothing_waits_for_the_device(bundle: ModuleType, name: str) -> None:
    mlp = name == "grouped_mlp"
    make = support.grouped_mlp_operands if mlp else support.grouped_linear_operands
    operands = make(CASE, torch.bfloat16)
    dy = support.randn((CASE.tokens, CASE.k if mlp else CASE.n), torch.bfloat16, 9)
    function = support.function_of(bundle, name)
    expected = support.forward_backward(function, operands, dy)
    with no_synchronisation():
        got = support.forward_backward(function, operands, dy)
    support.assert_same(got, expected)


def test_the_host_runs_ahead(bundle: ModuleType) -> None:
    """Calls return while the stream is still busy with what came before them."""
    operands, dy = operands_and_dy()
    function = grouped(bundle)
    support.forward_backward(function, operands, dy)
    torch.cuda.synchronize()
    done = support.cuda.Event()
    support.cuda._sleep(2_000_000_000)
    for _ in range(20):
        support.forward_backward(function, operands, dy)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


# ---- on which stream


def test_streams_do_not_disturb_each_other(bundle: ModuleType) -> None:
    function = grouped(bundle)
    inputs = []
    for seed in range(4):
        operands, dy = operands_and_dy(tuple(support.dirichlet(5, 480, 1.0, seed)))
        operands["x"] = support.randn((CASE.tokens, CASE.k), torch.bfloat16, 20 + seed)
        inputs.append((operands, dy))
    expected = [support.forward_backward(function, *each) for each in inputs]
    torch.cuda.synchronize()
    streams = [support.cuda.Stream() for _ in inputs]
    for _ in range(25):
        found = []
        for stream, each in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(support.forward_backward(function, *each))
        torch.cuda.synchronize()
        for got, wanted in zip(found, expected, strict=True):
            support.assert_same(got, wanted)


def test_calls_follow_the_current_stream(bundle: ModuleType) -> None:
    """An operand written late on a side stream is seen by the call that is queued behind it."""
    function = grouped(bundle)
    operands, _ = operands_and_dy()
    other = support.randn((CASE.tokens, CASE.k), torch.bfloat16, 77)
    expected = function(**{**operands, "x": other})
    torch.cuda.synchronize()
    stream = support.cuda.Stream()
    with torch.cuda.stream(stream):
        support.cuda._sleep(50_000_000)
        operands["x"].copy_(other)
        y = function(**operands)
    torch.cuda.synchronize()
    support.assert_same({"y": y}, {"y": expected})


# ---- what they say


Mistake = Callable[[Operands], None]


def _cast(name: str, dtype: torch.dtype) -> Mistake:
    return lambda operands: operands.__setitem__(name, operands[name].to(dtype))


def _unsqueeze(name: str) -> Mistake:
    return lambda operands: operands.__setitem__(name, operands[name][None])


def _cut(name: str, axis: int, size: int) -> Mistake:
    return lambda operands: operands.__setitem__(name, operands[name].narrow(axis, 0, size))


def _move(name: str) -> Mistake:
    return lambda operands: operands.__setitem__(name, operands[name].cpu())


def _narrow_all(operands: Operands) -> None:
    """K = 68, in every operand that has it."""
    operands["x"], operands["weight"] = operands["x"][:, :68], operands["weight"][..., :68]


MISTAKES: dict[str, Mistake] = {
    "x float32": _cast("x", torch.float32),
    "x float8": _cast("x", torch.float8_e4m3fn),
    "weight float16": _cast("weight", torch.float16),
    "bias float32": _cast("bias", torch.float32),
    "splits int32": _cast("split_sizes", torch.int32),
    "x rank": _unsqueeze("x"),
    "weight rank": _unsqueeze("weight"),
    "splits rank": _unsqueeze("split_sizes"),
    "bias rank": _unsqueeze("bias"),
    "x width": _cut("x", 1, 64),
    "weight groups": _cut("weight", 0, 4),
    "splits length": _cut("split_sizes", 0, 3),
    "bias width": _cut("bias", 1, 8),
    "K no multiple of 8": _narrow_all,
    "weight on the CPU": _move("weight"),
    "splits on the CPU": _move("split_sizes"),
    "bias on the CPU": _move("bias"),
}
ORDER = ("x", "weight", "split_sizes", "bias")


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_read_as_the_reference_words_them(bundle: ModuleType, mistake: Mistake) -> None:
    operands, _ = operands_and_dy()
    mistake(operands)
    reference = bundles.load_cell(bundle, "reference.grouped_linear__bf16")
    expected = support.first_line(lambda: reference.check_forward(*(operands[k] for k in ORDER)))
    assert expected.startswith("grouped_linear__bf16: ")
    assert support.first_line(lambda: grouped(bundle)(**operands)) == expected


BACKWARD_MISTAKES: dict[str, Callable[[list[Any]], None]] = {
    "dy float32": lambda given: given.__setitem__(0, given[0].float()),
    "dy rank": lambda given: given.__setitem__(0, given[0][None]),
    "x rows": lambda given: given.__setitem__(1, given[1][:-1]),
    "x dtype": lambda given: given.__setitem__(1, given[1].half()),
    "splits int32": lambda given: given.__setitem__(2, given[2].int()),
    "weight width": lambda given: given.__setitem__(3, given[3][:, :8]),
    "weight on the CPU": lambda given: given.__setitem__(3, given[3].cpu()),
}


@pytest.mark.parametrize("mistake", BACKWARD_MISTAKES.values(), ids=BACKWARD_MISTAKES.keys())
def test_backward_mistakes_read_alike(
    bundle: ModuleType, mistake: Callable[[list[Any]], None]
) -> None:
    operands, dy = operands_and_dy()
    given = [dy, operands["x"], operands["split_sizes"], operands["weight"]]
    mistake(given)
    reference = bundles.load_cell(bundle, "reference.grouped_linear__bf16")
    backward = support.op_of(bundle, "grouped_linear__bf16_backward")
    expected = support.first_line(lambda: reference.check_backward(*given))
    assert expected.startswith("grouped_linear__bf16: ")
    assert support.first_line(lambda: backward(*given, True, True, False)) == expected


def test_a_mistake_leaves_the_device_usable(bundle: ModuleType) -> None:
    operands, dy = operands_and_dy()
    expected = support.forward_backward(grouped(bundle), operands, dy)
    with pytest.raises(RuntimeError):
        grouped(bundle)(**{**operands, "x": operands["x"].float()})
    support.assert_same(support.forward_backward(grouped(bundle), operands, dy), expected)
