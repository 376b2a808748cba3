"""The bundle of what users may write holds every chain, recipe and kind of step of the tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusegen import api
from fusegen.spec.load import SpecSet

from .gpu_files import load

pytestmark = pytest.mark.slow

ARCH = "sm_90a"

written = load("written")
bundles = written.bundles


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bundle, generated as the ledger does it: by a process that has the extension."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "BUILD", tmp_path_factory.mktemp("build"))
        patch.setattr(sys, "path", [*sys.path])
        written.generate([ARCH])
        yield bundles.BUILD / bundles.WRITTEN / ARCH


@pytest.fixture(scope="module")
def cells(bundle: Path) -> set[str]:
    lock = json.loads((bundle / "fusegen.lock").read_text("utf-8"))
    return set(lock["selection"]["cells"])


@pytest.fixture(scope="module")
def specs() -> SpecSet:
    """The built-in ones and those of the folders, without the extension."""
    return api.load_specs(api.Folders(specs=(written.CHAINS, *written.RECIPES)))


def test_every_chain_runs_under_scales_that_gemms_read_and_that_are_decoded(
    cells: set[str],
) -> None:
    chains = {path.stem for path in (written.CHAINS / "modules").glob("*.yaml")}
    under = {
        chain: {c.split("__")[1] for c in cells if c.split("__")[0] == chain} for chain in chains
    }
    gemms = {chain for chain in chains if under[chain] == {*written.OF_CHAINS}}
    assert len(gemms) > 5
    assert {*chains} - gemms == {"fork", "scale_columns", "weighted_twice"}
    assert under["fork"] == under["scale_columns"] == under["weighted_twice"] == {"bf16"}


def test_every_recipe_runs_in_every_module(cells: set[str]) -> None:
    for folder in written.RECIPES:
        for path in (folder / "recipes").glob("*.yaml"):
            assert {f"{module}__{path.stem}" for module in written.OF_RECIPES} <= cells


def test_the_extension_has_a_kernel(bundle: Path, cells: set[str]) -> None:
    assert str(written.OF_EXTENSION) in cells
    assert (bundle / "csrc" / "kernels" / "log_sum_exp.cu").exists()


def test_recipes_are_found_where_the_lock_says(bundle: Path) -> None:
    names = {path.stem for each in bundles.spec_folders(bundle) for path in each.rglob("*.yaml")}
    assert names >= {"fp8_block", "fp8_mixed", "fp8_block_1x64", "residual_mlp"}


def test_what_cannot_be_made_is_refused(specs: SpecSet) -> None:
    with pytest.raises(written.LedgerError, match="nowhere: no cell of it can be made on sm_90a"):
        written._made(specs, ARCH, "nowhere", [])


def test_what_the_process_says_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = SimpleNamespace(returncode=1, stderr="build/written/sm_90a: edited by hand\n")
    monkeypatch.setattr(bundles, "BUILD", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(written.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        written.LedgerError, match=r"^written: build/written/sm_90a: edited by hand"
    ):
        written.generate([ARCH])
