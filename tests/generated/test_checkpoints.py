"""State dicts of other libraries' layers, both ways: outputs of both sides, and every bit."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from fusegen.ir.naming import Cell

from .loading import load_cells

GROUPS, HIDDEN, INNER = 4, 32, 64
ROUNDING = 2.0**-6
"""Largest relative error of two layers in bfloat16 that compute the same."""

OPTIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("parameter_per_group",),
    ("interleaved_32",),
    ("interleaved_32", "parameter_per_group"),
)
MODULES = (
    *("grouped_linear", "grouped_mlp", "grouped_mlp_clamped_qgeglu", "grouped_mlp_srelu"),
    *("linear", "mlp_swiglu", "layer_norm_linear", "layer_norm_mlp", "norm_mlp_swiglu"),
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a package with every module that is read or written here."""
    cells = [Cell(module, "bf16") for module in MODULES]
    cells += [Cell.parse(cell) for cell in cells_of("grouped_mlp__bf16")[1:]]
    clamped = "grouped_mlp_clamped_qgeglu__bf16__scaled_bias"
    cells += [Cell.parse(cell) for cell in cells_of(clamped)]
    cells.append(Cell("grouped_linear", "bf16", ("parameter_per_group",)))
    cells += [Cell("grouped_mlp", "fp8_delayed"), Cell("swiglu", "bf16")]
    cells.append(Cell("grouped_mlp", "fp8_block", ("quantized_weights",)))
    return load_cells("checkpoints", tmp_path_factory.mktemp("checkpoints"), cells)


@pytest.fixture(scope="module")
def checkpoints(bundle: str) -> Any:
    return importlib.import_module(f"{bundle}.integrations.checkpoints")


def make(bundle: str, cell: str, **more: Any) -> Any:
    """A layer of random parameters, biases included."""
    loaded = importlib.import_module(f"{bundle}.{cell}")
    made: Any = next(each for each in vars(loaded).values() if hasattr(each, "describe"))
    module = cell.split("__")[0]
    groups = (GROUPS,) if module.startswith("grouped") else ()
    layer = made(*groups, HIDDEN, INNER, **more)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            if not parameter.is_meta and "quantized_weights" not in cell:
                parameter.copy_(torch.randn_like(parameter) / HIDDEN**0.5)
    return layer


def close(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.double(), expected.double()
    error = (found - expected).norm() / expected.norm()
    return bool(error <= ROUNDING) and bool(expected.any())


def same(found: dict[str, Tensor], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) and found[key].dtype == expected[key].dtype
        for key in expected
    )


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Rows, how many each group has, and what they are weighted by."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, HIDDEN, generator=generator).bfloat16()
    return x, torch.tensor([9, 0, 13, 2]), torch.rand(24, generator=generator) + 0.5


# transformers


def small(name: str, **more: Any) -> Any:
    config = getattr(transformers, name)(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts_per_tok=2,
        vocab_size=64,
        pad_token_id=0,
        **more,
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / HIDDEN**0.5)
    return model


ROPE = {"rope_type": "default", "rope_theta": 1e4}
MODELS: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "mixtral": (
        "MixtralConfig", {"num_local_experts": GROUPS}, "grouped_mlp__bf16",
        "FUSED_EXPERTS", "MIXTRAL_EXPERTS",
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig", {"num_experts": GROUPS, "moe_intermediate_size": INNER, "head_dim": 8},
        "grouped_mlp__bf16", "FUSED_EXPERTS", "EXPERTS",
    ),
    "olmoe": (
        "OlmoeConfig", {"num_experts": GROUPS}, "grouped_mlp__bf16", "FUSED_EXPERTS", "EXPERTS",
    ),
    "gpt_oss": (
        "GptOssConfig", {"num_local_experts": GROUPS, "head_dim": 8, "rope_parameters": ROPE},
        "grouped_mlp_clamped_qgeglu__bf16__scaled_bias", "GPT_OSS_EXPERTS", "GPT_OSS_EXPERTS",
    ),
}  # fmt: skip
every_model = pytest.mark.parametrize("name", MODELS)


def cells_of(cell: str) -> list[str]:
    """The cell under every option that lays its parameters out otherwise."""
    module, recipe, *own = cell.split("__")
    order = ("interleaved_32", "scaled_bias", "parameter_per_group")
    chosen = [{*own, *options} for options in OPTIONS]
    return ["__".join((module, recipe, *(w for w in order if w in words))) for words in chosen]


