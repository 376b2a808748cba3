"""The walk-through of an option whose code runs around every step."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from generated.loading import load_bundle, run_generated_tests

from .walk import applied, fusegen

CELL = "linear__fp8_block__logged_steps"
STEP = re.compile(r"^  (\d+\. \w+(?: \w+)?): ", re.MULTILINE)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for each architecture, made by a fusegen that has the option."""
    folder = tmp_path_factory.mktemp("pointwise_option")
    words = ("--module", "linear", "--recipe", "fp8_block", "--option", "logged_steps")
    archs = ("--arch", "cpu", "--arch", "sm_90a")
    fusegen(applied("pointwise_option", folder), "generate", *archs, *words, "--out", folder)
    return folder


def test_the_option_is_listed(tmp_path: Path) -> None:
    said = fusegen(applied("pointwise_option", tmp_path), "list", "options")
    assert "\nstep_log: Whether a module says which step it runs\n" in said


def test_the_tests_of_the_bundle_pass(bundles: Path) -> None:
    assert run_generated_tests(bundles / "cpu") > 10


def test_steps_that_run_are_logged(bundles: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = load_bundle("logged_steps_bundle", bundles / "cpu")
    layer = importlib.import_module(f"{name}.{CELL}").Linear(128, 256)
    x = torch.randn(64, 128).bfloat16()
    capfd.readouterr()
    layer(x).sum().backward()
    logged = capfd.readouterr().err.splitlines()
    forward, backward = layer.describe().split("\nforward (")[1].split("\nbackward (")
    steps = [f"{CELL} forward {step}" for step in STEP.findall(forward)]
    steps += [f"{CELL} backward {step}" for step in STEP.findall(backward)]
    only_dx = ("backward 3. quantize", "dgrad")  # what nothing but dgrad reads, and dgrad
    assert logged == [step for step in steps if not step.endswith(only_dx)] != steps


def test_launchers_log_the_same_names(bundles: Path) -> None:
    launcher = (bundles / "sm_90a" / "csrc" / f"{CELL}.cpp").read_text(encoding="utf-8")
    assert '#include "fusegen/host/step_log.h"\n' in launcher
    reference = (bundles / "cpu" / "reference" / f"{CELL}.py").read_text(encoding="utf-8")
    names = re.findall(r'const StepLog step_log\("(.*)"\);', launcher)
    assert names == re.findall(r'step_log\.step\(\s*"([^"]*)"', reference) != []


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_the_class_of_launchers_writes_to_standard_error(bundles: Path, tmp_path: Path) -> None:
    source = tmp_path / "main.cpp"
    source.write_text(
        '#include "fusegen/host/step_log.h"\n'
        'int main() { const fusegen::StepLog log("1. gemm"); }\n'
    )
    csrc = bundles / "sm_90a" / "csrc"
    program = tmp_path / "main"
    words = ["-std=c++17", "-Wall", "-Werror", f"-I{csrc}", str(source), "-o", str(program)]
    subprocess.run(["c++", *words], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "1. gemm\n")
