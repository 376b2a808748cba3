"""The walk-through of a kind of step with a kernel, which an installed package brings."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compile.quantize_harness import Buffer, Kernels, Long, Pointer, address, compile_for_cpu
from generated.loading import load_bundle, run_generated_tests

from fusegen.build.toolchain import find_toolchain

from .walk import HERE, ROOT, has_toolchain, installed

PACKAGE = HERE / "log_sum_exp"
PROJECT = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CELL = "log_sum_exp__bf16"
ARCHS = ("--arch", "cpu", "--arch", "sm_90a")
WORDS = ("--module", "log_sum_exp", "--recipe", "bf16")

Run = subprocess.CompletedProcess[str]


def fusegen(*words: str | Path, packages: Path | None) -> Run:
    """Run a command with the packages of a folder beside fusegen, or with none."""
    path = os.pathsep.join(str(each) for each in (ROOT / "generator", packages) if each)
    command = [sys.executable, "-m", "fusegen", *map(str, words)]
    env = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("packages"), PACKAGE)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, packages: Path) -> Path:
    """A bundle for each architecture."""
    folder = tmp_path_factory.mktemp("log_sum_exp")
    done = fusegen("generate", *ARCHS, *WORDS, "--out", folder, packages=packages)
    assert done.returncode == 0, done.stderr
    return folder


def extensions(packages: Path | None) -> list[dict[str, Any]]:
    """What `list extensions` says."""
    done = fusegen("list", "extensions", "--json", packages=packages)
    found: list[dict[str, Any]] = json.loads(done.stdout)["extensions"]
    return found


def test_the_extension_is_listed(packages: Path) -> None:
    (found,) = extensions(packages)
    digest = found.pop("digest")
    assert len(digest) == 64
    names = ["log_sum_exp", "log_sum_exp_grad"]
    version = PROJECT["version"]
    assert found == {
        "name": "log_sum_exp", "package": PROJECT["name"], "version": version,
        "steps": names, "families": names,
    }  # fmt: skip
    assert extensions(None) == []


def test_the_tests_of_the_bundle_pass(bundles: Path) -> None:
    assert run_generated_tests(bundles / "cpu") > 10


def test_results_are_those_of_pytorch(bundles: Path) -> None:
    name = load_bundle("log_sum_exp_bundle", bundles / "cpu")
    layer = importlib.import_module(f"{name}.{CELL}").LogSumExp()
    x = torch.randn(37, 264).bfloat16().requires_grad_()
    y = layer(x)
    assert torch.equal(y, torch.logsumexp(x.float(), -1).bfloat16())
    dy = torch.randn(37).bfloat16()
    y.backward(dy)
    wanted = dy.float()[:, None] * torch.softmax(x.detach().float(), -1)
    torch.testing.assert_close(x.grad, wanted.bfloat16(), rtol=2**-7, atol=1e-6)


def test_rows_are_checked_and_their_number_is_not(bundles: Path) -> None:
    launcher = (bundles / "sm_90a" / "csrc" / f"{CELL}.cpp").read_text(encoding="utf-8")
    lines = {line.strip() for line in launcher.splitlines() if "check_multiple" in line}
    assert lines == {'check_multiple(kCell, "N (columns)", N, 8, "sm_90a");'}


def test_ranks_may_have_shards_of_rows(bundles: Path) -> None:
    """A row needs that row alone; along columns every result is of the whole row."""
    for arch in ("cpu", "sm_90a"):
        rules = (bundles / arch / "sharding" / f"{CELL}.py").read_text(encoding="utf-8")
        assert "Dimensions: T; no block" in rules


@pytest.mark.skipif(not has_toolchain(), reason="needs nvcc")
@pytest.mark.parametrize("unit", ["log_sum_exp", "log_sum_exp_grad"])
def test_units_compile(bundles: Path, unit: str, tmp_path: Path) -> None:
    csrc = bundles / "sm_90a" / "csrc"
    tools = find_toolchain()
    flags = ["-std=c++17", "-fmad=false", "-arch=compute_90a", f"-I{csrc}", "-ptx"]
    source, ptx = csrc / "kernels" / f"{unit}.cu", tmp_path / "unit.ptx"
    subprocess.run([str(tools.nvcc), *flags, str(source), "-o", str(ptx)], check=True)
    kernels = re.findall(r"^\.(?:visible )?entry (\w+)", ptx.read_text(encoding="utf-8"), re.M)
    assert len(kernels) == 2, "one for each element type"


# The kernels on the CPU

CALLS = """
#include "fusegen/log_sum_exp.cuh"

