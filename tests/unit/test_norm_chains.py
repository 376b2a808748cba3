"""Norms in front of GEMMs: which cells there are, and what their forward saves."""

from __future__ import annotations

import pytest
from plans import SPECS, by_form

from fusegen.ir.naming import Cell
from fusegen.ir.plan import ModulePlan
from fusegen.options.save import RECOMPUTE
from fusegen.passes.pipeline import resolve_module
from fusegen.passes.verify import verify_pass
from fusegen.steps import copies_memory

ARCHS = ("cpu", "sm_80", "sm_90a")
LINEARS = ("rms_norm_linear", "layer_norm_linear")
MLPS = ("norm_mlp", "norm_mlp_swiglu", "norm_mlp_srelu", "layer_norm_mlp")
MODULES = (*LINEARS, *MLPS)

every_arch = pytest.mark.parametrize("arch", ARCHS)
every_module = pytest.mark.parametrize("module", [*map(by_form, MODULES)])
every_recipe = pytest.mark.parametrize("recipe", SPECS.recipes)


def plan_of(module: str, recipe: str, arch: str, *options: str) -> ModulePlan:
    return resolve_module(SPECS, Cell(module, recipe, options), arch, observe=verify_pass)


def weights(module: str) -> set[str]:
    return {"fc_weight"} if module in LINEARS else {"fc1_weight", "fc2_weight"}


def inputs(module: str) -> set[str]:
    """What GEMMs read of the forward's activations."""
    return {"a"} if module in LINEARS else {"n", "a"}


def saved_whole(module: str, *, again: bool) -> set[str]:
    """What other steps than GEMMs read: operands of the norm and its gradient, of the activation's.

    A norm that runs again reads its bias and gives its statistics; its gradient reads those alone.
    """
    rstd, mean, bias = {"norm_rstd"}, {"norm_mean"}, {"norm_bias"}
    own = {"x", "norm_weight"} | (set() if module in LINEARS else {"h"})
    if not module.startswith("layer"):
        return own | (set() if again else rstd)
    return own | (bias if again else rstd | mean)


def saved(plan: ModulePlan) -> tuple[set[str], set[str]]:
    """Tensors that are saved as they are, and those of which copies are; no amax or scale alone."""
    steps = plan.unmerged.forward.steps
    copies = [copy for step in plan.unmerged.forward.steps for copy in step.copies]
    originals = {name: copy.original for copy in copies for name in copy.buffers}
    snapshots = {step.out for step in steps if copies_memory(step)}
    joined = {each.buffer: each.parts for each in plan.joined}
    names = {n for each in plan.saved for n in joined.get(each.buffer, (each.buffer,))}
    names -= snapshots
    return names - {*originals}, {originals[name] for name in names if name in originals}


@every_arch
@every_module
@every_recipe
def test_what_is_saved(module: str, recipe: str, arch: str) -> None:
    """The norm's result is, as the copy that wgrad reads where the recipe makes one, and x once."""
    whole, copied = saved(plan_of(module, recipe, arch))
    own = saved_whole(module, again=False) | weights(module)  # of which the backward makes copies
    if SPECS.recipes[recipe].roles:
        assert (whole, copied) == (own, inputs(module))
    else:
        assert (whole, copied) == (own | inputs(module), set())


@every_arch
@every_module
@every_recipe
def test_what_is_saved_where_the_backward_makes_it_again(
    module: str, recipe: str, arch: str
) -> None:
    """Neither result nor statistics of the norm, which both follow from x."""
    plan = plan_of(module, recipe, arch, RECOMPUTE)
    whole, copied = saved(plan)
    assert (whole, copied) == (saved_whole(module, again=True) | weights(module), set())
    norms = [s for s in plan.unmerged.backward.steps if s.primitive == "norm"]
    assert len(norms) == 1
    weight = "fc_weight" if module in LINEARS else "fc1_weight"
    flags = {"need_dx", "need_dnorm_weight", f"need_d{weight}"}
    assert flags <= {*norms[0].when}


@every_recipe
def test_the_gradient_of_the_residual_is_dy(recipe: str) -> None:
    """The norm's gradient adds it, and nothing computes it."""
    steps = plan_of("norm_mlp", recipe, "sm_90a").backward.steps
    (last,) = (step for step in steps if step.out == "dx")
    assert (last.primitive, last.input("add")) == ("norm_grad", "dy")
