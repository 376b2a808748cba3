"""Which cells a bundle offers to models of transformers, and what it states of them."""

from __future__ import annotations

import pytest
from plans import plan_of

from fusegen.emit.python.experts import ExpertsText, experts_context
from fusegen.emit.render import Renderer
from fusegen.ir.naming import Cell
from fusegen.publish.paths import builtin_templates


def stated(*cells: str) -> dict[str, ExpertsText]:
    context = experts_context(plan_of("cpu", Cell.parse(cell)) for cell in cells)
    return {each.cell: each for each in context.cells} if context else {}


def test_experts_by_their_chain() -> None:
    """No name is looked at: two grouped GEMMs around an activation that scales rows."""
    found = stated(
        "grouped_mlp__bf16",
        "grouped_mlp_clamped_qgeglu__bf16__scaled_bias",
        "grouped_mlp_srelu__bf16",
    )
    plain, clamped, squared = found.values()
    assert plain.gated and plain.biased and not plain.weighted_bias and not plain.scalars
    assert clamped.gated and clamped.weighted_bias
    assert [(s.symbol, s.keyword, s.default) for s in clamped.scalars] == [
        ("limit", "act_limit", "7.0"),
        ("alpha", "act_alpha", "1.702"),
        ("offset", "act_offset", "1.0"),
    ]
    assert not squared.gated and squared.sizes == ("hidden", "intermediate")


def test_states_are_named() -> None:
    found = stated("grouped_mlp__fp8_delayed", "grouped_mlp__nvfp4", "grouped_mlp__mxfp8")
    states = [[state.argument for state in each.states] for each in found.values()]
    assert states == [["forward_state", "backward_state"], ["rng_state"], []]


@pytest.mark.slow
def test_what_experts_of_models_cannot_call() -> None:
    """Columns that alternate, buffers and groups of the caller's, copies of weights, one GEMM."""
    options = (
        "interleaved_32",
        "add_to_main_grad",
        "delayed_wgrad",
        "cached_weights",
        "quantized_weights",
        "reduced_amax",
    )
    cells = [f"grouped_mlp__fp8_delayed__{option}" for option in options]
    assert not stated(*cells, "grouped_linear__bf16", "linear__bf16", "mlp_swiglu__bf16")


def test_the_example_keeps_no_state() -> None:
    cells = ("grouped_mlp__fp8_delayed", "grouped_mlp__bf16")
    context = experts_context(plan_of("cpu", Cell.parse(cell)) for cell in cells)
    assert context is not None and context.example == "grouped_mlp__bf16"
    text = Renderer([builtin_templates()]).render("integrations/_experts.py.j2", context)
    assert all(f'name="{cell}"' in text for cell in cells)