extern "C" int run_forward(const fusegen::LogSumExpArguments* in, fusegen::Stream* stream,
                           const char** call) {
  const fusegen::Status status = fusegen::launch_log_sum_exp<__nv_bfloat16>(*in, *stream);
  *call = status.call;
  return status.code;
}

extern "C" int run_backward(const fusegen::LogSumExpGradArguments* in, fusegen::Stream* stream,
                            const char** call) {
  const fusegen::Status status = fusegen::launch_log_sum_exp_grad<__nv_bfloat16>(*in, *stream);
  *call = status.call;
  return status.code;
}
"""


class _Forward(ctypes.Structure):
    _fields_ = [("x", Pointer), ("y", Pointer), ("lse", Pointer), ("rows", Long), ("columns", Long)]


class _Backward(ctypes.Structure):
    _fields_ = [
        ("dy", Pointer), ("x", Pointer), ("lse", Pointer), ("dx", Pointer),
        ("rows", Long), ("columns", Long),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    header = bundles / "sm_90a" / "csrc" / "on_cpu.h"
    header.write_text(CALLS, encoding="utf-8")
    return Kernels(compile_for_cpu(str(header), tmp_path_factory.mktemp("kernels")), "cpu")


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (13, 264), (70, 1032), (0, 16)])
def test_kernels_compute_what_the_reference_does(kernels: Kernels, rows: int, columns: int) -> None:
    rng = torch.Generator().manual_seed(rows)
    x = (20 * torch.randn(rows, columns, generator=rng)).bfloat16()
    dy = torch.randn(rows, generator=rng).bfloat16()
    y, dx = torch.empty(rows).bfloat16(), torch.empty(rows, columns).bfloat16()
    lse = Buffer(4 * rows, "cpu")
    kernels.call("run_forward", _Forward(address(x), address(y), address(lse), rows, columns))
    wanted = torch.logsumexp(x.double(), -1)
    torch.testing.assert_close(lse.floats().double(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(y, lse.floats().bfloat16())
    arguments = _Backward(address(dy), address(x), address(lse), address(dx), rows, columns)
    kernels.call("run_backward", arguments)
    gradient = dy.double()[:, None] * torch.exp(x.double() - wanted[:, None])
    torch.testing.assert_close(dx.double(), gradient, rtol=2**-7, atol=1e-30)


# Locks


def test_a_lock_names_the_extension(bundles: Path, packages: Path) -> None:
    (each,) = extensions(packages)
    lock = json.loads((bundles / "cpu" / "fusegen.lock").read_text(encoding="utf-8"))
    facts = {fact: each[fact] for fact in ("package", "version", "digest")}
    assert lock["selection"]["extensions"] == {"log_sum_exp": facts}
    assert lock["selection"]["specs"] == lock["selection"]["templates"] == []
    assert fusegen("check", bundles / "cpu", packages=packages).returncode == 0


def newer(folder: Path) -> Path:
    return installed(folder, PACKAGE, version="2.0")


def edited(folder: Path) -> Path:
    found = installed(folder, PACKAGE)
    code = found / "fusegen_log_sum_exp" / "__init__.py"
    code.write_text(f"{code.read_text(encoding='utf-8')}# more\n", encoding="utf-8")
    return found


@pytest.mark.parametrize(("other", "said"), [(newer, "2.0, "), (edited, "1.0, ")])
def test_a_bundle_of_another_extension_is_stale(
    bundles: Path, tmp_path: Path, other: Callable[[Path], Path], said: str
) -> None:
    done = fusegen("check", bundles / "cpu", packages=other(tmp_path))
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if "extension" in line)
    before, after = line.split(" when it was made, ")
    assert "extension log_sum_exp (fusegen-log-sum-exp 1.0, " in before
    assert after.startswith(f"log_sum_exp (fusegen-log-sum-exp {said}")
    assert before.split(", ")[1] not in after or said == "2.0, "


def test_a_bundle_without_its_extension_names_the_package(bundles: Path) -> None:
    for words in (("check", bundles / "cpu"), ("generate", "--out", bundles)):
        done = fusegen(*words, packages=None)
        assert done.returncode == 2
        assert "records extension 'log_sum_exp' of package fusegen-log-sum-exp 1.0" in done.stderr
        assert "pip install fusegen-log-sum-exp==1.0" in done.stderr


def test_a_spec_that_names_a_kind_that_nobody_brings(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE / "fusegen_log_sum_exp" / "specs", tmp_path / "specs")
    done = fusegen("validate", "--specs", tmp_path / "specs", packages=None)
    assert done.returncode == 3
    assert "unknown step 'log_sum_exp'" in done.stderr
    assert "fusegen list extensions" in done.stderr
