"""The schema can say every op, recipe and fusion that is planned; each resolves or says why not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fusegen.load import SpecSet, load
from fusegen.model.primitives import GemmKind
from fusegen.model.specs import OptionName, Role
from fusegen.naming import Cell
from fusegen.paths import builtin_specs
from fusegen.resolve import Plan, resolve

CATALOGUE = Path(__file__).parents[1] / "catalogue" / "specs"
OPS = [
    "linear",
    "grouped_linear",
    "bias",
    "gelu",
    "relu",
    "srelu",
    "silu",
    "qgelu",
    "glu",
    "geglu",
    "qgeglu",
    "reglu",
    "sreglu",
    "swiglu",
    "clamped_swiglu",
    "situglu",
    "scaled_swiglu",
    "scaled_clamped_qgeglu",
    "scaled_situglu",
    "scaled_srelu",
    "scaled_tanh_srelu",
    "layer_norm",
    "rms_norm",
    "l2_normalization",
    "constant_scale",
    "identity",
    "reshape",
    "quantize",
    "dropout",
    "add_extra_input",
    "make_extra_output",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
]
RECIPES = [
    "bf16",
    "fp8_delayed",
    "fp8_current",
    "fp8_rowwise",
    "fp8_block",
    "mxfp8",
    "nvfp4",
]
FUSIONS = [
    "linear_bias_activation",
    "linear_bias_add",
    "linear_scale_add",
    "norm_quantize",
    "activation_quantize",
    "gather_linear",
    "linear_reduce_scatter",
    "linear_add",
    "linear_scale",
    "activation_bias_quantize",
    "add_rms_norm",
    "grouped_mlp_recompute",
    "linear_activation",
]
UNSUPPORTED = {
    "all_gather": "the reference has no step collective",
    "all_reduce": "the reference has no step collective",
    "bias": "the gradient of 'bias' would be summed over rows",
    "dropout": "the reference has no step dropout",
    "interleaved_swiglu": "op 'interleaved_swiglu': no kernel reads the interleaved halves of 'x'",
    "l2_normalization": "the reference has no step norm",
    "layer_norm": "the reference has no step norm",
    "layer_norm_linear": "the reference has no step norm",
    "make_extra_output": "pointwise op 'make_extra_output' has 2 outputs, expected 1",
    "reduce_scatter": "the reference has no step collective",
    "reshape": "the reference has no step reshape",
    "rms_norm": "the reference has no step norm",
}
"""What the catalogue has and the built-in passes do not, each with the reason users read."""


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> SpecSet:
    """The built-in specs and those of the catalogue that are not built in."""
    folder = tmp_path_factory.mktemp("catalogue") / "specs"
    for path in CATALOGUE.rglob("*.yaml"):
        relative = path.relative_to(CATALOGUE)
        if not (builtin_specs() / relative).exists():
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / relative)
    return load([builtin_specs(), folder])


def planned(specs: SpecSet, arch: str, recipe: str) -> Plan:
    return resolve(specs, arch, [Cell(module, recipe) for module in specs.modules])


def test_everything_is_said(specs: SpecSet) -> None:
    assert not set(OPS) - set(specs.ops)
    assert not set(RECIPES) - set(specs.recipes)
    assert not set(FUSIONS) - set(specs.fusions)
    offered = {option for module in specs.modules.values() for option in module.options}
    assert offered == set(OptionName)
    assert not set(OPS) - set(specs.modules)


def test_recipes_say_what_is_normative(specs: SpecSet) -> None:
    for name in RECIPES[1:]:
        recipe = specs.recipes[name]
        assert set(recipe.roles) == set(Role)
        assert set(recipe.gemm) == set(GemmKind)
    nvfp4 = specs.recipes["nvfp4"].roles
    assert [role.value for role, q in nvfp4.items() if q.hadamard] == ["input", "grad_output"]
    assert [role.value for role, q in nvfp4.items() if q.rounding.value == "stochastic"] == [
        "grad_output"
    ]
    assert specs.recipes["fp8_delayed"].roles[Role.INPUT].scale.history == 1024


def test_what_is_pointwise_is_planned_on_cpu(specs: SpecSet) -> None:
    plan = planned(specs, "cpu", "bf16")
    assert {cell.module: cell.reason for cell in plan.unsupported} == UNSUPPORTED
    made = {module.module for module in plan.modules}
    assert made == set(specs.modules) - set(UNSUPPORTED)
    pointwise = {name for name, op in specs.ops.items() if op.pointwise} - set(UNSUPPORTED)
    assert len(pointwise) > 20
    assert pointwise <= made


def test_scales_get_a_gradient_of_their_own(specs: SpecSet) -> None:
    for module in planned(specs, "cpu", "bf16").modules:
        if module.module.startswith("scaled_"):
            assert [r.buffer for r in module.backward.results] == ["dx", "dscales"]
            assert [r.buffer for r in module.saved] == ["x", "scales"]


def test_no_cell_is_an_exception(specs: SpecSet) -> None:
    for arch in specs.archs:
        for recipe in specs.recipes:
            plan = planned(specs, arch, recipe)
            assert len(plan.modules) + len(plan.unsupported) == len(specs.modules)
            for cell in plan.unsupported:
                assert len(cell.reason) > 20, cell
                assert "Error" not in cell.reason


def test_catalogued_fusions_leave_the_built_in_modules_alone(specs: SpecSet) -> None:
    plain = load([builtin_specs()])
    for arch in plain.archs:
        cells = [Cell(module, "bf16") for module in plain.modules]
        assert resolve(specs, arch, cells) == resolve(plain, arch, cells)
