"""The first run on a GPU: its steps, in their order, and what ends it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fusegen import cli
from fusegen.build import gpu
from fusegen.commands.bench import BenchError
from fusegen.commands.first_light import first_light

ROOT = Path(__file__).parents[2]
FAMILIES = (
    "gemm_sm90",
    "gemm_fp8_fast_sm90",
    "gemm_fp8_split_sm90",
    "gemm_fp8_block_sm90",
    "gemm_decoded_sm90",
)


_VERBS = ("build", "test", "build", "test", "sanitize")


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.program, ["bench", "--first-light", *words])


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU is visible."""
    monkeypatch.setattr(gpu, "visible_capability", lambda: (9, 0))


@pytest.fixture
def none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "visible_capability", lambda: None)


def test_a_dry_run_prints_the_commands() -> None:
    done = run("sm_90a", "--dry-run")
    lines = [line.split("  ")[-1].strip() for line in done.stdout.splitlines()]
    swept = " ".join(f"--sweep {family}" for family in FAMILIES)
    assert done.exit_code == 0 and lines == [
        "python tests/gpu/ledger.py build sm_90a",
        "python tests/gpu/ledger.py test sm_90a",
        "python tests/gpu/oracles.py sm_90a",
        f"fusegen bench {swept}",
        "fusegen generate --arch sm_90a",
        "python tests/gpu/ledger.py build sm_90a",
        "python tests/gpu/ledger.py test sm_90a",
        "python tests/gpu/ledger.py sanitize sm_90a",
        "python tests/gpu/ledger.py record",
        "fusegen bench",
        "python tests/gpu/ledger.py readme",
        "python docs/pages.py",
    ]


@pytest.mark.parametrize("arch", ["sm_89", "sm_100a", "sm_120a"])
def test_of_a_part_that_is_committed_the_whole_runs(arch: str) -> None:
    """The tests of kernels are of modules that the part has not."""
    lines = [step.line for step in first_light(arch, dry_run=True)]
    whole = [f"python tests/gpu/ledger.py {verb} '{arch} whole'" for verb in _VERBS]
    assert [line for line in lines if "ledger.py" in line][:5] == whole


def test_a_plan_as_data() -> None:
    data = json.loads(run("sm_90a", "--dry-run", "--json").stdout)
    assert (data["arch"], data["ran"], len(data["steps"])) == ("sm_90a", False, 12)


def test_what_the_commands_name_is_there() -> None:
    """Scripts, and options of fusegen."""
    for step in first_light("sm_90a", dry_run=True):
        if step.words[0] == "python":
            assert (ROOT / step.words[1]).is_file()
            assert step.process[0] == sys.executable
        else:
            verb, *options = step.words[1:]
            done = CliRunner().invoke(cli.program, [verb, "--help"])
            assert done.exit_code == 0
            assert all(word in done.output for word in options if word.startswith("--"))


def test_all_steps_run_in_the_checkout(hopper: None) -> None:
    ran: list[tuple[str, ...]] = []

    def noted(words: Sequence[str], folder: Path) -> int:
        assert folder == ROOT
        ran.append(tuple(words))
        return 0

    heard: list[str] = []
    steps = first_light("sm_90a", run=noted, say=heard.append)
    assert ran == [step.process for step in steps]
    assert heard[0].startswith("1 of 12: compile the bundle: python tests/gpu/ledger.py build")


def test_a_step_that_fails_ends_the_run(hopper: None) -> None:
    ran: list[str] = []

    def failing(words: Sequence[str], folder: Path) -> int:
        ran.append(words[2])
        return 3 if words[2] == "test" else 0

    with pytest.raises(BenchError) as caught:
        first_light("sm_90a", run=failing)
    assert ran == ["build", "test"]
    assert "run its tests on the GPU failed with exit code 3" in str(caught.value)
    assert "python tests/gpu/ledger.py test sm_90a" in str(caught.value)
    assert "fusegen bench --first-light sm_90a" in str(caught.value)


def test_only_on_the_gpu_it_is_of(none: None) -> None:
    done = run("sm_90a")
    assert done.exit_code == cli.ExitCode.USAGE
    assert "there is no visible NVIDIA GPU; --dry-run prints what would run" in done.output


def test_another_gpu_is_named(hopper: None) -> None:
    assert "that of the visible GPU is sm_90a" in run("sm_80").output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sm_90",), "unknown arch 'sm_90'"),
        (("cpu",), "cpu has no kernels"),
        (("sm_90a", "--check"), "goes with --dry-run, --json and nothing else"),
        (("sm_90a", "--sweep", "gemm_sm90"), "goes with --dry-run, --json and nothing else"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.exit_code == cli.ExitCode.USAGE
    assert said in done.output
