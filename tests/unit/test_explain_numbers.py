"""`explain` on a page: its width, its colours, and numbers at sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fusegen import cli
from fusegen.cli import colours
from fusegen.emit.text.quantities import in_seconds, with_prefix
from fusegen.families.gpus import gpu_called
from fusegen.ir.plan import Status

ROOT = Path(cli.__file__).parents[3]
LINEAR = ("explain", "linear", "bf16", "sm_90a")
T, K, N = 8192, 4096, 2048
SIZES = ("--sizes", f"T={T},K={K},N={N}")


def run(*words: str, color: bool | None = None, env: dict[str, str | None] | None = None) -> Result:
    result = CliRunner().invoke(cli.program, list(words), color=bool(color), env=env)
    print(result.exit_code, result.stderr)
    return result


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in an empty folder outside the checkout."""
    monkeypatch.chdir(tmp_path)


# Width and colour


@pytest.mark.parametrize(
    "cell",
    [
        ("norm_mlp_swiglu", "fp8_block", "sm_90a"),
        ("grouped_mlp", "fp8_block", "sm_90a"),
        ("linear_cross_entropy", "nvfp4", "cpu"),
    ],
)
def test_every_line_fits_the_page(cell: tuple[str, ...]) -> None:
    done = run("explain", *cell)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100


def test_a_name_that_is_cut_loses_nothing() -> None:
    words = ("explain", "norm_mlp_swiglu", "fp8_block", "sm_90a")
    data = json.loads(run(*words, "--json").stdout)
    names = [word for line in data["text"] for word in line.split() if len(word) > 100]
    assert names
    joined = re.sub(r"_\n +", "_", run(*words).stdout)
    assert all(name in joined for name in names)


def test_colours_are_for_terminals_and_change_no_letter() -> None:
    words = ("explain", "grouped_mlp", "fp8_block", "sm_90a", "--sizes", "T=64,E=2,H=128,F=256")
    plain = run(*words, env={"NO_COLOR": None}).stdout
    assert "\x1b" not in plain
    assert "\x1b" not in run(*words, color=True, env={"NO_COLOR": "1"}).stdout
    shown = run(*words, color=True, env={"NO_COLOR": None}).stdout
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == plain
    for text in ("\x1b[32m\x1b[1mnative\x1b[0m", "\x1b[1mbuffers\x1b[0m", "\x1b[36mx_rowwise\x1b"):
        assert text in shown
    assert "\x1b[36m1. quantize\x1b" in shown and "\x1b[2mnot applied: " in shown
    assert "\x1b[32mapplied\x1b" in shown


def test_every_status_has_a_colour() -> None:
    assert colours._STATUS.keys() == {status.value for status in Status}


# Numbers


