"""Whole mixture-of-experts layers against the blocks of transformers, in float64.

Router and experts, shared ones among them, are modules of a bundle with the weights of the block,
or one module of all; y and all gradients are compared.  The experts of a token are the same: what
differs is rounding.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusegen.ir.naming import Cell

from .loading import class_of, load_cells, run_generated_tests, write_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

TOKENS, HIDDEN, INTERMEDIATE = 48, 64, 40
LARGEST_ERROR = 0.006
"""Of bf16, whose results are rounded three times on the way (2^-9 each)."""
LAYER, SHARED, GATED = (
    Cell(name, "bf16") for name in ("moe_layer", "shared_moe_layer", "gated_shared_moe_layer")
)
CLAMPED = Cell("moe_layer_clamped_qgeglu", "bf16", ("scaled_bias",))
COMPOSED = tuple(
    Cell(name, "bf16")
    for name in (
        *("router_llama4", "grouped_mlp", "mlp_swiglu", "moe_permute", "combine_extra"),
        "moe_layer_clamped_qgeglu",
    )
)
"""What the pages of docs put layers of Llama 4 and DeepSeek-V4 together of, besides these."""


@dataclass(frozen=True)
class Block:
    """A block of transformers, and the modules that are to give the same.

    Attributes:
        folder, name, config: of its class and its configuration's.
        router: ours.
        words: of the configuration.
        scale: of the router's weights; None is what the module has by itself.
        layer: our experts.
        whole: our module of router and experts; empty where there is none.
        gate: the block's name of its router.
        shared: its name of the experts that every token has.
    """

    folder: str
    name: str
    config: str
    router: str
    words: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None
    layer: Cell = LAYER
    whole: str = ""
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
        whole="routed_moe_layer_mixtral",
    ),
    Block(
        "qwen3_moe",
        "Qwen3MoeSparseMoeBlock",
        "Qwen3MoeConfig",
        "router",
        {**_CHOICES, "num_experts": 24, "norm_topk_prob": True},
        whole="routed_moe_layer",
    ),
    Block(
        "olmoe",
        "OlmoeSparseMoeBlock",
        "OlmoeConfig",
        "router_olmoe",
        {"num_experts": 16, "num_experts_per_tok": 8, "norm_topk_prob": False},
        whole="routed_moe_layer_olmoe",
    ),
    Block(
        "deepseek_v3",
        "DeepseekV3MoE",
        "DeepseekV3Config",
        "router_deepseek_v3",
        {**_SHARED, "n_routed_experts": 32, "n_group": 8, "topk_group": 4},
        layer=SHARED,
        whole="routed_shared_moe_layer_deepseek_v3",
    ),
    Block(
        "glm4_moe",
        "Glm4MoeMoE",
        "Glm4MoeConfig",
        "router_sigmoid",
        {**_SHARED, "n_routed_experts": 24, "n_group": 1, "topk_group": 1},
        scale=2.5,
        layer=SHARED,
        whole="routed_shared_moe_layer",
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
WHOLE = tuple(block for block in BLOCKS if block.whole)
CELLS = (
    *(LAYER, SHARED, GATED, CLAMPED),
    *(Cell(block.router, "bf16") for block in BLOCKS),
    *(Cell(block.whole, "bf16") for block in WHOLE),
    *COMPOSED,
)


GENERATED = (
    Cell("routed_moe_layer_mixtral", "bf16"),
    Cell("routed_shared_moe_layer_deepseek_v3", "fp8_block"),
)
"""Cells of no committed bundle: two choices; a router and shared experts."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    return load_cells("moe_blocks", tmp_path_factory.mktemp("moe_blocks"), CELLS)


def test_generated_tests_pass(tmp_path: Path) -> None:
    run_generated_tests(write_cells("moe_blocks_alone", "cpu", tmp_path, GENERATED))


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Values that bfloat16 has, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).bfloat16().double()


