"""The registry of options: what each promises, which modules inherit it, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from plans import SPECS

from fusegen import api
from fusegen.checks.load import load
from fusegen.ir.naming import Cell
from fusegen.options import OPTIONS, Exclusion, Option, Scope, excluded, option_of, scopes_of
from fusegen.passes.draft import NotPossible
from fusegen.passes.pipeline import resolve_module
from fusegen.publish.folders import used_specs
from fusegen.publish.paths import builtin_specs, builtin_templates
from fusegen.spec.cells import with_options
from fusegen.spec.load import SpecSet
from fusegen.spec.offers import choices_of, modules_with, options_of, recipe_facts
from fusegen.spec.usage import UsageError

FEATURES = Path(__file__).parents[2] / "docs" / "features"
FURTHER = [(option, word) for option in OPTIONS for word in option.further]
EXCLUSIONS = [(option, each) for option in OPTIONS for each in option.excludes]

every_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
every_exclusion = pytest.mark.parametrize(
    ("option", "exclusion"), EXCLUSIONS, ids=lambda each: getattr(each, "word", "")
)

IN_GATED = ("glu_interleave", "output_format", "ranges")
IN_GEMMS = (
    *("main_grad", "delay_wgrad", "weight_cache", "amax_reduction"),
    *("backward_precision", "ranges", "debug"),
)
IN_LINEARS = (
    *IN_GEMMS[:3],
    *("input_format", "output_format", "amax_reduction", "tensor_parallelism"),
    *IN_GEMMS[4:],
)
IN_EXPERTS = (
    *(
        "scale_bias",
        "parameters",
        "main_grad",
        "delay_wgrad",
        "weight_cache",
        "save",
        "cached_input",
        "input_format",
        "output_format",
        "backward_calls",
        "amax_reduction",
        "tensor_parallelism",
    ),
    *("backward_precision", "ranges", "debug"),
)
IN_MLPS = tuple(name for name in IN_EXPERTS if name not in ("scale_bias", "parameters"))
IN_LAYERS = tuple(
    each
    for name in IN_EXPERTS
    for each in ((name, "gather") if name == "cached_input" else (name,))
    if name not in ("save", "input_format")
)
IN_GATED_LAYERS = tuple(name for name in IN_LAYERS if name != "tensor_parallelism")
IN_ROUTED = tuple(
    each
    for name in IN_GATED_LAYERS
    for each in ((name, "router_weight") if name == "parameters" else (name,))
    if name != "output_format"
)
IN_NORM_MLPS = tuple(n for n in IN_MLPS if n not in ("input_format", "tensor_parallelism"))
IN_NORMED = tuple(name for name in IN_NORM_MLPS if name not in ("cached_input", "backward_calls"))
IN_QKV = tuple(name for name in IN_NORMED if name != "output_format")
IN_ACTIVATED = (*IN_GEMMS[:3], "cached_input", *IN_LINEARS[3:])
IN_ROWS = ("output_format", "ranges")
IN_ROUTERS = ("router_weight", "main_grad", "ranges")
INHERITED = {
    "add_extra_input": IN_ROWS,
    "bias": IN_ROWS,
    "biased_softmax": ("ranges",),
    "causal_softmax": ("ranges",),
    "clamped_swiglu": IN_GATED,
    "combine": IN_ROWS,
    "combine_extra": IN_ROWS,
    "constant_scale": IN_ROWS,
    "cross_entropy": ("ranges",),
    "dropout": IN_ROWS,
    "gated_shared_moe_layer": ("glu_interleave", *IN_GATED_LAYERS),
    "gather": IN_ROWS,
    "geglu": IN_GATED,
    "gelu": IN_ROWS,
    "glu": IN_GATED,
    "grouped_linear": ("scale_bias", "parameters", *IN_LINEARS),
    "grouped_mlp": ("glu_interleave", *IN_EXPERTS),
    "grouped_mlp_clamped_qgeglu": ("glu_interleave", *IN_EXPERTS),
    "grouped_mlp_situglu": ("glu_interleave", *IN_EXPERTS),
    "grouped_mlp_srelu": IN_EXPERTS,
    "grouped_mlp_tanh_srelu": IN_EXPERTS,
    "identity": IN_ROWS,
    "l2_normalization": IN_ROWS,
    "layer_norm": IN_ROWS,
    "layer_norm_linear": IN_NORMED,
    "layer_norm_mlp": IN_NORM_MLPS,
    "linear": IN_LINEARS,
    "linear_activation": IN_ACTIVATED,
    "linear_activation_silu": tuple(
        n for n in IN_ACTIVATED if n not in ("output_format", "tensor_parallelism")
    ),
    "linear_activation_srelu": IN_ACTIVATED,
    "linear_activation_swiglu": ("glu_interleave", *IN_ACTIVATED),
    "linear_cross_entropy": tuple(name for name in IN_GEMMS if name != "delay_wgrad"),
    "linear_residual": IN_LINEARS,
    "lm_head_loss": (*IN_GEMMS[:3], "input_format", *IN_GEMMS[3:]),
    "make_extra_output": ("ranges",),
    "masked_softmax": ("ranges",),
    "mlp": IN_MLPS,
    "mlp_srelu": IN_MLPS,
    "mlp_swiglu": ("glu_interleave", *IN_MLPS),
    "moe_layer": ("glu_interleave", *IN_LAYERS),
    "moe_layer_clamped_qgeglu": ("glu_interleave", *IN_LAYERS),
    "moe_layer_situglu": ("glu_interleave", *IN_LAYERS),
    "moe_layer_srelu": IN_LAYERS,
    "moe_layer_tanh_srelu": IN_LAYERS,
    "moe_permute": ("ranges",),
    "norm_mlp": IN_NORM_MLPS,
    "norm_mlp_srelu": IN_NORM_MLPS,
    "norm_mlp_swiglu": ("glu_interleave", *IN_NORM_MLPS),
    "norm_qkv": IN_QKV,
    "norm_qkv_gqa_4": IN_QKV,
    "norm_qkv_gqa_8": IN_QKV,
    "norm_qkv_interleaved": IN_QKV,
    "qgeglu": IN_GATED,
    "qgelu": IN_ROWS,
    "quantize": ("ranges", "debug"),
    "reglu": IN_GATED,
    "relu": IN_ROWS,
    "residual_layer_norm": ("ranges",),
    "residual_rms_norm": ("ranges",),
    "rms_norm": IN_ROWS,
    "rms_norm_linear": IN_NORMED,
    "rotary": IN_ROWS,
    "rotary_qkv": ("ranges",),
    "routed_moe_layer": ("glu_interleave", *IN_ROUTED),
    "routed_moe_layer_mixtral": ("glu_interleave", *IN_ROUTED),
    "routed_moe_layer_olmoe": ("glu_interleave", *IN_ROUTED),
    "routed_shared_moe_layer": ("glu_interleave", *IN_ROUTED),
    "routed_shared_moe_layer_deepseek_v3": ("glu_interleave", *IN_ROUTED),
    "router": IN_ROUTERS,
    "router_deepseek_v2": IN_ROUTERS,
    "router_deepseek_v3": IN_ROUTERS,
    "router_deepseek_v4": IN_ROUTERS,
    "router_ernie": IN_ROUTERS,
    "router_gpt_oss": IN_ROUTERS,
    "router_llama4": IN_ROUTERS,
    "router_longcat": IN_ROUTERS,
    "router_mixtral": IN_ROUTERS,
    "router_olmoe": IN_ROUTERS,
    "router_sigmoid": IN_ROUTERS,
    "scaled_clamped_qgeglu": IN_GATED,
    "scaled_situglu": IN_GATED,
    "scaled_srelu": IN_ROWS,
    "scaled_swiglu": IN_GATED,
    "scaled_tanh_srelu": IN_ROWS,
    "shared_moe_layer": ("glu_interleave", *IN_LAYERS),
    "sigmoid_gate": IN_ROWS,
    "silu": ("ranges",),
    "situglu": IN_GATED,
    "softmax": ("ranges",),
    "sreglu": IN_GATED,
    "srelu": IN_ROWS,
    "swiglu": IN_GATED,
}
"""What each module has without a word in its spec."""

WORDS = (
    *("interleaved_32", "scaled_bias", "parameter_per_group", "fp32_router_weight"),
    *("add_to_main_grad", "write_main_grad"),
    *("add_to_16_bit_main_grad", "write_16_bit_main_grad", "delayed_wgrad", "held_weights"),
    *(
        "cached_weights",
        "quantized_weights",
        "recompute_activations",
        "cache_quantized_input",
        "written_rows",
        "quantized_input",
        "quantized_output",
        "one_backward_call",
        "reduced_amax",
        "column_parallel",
        "row_parallel",
        "tensor_parallel",
        "column_sequence_parallel",
        "row_sequence_parallel",
        "tensor_sequence_parallel",
        "expert_parallel",
        "expert_parallel_all_to_all",
    ),
    *("high_precision_backward", "dequantized_backward", "nvtx_ranges", "debug"),
)
"""In the order in which they stand in names: another one would rename committed cells."""


def recipe_with(option: Option) -> str:
    """A recipe under which an option has something to choose."""
    recipes = SPECS.recipes.items()
    return next(n for n, r in recipes if option.applies_under(recipe_facts(r)) is None)


def written(tmp_path: Path, **modules: str) -> SpecSet:
    """The built-in specs and some modules."""
    folder = tmp_path / "mine" / "modules"
    folder.mkdir(parents=True)
    for name, text in modules.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return load([builtin_specs(), folder.parent])


# What an option promises


@every_option
def test_an_option_says_what_it_decides(option: Option) -> None:
    assert option.summary and len(option.choices) > 1
    assert all(choice.summary for choice in option.choices)
    assert len({choice.summary for choice in option.choices}) == len(option.choices)


def test_a_word_is_a_choice_of_one_option() -> None:
    words = [word for option in OPTIONS for word in option.words]
    assert len(words) == len({*words})
    assert all(word in found.words for word in words if (found := option_of(word)))
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)


@pytest.mark.parametrize(("option", "word"), FURTHER, ids=lambda each: str(each)[:30])
def test_a_choice_changes_the_plan(option: Option, word: str) -> None:
    """A pass reads it, or each step runs in a scope of its own.

    Some modules do by themselves what it asks for.
    """
    recipe = recipe_with(option)

    def changes(module: str) -> bool:
        plain, chosen = (
            resolve_module(SPECS, Cell(module, recipe, words), "cpu") for words in ((), (word,))
        )
        return replace(chosen, cell=plain.cell) != plain

    assert scopes_of([word]) or any(map(changes, modules_with(word, SPECS)))


@pytest.mark.parametrize("scope", scopes_of(word for _, word in FURTHER), ids=str)
def test_a_scope_is_a_context_manager_and_a_class(scope: Scope) -> None:
    static = builtin_templates() / "static"
    python = (static / "reference" / f"_{scope.python}.py").read_text(encoding="utf-8")
    assert "\ndef step(name: str, *, runs: bool = True) -> AbstractContextManager" in python
    cpp = (static / "csrc" / "fusegen" / "host" / f"{scope.cpp}.h").read_text(encoding="utf-8")
    assert f"\nclass {scope.cpp_class} {{" in cpp
    assert f"  explicit {scope.cpp_class}(const char* name)" in cpp


def test_scopes_are_in_the_order_of_names() -> None:
    ranges, other = Scope("ranges", "range"), Scope("step_log", "step_log")
    assert scopes_of(["debug", "nvtx_ranges", "no_statistics"]) == (ranges,)
    assert scopes_of(["no_ranges"]) == ()
    assert (ranges.cpp_class, other.cpp_class) == ("Range", "StepLog")


def test_the_documentation_has_every_choice() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in FEATURES.glob("*.md"))
    missing = [word for _, word in FURTHER if not re.search(rf"\b{word}\b", text)]
    assert not missing


def test_the_readme_has_a_row_for_every_choice() -> None:
    text = (FEATURES.parents[1] / "README.md").read_text(encoding="utf-8")
    rows = text.partition("| `--option` | |")[2].partition("\n\n")[0].splitlines()
    named = [word for row in rows for word in re.findall(r"`(\w+)`", row.split(" | ")[0])]
    assert sorted(named) == sorted(WORDS)


# Which modules have which


def test_modules_inherit_what_applies() -> None:
    found = {
        name: tuple(option.name for option in options_of(module, SPECS.ops))
        for name, module in SPECS.modules.items()
    }
    assert found == INHERITED


def test_the_order_of_names_is_the_registrys() -> None:
    assert tuple(word for _, word in FURTHER) == WORDS
    cell = Cell("grouped_mlp", "fp8_delayed")
    words = ("debug", "recompute_activations", "delayed_wgrad", "scaled_bias")
    (named,) = with_options(SPECS, [cell], words)
    assert named.options == words[::-1]


def test_a_module_may_have_less(tmp_path: Path) -> None:
    toy = "edition: 2\nmodule: toy\nclass: Toy\nop: swiglu\nwithout: [glu_interleave]\n"
    specs = written(tmp_path, toy=toy)
    reason = "module 'toy' offers no option 'interleaved_32': its spec says without: [glu_inter"
    with pytest.raises(UsageError, match=re.escape(reason)):
        with_options(specs, [Cell("toy", "bf16")], ["interleaved_32"])
    with pytest.raises(NotPossible, match=re.escape(reason)):
        resolve_module(specs, Cell("toy", "bf16", ("interleaved_32",)), "cpu")
    named = resolve_module(specs, Cell("toy", "bf16", ("nvtx_ranges",)), "cpu")
    assert named.options == ("nvtx_ranges",)


def test_a_reason_is_about_the_ops_of_the_module() -> None:
    reasons = {
        "interleaved_32": "of silu no op is a gated activation, whose halves could alternate",
        "scaled_bias": "no grouped GEMM adds a bias that could be scaled",
        "parameter_per_group": "no grouped GEMM reads a parameter of each group",
        "add_to_main_grad": "no GEMM gives the gradient of a weight",
        "delayed_wgrad": "no GEMM gives the gradient of a weight",
        "cached_weights": "no GEMM reads a weight whose copies could be kept",
        "recompute_activations": "neither expression nor norm gives an activation that is saved"
        " for the backward",
        "reduced_amax": "no GEMM has operands whose amaxes ranks could share",
        "dequantized_backward": "no GEMM's backward could read other operands",
        "debug": "no op makes copies to take statistics of",
    }
    for word, reason in reasons.items():
        with pytest.raises(NotPossible) as caught:
            resolve_module(SPECS, Cell("silu", "bf16", (word,)), "cpu")
        assert str(caught.value) == f"module 'silu' offers no option {word!r}: {reason}"


def test_choices_of_a_module_have_defaults() -> None:
    found = choices_of(SPECS.modules["swiglu"], SPECS.ops, ("nvtx_ranges",))
    assert found == {
        "glu_interleave": "whole_halves",
        "output_format": "output_in_high_precision",
        "ranges": "nvtx_ranges",
    }


def test_options_are_listed_with_where_they_apply() -> None:
    found = {entry.name: entry for entry in api.list_options()}
    assert list(found) == [option.name for option in OPTIONS]
    entry = found["amax_reduction"]
    assert (entry.default, list(entry.choices)) == ("own_amax", ["own_amax", "reduced_amax"])
    assert entry.recipes == ("fp8_delayed",)
    assert entry.modules == tuple(m for m, names in INHERITED.items() if "amax_reduction" in names)


# What is refused


@every_exclusion
def test_what_excludes_another_says_why(option: Option, exclusion: Exclusion) -> None:
    other = option_of(exclusion.other)
    assert exclusion.word in option.further
    assert other is not None and other is not option and exclusion.other in other.further
    pair = (exclusion.word, exclusion.other)
    offering = [{*modules_with(word, SPECS)} for word in pair]
    module = min(set.intersection(*offering))
    for words in (pair, pair[::-1], ("debug", *pair)):
        assert excluded(words) == exclusion.reason
        with pytest.raises(NotPossible, match=re.escape(exclusion.reason)):
            resolve_module(SPECS, Cell(module, "fp8_delayed", words), "cpu")


def test_exclusions_stand_once() -> None:
    pairs = [frozenset((each.word, each.other)) for _, each in EXCLUSIONS]
    assert len(pairs) == len({*pairs}) > 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("cached_weights", "quantized_weights"),
            "cached_weights and quantized_weights are choices of one option, weight_cache",
        ),
        (("own_amax",), "'own_amax' is what a cell has without a word for it; leave it out"),
        (("reduced_amax",), "recipe 'bf16' keeps no amaxes that ranks could share"),
        (("fast",), "module 'linear' offers no option 'fast'; known: "),
    ],
)
def test_what_no_cell_is_named(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(NotPossible, match=re.escape(reason)):
        resolve_module(SPECS, Cell("linear", "bf16", words), "cpu")


# Variants: modules that are one spec


def test_a_variant_is_the_module_that_it_would_be_written_out(tmp_path: Path) -> None:
    chain = """dims: {T: tokens, E: num_groups, H: hidden, F: intermediate}
