"""Benchmarks of what memory bounds: floors by a copy, and kernels told apart in a profile."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

from fusegen.commands import bench

torch: Any = importlib.import_module("torch")
OURS = "fusegen"


@pytest.fixture
def benchmarks() -> bench.Benchmarks:
    return bench.find()


@pytest.fixture
def quick(benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows of a benchmark's quick run on the CPU, of one round and nothing compiled."""
    common = benchmarks.module("common")
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "REST_SECONDS", 0.0)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def rows(module: str, function: str) -> dict[tuple[str, str], Any]:
        cases = getattr(benchmarks.module(module), function)(quick=True)
        with common.rounds_of(1):
            found = common.outcomes(cases)
        assert [each.error for each in found if isinstance(each, common.Failure)] == []
        return {(row.case, row.contender): row for row in found}

    return rows


def test_small_tensors_are_held_against_microseconds(benchmarks: bench.Benchmarks) -> None:
    bandwidth = benchmarks.module("bandwidth")
    samples = {OURS: [0.2, 0.3, 0.4], "copy": [0.1, 0.2, 0.3]}
    small, copy = bandwidth.rows("a", samples, bandwidth.LARGE - 1)
    assert (small.floor, small.fraction, copy.fraction) == (0.2, pytest.approx(2 / 3), 1.0)
    assert small.extra == {"us_above_copy": pytest.approx(100.0)}
    large, _ = bandwidth.rows("a", samples, bandwidth.LARGE)
    assert large.extra == {} and large.rate == bandwidth.LARGE / 0.3e9


def test_a_copy_reads_half_of_the_bytes_and_writes_half(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks.module("common"), "DEVICE", "cpu")
    copied = benchmarks.module("bandwidth").copy(1000)()
    assert copied.numel() * copied.element_size() == 500


def test_another_result_is_not_timed(benchmarks: bench.Benchmarks) -> None:
    bandwidth, one = benchmarks.module("bandwidth"), torch.ones(4)
    bandwidth.require_results("a", (one, one), one)
    with pytest.raises(SystemExit, match="a: relative difference"):
        bandwidth.require_results("a", (one, one), (one, 2 * one))


@pytest.mark.parametrize(
    ("module", "function", "case"),
    [
        ("dropout", "dropout", "dropout forward 64 x 256"),
        ("dropout", "dropout", "dropout backward 64 x 256"),
        ("router", "router", "router forward 64 x 64 x 16"),
        ("router", "router", "router backward 64 x 64 x 16"),
        ("norm_quantize", "norm_quantize", "norm_quantize fp8_delayed 128 x 256"),
        ("norm_quantize", "norm_quantize", "norm_quantize fp8_block 128 x 256"),
    ],
)
def test_quick_runs_have_the_contenders(quick: Any, module: str, function: str, case: str) -> None:
    found = quick(module, function)
    for contender in (OURS, "torch compiled", "copy"):
        assert found[case, contender].floor == pytest.approx(found[case, "copy"].median, rel=1e-4)
    assert math.isfinite(found[case, OURS].extra["us_above_copy"])


def test_a_dropout_that_drops_too_much_is_refused(benchmarks: bench.Benchmarks) -> None:
    module, x = benchmarks.module("dropout"), torch.ones(100, 100)
    kept = torch.rand(100, 100) >= module.P
    module._require_dropped("a", x, kept / (1 - module.P))
    with pytest.raises(SystemExit, match=r"a: 0\.\d+ of the elements are zero, expected 0\.1"):
        module._require_dropped("a", x, (torch.rand(100, 100) >= 0.5) / (1 - module.P))
    with pytest.raises(SystemExit, match="a: relative difference"):
        module._require_dropped("a", x, kept.float())


# Kernels of a profile


def ran(benchmarks: bench.Benchmarks, *names: str) -> list[Any]:
    """Kernels of 2 us each, launched 1 us before the end of their predecessor."""
    of = benchmarks.module("profiled").Ran
    return [of(name, 1.0 * place, 2.0 + place) for place, name in enumerate(names)]


def test_a_part_of_each_call_counts(benchmarks: bench.Benchmarks) -> None:
    profiled = benchmarks.module("profiled")
    calls = {OURS: ["clear", "norm_quantize<e4m3>", "gemm"], "copy": ["Memcpy DtoD"]}
    parts = {
        OURS: profiled.Part(lambda _: None, "norm_quantize"),
        "copy": profiled.Part(lambda _: None),
    }
    turns = ["copy", OURS, OURS]
    names = [name for turn in turns for _ in range(profiled.CALLS) for name in calls[turn]]
    found = profiled.by_turn(turns, parts, calls, ran(benchmarks, *names))
    assert found[OURS] == [pytest.approx(0.002)] * 2, "the clear and the step, not the GEMM"
    first = 0.002 + 0.001 * (profiled.CALLS - 1)
    assert found["copy"] == [pytest.approx(first / profiled.CALLS)]
    with pytest.raises(SystemExit, match="copy: its calls do not run the same kernels"):
        profiled.by_turn(turns, parts, calls, ran(benchmarks, *names[1:]))


def test_a_step_without_its_kernel_is_refused(
    benchmarks: bench.Benchmarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled = benchmarks.module("profiled")
    part = profiled.Part(lambda _: None, "norm_quantize")
    assert part.counted(["norm", "quantize"]) == []
    assert profiled.Part(part.run).counted(["a"]) == [0]
    assert profiled.Part(part.run, of="amax").counted(["amax", "gemm", "amax"]) == [0, 2]

    class Profile:
        def __enter__(self) -> Any:
            return lambda: ran(benchmarks, "norm", "quantize")

        def __exit__(self, *_: Any) -> None:
            return None

    monkeypatch.setattr(profiled, "profiled", Profile)
    with pytest.raises(SystemExit, match="fusegen: none of its kernels counts: norm, quantize"):
        profiled._kernels(OURS, part)
