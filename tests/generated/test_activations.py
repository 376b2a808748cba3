"""Every activation there is a spec for, alone and inside an expert MLP: generated tests pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen import api

from .loading import run_generated_tests

GLUS = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "clamped_swiglu", "situglu")
UNARY = ("gelu", "relu", "srelu", "qgelu")
SCALED = ("scaled_clamped_qgeglu", "scaled_situglu", "scaled_srelu", "scaled_tanh_srelu")
GATES = ("sigmoid_gate",)
SUMS_AND_NAMES = ("bias", "constant_scale", "add_extra_input", "make_extra_output", "identity")
EXPERTS = tuple(f"grouped_mlp_{name.removeprefix('scaled_')}" for name in SCALED)


def test_every_activation_is_here() -> None:
    """Those of the committed targets have committed tests."""
    specs = api.load_specs(api.Folders())
    committed = {"silu", "swiglu", "scaled_swiglu", *SUMS_AND_NAMES}
    pointwise = {name for name, op in specs.ops.items() if op.pointwise}
    assert pointwise == committed | {*GLUS, *UNARY, *SCALED, *GATES}


@pytest.mark.parametrize(
    ("modules", "recipe"),
    [(GLUS, "bf16"), (UNARY + SCALED + GATES, "bf16"), (EXPERTS, "bf16"), (EXPERTS, "mxfp8")],
    ids=["glus", "others", "experts", "quantised experts"],
)
def test_generated_tests_pass(modules: tuple[str, ...], recipe: str, tmp_path: Path) -> None:
    request = api.Request(
        out=tmp_path, archs=("cpu",), modules=modules, recipes=(recipe,), namespace="activations"
    )
    done = api.generate(request)
    assert len(done.bundles[0].selection.cells) == len(modules)
    run_generated_tests(tmp_path / "cpu")
