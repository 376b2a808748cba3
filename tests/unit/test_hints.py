"""What commands say comes next, and that it works where it is read."""

from __future__ import annotations

import importlib
import math
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from gpu import bundles

from fusegen import cli
from fusegen.build.toolchain import BuildError
from fusegen.checks.load import load
from fusegen.commands import following
from fusegen.families.gpus import GPUS, Gpu, gpu_called
from fusegen.publish import paths
from fusegen.spec.serving import arch_called

SILU = ("--module", "silu", "--recipe", "bf16")


def run(*words: str) -> Result:
    result = CliRunner().invoke(cli.program, list(words))
    print(result.exit_code, result.stderr)
    return result


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in an empty folder outside the checkout."""
    monkeypatch.chdir(tmp_path)


def steps_of(text: str) -> Iterator[str]:
    """The command lines behind `next:`."""
    _, _, tail = text.partition("next:\n")
    yield from (line.strip() for line in tail.splitlines() if line.startswith("  "))


# GPUs by name


@pytest.mark.parametrize(
    ("word", "gpu"),
    [
        ("h100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100-PCIe", "h100_pcie"),
        ("a100-sxm4-80gb", "a100"),
        ("A100 40GB", "a100_40gb"),
        ("h200", "h200"),
        ("l4", "l4"),
        ("l40s", "l40s"),
        ("h1000", None),
        ("sm_90", None),
        ("", None),
    ],
)
def test_gpus_are_known_by_what_people_call_them(word: str, gpu: str | None) -> None:
    found = gpu_called(word)
    assert (found.name if found else None) == gpu


def test_every_gpu_in_the_table_is_found_and_served() -> None:
    specs = load([paths.builtin_specs()])
    for gpu in GPUS:
        assert gpu_called(gpu.name) == gpu
        arch = arch_called(gpu.name, specs)
        assert arch is not None and specs.archs[arch].runs_on(gpu.capability)
        assert 16 in gpu.rates and gpu.bandwidth > 1e11
    assert [gpu.capability for gpu in GPUS] == sorted(gpu.capability for gpu in GPUS)


@pytest.mark.parametrize(
    "gpu", [gpu for gpu in GPUS if gpu.name != "h20"], ids=lambda gpu: gpu.name
)
def test_rates_are_what_multiprocessors_do_in_a_cycle(gpu: Gpu) -> None:
    """A power of two of operations: two derivations of a data sheet's number."""
    for bits, rate in gpu.rates.items():
        cycle = rate / (gpu.sms * gpu.gigahertz * 1e9)
        assert cycle == pytest.approx(2 ** round(math.log2(cycle)), rel=0.015), bits
        assert round(math.log2(rate / gpu.rates[16])) in (0, 1, 2, 3)


def test_a_part_with_an_architecture_of_its_own_is_served_by_it() -> None:
    walkthrough = Path(cli.__file__).parents[3] / "tests" / "walkthroughs" / "known_mma" / "specs"
    specs = load([paths.builtin_specs(), walkthrough])
    assert (arch_called("h20", specs), arch_called("h100", specs)) == ("sm_90a_h20", "sm_90a")


# After `generate`


@pytest.mark.slow
def test_generate_says_which_cells_it_wrote_and_what_comes_next() -> None:
    done = run("generate", "--arch", "cpu", *SILU)
    assert "\n  cells: silu__bf16\n" in done.stdout
    assert [*steps_of(done.stderr)] == ["python -m pytest generated/cpu/tests"]
    done = run("generate", "--arch", "cpu", "--module", "gelu", "--recipe", "bf16")
    assert "\n  cells: gelu__bf16\n" in done.stdout
    again = run("generate")
    assert "cells:" not in again.stdout and again.stderr == ""
    removed = run("generate", "--remove", "--arch", "cpu", *SILU)
    assert "cells:" not in removed.stdout and removed.stderr == ""
    assert run("generate", "--arch", "cpu", *SILU, "--dry-run").stderr == ""


