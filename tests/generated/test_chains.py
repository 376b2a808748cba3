"""Chains that no committed bundle has pass the tests that are printed for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen import api
from fusegen.emit.tests.cell import error_counts
from fusegen.ir.naming import Cell
from fusegen.passes.pipeline import resolve

from .loading import run_generated_tests

DENSE = """edition: 2
module: {name}
class: Deep
summary: linear layers and activations by turns
dims: {{T: tokens, H: hidden}}
inputs: {{x: {{shape: [T, H], role: input}}}}
chain:
"""
GROUPED = """edition: 2
module: {name}
class: Experts
summary: rows in groups
dims: {{T: tokens, E: num_groups, H: hidden, F: intermediate}}
inputs:
  x: {{shape: [T, {width}], role: input}}
  split_sizes: {{shape: [E], dtype: int64}}
  probs: {{shape: [T], dtype: float32}}
chain:
"""
SCALED = "  - {op: scaled_swiglu, as: act, with: {scales: probs}, dims: {D: %s}}\n"
FC = "  - {op: grouped_linear, as: fc, dims: {K: H, N: %s}}\n"
COSH = """edition: 2
op: cosh
summary: not 0 at 0
dims: {T: rows, D: width}
inputs: {x: {shape: [T..., D]}}
outputs: {y: {shape: [T..., D]}}
pointwise: {y: (exp(x / 4) + exp(-x / 4)) / 2}
"""


def deep(activation: str, layers: int) -> str:
    width = "2 * H" if activation.endswith("glu") else "H"
    return "".join(
        f"  - {{op: linear, as: fc{i}, dims: {{K: H, N: {width}}}}}\n"
        f"  - {{op: {activation}, as: act{i}, dims: {{D: H}}}}\n"
        for i in range(layers)
    )


CHAINS = {
    "deep_swiglu": DENSE + deep("swiglu", 4),
    "deep_relu": DENSE + deep("relu", 5),  # its gradient jumps
    "deep_srelu": DENSE + deep("srelu", 3),
    "deep_gelu": DENSE + deep("gelu", 8),
    "activation_first": GROUPED.replace("{width}", "2 * H") + SCALED % "H" + FC % "F",
    "activation_last": GROUPED.replace("{width}", "H") + FC % "2 * F" + SCALED % "F",
    "not_zero_at_zero": GROUPED.replace("{width}", "H").replace(
        "  probs: {{shape: [T], dtype: float32}}\n", ""
    )
    + FC % "F"
    + "  - {op: cosh, as: act, dims: {D: F}}\n",
    "any_shape": DENSE
    + "  - {op: linear, as: fc, out: h, dims: {K: H, N: H}}\n"
    + "  - {op: silu, as: act}\n",
    "norms": DENSE
    + "  - {op: layer_norm, as: layer, dims: {D: H}, attributes: {zero_centered_gamma: true}}\n"
    + "  - {op: linear, as: fc1, dims: {K: H, N: H}}\n"
    + "  - {op: rms_norm, as: rms, dims: {D: H}}\n"
    + "  - {op: linear, as: fc2, dims: {K: H, N: H}}\n"
    + "  - {op: l2_normalization, as: l2, dims: {D: H}}\n",
}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chains")
    (folder / "modules").mkdir()
    (folder / "ops").mkdir()
    (folder / "ops" / "cosh.yaml").write_text(COSH)
    for name, text in CHAINS.items():
        head, chain = text.split("chain:\n")
        (folder / "modules" / f"{name}.yaml").write_text(
            head.replace("{name}", name).replace("{{", "{").replace("}}", "}") + "chain:\n" + chain
        )
    return folder


@pytest.mark.parametrize(
    ("modules", "recipe"),
    [(tuple(CHAINS), "bf16"), (tuple(CHAINS)[4:], "fp8_block"), (tuple(CHAINS)[4:], "nvfp4")],
    ids=["bf16", "fp8_block", "nvfp4"],
)
def test_generated_tests_pass(
    specs: Path, modules: tuple[str, ...], recipe: str, tmp_path: Path
) -> None:
    request = api.Request(
        out=tmp_path,
        archs=("cpu",),
        modules=modules,
        recipes=(recipe,),
        namespace=f"chains_{recipe}",
        folders=api.Folders(specs=(specs,)),
    )
    done = api.generate(request)
    assert len(done.bundles[0].selection.cells) == len(modules)
    run_generated_tests(tmp_path / "cpu")


def test_errors_add_up_along_a_chain(specs: Path) -> None:
    def counts(module: str) -> dict[str, float]:
        loaded = api.load_specs(api.Folders(specs=(specs,)))
        return error_counts(resolve(loaded, "cpu", [Cell(module, "bf16")]).modules[0])

    experts = counts("grouped_mlp")
    # h rounds, a has the errors of both halves of h, and each GEMM one of its own.
    assert [experts[name] for name in ("h", "a", "y", "da", "dh", "dx")] == [1, 3, 4, 1, 4, 5]
    squares = counts("deep_srelu")
    assert [squares[name] for name in ("fc0_y", "act0_y", "fc1_y", "act1_y")] == [1, 5, 6, 25]
    jumps = counts("deep_relu")
    assert jumps["y"] == 10
    assert jumps["dfc4_y"] > 100 * jumps["y"]
