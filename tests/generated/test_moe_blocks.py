"""Whole mixture-of-experts layers against the blocks of transformers, in float64.

Router and experts, shared ones among them, are modules of a bundle with the weights of the block; y
and all gradients are compared.  The experts of a token are the same: what differs is rounding.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusegen.ir.naming import Cell

from .loading import class_of, load_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

TOKENS, HIDDEN, INTERMEDIATE = 48, 64, 40
LARGEST_ERROR = 0.006
"""Of bf16, whose results are rounded three times on the way (2^-9 each)."""
LAYER, SHARED, GATED = (
    Cell(name, "bf16") for name in ("moe_layer", "shared_moe_layer", "gated_shared_moe_layer")
)
CLAMPED = Cell("moe_layer_clamped_qgeglu", "bf16", ("scaled_bias",))


@dataclass(frozen=True)
class Block:
    """A block of transformers, and the modules that are to give the same.

    Attributes:
        folder, name, config: of its class and its configuration's.
        router: ours.
        words: of the configuration.
        scale: of the router's weights.
        layer: our experts.
        gate: the block's name of its router.
        shared: its name of the experts that every token has.
    """

    folder: str
    name: str
    config: str
    router: str
    words: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    layer: Cell = LAYER
    gate: str = "gate"
    shared: str = "shared_experts"


_CHOICES = {"num_experts_per_tok": 8, "moe_intermediate_size": INTERMEDIATE}
_SHARED = {**_CHOICES, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_shared_experts": 2}
BLOCKS = (
    Block(
        "mixtral",
        "MixtralSparseMoeBlock",
        "MixtralConfig",
        "router_mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    Block(
        "qwen3_moe",
        "Qwen3MoeSparseMoeBlock",
        "Qwen3MoeConfig",
        "router",
        {**_CHOICES, "num_experts": 24, "norm_topk_prob": True},
    ),
    Block(
        "olmoe",
        "OlmoeSparseMoeBlock",
        "OlmoeConfig",
        "router_olmoe",
        {"num_experts": 16, "num_experts_per_tok": 8, "norm_topk_prob": False},
    ),
    Block(
        "deepseek_v3",
        "DeepseekV3MoE",
        "DeepseekV3Config",
        "router_deepseek_v3",
        {**_SHARED, "n_routed_experts": 32, "n_group": 8, "topk_group": 4},
        scale=2.5,
        layer=SHARED,
    ),
    Block(
        "glm4_moe",
        "Glm4MoeMoE",
        "Glm4MoeConfig",
        "router_sigmoid",
        {**_SHARED, "n_routed_experts": 24, "n_group": 1, "topk_group": 1},
        scale=2.5,
        layer=SHARED,
    ),
    Block(
        "qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        "Qwen2MoeConfig",
        "router",
        {
            **_CHOICES,
            "num_experts": 24,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 56,
        },
        layer=GATED,
        shared="shared_expert",
    ),
    Block(
        "gpt_oss",
        "GptOssMLP",
        "GptOssConfig",
        "router_gpt_oss",
        {"num_local_experts": 8, "num_experts_per_tok": 4},
        layer=CLAMPED,
        gate="router",
    ),
)
CELLS = (LAYER, SHARED, GATED, CLAMPED, *(Cell(block.router, "bf16") for block in BLOCKS))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    return load_cells("moe_blocks", tmp_path_factory.mktemp("moe_blocks"), CELLS)


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Values that bfloat16 has, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).bfloat16().double()


def its_block(block: Block) -> Any:
    """In float64, with random weights, biases and, where it has one, a bias of the choice."""
    config = getattr(importlib.import_module("transformers"), block.config)(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, **block.words
    )
    config._experts_implementation = "eager"
    path = f"transformers.models.{block.folder}.modeling_{block.folder}"
    made = getattr(importlib.import_module(path), block.name)(config).double()
    for seed, parameter in enumerate(made.parameters(), 1):
        parameter.data = random(*parameter.shape, seed=seed, scale=HIDDEN**-0.5)
    for name, buffer in made.named_buffers():
        assert name == "gate.e_score_correction_bias"
        buffer.copy_(0.1 * random(*buffer.shape, seed=99))
    return made


class Layer(nn.Module):
    """Ours, of modules of the bundle that have a block's weights."""

    def __init__(self, bundle: str, block: Block, theirs: Any) -> None:
        super().__init__()
        gate = getattr(theirs, block.gate)
        own = dict(gate.named_buffers())
        self.bias_of_choice = own["e_score_correction_bias"].float() if own else None
        experts, biased = gate.weight.shape[0], hasattr(theirs.experts, "down_proj_bias")
        router = class_of(bundle, str(Cell(block.router, "bf16")))
        self.router = router(HIDDEN, experts, bias=biased, scale=block.scale)
        layer = class_of(bundle, str(block.layer))
        sizes = {"num_experts": experts, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
        if shared := getattr(theirs, block.shared, None):
            sizes["shared_intermediate"] = shared.down_proj.in_features
        self.experts = layer(**sizes, bias=biased)
        with torch.no_grad():
            for name, value in renamed(theirs, block, dict(theirs.named_parameters())).items():
                self.get_parameter(name).copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        probs, _, _, ids, counts = self.router(x, self.bias_of_choice)
        y: Tensor = self.experts(x, probs, ids, counts)
        return y


def renamed(theirs: Any, block: Block, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the block, or their gradients, as ours has them."""
    own = {
        f"router.{name}": values[f"{block.gate}.{name}"]
        for name, _ in getattr(theirs, block.gate).named_parameters()
    }
    for ours, name in (("fc1", "gate_up_proj"), ("fc2", "down_proj")):
        weight, bias = values[f"experts.{name}"], values.get(f"experts.{name}_bias")
        if bias is None:
            own[f"experts.{ours}.weight"] = weight
            continue
        # Of this one, inputs come before outputs, and gates take turns with what they let through.
        weight = weight.mT
        if ours == "fc1":
            weight, bias = (torch.cat([w[:, ::2], w[:, 1::2]], 1) for w in (weight, bias))
        own |= {f"experts.{ours}.weight": weight, f"experts.{ours}.bias": bias}
    if hasattr(theirs, block.shared):
        gate, up, down = (
            values[f"{block.shared}.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        own["experts.shared_fc1.weight"] = torch.cat([gate, up])
        own["experts.shared_fc2.weight"] = down
    if f"{block.shared}_gate.weight" in values:
        own["experts.shared_gate.weight"] = values[f"{block.shared}_gate.weight"][0]
    return own


def result_of(theirs: Any, x: Tensor) -> Tensor:
    """Of one sequence; gpt-oss gives the router's scores, too."""
    found = theirs(x[None])
    y: Tensor = (found[0] if isinstance(found, tuple) else found)[0]
    return y


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.folder)
def test_blocks(bundle: str, block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those classes compute in fp32 what they are told to, whatever they have: here in float64."""
    with monkeypatch.context() as wide:
        wide.setattr(Tensor, "float", Tensor.double)
        wide.setattr(torch, "float32", torch.float64)
        wide.setattr(torch, "float", torch.float64)
        theirs = its_block(block)
        x, dy = random(TOKENS, HIDDEN, seed=200), random(TOKENS, HIDDEN, seed=201)
        leaves = {"x": x.requires_grad_(), **dict(theirs.named_parameters())}
        y = result_of(theirs, x)
        gradients = torch.autograd.grad(y, [*leaves.values()], dy)
    wanted = dict(zip(leaves, gradients, strict=True))
    ours = Layer(bundle, block, theirs)
    own = x.detach().bfloat16().requires_grad_()
    got = ours(own)
    parameters = dict(ours.named_parameters())
    found = torch.autograd.grad(got, [own, *parameters.values()], dy.bfloat16())
    exact = {"y": y, "x": wanted["x"], **renamed(theirs, block, wanted)}
    for name, value in zip(("y", "x", *parameters), (got, *found), strict=True):
        error = ((value - exact.pop(name)).norm() / value.norm()).item()
        assert error < LARGEST_ERROR, name
    assert not exact, "every gradient was compared"