def outputs_of(experts: Any, own: Any) -> tuple[Tensor, Tensor]:
    """Outputs of a layer of transformers' experts, in float64, and of ours, of the same tokens."""
    x, sizes, probs = tokens()
    chosen = torch.arange(GROUPS).repeat_interleave(sizes)[:, None]
    experts.config._experts_implementation = "eager"
    theirs = experts.double()(x.double(), chosen, probs[:, None].double())
    with torch.no_grad():
        return own(x, sizes, probs), theirs


@every_model
def test_experts_of_transformers(bundle: str, checkpoints: Any, name: str) -> None:
    """Their modules' parameters in ours, under every option, and ours in theirs."""
    config, more, cell, layout, _ = MODELS[name]
    for each in cells_of(cell):
        experts: Any = small(config, **more).model.layers[0].mlp.experts
        state = {key: value.clone() for key, value in experts.state_dict().items()}
        own = make(bundle, each, bias="bias" in "".join(state))
        own.load_state_dict(checkpoints.read(own, state, getattr(checkpoints, layout)))
        assert close(*outputs_of(experts, own)), each
        assert same(checkpoints.write(own, getattr(checkpoints, layout)), state), each
        other = make(bundle, each, bias="bias" in "".join(state))
        experts.bfloat16().load_state_dict(checkpoints.write(other, getattr(checkpoints, layout)))
        assert close(*outputs_of(experts, other)), each


@every_model
def test_checkpoints_of_transformers(
    bundle: str, checkpoints: Any, name: str, tmp_path: Path
) -> None:
    """As `save_pretrained` writes them, many with a tensor for each expert."""
    config, more, cell, _, layout = MODELS[name]
    model = small(config, **more)
    model.save_pretrained(tmp_path / "theirs")
    state = load_file(tmp_path / "theirs" / "model.safetensors")
    matches = (re.match(r"model\.layers\.0\.\w+\.experts\.", key) for key in state)
    prefix = next(match[0] for match in matches if match)
    for each in cells_of(cell):
        own = make(bundle, each, bias=name == "gpt_oss", device="meta")
        found = checkpoints.read(own, state, getattr(checkpoints, layout), prefix)
        own.load_state_dict(found, assign=True)
        experts: Any = model.bfloat16().model.layers[0].mlp.experts
        assert close(*outputs_of(experts, own)), each
        written = checkpoints.write(own, getattr(checkpoints, layout), prefix)
        assert same(written, {key: state[key] for key in state if key.startswith(prefix)}), each


def test_a_layer_without_a_gate(bundle: str, checkpoints: Any) -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    config = transformers.NemotronHConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=GROUPS,
        mlp_hidden_act="relu2",
    )  # fmt: skip
    config._experts_implementation = "eager"
    experts: Any = NemotronHExperts(config).bfloat16()
    own = make(bundle, "grouped_mlp_srelu__bf16")
    state = checkpoints.write(own, checkpoints.UNGATED_FUSED_EXPERTS)
    experts.load_state_dict(state)
    assert close(*outputs_of(experts, own))
    assert same(checkpoints.read(own, state, checkpoints.UNGATED_FUSED_EXPERTS), own.state_dict())
    by_expert = checkpoints.write(own, checkpoints.UNGATED_EXPERTS)
    assert torch.equal(by_expert["2.up_proj.weight"], state["up_proj"][2])
    assert same(checkpoints.read(own, by_expert, checkpoints.UNGATED_EXPERTS), own.state_dict())


def test_a_dense_layer_of_transformers(bundle: str, checkpoints: Any) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = transformers.LlamaConfig(hidden_size=HIDDEN, intermediate_size=INNER, mlp_bias=True)
    theirs: Any = LlamaMLP(config).bfloat16()
    own = make(bundle, "mlp_swiglu__bf16", bias=True)
    for state in (theirs.state_dict(), checkpoints.write(own, checkpoints.DENSE)):
        own.load_state_dict(checkpoints.read(own, state, checkpoints.DENSE))
        theirs.load_state_dict(checkpoints.write(own, checkpoints.DENSE))
        assert same(checkpoints.write(own, checkpoints.DENSE), theirs.state_dict())
        x = tokens()[0]
        assert close(own(x), theirs(x))


# PyTorch


