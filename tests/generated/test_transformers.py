"""Models of transformers, made from small configurations, with their experts run by cells."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from fusegen.ir.naming import Cell

from .loading import load_cells

PLAIN, DELAYED = "grouped_mlp__bf16", "grouped_mlp__fp8_delayed"
SQUARED = "grouped_mlp_srelu__bf16"
CLAMPED = "grouped_mlp_clamped_qgeglu__bf16__scaled_bias"
OTHERS = ("grouped_mlp__bf16__scaled_bias", "grouped_mlp__nvfp4")
NEVER = ("grouped_mlp__bf16__add_to_main_grad", "grouped_mlp__fp8_delayed__cached_weights")
"""Cells that experts cannot run, because a call of theirs takes more than experts have."""

ROUNDING = 2.0**-9
"""Largest relative error of rounding to bfloat16."""

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOW_RANK = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
ROPE = {"rope_theta": 1e4, "rope_type": "default"}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", PLAIN, {"intermediate_size": 48, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        PLAIN,
        {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 64, "num_experts": 8},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        PLAIN,
        {"moe_intermediate_size": 48, "num_experts": 8, "head_dim": 8},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        PLAIN,
        {
            "intermediate_size": 64,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            **LOW_RANK,
        },
    ),
    "olmoe": ("OlmoeConfig", PLAIN, {"intermediate_size": 48, "num_experts": 8}),
    "gpt_oss": (
        "GptOssConfig",
        CLAMPED,
        {
            "intermediate_size": 48,
            "head_dim": 8,
            "num_local_experts": 4,
            "rope_parameters": ROPE,
        },
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def integration(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The generated file of a bundle with cells that experts can run, and others."""
    words = (PLAIN, DELAYED, SQUARED, CLAMPED, *OTHERS, *NEVER, "linear__bf16")
    cells = [Cell.parse(word) for word in words]
    bundle = load_cells("transformers", tmp_path_factory.mktemp("transformers"), cells)
    return importlib.import_module(f"{bundle}.integrations.transformers")


def make(
    name: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16, scale: float = 0.0, **more: Any
) -> Any:
    """A model of random weights, normal ones of a standard deviation where that is given."""
    config, _, sizes = MODELS[name]
    torch.manual_seed(seed)
    made = getattr(transformers, config)(**{**SIZES, **sizes, **more})
    model = AutoModelForCausalLM.from_config(made, dtype=dtype)
    if scale:
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if "norm" not in path:
                    parameter.normal_(0.0, scale)
    return model


def tokens(seed: int = 0, length: int = 8) -> Tensor:
    return torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Without gradients, which no recipe moves its state on for."""
    found: Tensor = model(tokens()).logits
    return found


def experts_of(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if hasattr(layer, "is_concatenated")]


def error(found: Tensor, exact: Tensor) -> float:
    difference = found.detach().double() - exact.detach().double()
    return (difference.norm() / exact.detach().double().norm()).item()


# As the library's own


def training_step(model: Any, ids: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Experts that each layer chose; logits and gradients."""
    chosen: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: chosen.append(args[1].sort().values))
        for layer in experts_of(model)
    ]
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return chosen, {"logits": out.logits.detach(), **gradients}


