"""The benchmark of a decoder layer, on the CPU: its graph is compiled, but not captured."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fusegen import api
from fusegen.commands import bench

from .loading import load_bundle

MODULES = ("norm_qkv", "linear_residual", "norm_mlp_swiglu")
RECIPES = ("bf16", "fp8_delayed")
OURS = ("fusegen", "fusegen fp8_delayed")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("decoder")
    request = api.Request(
        out=folder, archs=("cpu",), modules=MODULES, recipes=RECIPES, namespace="decoder"
    )
    api.generate(request)
    return sys.modules[load_bundle("decoder_bundle", folder / "cpu")]


@pytest.fixture
def decoder(package: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark with this bundle; compilers stop before they generate code."""
    benchmarks = bench.find()
    common = benchmarks.module("common")
    monkeypatch.setattr(common, "DEVICE", "cpu")
    monkeypatch.setattr(common, "REST_SECONDS", 0.0)
    monkeypatch.setattr(common, "compare", partial(common.compare, rounds=2, seconds=0.0))
    monkeypatch.setattr(common, "bundle", lambda: package)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    return benchmarks.module("decoder")


def rows_of(decoder: Any) -> tuple[list[Any], list[Any]]:
    common = bench.find().module("common")
    found = common.outcomes(decoder.decoder(quick=True))
    failed = [each for each in found if isinstance(each, common.Failure)]
    return [each for each in found if each not in failed], failed


def test_every_recipe_is_checked_and_timed(decoder: Any) -> None:
    rows, failed = rows_of(decoder)
    assert failed == []
    names = ["torch", "torch compiled", *OURS]
    cases = ["decoder 2 x 64", "decoder 2 x 64 captured"]
    assert [(row.case, row.contender) for row in rows] == [
        (case, name) for case in cases for name in names
    ]
    for row in rows:
        assert (row.extra["speedup_over_torch"] == 1) == (row.contender == "torch compiled")


def test_what_computes_something_else_is_not_timed(
    decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of ours that is not the one of all others shows in y."""
    init = decoder.Layer.__init__

    def wrong(self: Any, package: Any, recipe: str, size: Any, weights: Any) -> None:
        init(self, package, recipe, size, {**weights, "qkv": 2 * weights["qkv"].detach()})

    monkeypatch.setattr(decoder.Layer, "__init__", wrong)
    rows, failed = rows_of(decoder)
    assert {row.contender for row in rows} == {"torch", "torch compiled"}
    assert [each.contender for each in failed] == [*OURS]
    assert all("relative difference" in each.error for each in failed)


def test_a_bundle_without_its_modules_is_refused(decoder: Any, tmp_path: Path) -> None:
    package = type(sys)("empty")
    package.__path__ = [str(tmp_path)]
    with pytest.raises(SystemExit, match="has no recipe with norm_qkv, linear_residual and"):
        decoder.recipes(package)
