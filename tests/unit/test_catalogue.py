"""What the catalogue plans can be said, resolves, or is refused with the reason."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from plans import SLOW

from fusegen.checks.load import load
from fusegen.ir.kernel import GemmKind
from fusegen.ir.naming import Cell
from fusegen.ir.quantization import Role
from fusegen.passes.pipeline import Plan, resolve
from fusegen.publish.paths import builtin_specs
from fusegen.spec.diagnostics import SpecError
from fusegen.spec.kinds import SpecKind
from fusegen.spec.load import SpecSet, parse_spec

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
    "softmax",
    "cross_entropy",
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
    "interleaved_swiglu": "op 'interleaved_swiglu': no kernel reads the interleaved halves of 'x'",
}
"""What the catalogue has and the built-in passes do not, each with the reason users read."""
REFUSED = {
    "grouped_mlp_recompute": "a merged step has one direction",
    "linear_activation": "expected one step that computes y, got 0",
}
"""Fusions that can be said and that no pass applies, each with what a user reads."""
OF_SEVERAL = {"activation_bias_quantize": "activation_gradient_quantize"}
"""What a fusion does together with the pass `sums`, which has left the gradient of the bias to the
step that quantises."""
WITHOUT_STEP = {
    "ops/all_gather": "collective",
    "ops/all_reduce": "collective",
    "ops/reduce_scatter": "collective",
    "fusions/gather_linear": "gather_gemm",
    "fusions/linear_reduce_scatter": "gemm_scatter",
}
"""What the catalogue has and no step computes, with the kind of step it names."""
IN_CHAINS = {"reshape"}
"""Ops that are no modules: a tensor in other dimensions takes PyTorch nothing but `reshape`."""
MODULES_WITHOUT_STEP = {name.split("/")[1] for name in WITHOUT_STEP}


REFUSING = ("sm_90a", "sm_120a")
"""Architectures with families of most and of fewest formats."""


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> SpecSet:
    """The built-in specs and those of the catalogue that are not built in, but for fusions."""
    folder = tmp_path_factory.mktemp("catalogue") / "specs"
    for path in CATALOGUE.rglob("*.yaml"):
        relative = path.relative_to(CATALOGUE)
        left_out = relative.parts[0] == "fusions" or path.stem in MODULES_WITHOUT_STEP
        if not left_out and not (builtin_specs() / relative).exists():
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / relative)
    return load([builtin_specs(), folder])


def planned(specs: SpecSet, arch: str, recipe: str) -> Plan:
    return resolve(specs, arch, [Cell(module, recipe) for module in specs.modules])


def test_everything_is_said(specs: SpecSet) -> None:
    later = {name.split("/")[1] for name in WITHOUT_STEP}
    assert set(OPS) - set(specs.ops) == later & set(OPS)
    assert not set(RECIPES) - set(specs.recipes)
    assert {*OF_SEVERAL.values()} <= {*specs.fusions}
    assert set(FUSIONS) - {*specs.fusions, *REFUSED, *OF_SEVERAL} == later & set(FUSIONS)
    assert set(OPS) - set(specs.modules) == later & set(OPS) | IN_CHAINS


@pytest.mark.parametrize("name", WITHOUT_STEP)
def test_a_step_that_nothing_computes_is_refused(name: str) -> None:
    path = CATALOGUE / f"{name}.yaml"
    kind = next(kind for kind in SpecKind if kind.folder == path.parent.name)
    with pytest.raises(SpecError, match=f"unknown step '{WITHOUT_STEP[name]}'"):
        parse_spec(kind, path, path.name)


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


@pytest.mark.slow
def test_what_is_pointwise_is_planned_on_cpu(specs: SpecSet) -> None:
    plan = planned(specs, "cpu", "bf16")
    assert {cell.module: cell.reason for cell in plan.unsupported} == UNSUPPORTED
    made = {module.module for module in plan.modules}
    assert made == set(specs.modules) - set(UNSUPPORTED)
    pointwise = {name for name, op in specs.ops.items() if op.pointwise} - set(UNSUPPORTED)
    assert len(pointwise) > 20
    assert pointwise <= made


@pytest.mark.slow
def test_scales_get_a_gradient_of_their_own(specs: SpecSet) -> None:
    for module in planned(specs, "cpu", "bf16").modules:
        if module.module.startswith("scaled_"):
            assert [r.buffer for r in module.backward.results] == ["dx", "dscales"]
            assert [r.buffer for r in module.saved] == ["x", "scales"]


# Of the others `fusegen check` plans what is kept as digests, and test_verify.py every form.
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["cpu", *(pytest.param(a, marks=SLOW) for a in REFUSING)])
def test_no_cell_is_an_exception(specs: SpecSet, arch: str) -> None:
    for recipe in specs.recipes:
        plan = planned(specs, arch, recipe)
        assert len(plan.modules) + len(plan.unsupported) == len(specs.modules)
        for cell in plan.unsupported:
            assert len(cell.reason) > 20, cell
            assert "Error" not in cell.reason


@pytest.mark.parametrize("name", REFUSED)
def test_a_catalogued_fusion_says_why_no_pass_applies_it(name: str, tmp_path: Path) -> None:
    path = CATALOGUE / "fusions" / f"{name}.yaml"
    parse_spec(SpecKind.FUSIONS, path, path.name)
    without = [f"{name}.yaml" for name in MODULES_WITHOUT_STEP]
    shutil.copytree(CATALOGUE, tmp_path / "specs", ignore=lambda *_: ["fusions", *without])
    (tmp_path / "specs" / "fusions").mkdir()
    shutil.copy(path, tmp_path / "specs" / "fusions")
    with pytest.raises(SpecError, match=re.escape(REFUSED[name])):
        load([builtin_specs(), tmp_path / "specs"])


def test_every_fusion_of_the_catalogue_is_known() -> None:
    later = {name.split("/")[1] for name in WITHOUT_STEP if name.startswith("fusions/")}
    assert {*REFUSED} | later == {path.stem for path in (CATALOGUE / "fusions").iterdir()}