@every_model
def test_models_compute_what_they_did(integration: Any, name: str) -> None:
    """Against float64: about as far from it as the library's own in bfloat16.

    Errors of some gradients are those of a few numbers, so one run's may be twice the other's; a
    layer alone is held to more.  Routing jumps where two experts are as good as equal, so it has
    to be the same in all three.
    """
    for seed in range(20):
        model = make(name, seed, scale=0.3)
        exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
        integration.swap(model, MODELS[name][1])
        for other in (exact, plain):
            other.set_experts_implementation("eager")
        runs = [training_step(each, tokens(seed)) for each in (exact, plain, model)]
        choices = [torch.stack(chosen) for chosen, _ in runs]
        if all(torch.equal(choices[0], other) for other in choices[1:]):
            break
    else:
        pytest.fail("no seed without a tie of experts")
    expected, theirs, ours = (results for _, results in runs)
    assert {*ours} == {*theirs} == {*expected}
    assert any("experts" in path for path in ours)
    for path, value in expected.items():
        if value.any():
            allowed = 2 * error(theirs[path], value) + 4 * ROUNDING
            assert error(ours[path], value) <= allowed, path
        else:
            assert not ours[path].any(), path


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_layer_alone(integration: Any, name: str) -> None:
    """Of equal inputs there is no jump: a few roundings, of every gradient, and fewer in ours."""
    cell = MODELS[name][1]
    layer = experts_of(make(name, scale=0.3))[0]
    exact = copy.deepcopy(layer).double()
    exact.config._experts_implementation = "eager"
    torch.manual_seed(1)
    x, weights = torch.randn(24, 32).bfloat16(), torch.rand(24, 2)
    chosen = torch.rand(24, 4).argsort(dim=1)[:, :2]
    dy = torch.randn(24, 32).bfloat16()

    def run(layer: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        layer.zero_grad()
        given, probs = (t.to(dtype, copy=True).requires_grad_() for t in (x, weights))
        y = layer(given, chosen, probs)
        assert y.dtype == dtype
        y.backward(dy.to(dtype))
        grads: dict[str, Any] = {n: p.grad.clone() for n, p in layer.named_parameters()}
        return {"y": y.detach(), "dx": given.grad, "dprobs": probs.grad, **grads}

    expected = run(exact, torch.float64)
    integration.swap(layer, cell)
    ours = run(layer, torch.bfloat16)
    layer.config._experts_implementation = "eager"
    theirs = run(layer, torch.bfloat16)
    for path, value in expected.items():
        allowed = min(error(theirs[path], value) + ROUNDING, 8 * ROUNDING)
        assert error(ours[path], value) <= allowed, path


def test_without_a_gate(integration: Any) -> None:
    """Experts of one projection up, with the square of ReLU."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    config = transformers.NemotronHConfig(
        hidden_size=32, moe_intermediate_size=48, n_routed_experts=4, mlp_hidden_act="relu2"
    )
    torch.manual_seed(0)
    layer = NemotronHExperts(config).bfloat16()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0.0, 0.3)
    x, weights = torch.randn(24, 32).bfloat16(), torch.rand(24, 2)
    chosen = torch.rand(24, 4).argsort(dim=1)[:, :2]
    exact = copy.deepcopy(layer).double()
    exact.config._experts_implementation = "eager"
    integration.swap(layer, SQUARED)
    expected = exact(x.double(), chosen, weights.double())
    assert error(layer(x, chosen, weights), expected) < 4 * ROUNDING


def test_experts_of_other_ranks_add_nothing(integration: Any) -> None:
    """Under expert parallelism an index past the last expert stands for them."""
    layer = experts_of(make("mixtral", scale=0.3))[0]
    torch.manual_seed(1)
    x = torch.randn(24, 32).bfloat16().requires_grad_()
    chosen = torch.rand(24, 5).argsort(dim=1)[:, :2]
    elsewhere = chosen == 4
    assert elsewhere.any() and elsewhere.all(dim=1).logical_not().all()
    weights = torch.rand(24, 2).requires_grad_()
    integration.swap(layer, PLAIN)
    y = layer(x, chosen, weights)
    y.float().square().sum().backward()
    assert weights.grad is not None and not weights.grad[elsewhere].any()
    kept = weights.detach().masked_fill(elsewhere, 0.0)
    expected = layer(x.detach(), chosen.clamp(max=3), kept)
    assert error(y.detach(), expected) < 4 * ROUNDING


def test_no_tokens(integration: Any) -> None:
    layer = experts_of(integration.swap(make("mixtral"), PLAIN))[0]
    x = torch.randn(0, 32).bfloat16().requires_grad_()
    y = layer(x, torch.zeros(0, 2, dtype=torch.int64), torch.rand(0, 2))
    y.sum().backward()
    assert y.shape == (0, 32) and not layer.down_proj.grad.any()


@pytest.mark.parametrize("cell", [PLAIN, DELAYED])
def test_compiled(integration: Any, cell: str) -> None:
    """As one graph, and what is compiled is checked, too."""
    block = integration.swap(make("mixtral"), cell).model.layers[0].mlp
    eager = copy.deepcopy(block)
    x = torch.randn(2, 8, 32).bfloat16()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    runs = []
    for call, module in ((compiled, block), (eager, eager)):
        given = x.clone().requires_grad_()
        y = call(given)
        y.float().square().sum().backward()
        runs.append([y.detach(), given.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    wrong = make("mixtral", hidden_act="gelu", experts_implementation=integration.register(PLAIN))
    with pytest.raises(Exception, match="expected the activation"):
        torch.compile(wrong.model.layers[0].mlp, fullgraph=True, backend="aot_eager")(x)


# Refusals


def test_what_runs_experts(integration: Any) -> None:
    assert {*integration.CELLS} == {PLAIN, DELAYED, SQUARED, CLAMPED, *OTHERS}


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_another_activation_is_refused(integration: Any, act: str) -> None:
    """At once by `swap`, in the first call by the name in the model's configuration."""
    differs = f"{PLAIN}: MixtralExperts: expected the activation .* differs from it by up to"
    with pytest.raises(RuntimeError, match=differs):
        integration.swap(make("mixtral", hidden_act=act), PLAIN)
    registered = integration.register(PLAIN)
    model = make("mixtral", hidden_act=act, experts_implementation=registered)
    with pytest.raises(RuntimeError, match=differs):
        model(tokens())


@pytest.mark.parametrize(
    "name, cell, why",
    [
        ("mixtral", SQUARED, f"with a gate; run them by {PLAIN}"),
        ("mixtral", CLAMPED, f"expected the activation .*; run them by {PLAIN}"),
        (
            "gpt_oss",
            PLAIN,
            f"without biases, got some.*--option scaled_bias; run them by {CLAMPED}",
        ),
        ("gpt_oss", OTHERS[0], f"expected the activation .*; run them by {CLAMPED}"),
    ],
)
def test_experts_of_another_kind_are_refused(
    integration: Any, name: str, cell: str, why: str
) -> None:
    model = make(name)
    before = model.config._experts_implementation
    with pytest.raises(RuntimeError, match=why):
        integration.swap(model, cell)
    assert model.config._experts_implementation == before


def test_another_limit(integration: Any) -> None:
    """Scalars that experts have are those that the cell is called with."""
    layers = [experts_of(make("gpt_oss", scale=0.5, swiglu_limit=limit))[0] for limit in (7.0, 0.5)]
    x, chosen, weights = torch.randn(8, 32).bfloat16(), torch.tensor([[0, 1]] * 8), torch.rand(8, 2)
    found = []
    for layer in layers:
        eager = copy.deepcopy(layer)
        eager.config._experts_implementation = "eager"
        found.append(integration.swap(layer, CLAMPED)(x, chosen, weights))
        assert error(found[-1], eager(x, chosen, weights.bfloat16())) < 8 * ROUNDING
    assert not torch.equal(*found)


def test_a_norm_behind_experts_is_refused(integration: Any) -> None:
    layer = experts_of(make("mixtral"))[0]
    layer.has_post_expert_norm = True
    with pytest.raises(RuntimeError, match="no norm behind each expert"):
        integration.swap(layer, PLAIN)


def test_types_of_a_call(integration: Any) -> None:
    model = integration.swap(make("mixtral", dtype=torch.float32), PLAIN)
    with pytest.raises(RuntimeError, match=r"got torch.float32 and torch.float32.*autocast"):
        model(tokens())
    layer = experts_of(integration.swap(make("mixtral"), PLAIN))[0]
    x, chosen, weights = torch.randn(8, 32).bfloat16(), torch.tensor([[0, 1]] * 8), torch.rand(8, 2)
    with pytest.raises(RuntimeError, match=r"got torch.float32 and torch.bfloat16"):
        layer(x.float(), chosen, weights)
    with pytest.raises(RuntimeError, match=r"top_k_weights \[tokens, k\], got .*\(8, 4\)"):
        layer(x, chosen, torch.rand(8, 4))
    with pytest.raises(RuntimeError, match=r"expected integers in top_k_index"):
        layer(x, weights, weights)


def test_names_of_cells(integration: Any) -> None:
    for call in (integration.register, partial(integration.swap, make("mixtral"))):
        with pytest.raises(ValueError, match=f"linear__bf16: expected a cell of .*{PLAIN}"):
            call("linear__bf16")
    with pytest.raises(ValueError, match=f"keeps forward_state and .*swap\\(model, '{DELAYED}'"):
        integration.register(DELAYED)
    with pytest.raises(RuntimeError, match="ExpertsInterface, got none"):
        integration.swap(nn.Linear(2, 2), PLAIN)


# State


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "state" in name}