@contextmanager
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those classes compute in fp32 what they are told to, whatever they have: here in float64."""
    with monkeypatch.context() as wide:
        wide.setattr(Tensor, "float", Tensor.double)
        wide.setattr(torch, "float32", torch.float64)
        wide.setattr(torch, "float", torch.float64)
        yield


def its_class(folder: str, name: str, config: str, *further: Any, **words: Any) -> Any:
    """In float64, with random weights, biases and, where it has one, a bias of the choice."""
    made = getattr(importlib.import_module("transformers"), config)(hidden_size=HIDDEN, **words)
    made._experts_implementation = "eager"
    path = f"transformers.models.{folder}.modeling_{folder}"
    block = getattr(importlib.import_module(path), name)(made, *further).double()
    for seed, parameter in enumerate(block.parameters(), 1):
        parameter.data = random(*parameter.shape, seed=seed, scale=HIDDEN**-0.5)
    for buffer_name, buffer in block.named_buffers():
        if buffer_name == "gate.e_score_correction_bias":
            buffer.copy_(0.1 * random(*buffer.shape, seed=99))
        else:  # experts of words
            assert buffer_name == "gate.tid2eid"
            generator = torch.Generator().manual_seed(98)
            buffer.random_(words["n_routed_experts"], generator=generator)
    return block


def its_block(block: Block) -> Any:
    return its_class(
        *(block.folder, block.name, block.config), intermediate_size=INTERMEDIATE, **block.words
    )


def bias_of_choice(theirs: Any, block: Block) -> Tensor | None:
    own = dict(getattr(theirs, block.gate).named_buffers())
    return own["e_score_correction_bias"].float() if own else None


def sizes_of(theirs: Any, block: Block) -> dict[str, int]:
    """Of our layer."""
    experts = getattr(theirs, block.gate).weight.shape[0]
    sizes = {"num_experts": experts, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
    if shared := getattr(theirs, block.shared, None):
        sizes["shared_intermediate"] = shared.down_proj.in_features
    return sizes


class Parts(nn.Module):
    """Ours, of modules of the bundle that have a block's weights."""

    def __init__(self, bundle: str, block: Block, theirs: Any) -> None:
        super().__init__()
        self.bias_of_choice = bias_of_choice(theirs, block)
        sizes, biased = sizes_of(theirs, block), hasattr(theirs.experts, "down_proj_bias")
        scale = {} if block.scale is None else {"scale": block.scale}
        router = class_of(bundle, str(Cell(block.router, "bf16")))
        self.router = router(HIDDEN, sizes["num_experts"], bias=biased, **scale)
        self.experts = class_of(bundle, str(block.layer))(**sizes, bias=biased)

    def forward(self, x: Tensor) -> Tensor:
        probs, _, _, ids, counts = self.router(x, self.bias_of_choice)
        y: Tensor = self.experts(x, probs, ids, counts)
        return y


class Whole(nn.Module):
    """Ours, of one module; its experts are where it itself is."""

    def __init__(self, bundle: str, block: Block, theirs: Any) -> None:
        super().__init__()
        self.bias_of_choice = bias_of_choice(theirs, block)
        scale = {} if block.scale is None else {"router_scale": block.scale}
        layer = class_of(bundle, str(Cell(block.whole, "bf16")))
        self.experts = layer(**sizes_of(theirs, block), **scale)
        self.choices = theirs.gate.top_k

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor
        y, aux_loss, z_loss, counts = self.experts(x, self.bias_of_choice)
        assert aux_loss == z_loss == 0.0 and counts.sum() == self.choices * len(x)
        return y