@pytest.mark.parametrize("option", ["", "__parameter_per_group"])
def test_layers_of_pytorch(bundle: str, checkpoints: Any, option: str) -> None:
    linears = nn.ModuleList(nn.Linear(HIDDEN, INNER, dtype=torch.bfloat16) for _ in range(GROUPS))
    own = make(bundle, f"grouped_linear__bf16{option}", bias=True)
    own.load_state_dict(checkpoints.read(own, linears.state_dict(), checkpoints.LINEARS))
    x, sizes, _ = tokens()
    each = [linear(rows) for linear, rows in zip(linears, x.split(sizes.tolist()), strict=True)]
    assert close(own(x, sizes), torch.cat(each))
    assert same(checkpoints.write(own, checkpoints.LINEARS), linears.state_dict())
    stacked = checkpoints.write(own, checkpoints.OWN)
    assert {key: [*value.shape] for key, value in stacked.items()} == {
        "weight": [GROUPS, INNER, HIDDEN],
        "bias": [GROUPS, INNER],
    }
    assert same(checkpoints.read(own, stacked, checkpoints.OWN), own.state_dict())
    single = make(bundle, "linear__bf16", bias=True)
    single.load_state_dict(checkpoints.read(single, linears[1].state_dict(), checkpoints.OWN))
    assert close(single(x), linears[1](x))


@pytest.mark.parametrize("first", cells_of("grouped_mlp__bf16"))
def test_options_of_one_module(bundle: str, checkpoints: Any, first: str) -> None:
    """A checkpoint of a module with some options in one with others."""
    layer = make(bundle, first, bias=True)
    for second in cells_of("grouped_mlp__bf16"):
        other = make(bundle, second, bias=True)
        state = checkpoints.write(layer, checkpoints.OWN, "mlp.")
        other.load_state_dict(checkpoints.read(other, state, checkpoints.OWN, "mlp."))
        assert torch.equal(other(*tokens()), layer(*tokens())), second
        assert same(checkpoints.write(other, checkpoints.OWN, "mlp."), state)


# TransformerEngine, by the keys and shapes of its 2.x: it does not import without a GPU's libraries


def random_state(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        key.replace("__", "."): (torch.randn(*shape, generator=generator) / HIDDEN**0.5).bfloat16()
        for key, shape in shapes.items()
    }


def norm(x: Tensor, state: dict[str, Tensor], key: str = "layer_norm_") -> Tensor:
    weight = state[f"{key}weight"].double()
    if f"{key}bias" in state:
        return functional.layer_norm(x, (HIDDEN,), weight, state[f"{key}bias"].double(), 1e-5)
    return functional.rms_norm(x, (HIDDEN,), weight, 1e-5)


def linear(x: Tensor, state: dict[str, Tensor], weight: str, bias: str) -> Tensor:
    return functional.linear(x, state[weight].double(), state[bias].double())