def test_state_is_one_layers_own(integration: Any) -> None:
    """It moves on in training, follows a copy, stays where swapped again and goes with the cell."""
    plain = make("olmoe")
    parameters = {name: id(p) for name, p in plain.named_parameters()}
    model = integration.swap(plain, DELAYED)
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    fresh = state_of(model)
    assert len(fresh) == 2 * 2 * 6
    training_step(model, tokens())
    moved = state_of(model)
    histories = [name for name in fresh if "history" in name]
    assert all(not torch.equal(moved[name], fresh[name]) for name in histories)
    assert len({moved[name].sum().item() for name in histories}) == len(histories)
    integration.swap(model, DELAYED)
    again = copy.deepcopy(model)
    for each in (model, again):
        assert all(torch.equal(value, moved[name]) for name, value in state_of(each).items())
    integration.swap(model, PLAIN)
    assert not state_of(model)
    model.config._experts_implementation = again.config._experts_implementation
    with pytest.raises(RuntimeError, match=rf"without; call swap\(model, '{DELAYED}'\)"):
        model(tokens())


def test_delayed_scaling_is_near(integration: Any) -> None:
    model = make("olmoe", scale=0.3)
    expected = logits(model)
    integration.swap(model, DELAYED)
    for _ in range(2):  # the first step has no amaxes yet
        training_step(model, tokens())
    assert 0 < error(logits(model), expected) < 0.15