NO_NVCC = BuildError("nvcc was not found", remedy="pip install nvcc")
NO_TORCH = BuildError("torch was not found", remedy="pip install torch")
ODD_NVCC = BuildError("nvcc cannot be run")


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ((), ["fusegen build generated/sm_90a"]),
        (
            (NO_NVCC, NO_TORCH),
            ["pip install nvcc", "pip install torch", "fusegen build generated/sm_90a"],
        ),
        ((ODD_NVCC,), ["nvcc cannot be run"]),
    ],
)
def test_what_a_build_lacks_comes_before_it(
    missing: tuple[BuildError, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def missing_tools(code: str) -> tuple[BuildError, ...]:
        asked.append(code)
        return missing

    monkeypatch.setattr(following, "missing_tools", missing_tools)
    done = run("generate", "--arch", "sm_90a", *SILU)
    assert asked == ["sm_90a"]
    assert [*steps_of(done.stderr)] == expected


def test_a_bundle_without_torch_has_it_installed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_TESTED_WITH", ("pytest", "no_such_package"))
    steps = [*steps_of(run("generate", "--arch", "cpu", *SILU).stderr)]
    assert steps == ["pip install no_such_package", "python -m pytest generated/cpu/tests"]


# Commands that hints name do not refuse


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("recipe", "mine"),
        ("recipe", "mine", "--from", "fp8_block"),
        ("module", "mine"),
        ("op", "mine"),
        ("arch", "sm_86"),
    ],
)
def test_what_new_names_next_works(words: tuple[str, ...]) -> None:
    done = run("new", *words)
    schema, edit, *commands = steps_of(done.stderr)
    assert edit == f"edit {done.stdout.strip()}" and len(commands) == 2
    assert run(*schema.split()[1:]).exit_code == 0
    for command in commands:
        assert run(*command.split()[1:]).exit_code == 0, command


def test_accepting_a_layout_is_offered_only_where_nothing_else_is_edited() -> None:
    assert run("generate", "--arch", "cpu", *SILU).exit_code == 0
    file, other = Path("generated/cpu/silu__bf16.py"), Path("generated/cpu/__init__.py")
    file.write_text(file.read_text(encoding="utf-8") + "\n\n", encoding="utf-8")
    assert "--accept-format" in run("generate").stderr
    other.write_text("mine = 1\n", encoding="utf-8")
    refused = run("generate")
    assert refused.exit_code == cli.ExitCode.REFUSED and "--accept-format" not in refused.stderr


def test_a_spec_that_lies_where_nobody_reads_it_is_named() -> None:
    assert run("new", "recipe", "mine").exit_code == 0
    words = ("generate", "--arch", "cpu", "--module", "linear", "--recipe", "mine")
    refused = run(*words)
    told = "unknown recipe 'mine'; specs/recipes/mine.yaml is not read: add --specs specs"
    assert refused.exit_code == cli.ExitCode.USAGE and told in refused.stderr
    assert run(*words, "--specs", "specs", "--dry-run").exit_code == 0


@pytest.mark.slow
def test_an_option_that_chooses_a_pass_is_named_only_where_it_is_offered() -> None:
    words = ["explain", "silu", "bf16", "cpu", "--after"]
    refused = run(*words, "main_grad")
    assert refused.exit_code == cli.ExitCode.USAGE
    assert "no option of 'silu' chooses it" in refused.stderr and "--option" not in refused.stderr
    linear = run("explain", "linear", "bf16", "cpu", "--after", "main_grad")
    offered = re.findall(r"\w+_main_grad", linear.stderr.partition("--option ")[2])
    assert offered
    for word in offered:
        assert run("explain", "linear", "bf16", "cpu", "--option", word).exit_code == 0, word


# Hints that name a folder of somebody's own


def commands_in(text: str) -> list[str]:
    """The commands of fusegen that a message names between backquotes, or to the end of a line."""
    return [a or b for a, b in re.findall(r"`(fusegen [^`]*)`|: (fusegen [^\n`;]*)$", text, re.M)]


