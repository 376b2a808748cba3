"""The examples run, and do what they say."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fusegen.ir.naming import Cell

from .loading import write_cells
from .ranks import EXAMPLES, Place, run_ranks

SOON = ("--steps", "30")
"""Half of what these examples do."""


def test_moe_layer_learns() -> None:
    words = [sys.executable, str(EXAMPLES / "moe_layer.py")]
    result = subprocess.run(words, capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr
    ratio = re.search(r"fell to (\d+)%", result.stdout)
    assert ratio and int(ratio[1]) < 60, result.stdout


def test_fsdp2_learns_and_loads() -> None:
    words = [sys.executable, str(EXAMPLES / "fsdp2.py")]
    result = subprocess.run(words, capture_output=True, text=True, cwd="/", check=False)
    assert result.returncode == 0, result.stderr
    losses = re.search(r"loss (\S+), after \d+ steps (\S+)", result.stdout)
    assert losses and float(losses[2]) < 0.8 * float(losses[1]), result.stdout
    assert "gives the same: True" in result.stdout


def test_megatron_style_ranks_learn_as_one() -> None:
    check_megatron_style("cpu", ranks=4)


def test_groups_of_gloo_have_one_thread(tmp_path: Path) -> None:
    run_ranks(ONE_THREAD, tmp_path, Place(EXAMPLES.parent / "generated" / "cpu"))


ONE_THREAD = """
import datetime
soon = datetime.timedelta(seconds=50)
for group in (dist.group.WORLD, dist.new_group(timeout=soon)):
    options = group._get_backend(torch.device("cpu")).options
    assert options._threads == 1 and (options._timeout == soon) == (group != dist.group.WORLD)
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [2] * 3
"""


def check_megatron_style(arch: str, ranks: int) -> None:
    """Ranks, of which two share weights, learn what one does."""
    first, last = losses_of(1, "megatron_style.py", arch, *SOON)
    assert last < 0.5 * first
    others = losses_of(ranks, "megatron_style.py", arch, *SOON, "--tensor", "2")
    assert others == pytest.approx((first, last), rel=2e-2)


def test_expert_parallel_ranks_learn_as_one() -> None:
    (first, last), others = (losses_of(ranks, "expert_parallel.py") for ranks in (1, 2))
    assert last < 0.85 * first
    assert others == pytest.approx((first, last), rel=2e-2)


def test_ranks_with_parts_of_the_weights_learn_as_one(tmp_path: Path) -> None:
    check_parallel(write_cells("split", "cpu", tmp_path, PARTS), (4, 2))


PARTS = (
    Cell("linear", "bf16", ("column_sequence_parallel",)),
    Cell("linear", "bf16", ("row_sequence_parallel",)),
    Cell("moe_layer", "bf16", ("tensor_sequence_parallel",)),
    Cell("router", "bf16"),
)
"""Cells of `parallel.py`."""


def check_parallel(bundle: Path, *further: tuple[int, int]) -> None:
    """Two ranks learn what one does, whatever they share, and so do further ones, of which as many
    share the weights.
    """
    first, last = losses_of(1, "parallel.py", str(bundle), *SOON)
    assert last < 0.5 * first
    for ranks, tensor, *more in ((2, 2, "--overlap", "--compile"), (2, 1), *further):
        words = (str(bundle), *SOON, "--tensor", str(tensor), *more)
        others = losses_of(ranks, "parallel.py", *words)
        assert others == pytest.approx((first, last), rel=1e-2)


LEAVING = """
import os, runpy, sys
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""
"""Runs a script and leaves past Python's own end, where gloo's threads may abort: see ranks.py."""


def losses_of(ranks: int, script: str, *words: str) -> tuple[float, float]:
    """The first and the last loss of an example that several ranks run."""
    started = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as scratch:
        leaving = Path(scratch, "leaving.py")
        leaving.write_text(LEAVING)
        started += ["--standalone", str(leaving), str(EXAMPLES / script), *words]
        result = subprocess.run(started, capture_output=True, text=True, cwd="/", check=False)
    assert result.returncode == 0, result.stderr
    losses = re.search(r"loss (\S+), after \d+ steps (\S+)", result.stdout)
    assert losses, result.stdout
    return float(losses[1]), float(losses[2])


@pytest.mark.parametrize(
    ("script", "words", "count"),
    [
        ("moe_layer", ("generated/sm_90a",), 1),
        ("fsdp2", ("generated/sm_90a",), 2),
        ("expert_parallel", ("generated/sm_90a",), 1),
        ("megatron_style", ("sm_90a",), 1),
        ("train_recipes", ("--arch", "sm_90a"), 1),
    ],
)
def test_missing_gpus_are_named(script: str, words: tuple[str, ...], count: int) -> None:
    started = [sys.executable, str(EXAMPLES / f"{script}.py"), *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        started, capture_output=True, text=True, cwd=EXAMPLES.parent, env=environment, check=False
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"sm_90a: needs GPUs: {count}; torch "), result.stderr


def test_a_folder_without_a_bundle_is_named(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / "moe_layer.py"), str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True, cwd="/", check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(f"{tmp_path}: expected a generated bundle"), result.stderr


def test_a_run_alone_joins_a_record(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / "train_recipes.py"), "--steps", "2"]
    words += ["--run", "bf16", "--out", str(tmp_path)]
    alone = subprocess.run(words, capture_output=True, text=True, cwd="/", check=False)
    assert alone.returncode == 1 and "nothing is recorded" in alone.stderr
    shutil.copy(EXAMPLES / "recipes_cpu.json", tmp_path)
    other = subprocess.run(words, capture_output=True, text=True, cwd="/", check=False)
    assert other.returncode == 1 and "recorded with" in other.stderr


@pytest.mark.slow
def test_every_recipe_learns(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / "train_recipes.py"), "--steps", "8"]
    result = subprocess.run(
        [*words, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "FUSEGEN_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert result.returncode == 0, result.stderr
    runs = json.loads((tmp_path / "recipes_cpu.json").read_text())["runs"]
    assert len(runs) == 11 and (tmp_path / "recipes_cpu.png").stat().st_size > 10_000
    for recipe, each in runs.items():
        (run,), (base,) = each, runs["bf16"]
        first, last = run["curve"][0], run["curve"][-1]
        assert first > 5 and last < 0.75 * first, recipe
        assert abs(run["final_loss"] / base["final_loss"] - 1) < 0.02, recipe
        assert recipe == "bf16" or run["curve"] != base["curve"], recipe


def test_recipes_are_compared_seed_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    recipes: Any = importlib.import_module("train_recipes")
    base = [recipes.Run((), 1.0, 2.0), recipes.Run((), 3.0, 4.0)]
    other = [recipes.Run((), 1.1, 2.0), recipes.Run((), 3.0, 3.0)]
    assert recipes.against(other, base, "final_loss") == pytest.approx([0.1, 0.0])
    _, first, last = recipes.table({"bf16": base, "nvfp4": other}).splitlines()
    assert "2.0000 (+0.00%, +0.00% to +0.00%)    3.0000 (+0.00%, +0.00% to +0.00%)" in first
    assert "2.0500 (+5.00%, +0.00% to +10.00%)    2.5000 (-12.50%, -25.00% to +0.00%)" in last