def renamed(
    theirs: Any, block: Block, values: dict[str, Tensor], router: str = "router"
) -> dict[str, Tensor]:
    """Weights of the block, or their gradients, as ours has them."""
    own = {
        f"{router}.{name}": values[f"{block.gate}.{name}"]
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


def fill(ours: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            ours.get_parameter(name).copy_(value)


def compare(ours: nn.Module, x: Tensor, dy: Tensor, exact: dict[str, Tensor]) -> None:
    """Of y, and of the gradients of x and of every parameter."""
    own = x.detach().bfloat16().requires_grad_()
    got = ours(own)
    parameters = dict(ours.named_parameters())
    found = torch.autograd.grad(got, [own, *parameters.values()], dy.bfloat16())
    left = dict(exact)
    for name, value in zip(("y", "x", *parameters), (got, *found), strict=True):
        error = ((value - left.pop(name)).norm() / value.norm()).item()
        assert error < LARGEST_ERROR, name
    assert not left, "every gradient was compared"


X, DY = random(TOKENS, HIDDEN, seed=200), random(TOKENS, HIDDEN, seed=201)
ROUTER_OF = {Parts: "router", Whole: "experts.router"}


@pytest.mark.parametrize(
    ("block", "kind"),
    [*((block, Parts) for block in BLOCKS), *((block, Whole) for block in WHOLE)],
    ids=lambda each: each.folder if isinstance(each, Block) else each.__name__.lower(),
)
def test_blocks(
    bundle: str, block: Block, kind: type[Parts | Whole], monkeypatch: pytest.MonkeyPatch
) -> None:
    with float64(monkeypatch):
        theirs = its_block(block)
        leaves = {"x": X.clone().requires_grad_(), **dict(theirs.named_parameters())}
        y = result_of(theirs, leaves["x"])
        gradients = torch.autograd.grad(y, [*leaves.values()], DY)
    wanted = dict(zip(leaves, gradients, strict=True))
    ours, router = kind(bundle, block, theirs), ROUTER_OF[kind]
    fill(ours, renamed(theirs, block, dict(theirs.named_parameters()), router))
    compare(ours, X, DY, {"y": y, "x": wanted["x"], **renamed(theirs, block, wanted, router)})


# ---- layers that pages of docs put together


class Llama4(nn.Module):
    """Weights of x and not of what the activation gives, as the page of routers says."""

    def __init__(self, bundle: str, experts: int, by_rows: bool) -> None:
        super().__init__()
        self.bundle, self.by_rows = bundle, by_rows
        self.router = class_of(bundle, "router_llama4__bf16")(HIDDEN, experts)
        layer = class_of(bundle, "grouped_mlp__bf16" if by_rows else "moe_layer__bf16")
        self.experts = layer(experts, HIDDEN, INTERMEDIATE)
        self.shared = class_of(bundle, "mlp_swiglu__bf16")(HIDDEN, INTERMEDIATE)

    def forward(self, x: Tensor) -> Tensor:
        probs, _, _, ids, counts = self.router(x)
        y: Tensor
        if not self.by_rows:
            weighted = (x * probs).to(x.dtype)
            y = self.experts(weighted, torch.ones_like(probs), ids, counts) + self.shared(x)
            return y
        permute, combine = (
            getattr(importlib.import_module(f"{self.bundle}.{name}__bf16"), name)
            for name in ("moe_permute", "combine_extra")
        )
        rows, row_probs, split_sizes, row_slot, slot_row = permute(x, probs, ids, counts)
        weighted = (rows * row_probs[:, None]).to(x.dtype)
        y = self.experts(weighted, split_sizes, torch.ones_like(row_probs))
        return combine(y, row_slot, slot_row, self.shared(x))  # type: ignore[no-any-return]


def of_llama4(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `renamed` does; experts have inputs before outputs here."""
    gate, up, down = (
        values[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    return {
        "router.weight": values["router.weight"],
        "experts.fc1.weight": values["experts.gate_up_proj"].mT,
        "experts.fc2.weight": values["experts.down_proj"].mT,
        "shared.fc1.weight": torch.cat([gate, up]),
        "shared.fc2.weight": down,
    }


@pytest.mark.parametrize("by_rows", [False, True])
def test_llama4(bundle: str, by_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with float64(monkeypatch):
        words = {"num_local_experts": 8, "intermediate_size": INTERMEDIATE}
        theirs = its_class("llama4", "Llama4TextMoe", "Llama4TextConfig", **words)
        leaves = {"x": X.clone().requires_grad_(), **dict(theirs.named_parameters())}
        y = theirs(leaves["x"])[0]
        gradients = torch.autograd.grad(y, [*leaves.values()], DY)
    wanted = dict(zip(leaves, gradients, strict=True))
    ours = Llama4(bundle, 8, by_rows)
    fill(ours, of_llama4(dict(theirs.named_parameters())))
    compare(ours, X, DY, {"y": y, "x": wanted["x"], **of_llama4(wanted)})


class HashRouted(nn.Module):
    """Experts by a table of words, weighted by what the logits say of them."""

    def __init__(self, bundle: str, theirs: Any, words: Tensor) -> None:
        super().__init__()
        self.ids, experts = theirs.gate.tid2eid[words], theirs.gate.num_experts
        self.weight = nn.Parameter(torch.empty(experts, HIDDEN, dtype=torch.bfloat16))
        self.experts = class_of(bundle, "moe_layer_clamped_qgeglu__bf16")(
            *(experts, HIDDEN, INTERMEDIATE),
            act_limit=theirs.experts.limit,
            act_alpha=1.0,
            act_offset=0.0,
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = nn.functional.softplus(x.float() @ self.weight.float().T).sqrt()
        chosen = scores.gather(1, self.ids)
        probs = 1.5 * chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        slots = self.ids.flatten()
        counts = slots.new_zeros(len(self.weight)).scatter_add(0, slots, torch.ones_like(slots))
        y: Tensor = self.experts(x, probs, self.ids.int(), counts)
        return y


def test_deepseek_v4_chooses_by_words(bundle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its first layers; a token may have an expert twice, which the table has at random."""
    words = torch.arange(TOKENS) % 37
    with float64(monkeypatch):
        theirs = its_class(
            *("deepseek_v4", "DeepseekV4SparseMoeBlock", "DeepseekV4Config", 0),
            moe_intermediate_size=INTERMEDIATE,
            n_routed_experts=16,
            vocab_size=37,
            swiglu_limit=3.0,
            mlp_layer_types=["hash_moe"],
            num_hidden_layers=1,
            layer_types=["sliding_attention"],
        )
        parts = {"weight": theirs.gate.weight}
        parts |= {
            "experts.fc1.weight": theirs.experts.gate_up_proj,
            "experts.fc2.weight": theirs.experts.down_proj,
        }
        x = X.clone().requires_grad_()
        _, weights, ids = theirs.gate(x, words)
        y = theirs.experts(x, ids, weights)
        dx, *others = torch.autograd.grad(y, [x, *parts.values()], DY)
    ours = HashRouted(bundle, theirs, words)
    fill(ours, parts)
    compare(ours, X, DY, {"y": y, "x": dx, **dict(zip(parts, others, strict=True))})