def follow(text: str, word: str) -> Result:
    """Run the one command of a verb that a message names."""
    (line,) = {line for line in commands_in(text) if line.split()[1] == word}
    return run(*shlex.split(line)[1:])


VENDOR = ("vendor", "my experts", "--arch", "cpu", *SILU, "--namespace", "acme")


@pytest.mark.slow
def test_commands_work_for_folders_with_spaces() -> None:
    for words in (["init", "-q"], ["config", "user.name", "a"], ["config", "user.email", "b"]):
        subprocess.run(["git", *words], check=True)
    done = run(*VENDOR)
    subprocess.run(["git", "add", "--all"], check=True)
    subprocess.run(["git", "commit", "-qm", "as it is"], check=True)
    assert follow(done.stderr, "upgrade").exit_code == 0
    edited = Path("my experts/cpu/silu__bf16.py")
    text = edited.read_text("utf-8")
    edited.write_text(text + "# more\n", "utf-8")
    done = run(*VENDOR)
    assert done.exit_code == cli.ExitCode.REFUSED
    edited.unlink()
    assert follow(done.stderr, "generate").exit_code == 0
    assert edited.read_text("utf-8") == text
    (line,) = (
        line
        for line in steps_of(run("generate", "--out", "other dir", "--arch", "cpu", *SILU).stderr)
    )
    assert shlex.split(line)[-1] == "other dir/cpu/tests"


def test_a_bundle_of_the_cpu_names_the_whole_command_for_a_gpu() -> None:
    cell, folder = "linear__fp8_block__cached_weights", Path("my experts")
    words = ("--module", "linear", "--recipe", "fp8_block", "--option", "cached_weights")
    run("generate", "--arch", "cpu", *words, "--namespace", "acme", "--out", str(folder))
    package = bundles.load_bundle((folder / "cpu").resolve(), "of_the_cpu")
    said = importlib.import_module(f"{package.__name__}._library")._explain_absence(cell)
    line = said[said.index("fusegen generate") :]
    assert run(*shlex.split(line.replace("native", "sm_90a"))[1:]).exit_code == 0
    made = folder / "sm_90a"
    assert (made / f"{cell}.py").exists()
    assert 'NAMESPACE = "acme_sm_90a"' in (made / "_library.py").read_text("utf-8")


@pytest.mark.slow
def test_an_op_that_is_no_module_yet_names_the_command_that_makes_it_one() -> None:
    assert run("new", "op", "cube").exit_code == 0
    done = run(
        "generate", "--arch", "cpu", "--module", "cube", "--recipe", "bf16", "--specs", "specs"
    )
    assert done.exit_code == cli.ExitCode.USAGE and "'cube': it is an op" in done.stderr
    assert follow(done.stderr, "new").exit_code == 0
    assert (
        run(
            "generate", "--arch", "cpu", "--module", "cube", "--recipe", "bf16", "--specs", "specs"
        ).exit_code
        == 0
    )


def test_specs_that_lie_here_unread_are_told() -> None:
    assert "is not read" not in run("validate").stderr
    assert run("new", "op", "cube").exit_code == 0
    done = run("validate")
    assert done.exit_code == 0 and "specs is not read: fusegen validate --specs" in done.stderr
    done = follow(done.stderr, "validate")
    assert done.exit_code == 0 and "is not read" not in done.stderr


@pytest.mark.parametrize(
    "place", ["top.yaml", "top.YML", "schema/a.yaml", "recipes/a.yml", "recipes/old/a.yaml"]
)
def test_yaml_that_lies_where_nothing_reads_it_is_told(place: str) -> None:
    path = Path("mine") / place
    path.parent.mkdir(parents=True)
    path.touch()
    named = f"mine/{place.removesuffix('/a.yaml') if 'old' in place else place}:1:1: "
    done = run("validate", "--specs", "mine")
    assert done.exit_code == cli.ExitCode.SPEC and named in done.stderr
    done = run("plan", "--arch", "cpu", "--specs", "mine", *SILU)
    assert done.exit_code == 0 and f"warning: {named}" in done.stderr