def swiglu(h: Tensor, block: int = 0) -> Tensor:
    """Of TransformerEngine: silu of the first half, times the second."""
    if block:
        h = h.reshape(-1, h.shape[-1] // (2 * block), 2, block).transpose(1, 2).reshape(h.shape)
    gate, up = h.chunk(2, dim=-1)
    return functional.silu(gate) * up


EMPTY = {"_extra_state": torch.empty(0, dtype=torch.uint8)}
DENSE_OF_TE: dict[str, tuple[str, str, dict[str, tuple[int, ...]], Callable[..., Tensor]]] = {
    "Linear": (
        "linear__bf16", "TE_LINEAR", {"weight": (INNER, HIDDEN), "bias": (INNER,)},
        lambda x, s: linear(x, s, "weight", "bias"),
    ),
    "LayerNormLinear": (
        "layer_norm_linear__bf16", "TE_LAYER_NORM_LINEAR",
        {
            "layer_norm_weight": (HIDDEN,), "layer_norm_bias": (HIDDEN,),
            "weight": (INNER, HIDDEN), "bias": (INNER,),
        },
        lambda x, s: linear(norm(x, s), s, "weight", "bias"),
    ),
    "LayerNormMLP": (
        "layer_norm_mlp__bf16", "TE_LAYER_NORM_MLP",
        {
            "layer_norm_weight": (HIDDEN,), "layer_norm_bias": (HIDDEN,),
            "fc1_weight": (INNER, HIDDEN), "fc1_bias": (INNER,),
            "fc2_weight": (HIDDEN, INNER), "fc2_bias": (HIDDEN,),
        },
        lambda x, s: x + linear(
            functional.gelu(linear(norm(x, s), s, "fc1_weight", "fc1_bias"), approximate="tanh"),
            s, "fc2_weight", "fc2_bias",
        ),
    ),
    "LayerNormMLP with RMSNorm and swiglu": (
        "norm_mlp_swiglu__bf16", "TE_LAYER_NORM_MLP",
        {
            "layer_norm_weight": (HIDDEN,), "fc1_weight": (2 * INNER, HIDDEN),
            "fc1_bias": (2 * INNER,), "fc2_weight": (HIDDEN, INNER), "fc2_bias": (HIDDEN,),
        },
        lambda x, s: x + linear(
            swiglu(linear(norm(x, s), s, "fc1_weight", "fc1_bias")), s, "fc2_weight", "fc2_bias"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE_OF_TE)
def test_dense_layers_of_transformer_engine(bundle: str, checkpoints: Any, name: str) -> None:
    cell, layout, shapes, compute = DENSE_OF_TE[name]
    state = random_state(**shapes) | EMPTY
    own = make(bundle, cell, bias=True)
    own.load_state_dict(checkpoints.read(own, state, getattr(checkpoints, layout)))
    x = tokens()[0]
    assert close(own(x), compute(x.double(), state))
    assert same(checkpoints.write(own, getattr(checkpoints, layout)), state)


@pytest.mark.parametrize("option", ["", "__parameter_per_group"])
@pytest.mark.parametrize("single", [False, True])
def test_grouped_layers_of_transformer_engine(
    bundle: str, checkpoints: Any, single: bool, option: str
) -> None:
    each = {f"weight{g}": (INNER, HIDDEN) for g in range(GROUPS)}
    state = random_state(**each, **{f"bias{g}": (INNER,) for g in range(GROUPS)})
    if single:
        kinds = ("weight", "bias")
        state = {k: torch.stack([state[f"{k}{g}"] for g in range(GROUPS)]) for k in kinds}
    state |= EMPTY
    layout = checkpoints.TE_SINGLE_GROUPED_LINEAR if single else checkpoints.TE_GROUPED_LINEAR
    own = make(bundle, f"grouped_linear__bf16{option}", bias=True)
    own.load_state_dict(checkpoints.read(own, state, layout))
    x, sizes, _ = tokens()
    of = (lambda k, g: state[k][g]) if single else (lambda k, g: state[f"{k}{g}"])
    rows = enumerate(x.split(sizes.tolist()))
    expected = [functional.linear(r, of("weight", g), of("bias", g)) for g, r in rows]
    assert close(own(x, sizes), torch.cat(expected))
    assert same(checkpoints.write(own, layout), state)


@pytest.mark.parametrize("cell", cells_of("grouped_mlp__bf16"))
@pytest.mark.parametrize("block", [0, 32])
def test_experts_of_te_ops_and_megatron(
    bundle: str, checkpoints: Any, block: int, cell: str
) -> None:
    shapes = {}
    for g in range(GROUPS):
        shapes |= {f"0__weight{g}": (2 * INNER, HIDDEN), f"0__bias{g}": (2 * INNER,)}
        shapes |= {f"2__weight{g}": (HIDDEN, INNER), f"2__bias{g}": (HIDDEN,)}
    state = random_state(**shapes)
    layout = checkpoints.te_ops({"fc1": "0", "fc2": "2"}, ["1"], grouped=True, block=block)
    extras = {f"{op}._extra_state": EMPTY["_extra_state"] for op in range(3)}
    own = make(bundle, cell, bias=True)
    own.load_state_dict(checkpoints.read(own, state | extras, layout))
    x, sizes, probs = tokens()
    expected = []
    rows = zip(x.double().split(sizes.tolist()), probs.double().split(sizes.tolist()), strict=True)
    for g, (r, p) in enumerate(rows):
        h = swiglu(linear(r, state, f"0.weight{g}", f"0.bias{g}"), block) * p[:, None]
        expected.append(linear(h, state, f"2.weight{g}", f"2.bias{g}"))
    assert close(own(x, sizes, probs), torch.cat(expected))
    assert same(checkpoints.write(own, layout), state | extras)
    if not block:
        names, every = {"0": "linear_fc1", "2": "linear_fc2"}, state | extras
        named = {f"{names[k[0]]}{k[1:]}": v for k, v in every.items() if k[0] in names}
        assert same(checkpoints.write(own, checkpoints.MEGATRON_EXPERTS), named)
        again = checkpoints.read(own, named, checkpoints.MEGATRON_EXPERTS)
        assert same(again, dict(own.state_dict()))


def test_dense_te_ops(bundle: str, checkpoints: Any) -> None:
    state = random_state(
        **{"0__weight": (HIDDEN,), "1__basic_ops__0__weight": (2 * INNER, HIDDEN)},
        **{"1__basic_ops__1__bias": (2 * INNER,), "3__basic_ops__0__weight": (HIDDEN, INNER)},
        **{"3__basic_ops__1__bias": (HIDDEN,)},
    )
    owners = ("0", "1.basic_ops.0", "1.basic_ops.1", "2", "3.basic_ops.0", "3.basic_ops.1")
    state |= {f"{owner}._extra_state": EMPTY["_extra_state"] for owner in owners}
    layout = checkpoints.te_ops({"norm": "0", "fc1": "1", "fc2": "3"}, ["2"])
    own = make(bundle, "norm_mlp_swiglu__bf16", bias=True)
    own.load_state_dict(checkpoints.read(own, state, layout))
    x = tokens()[0]
    h = linear(norm(x.double(), state, "0."), state, "1.basic_ops.0.weight", "1.basic_ops.1.bias")
    y = linear(swiglu(h), state, "3.basic_ops.0.weight", "3.basic_ops.1.bias")
    assert close(own(x), x + y)
    assert same(checkpoints.write(own, layout), state)


class Quantized(Tensor):
    """A tensor that stands for others, as TransformerEngine's quantised parameters do."""

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor) * 2


def test_quantised_parameters_are_dequantised(bundle: str, checkpoints: Any) -> None:
    own = make(bundle, "linear__bf16")
    plain = torch.randn(INNER, HIDDEN).bfloat16()
    state = {"weight": plain.as_subclass(Quantized)}
    found = checkpoints.read(own, state, checkpoints.TE_LINEAR)
    assert type(found["weight"]) is Tensor and torch.equal(found["weight"], plain * 2)


def test_the_state_of_a_recipe_starts_anew(bundle: str, checkpoints: Any) -> None:
    own = make(bundle, "grouped_mlp__fp8_delayed")
    shapes = {f"linear_fc1__weight{g}": (2 * INNER, HIDDEN) for g in range(GROUPS)}
    shapes |= {f"linear_fc2__weight{g}": (HIDDEN, INNER) for g in range(GROUPS)}
    state: dict[str, Any] = random_state(**shapes)
    state["linear_fc1._extra_state"] = torch.ones(9, dtype=torch.uint8)
    state["linear_fc2._extra_state"] = None
    own(*tokens()).sum().backward()
    history = own.fc1.input_amax_history.clone()
    assert history.any()
    with pytest.warns(UserWarning, match=r"linear_fc1\._extra_state: pickles .* start anew"):
        found = checkpoints.read(own, state, checkpoints.MEGATRON_EXPERTS)
    own.load_state_dict(found, strict=True)
    assert torch.equal(own.fc1.input_amax_history, history)
    assert not any("amax" in key for key in checkpoints.write(own, checkpoints.MEGATRON_EXPERTS))
    bare = make(bundle, "grouped_mlp__fp8_delayed", device="meta")
    del state["linear_fc1._extra_state"]
    with pytest.raises(
        RuntimeError, match=r"fc1\.\w+: expected what the recipe keeps, got .* meta"
    ):
        checkpoints.read(bare, state, checkpoints.MEGATRON_EXPERTS)


def test_weights_that_are_held_quantised(bundle: str, checkpoints: Any) -> None:
    plain = make(bundle, "grouped_mlp__bf16")
    held = make(bundle, "grouped_mlp__fp8_block__quantized_weights")
    state = checkpoints.write(plain, checkpoints.MIXTRAL_EXPERTS)
    held.load_state_dict(checkpoints.read(held, state, checkpoints.MIXTRAL_EXPERTS))
    written = checkpoints.write(held, checkpoints.MIXTRAL_EXPERTS)
    assert written.keys() == state.keys()
    for key, value in written.items():
        error = (value.float() - state[key].float()).norm() / state[key].float().norm()
        assert 0 < error < 0.05, key


# What is refused


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "missing": (
        lambda s: s.pop("m.1.w3.weight"),
        r"m\.1\.w3\.weight: expected a tensor \[64, 32\], got m\.\d\.w\d\.weight; check prefix",
    ),
    "unexpected": (
        lambda s: s.update({"m.4.w1.weight": s["m.0.w1.weight"]}),
        r"m\.4\.w1\.weight: expected no such key under 'm\.'; .* the number of groups",
    ),
    "biased": (
        lambda s: s.update({"m.0.w1.bias": torch.zeros(INNER)}),
        r"m\.0\.w1\.bias: expected no such key under 'm\.'; make the module with bias=True",
    ),
    "transposed": (
        lambda s: s.update({"m.2.w2.weight": s["m.2.w2.weight"].mT}),
        r"m\.2\.w2\.weight: expected shape \[32, 64\], got \[64, 32\]; check the sizes",
    ),
    "quantised": (
        lambda s: s.update({"m.0.w1.weight": s["m.0.w1.weight"].to(torch.float8_e4m3fn)}),
        r"m\.0\.w1\.weight: expected bfloat16, .* got float8_e4m3fn; dequantise it first",
    ),
    "no tensor": (
        lambda s: s.update({"m.0.w1.weight": [1.0]}),
        r"m\.0\.w1\.weight: expected a plain tensor, got list",
    ),
    "extra state": (
        lambda s: s.update({"m._extra_state": torch.empty(0)}),
        r"m\._extra_state: expected no such key",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_state_is_named(bundle: str, checkpoints: Any, case: str) -> None:
    layer = make(bundle, "grouped_mlp__bf16")
    state = checkpoints.write(layer, checkpoints.MIXTRAL_EXPERTS, "m.")
    change, message = WRONG[case]
    change(state)
    with pytest.raises(RuntimeError, match=message) as caught:
        checkpoints.read(layer, state, checkpoints.MIXTRAL_EXPERTS, "m.")
    lines = str(caught.value).splitlines()
    assert lines[0] == "grouped_mlp__bf16: from experts by w1, w3, w2:" and len(lines) == 2


def test_every_problem_is_named_at_once(bundle: str, checkpoints: Any) -> None:
    layer = make(bundle, "grouped_mlp__bf16")
    with pytest.raises(RuntimeError) as caught:
        checkpoints.read(layer, {"m.gate_up_proj": torch.zeros(2)}, checkpoints.EXPERTS, "m.")
    assert len(str(caught.value).splitlines()) == 1 + 3 * GROUPS + 1
    others = {f"layers.{number}": torch.zeros(2) for number in range(99)}
    with pytest.raises(RuntimeError, match=rf"\nand {3 * GROUPS + 99 - 20} more$"):
        checkpoints.read(layer, others, checkpoints.EXPERTS)


def test_layouts_that_do_not_fit(bundle: str, checkpoints: Any) -> None:
    biased = make(bundle, "grouped_mlp__bf16", bias=True)
    with pytest.raises(RuntimeError, match=r"fc1\.bias: expected one of .*; take another layout"):
        checkpoints.write(biased, checkpoints.FUSED_EXPERTS)
    squared = make(bundle, "grouped_mlp_srelu__bf16")
    with pytest.raises(RuntimeError, match=r"fc1\.weight: expected rows of gate and up, which alt"):
        checkpoints.write(squared, checkpoints.GPT_OSS_EXPERTS)
    dense = make(bundle, "linear__bf16")
    with pytest.raises(
        RuntimeError, match="weight: expected a parameter of groups, got one of a d"
    ):
        checkpoints.write(dense, checkpoints.LINEARS)
    alone = importlib.import_module(f"{bundle}.swiglu__bf16").SwiGLU()
    for other in (nn.Linear(2, 2), alone, nn.Sequential(dense)):
        with pytest.raises(RuntimeError, match=r"expected a module with parameters of .*; unwrap"):
            checkpoints.write(other, checkpoints.OWN)


def test_a_layout_of_ones_own(bundle: str, checkpoints: Any) -> None:
    """Up before gate, experts in one tensor, for instance."""
    layer = make(bundle, "grouped_mlp__bf16")
    place = checkpoints.Place
    mine = checkpoints.Layout(
        "mine", {"fc1.weight": place(("gate", "up")), "fc2.weight": place(("{group}.down",), True)}
    )
    state = checkpoints.write(layer, mine)
    assert torch.equal(state["up"], layer.fc1.weight[:, INNER:])
    assert torch.equal(state["3.down"], layer.fc2.weight[3].mT)
    assert same(checkpoints.read(layer, state, mine), layer.state_dict())
    with pytest.raises(dataclasses.FrozenInstanceError):
        mine.name = "yours"
