"""Which cells a bundle offers to PEFT, and which files come with them."""

from __future__ import annotations

from plans import plan_of

from fusegen.emit.python.adapters import AdaptersContext, adapters_context
from fusegen.ir.naming import Cell


def stated(*cells: str) -> AdaptersContext | None:
    return adapters_context(plan_of("cpu", Cell.parse(cell)) for cell in cells)


def test_linear_layers_by_their_interface() -> None:
    """One GEMM of x and a weight; no residual, activation or norm, and no group of ranks."""
    none = ("linear_residual__bf16", "linear_activation__bf16", "mlp_swiglu__bf16", "silu__bf16")
    assert stated(*none, "rms_norm_linear__bf16", "grouped_mlp__bf16") is None
    assert stated("grouped_linear__fp8_delayed__reduced_amax") is None
    found = stated("linear__mxfp8", "grouped_linear__fp8_block__quantized_weights", *none)
    assert found is not None and found.products == ""
    assert [(each.grouped, each.held_quantized) for each in found.linears] == [
        (False, False),
        (True, True),
    ]


def test_experts_and_their_parts() -> None:
    parts = ("grouped_linear__bf16", "grouped_linear__fp8_block", "scaled_swiglu__bf16")
    never = ("grouped_mlp__fp8_block__cached_weights", "grouped_mlp__bf16__scaled_bias")
    found = stated(*parts, *never, "grouped_mlp__fp8_block", "grouped_mlp_srelu__bf16")
    assert found is not None and found.products == "grouped_linear__bf16"
    whole, lacking = found.fused
    assert (whole.linear, whole.activation) == parts[1:]
    assert whole.parts == ("fc1", "act", "fc2")
    assert (lacking.linear, lacking.activation) == ("grouped_linear__bf16", "")


def test_scalars_of_an_activation() -> None:
    cells = ("scaled_clamped_qgeglu__bf16", "grouped_mlp_clamped_qgeglu__bf16")
    found = stated("grouped_linear__bf16", *cells)
    assert found is not None
    (experts,) = found.fused
    assert experts.activation == cells[0]
    assert experts.scalars == (
        ("limit", "act_limit"),
        ("alpha", "act_alpha"),
        ("offset", "act_offset"),
    )
