"""Plans that make activations again: what they save, run and refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plans import SPECS

from fusegen.checks.load import load
from fusegen.emit.launcher.program import launcher_context
from fusegen.emit.text.explain import explain
from fusegen.ir.buffers import size_in_bytes
from fusegen.ir.naming import Cell, need
from fusegen.ir.plan import ModulePlan
from fusegen.ir.shapes import evaluate
from fusegen.ir.step import Step
from fusegen.passes.pipeline import resolve, resolve_module
from fusegen.publish.paths import builtin_specs
from fusegen.spec.load import SpecSet
from fusegen.spec.offers import modules_with
from fusegen.steps import copies_memory, quantizes

AGAIN = "recompute_activations"
HELD = "held_weights"
ARCHS = ("cpu", "sm_90a")
MODULES = tuple(name for name in SPECS.modules if name.startswith("grouped_mlp"))
QUANTIZED = tuple(name for name, recipe in SPECS.recipes.items() if recipe.roles)
SIZES = {"T": 1000, "E": 5, "H": 264, "F": 200}
every_arch = pytest.mark.parametrize("arch", ARCHS)
every_module = pytest.mark.parametrize("module", MODULES)
every_recipe = pytest.mark.parametrize("recipe", SPECS.recipes)


def plan_of(module: str, recipe: str, arch: str, *options: str) -> ModulePlan:
    return resolve_module(SPECS, Cell(module, recipe, options), arch).unmerged


def pair(module: str, recipe: str, arch: str) -> tuple[ModulePlan, ModulePlan]:
    """Plans that save activations and make them again, and keep the same of weights."""
    held = (HELD,) if recipe in QUANTIZED else ()
    return plan_of(module, recipe, arch, *held), plan_of(module, recipe, arch, *held, AGAIN)


def saved_bytes(plan: ModulePlan) -> int:
    return sum(evaluate(size_in_bytes(plan.buffer(each.buffer)), SIZES) for each in plan.saved)


def quantizing(steps: tuple[Step, ...], source: str) -> list[Step]:
    return [s for s in steps if quantizes(s) and s.reads[0] == source]


def test_modules_offer_it_where_a_gemm_reads_what_an_expression_or_a_norm_gives() -> None:
    offering = {*modules_with(AGAIN, SPECS)}
    dense = {name for name in SPECS.modules if name.startswith("mlp")}
    norms = {
        name for name in SPECS.modules if re.match(r"(rms_|layer_)?norm_(linear|mlp|qkv)", name)
    }
    assert offering == {*MODULES, *dense, *norms}
    assert len(dense) > 1 and len(norms) > 1


@every_arch
@every_module
@every_recipe
def test_the_activation_is_not_saved(module: str, recipe: str, arch: str) -> None:
    saving, again = pair(module, recipe, arch)
    before, after = ({each.buffer for each in plan.saved} for plan in (saving, again))
    gone = {name for name in before if name == "a" or name.startswith("a_columnwise")}
    assert before - after == gone != set()
    assert after - before == ({"fc2_input_scale_used"} if recipe == "fp8_delayed" else set())
    assert saved_bytes(again) < saved_bytes(saving)


@every_arch
@every_module
@every_recipe
def test_what_it_follows_from_is_saved_for_it(module: str, recipe: str, arch: str) -> None:
    saving, again = pair(module, recipe, arch)
    before, after = ({each.buffer: each.when for each in plan.saved} for plan in (saving, again))
    flag = need("fc2_weight")
    # A step for the activation and its gradient waits for the gradient of the activation, too.
    read = {"h", "probs", *(["fc2_weight"] if recipe == "bf16" else [])}
    for name in read:
        assert flag not in before[name] and flag in after[name]
        assert {*after[name]} == {*before[name], flag}
    for name in before.keys() & after.keys() - read:
        if again.joined_tensor(name):  # without rows of copies that are made again
            assert {*after[name]} <= {*before[name]}
        else:
            assert after[name] == before[name]


@every_arch
@every_module
@every_recipe
def test_the_same_step_runs_again(module: str, recipe: str, arch: str) -> None:
    saving, again = pair(module, recipe, arch)
    (first,) = [step for step in again.forward.steps if "a" in step.writes]
    (second,) = [step for step in again.backward.steps if "a" in step.writes]
    flag = (need("fc2_weight"),)
    made = [step for step in again.backward.steps if "a" in step.reads]
    assert {step.when for step in made} == {flag}
    after, before = ({s.kernels for s in plan.steps if s.kernels} for plan in (again, saving))
    extra = after - before
    if recipe == "bf16":  # beside its gradient, with the expression of both
        assert second.wanted("a") == flag
        assert first.pointwise and second.pointwise
        assert [*first.pointwise.results] == [
            r for r in second.pointwise.results if r.buffer == "a"
        ]
        assert extra == {second.kernels} - {None}
        return
    assert second.when == flag
    assert (first.pointwise, first.kernels) == (second.pointwise, second.kernels)
    # A rowwise copy alone needs no transform.
    assert extra == ({"quantize_e2m1_nv_1x16"} if (recipe, arch) == ("nvfp4", "sm_90a") else set())


@every_arch
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_each_direction_makes_the_copy_it_reads(recipe: str, arch: str) -> None:
    saving, again = pair("grouped_mlp", recipe, arch)
    (both,) = quantizing(saving.forward.steps, "a")
    (forward,), (backward,) = (quantizing(p.steps, "a") for p in (again.forward, again.backward))
    assert [copy.orientation.value for copy in forward.copies] == ["rowwise"]
    assert [copy.orientation.value for copy in backward.copies] == ["columnwise"]
    assert forward.copies + backward.copies == both.copies
    assert backward.sizes == forward.sizes == both.sizes
    assert not backward.mutates


@every_arch
@pytest.mark.parametrize("options", [(), ("reduced_amax",)])
def test_a_scale_is_kept_as_the_forward_used_it(arch: str, options: tuple[str, ...]) -> None:
    saving = plan_of("grouped_mlp", "fp8_delayed", arch, HELD, *options)
    again = plan_of("grouped_mlp", "fp8_delayed", arch, HELD, AGAIN, *options)
    steps = again.forward.steps
    (at,) = [i for i, step in enumerate(steps) if copies_memory(step)]
    snapshot, (quantized,) = steps[at], quantizing(steps[at:], "a")
    assert (snapshot.reads, snapshot.writes) == (("fc2_input_scale",), ("fc2_input_scale_used",))
    assert snapshot.when == (need("fc2_weight"),)
    assert quantized.input("scale") == "fc2_input_scale"
    (step,) = quantizing(again.backward.steps, "a")
    assert step.input("scale") == "fc2_input_scale_used" and step.input("amax_history") is None
    assert "a_amax" not in step.writes
    assert again.states == saving.states
    assert [each.starts for each in again.directions] == [d.starts for d in saving.directions]
    for one, other in ((saving.forward, again.forward), (saving.backward, again.backward)):
        assert one.mutated == other.mutated


@every_arch
@every_recipe
@pytest.mark.parametrize(
    "others",
    [
        ("add_to_main_grad",),
        ("write_main_grad",),
        ("cached_weights",),
        ("reduced_amax",),
        ("high_precision_backward",),
        ("add_to_main_grad", "cached_weights"),
        ("add_to_main_grad", "reduced_amax"),
        ("cached_weights", "high_precision_backward"),
    ],
)
def test_with_other_choices(recipe: str, arch: str, others: tuple[str, ...]) -> None:
    """Possible wherever they are possible without it, for the same reasons."""
    cells = [Cell("grouped_mlp", recipe, options) for options in (others, (AGAIN, *others))]
    saving, again = (resolve(SPECS, arch, [cell]) for cell in cells)
    assert [u.reason for u in again.unsupported] == [u.reason for u in saving.unsupported]
    for one, other in zip(saving.modules, again.modules, strict=True):
        assert saved_bytes(other) < saved_bytes(one)
        assert not {r.buffer for r in other.saved} & {"a", "a_columnwise"}
        assert other.refresh == one.refresh and other.main_grads == one.main_grads


def test_high_precision_makes_the_tensor_itself_again() -> None:
    plan = plan_of("grouped_mlp", "fp8_block", "sm_90a", AGAIN, "high_precision_backward")
    (wgrad,) = [step for step in plan.backward.steps if "dfc2_weight" in step.writes]
    assert wgrad.input("b") == "a" and not quantizing(plan.backward.steps, "a")


def test_explain_and_the_launcher_tell_of_it() -> None:
    plan = resolve_module(SPECS, Cell("grouped_mlp", "fp8_delayed", (HELD, AGAIN)), "sm_90a")
    text = "\n".join(explain(plan))
    assert text.count(" pointwise_quantize: h, probs, split_sizes, fc2_input") == 1
    assert text.count(" grouped_gemm_pointwise_quantize fprop: x_rowwise") == 1
    assert "fc2_input_scale_used         4 E bytes" in text.partition("saved for")[2]
    context = launcher_context(plan, SPECS.archs["sm_90a"], "namespace")
    (step,) = [s for p in context.programs for s in p.steps if "snapshot" in s.comment]
    assert step.opening == f"if ({need('fc2_weight')}) {{"
    copied = "writable(fc2_input_scale_used), fc2_input_scale, 4 * E"
    assert step.lines == (f"check(kCell, copy_memory({copied}, stream));",)


# Other modules and recipes

CHAIN = """edition: 2
module: toy
class: Toy
summary: toy
dims: {T: tokens, H: hidden}
inputs: {x: {shape: [T, H], role: input}}
chain:
"""


def layer(tmp_path: Path, items: tuple[str, ...], **recipes: str) -> SpecSet:
    """The built-in specs, a module ``toy`` of these ops, and some recipes."""
    files = {"modules/toy": CHAIN + "".join(f"  - {{{item}}}\n" for item in items)}
    files["ops/wave"] = OP
    files |= {f"recipes/{name}": text for name, text in recipes.items()}
    for name, text in files.items():
        path = tmp_path / "mine" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return load([builtin_specs(), tmp_path / "mine"])


FIRST = "op: linear, as: one, dims: {K: H, N: H}"
SECOND = "op: linear, as: two, dims: {K: H, N: H}"
WAVE = "op: wave, as: {name}, dims: {{D: H}}"
OP = """edition: 2
op: wave
summary: toy
dims: {T: rows, D: width}
inputs: {x: {shape: [T..., D]}}
outputs: {y: {shape: [T..., D], role: input}}
pointwise: {y: x * sigmoid(x)}
"""


def test_a_run_of_pointwise_steps_follows_from_its_beginning(tmp_path: Path) -> None:
    acts = tuple(WAVE.format(name=name) for name in ("p", "q"))
    specs = layer(tmp_path, (FIRST, *acts, SECOND))
    plain, again = (
        resolve_module(specs, Cell("toy", "bf16", options), "cpu") for options in ((), (AGAIN,))
    )
    assert [r.buffer for r in plain.saved] == [
        "x",
        "one_weight",
        "one_y",
        "p_y",
        "q_y",
        "two_weight",
    ]
    assert [r.buffer for r in again.saved] == ["x", "one_weight", "one_y", "two_weight"]
    (repeated,) = (s for s in again.backward.steps if s.primitive == "pointwise")
    assert repeated.writes == ("p_y",)
    (gradient,) = (s for s in again.backward.steps if "q_y" in s.writes)
    assert gradient.primitive == "pointwise_grad"
    assert gradient.wanted("q_y") == (need("two_weight"),)
    every = {need(name) for name in ("x", "one_weight", "one_bias", "two_weight")}
    assert {*repeated.when} == {*gradient.when} == every


def test_what_only_arguments_give_is_made_again(tmp_path: Path) -> None:
    specs = layer(tmp_path, (WAVE.format(name="p"), SECOND))
    plan = resolve_module(specs, Cell("toy", "bf16", (AGAIN,)), "cpu")
    assert [result.buffer for result in plan.saved] == ["x", "two_weight"]


@pytest.mark.parametrize(
    "items",
    [
        (FIRST, SECOND),
        (FIRST, WAVE.format(name="p")),
    ],
)
def test_nothing_to_make_again(tmp_path: Path, items: tuple[str, ...]) -> None:
    """What GEMMs give is not; the last activation is nothing that the backward reads."""
    found = resolve(layer(tmp_path, items), "cpu", [Cell("toy", "bf16", (AGAIN,))])
    assert [cell.reason for cell in found.unsupported] == [
        "module 'toy' offers no option 'recompute_activations': neither expression nor norm"
        " gives an activation that is saved for the backward"
    ]


def test_random_rounding_is_refused(tmp_path: Path) -> None:
    recipe = (builtin_specs() / "recipes" / "nvfp4.yaml").read_text(encoding="utf-8")
    head, _, rest = recipe.partition("    tensor_scale")
    recipe = f"{head}    rounding: stochastic\n    tensor_scale{rest}"
    recipe = recipe.replace("recipe: nvfp4", "recipe: toy")
    specs = layer(tmp_path, (FIRST, WAVE.format(name="p"), SECOND), toy=recipe)
    assert resolve(specs, "cpu", [Cell("toy", "toy")]).unsupported == ()
    (found,) = resolve(specs, "cpu", [Cell("toy", "toy", (AGAIN,))]).unsupported
    assert found.reason == (
        "recipe 'toy' rounds 'p_y' stochastically: made again, it would be rounded otherwise"
    )