# Training


class Sentences(Dataset[dict[str, Tensor]]):
    """Tokens that count upwards, from a start each."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(index, index + 8) + 3
        return {"input_ids": ids, "labels": ids}


def trainer(model: Any, folder: Path) -> Trainer:
    """Six steps under autocast, saved after three and at the end."""
    arguments = TrainingArguments(
        str(folder),
        bf16=True,
        max_steps=6,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(model=model, args=arguments, train_dataset=Sentences())


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize("cell", [PLAIN, DELAYED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "autocast"])
def test_trainer(integration: Any, tmp_path: Path, cell: str, dtype: torch.dtype) -> None:
    """Trains, near the library's own, and resumed from a checkpoint as if it had never stopped.

    Checkpoints have a tensor for each expert, which the trainer does not load and a model does.
    """
    reference = trainer(make("olmoe", dtype=dtype), tmp_path / "reference")
    reference.train()
    whole = trainer(integration.swap(make("olmoe", dtype=dtype), cell), tmp_path / "whole")
    whole.train()
    assert losses(whole)[-1] < 0.9 * losses(whole)[0]
    for ours, theirs in zip(losses(whole), losses(reference), strict=True):
        assert abs(ours - theirs) < (0.02 if cell == PLAIN else 0.1) * theirs
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")
    other = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    resumed = trainer(integration.swap(other, cell), tmp_path / "whole")
    resumed.train(resume_from_checkpoint=checkpoint)
    assert losses(resumed) == losses(whole)
    expected = whole.model.state_dict()
    assert {*resumed.model.state_dict()} == {*expected}
    for path, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[path]), path


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_checkpoints_are_the_librarys(integration: Any, tmp_path: Path, name: str) -> None:
    """Saved and loaded by its own means, with experts run by a cell or not."""
    model = integration.swap(make(name), MODELS[name][1])
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert plain.config._experts_implementation != model.config._experts_implementation
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        experts_implementation=integration.register(MODELS[name][1]),
    )
    assert {*plain.state_dict()} == {*loaded.state_dict()} == {*model.state_dict()}
    assert torch.equal(logits(loaded), logits(model))


def test_checkpoints_have_state(
    integration: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = integration.swap(make("olmoe"), DELAYED)
    training_step(model, tokens())
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.ERROR):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    weights = {name for name in model.state_dict() if "state" not in name}
    assert {*plain.state_dict()} == weights


# Checkpointing, generation, adapters


def selective(integration: Any, cell: str) -> Callable[[], Any]:
    """Contexts of a checkpoint that keeps what the cell's forward gave."""
    namespace = integration.CELLS[cell].implementation.partition("::")[0]
    forward = getattr(getattr(torch.ops, namespace), f"{cell}_forward").default

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op is forward
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.parametrize("cell", [PLAIN, DELAYED])
def test_gradient_checkpointing(integration: Any, cell: str) -> None:
    """The same gradients, and a state that moves on once."""
    results = []
    for checkpointed in (False, True):
        model = integration.swap(make("olmoe"), cell).train()
        if checkpointed:
            more = {} if cell == PLAIN else {"context_fn": selective(integration, cell)}
            model.gradient_checkpointing_enable({"use_reentrant": False, **more})
        values = {}
        for seed in range(2):
            values = training_step(model, tokens(seed))[1]
        results.append({**values, **state_of(model)})
    plain, checkpointed_ones = results
    assert {*plain} == {*checkpointed_ones}
    for path, value in plain.items():
        assert torch.equal(value, checkpointed_ones[path]), path


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_generate(integration: Any, name: str) -> None:
    """A token at a time is what the whole sentence gives."""
    model = integration.swap(make(name, scale=0.1), MODELS[name][1]).eval()
    prompt = tokens()
    found = model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
    assert found.shape == (2, 12)
    with torch.no_grad():
        whole = model(found[:, :-1]).logits[:, prompt.shape[1] - 1 :].float()
    chosen = whole.gather(2, found[:, prompt.shape[1] :, None])[..., 0]
    assert (chosen >= whole.amax(dim=2) - 0.02 * whole.abs().amax()).all()


@pytest.mark.parametrize("cell", [PLAIN, DELAYED])
def test_lora_on_experts(integration: Any, cell: str) -> None:
    """Adapters of PEFT on the experts' own parameters train, and merge into them."""
    model = integration.swap(make("olmoe"), cell).eval()
    expected = logits(model)
    config = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        lora_dropout=0.0,
    )
    wrapped = get_peft_model(model, config)
    assert torch.equal(logits(wrapped), expected)
    _, before = training_step(wrapped, tokens())
    assert {path.split(".")[-2] for path in before if "experts" in path} <= {
        "lora_A",
        "lora_B",
        "default",
    }
    with torch.no_grad():
        for path, parameter in wrapped.named_parameters():
            if "lora_B" in path:
                parameter.normal_(0.0, 0.1)
    adapted = logits(wrapped.eval())
    assert not torch.equal(adapted, expected)
    merged = wrapped.merge_and_unload()
    assert error(logits(merged), adapted) < (8 * ROUNDING if cell == PLAIN else 0.1)