def numbers_of(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json").stdout)["numbers"]
    return found


def test_the_numbers_of_a_linear_by_hand() -> None:
    found = numbers_of(*LINEAR, *SIZES)
    assert found["sizes"] == {"T": T, "K": K, "N": N}
    assert found["parameters"] == 2 * N * K
    assert found["saved"] == 2 * (T * K + N * K)
    gpu = gpu_called("h100")
    assert gpu is not None and found["gpu"]["name"] == gpu.name
    gemms = [step for step in found["steps"] if "gemm" in step["step"]]
    assert [step["program"] for step in gemms] == ["forward", "backward", "backward"]
    for step in gemms:
        assert step["operations"] == 2 * T * K * N
        assert step["bytes"] == 2 * (T * K + N * K + T * N)
        seconds = max(step["operations"] / gpu.rates[16], step["bytes"] / gpu.bandwidth)
        assert step["floor_seconds"] == pytest.approx(seconds)
        assert step["bound_by"] == "operations"


def test_few_rows_are_bound_by_bytes_and_fp8_is_faster() -> None:
    few = numbers_of(*LINEAR, "--sizes", f"tokens=16,in_features={K},out_features={N}")
    assert {step["bound_by"] for step in few["steps"]} == {"bytes"}
    fast = numbers_of("explain", "linear", "fp8_block", "sm_90a", *SIZES)
    slow = numbers_of(*LINEAR, *SIZES)

    def gemm(found: dict[str, Any]) -> float:
        return min(step["floor_seconds"] for step in found["steps"] if "gemm" in step["step"])

    assert gemm(fast) == pytest.approx(gemm(slow) / 2, rel=1e-3)


def test_gemms_in_a_loop_count_with_their_operations() -> None:
    """Logits of a chunk of rows at a time: one GEMM in the forward, three in the backward."""
    t, h, v = 8192, 4096, 32000
    sizes = ("--sizes", f"T={t},H={h},V={v}")
    found = numbers_of("explain", "linear_cross_entropy", "bf16", "sm_90a", *sizes)
    gpu = gpu_called("h100")
    assert gpu is not None
    gemm = 2 * t * h * v / gpu.rates[16]
    loops = [step for step in found["steps"] if step["step"] == "1. chunked"]
    for loop, count in zip(loops, (1, 3), strict=True):
        assert loop["bound_by"] == "operations"
        assert loop["floor_seconds"] == pytest.approx(count * gemm)


def test_the_table_says_what_the_data_say() -> None:
    shown = run(*LINEAR, *SIZES, "--gpu", "H200").stdout
    assert f"\nat T = {T}, K = {K}, N = {N}\n  floors of h200: 4800 GB/s, 989 TFLOP/s" in shown
    assert re.search(r"^  1\. gemm fprop +137 GFLOP +117 MB +138\.9 us +operations$", shown, re.M)
    assert re.search(r"^  backward, all steps +275 GFLOP +235 MB +277\.8 us$", shown, re.M)


def test_an_architecture_has_a_gpu_that_stands_for_it() -> None:
    ampere = numbers_of("explain", "linear", "bf16", "sm_80", *SIZES)
    assert ampere["gpu"]["name"] == "a100"
    part = str(ROOT / "tests" / "walkthroughs" / "known_mma" / "specs")
    words = ("explain", "linear", "bf16", "sm_90a_h20", *SIZES, "--specs", part)
    assert numbers_of(*words)["gpu"]["name"] == "h20"
    cpu = numbers_of("explain", "linear", "bf16", "cpu", *SIZES)
    assert cpu["gpu"] is None and "floor_seconds" not in cpu["steps"][0]
    later = numbers_of("explain", "linear", "bf16", "sm_80", *SIZES, "--gpu", "h100")
    assert later["gpu"]["name"] == "h100", "by PTX"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--sizes", "T=1,K=2"), "linear__bf16 has T (tokens), K (in_features), N (out_features);"),
        (("--sizes", "T=1,K=2"), "add N (out_features)"),
        (("--sizes", "T=1,Q=2"), "no dimension 'Q'; known: T (tokens), K"),
        (("--sizes", "T=1,tokens=2"), "tokens is given twice"),
        (("--sizes", "T=0,K=2,N=3"), "expected T=<number from 1 to 2^40>, got 'T=0'"),
        (("--sizes", "T=1e3"), "expected T=<number from 1 to 2^40>, got 'T=1e3'"),
        (("--sizes", "T"), "got 'T'"),
        ((*SIZES, "--gpu", "a100"), "a100 does not run sm_90a; what runs it: h100, "),
        ((*SIZES, "--gpu", "tpu"), "'tpu' is not known; what runs it: h100, "),
        (("--gpu", "h100"), "--gpu goes with --sizes"),
        ((*SIZES, "--after", "math"), "leave --sizes out"),
    ],
)
def test_sizes_that_are_not_the_modules(words: tuple[str, ...], says: str) -> None:
    done = run(*LINEAR, *words)
    assert done.exit_code == cli.ExitCode.USAGE and done.stdout == ""
    assert says in done.stderr


def test_a_module_that_runs_on_no_gpu_has_no_floors() -> None:
    done = run("explain", "linear", "bf16", "cpu", *SIZES, "--gpu", "h100")
    assert "h100 does not run cpu; cpu is no GPU's, so leave --gpu out" in done.stderr
    assert " us" not in run("explain", "linear", "bf16", "cpu", *SIZES).stdout


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (99_960, "100 kB"),
        (12_345_678, "12.3 MB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (10**18, "1 EB"),
    ],
)
def test_numbers_for_people_have_few_digits(number: int, text: str) -> None:
    assert with_prefix(number, "B") == text


def test_times_for_people() -> None:
    assert in_seconds(38.2e-12) == "0.0382 ns"
    assert in_seconds(128e-9) == "128 ns"
    assert [in_seconds(each) for each in (1.234e-6, 12.34e-6, 999.4e-6, 1.5e-3)] == [
        "1.23 us",
        "12.3 us",
        "999.4 us",
        "1.50 ms",
    ]