inputs:
  x: {shape: [T, H], role: input}
  split_sizes: {shape: [E], dtype: int64}
  probs: {shape: [T], dtype: float32}
chain:
  - {op: grouped_linear, as: fc1, out: h, dims: {K: H, N: F}}
  - {op: scaled_srelu, as: act, out: a, with: {scales: probs}, dims: {D: F}}
  - {op: grouped_linear, as: fc2, dims: {K: F, N: H}}
"""
    variant = SPECS.modules["grouped_mlp_srelu"]
    toy = f"edition: 2\nmodule: toy\nclass: {variant.class_}\nsummary: {variant.summary}\n{chain}"
    module = written(tmp_path, toy=toy).modules["toy"]
    assert (module.class_, module.summary, module.dims, module.inputs, module.chain) == (
        *(variant.class_, variant.summary, variant.dims, variant.inputs, variant.chain),
    )


def test_a_variant_is_read_from_the_file_of_its_module(tmp_path: Path) -> None:
    toy = """edition: 2
module: toy
class: Toy
summary: toy
dims: {T: tokens, H: hidden}
inputs: {x: {shape: [T, H], role: input}}
chain: [{op: relu, as: act, dims: {D: H}}]
without: [output_format, ranges]
variants: {toy_gelu: {class: ToyGelu, summary: With GELU, chain: {act: {op: gelu}}}}
"""
    specs = written(tmp_path, toy=toy)
    plan = resolve_module(specs, Cell("toy_gelu", "bf16"), "cpu")
    assert plan.sources[:2] == ("mine/modules/toy.yaml", "specs/ops/gelu.yaml")
    assert (plan.class_name, plan.summary) == ("ToyGelu", "With GELU")
    assert options_of(specs.modules["toy_gelu"], specs.ops) == ()
    mine = tmp_path / "mine"
    assert used_specs([builtin_specs(), mine], specs, [plan]) == (builtin_specs(), mine)
