"""Other libraries' grouped GEMMs, expert MLPs and ops on rows, where they are installed.

Each makes, from operands as ours reads them, a call that computes the same. What a library wants
laid out otherwise (groups padded to an alignment, an operand transposed, codes and scales of a
GEMM in FP8) is laid out before the timing, and group sizes that it wants on the host are read
before: so a GEMM's time is the GEMM's alone. An expert MLP pays for its quantisation, as ours
does. Checked against the sources of the versions named. A library that is absent, fails or computes
something else is left out with a line on stderr: a peer's fault ends no benchmark of ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import common
import torch
from torch import Tensor

Call = Callable[[], Any]
Results = tuple[Tensor, ...]
FP8_ALIGNMENT = 16  # of groups: TransformerEngine's and torchao's GEMMs in FP8


def _same(out: Any) -> Any:
    return out


@dataclass(frozen=True)
class Made:
    """A call, and what becomes of its result to compare it, which is not timed."""

    run: Call
    read: Callable[[Any], Any] = _same


@dataclass(frozen=True)
class Peer:
    """A library: what it is imported and installed as, and how its calls are made.

    Attributes:
        module: imported to see whether it is there.
        install: what pip installs.
        make: a GEMM's (kind; group sizes; x; weight; dy), an `Expert`, the (kind; operands) of an
            op on rows or a shared linear layer's (split; x; weight; group) -> the call; None where
            the library has no such one.
        tolerance: relative Frobenius distance that its first result may have.
    """

    module: str
    install: str
    make: Callable[..., Made | None]
    tolerance: float = 1e-2


# ---- groups that begin at multiples of an alignment


def padded(sizes: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    """Groups that begin at multiples of an alignment.

    Returns:
        The padded row of every token, and the group of every padded row, -1 for none (int32).
    """
    room = -(-sizes // alignment) * alignment
    begins = room.cumsum(0) - room
    groups = torch.arange(len(sizes), device=sizes.device)
    owner = groups.repeat_interleave(sizes)
    places = torch.arange(len(owner), device=sizes.device) - (sizes.cumsum(0) - sizes)[owner]
    rows = begins[owner] + places
    layout = torch.full((int(room.sum()),), -1, dtype=torch.int32, device=sizes.device)
    layout[rows] = owner.to(torch.int32)
    return rows, layout


def _spread(tensor: Tensor, rows: Tensor, length: int) -> Tensor:
    """Rows of a tensor at their padded places, zeros elsewhere."""
    out = tensor.new_zeros(length, *tensor.shape[1:])
    out[rows] = tensor[: len(rows)].detach()
    return out


# ---- GEMMs in bf16


def _quack(kind: str, sizes: Tensor, x: Tensor, weight: Tensor, dy: Tensor) -> Made:
    """quack-kernels 0.6.5 with its default tile; tuning compiles 22 to 44 of them per GEMM."""
    quack: Any = importlib.import_module("quack.gemm_interface")
    begins = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    gemm = partial(quack.gemm, tuned=False)
    if kind == "wgrad, added":
        total = torch.zeros(weight.shape, device=weight.device)

        def add() -> Tensor:
            quack.gemm_add_inplace(dy.t(), x, total, cu_seqlens_k=begins, tuned=False)
            return total

        return Made(add)
    runs: dict[str, Call] = {
        "fprop": lambda: gemm(x, weight.mT, cu_seqlens_m=begins),
        "dgrad": lambda: gemm(dy, weight, cu_seqlens_m=begins),
        "wgrad": lambda: gemm(dy.t(), x, cu_seqlens_k=begins),
    }
    return Made(runs[kind])


def _transformer_engine(kind: str, sizes: Tensor, x: Tensor, weight: Tensor, dy: Tensor) -> Made:
    """transformer-engine 2.20: the GEMMs of its GroupedLinear, one cuBLAS call per group."""
    gemm: Any = importlib.import_module(
        "transformer_engine.pytorch.cpp_extensions"
    ).general_grouped_gemm
    splits = sizes.tolist()
    weights, xs, dys = list(weight), list(torch.split(x, splits)), list(torch.split(dy, splits))
    none = [None] * len(splits)
    more: dict[str, Any] = {"m_splits": splits}

    def fprop() -> Tensor:
        out = torch.empty_like(dy)
        gemm(weights, xs, [out], none, x.dtype, single_output=True, **more)
        return out

    def dgrad() -> Tensor:
        out = torch.empty_like(x)
        gemm(
            *(weights, dys, [out], none, x.dtype),
            **{"layout": "NN", "single_output": True, "grad": True, **more},
        )
        return out

    def wgrad() -> Tensor:
        out = torch.empty_like(weight)
        gemm(xs, dys, list(out), none, x.dtype, layout="NT", grad=True, **more)
        return out

    if kind == "wgrad, added":
        total = torch.zeros(weight.shape, device=weight.device)
        added = {"layout": "NT", "grad": True, "accumulate": True, **more}

        def add() -> Tensor:
            gemm(xs, dys, list(total), none, total.dtype, **added)
            return total

        return Made(add)
    return Made({"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}[kind])


def _deep_gemm(kind: str, sizes: Tensor, x: Tensor, weight: Tensor, dy: Tensor) -> Made | None:
    """deep_gemm 2.6.1: of the gradients of weights it has the one that adds to fp32 alone."""
    deep_gemm: Any = importlib.import_module("deep_gemm")
    alignment = int(deep_gemm.get_mk_alignment_for_contiguous_layout())
    rows, layout = padded(sizes, alignment)
    spread = partial(_spread, rows=rows, length=len(layout))
    if kind == "wgrad":
        return None
    if kind == "wgrad, added":
        lengths = (-(-sizes // alignment) * alignment).to(torch.int32)
        operands = spread(dy), spread(x)
        return _added(deep_gemm.k_grouped_bf16_gemm_tn_contiguous, operands, weight, lengths)
    a = spread(x if kind == "fprop" else dy)
    out = a.new_empty(len(layout), weight.shape[1 if kind == "fprop" else 2])
    multiply: Callable[..., None] = {
        "fprop": deep_gemm.m_grouped_bf16_gemm_nt_contiguous,
        "dgrad": deep_gemm.m_grouped_bf16_gemm_nn_contiguous,
    }[kind]

    def run() -> Tensor:
        multiply(a, weight, out, layout)
        return out

    return Made(run, lambda out: out[rows])


def _added(
    multiply: Callable[..., None], operands: tuple[Any, Any], weight: Tensor, lengths: Tensor
) -> Made:
    """DeepGEMM's GEMM over tokens of every group, added to fp32 of the weight's shape."""
    total, of_host = torch.zeros(weight.shape, device=weight.device), lengths.tolist()

    def run() -> Tensor:
        multiply(*operands, total, of_host, lengths, total)
        return total

    return Made(run)


# ---- GEMMs in FP8, scales of 1 x 128 for tokens and 128 x 128 for weights


def _deep_gemm_scaled(kind: str, sizes: Tensor, x: Tensor, weight: Tensor, dy: Tensor) -> Made:
    """deep_gemm 2.6.1; the gradient of weights has scales of 128 tokens and is added to fp32."""
    deep_gemm: Any = importlib.import_module("deep_gemm")
    alignment = int(deep_gemm.get_mk_alignment_for_contiguous_layout())
    rows, layout = padded(sizes, alignment)
    spread = partial(_spread, rows=rows, length=len(layout))
    if kind == "wgrad":
        lengths = (-(-sizes // alignment) * alignment).to(torch.int32)
        a, b = (_codes_along_tokens(deep_gemm, spread(each), lengths) for each in (dy, x))
        return _added(deep_gemm.k_grouped_fp8_gemm_nt_contiguous, (a, b), weight, lengths)
    codes, scales = deep_gemm.per_token_cast_to_fp8(spread(x if kind == "fprop" else dy), False)
    a = codes, deep_gemm.get_mn_major_tma_aligned_tensor(scales)
    b = _codes_of_weights(deep_gemm, weight if kind == "fprop" else weight.mT)
    out = x.new_empty(len(layout), b[0].shape[1])

    def run() -> Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, layout)
        return out

    return Made(run, lambda out: out[rows])


def _codes_of_weights(deep_gemm: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [E, N, K] with K contiguous, and a scale per 128 x 128 of them."""
    made = [deep_gemm.per_block_cast_to_fp8(each.contiguous(), False) for each in weight]
    return torch.stack([codes for codes, _ in made]), torch.stack([scales for _, scales in made])


def _codes_along_tokens(deep_gemm: Any, tensor: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of each group [width, its tokens], one group after another, and scales [width, T/128].

    Groups are multiples of 128 tokens, so no scale is of two of them.
    """
    codes, scales = deep_gemm.per_channel_cast_to_fp8(tensor, False)
    groups = torch.split(codes, lengths.tolist())
    return torch.cat([each.t().flatten() for each in groups]), scales.t()


# ---- expert MLPs


@dataclass(frozen=True)
class Expert:
    """What an expert MLP computes with: gate and up are the halves of fc1's result.

    Attributes:
        sizes: of groups, int64 [E].
        x: [T, H] bf16.
        fc1: [E, 2 F, H] bf16.
        fc2: [E, H, F] bf16.
        probs: router probability of every token, [T] fp32.
        dy: the result's gradient, [T, H] bf16.
    """

    sizes: Tensor
    x: Tensor
    fc1: Tensor
    fc2: Tensor
    probs: Tensor
    dy: Tensor

    def aligned(self, alignment: int) -> tuple[Expert, Tensor]:
        """The same with groups padded to an alignment, and the place of every token in it."""
        rows, layout = padded(self.sizes, alignment)
        spread = partial(_spread, rows=rows, length=len(layout))
        wider = replace(
            self,
            sizes=-(-self.sizes // alignment) * alignment,
            x=spread(self.x),
            probs=spread(self.probs),
            dy=spread(self.dy),
        )
        return wider, rows


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _trained(
    forward: Callable[[Tensor, Tensor], Tensor], expert: Expert, weights: Sequence[Sequence[Tensor]]
) -> Call:
    """One forward and backward: y, and gradients of x, fc1, fc2 (a tensor or one per group), probs.

    It ran once before: a recipe with state has warmed up.
    """
    x, probs = _leaf(expert.x), _leaf(expert.probs)
    leaves = [x, *weights[0], *weights[1], probs]

    def run() -> Results:
        y = forward(x, probs)
        return (y.detach(), *torch.autograd.grad(y, leaves, expert.dy))

    run()
    return run


def _read(results: Results, rows: Tensor, groups: int) -> Results:
    """What `_trained` gives, in order of tokens and with one gradient for each linear's weights."""
    y, dx, *weights, dprobs = results
    half = len(weights) // 2
    fc1, fc2 = weights[:half], weights[half:]
    joined = [torch.stack(each) if half == groups else each[0] for each in (fc1, fc2)]
    return (y[rows], dx[rows], *joined, dprobs[rows])


def _torchao(expert: Expert) -> Made:
    """torchao 0.18: e4m3 codes with a scale per row of each operand, compiled."""
    gemm: Any = importlib.import_module(
        "torchao.prototype.moe_training.fp8_grouped_mm"
    )._to_fp8_rowwise_then_scaled_grouped_mm
    wide, rows = expert.aligned(FP8_ALIGNMENT)
    fc1, fc2 = _leaf(wide.fc1), _leaf(wide.fc2)
    ends = wide.sizes.cumsum(0).to(torch.int32)

    def mlp(x: Tensor, fc1: Tensor, fc2: Tensor, probs: Tensor) -> Tensor:
        def multiply(a: Tensor, weight: Tensor) -> Tensor:
            out: Tensor = gemm(a, weight.mT, ends, pad_token_groups_for_grouped_mm=False)
            return out

        return multiply(_activation(multiply(x, fc1), probs), fc2)

    compiled = torch.compile(mlp, dynamic=False)
    run = _trained(lambda x, probs: compiled(x, fc1, fc2, probs), wide, ([fc1], [fc2]))
    return Made(run, lambda out: _read(out, rows, 0))


def _activation(h: Tensor, probs: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up * probs[:, None]).to(h.dtype)


def _engine_mlp(expert: Expert, recipe: str) -> Made:
    """transformer-engine 2.20, te.ops; where those have no recipe, its modules.

    Args:
        recipe: a class of its recipes; none: bf16.
    """
    te: Any = importlib.import_module("transformer_engine.pytorch")
    recipes: Any = importlib.import_module("transformer_engine.common.recipe")
    wide, rows = expert.aligned(FP8_ALIGNMENT if recipe else 1)
    chosen = getattr(recipes, recipe)() if recipe else None
    build = _engine_modules if recipe == "Float8BlockScaling" else _engine_ops
    layers, multiply = build(te, wide)
    weights = [
        _engine_weights(layer, weight)
        for layer, weight in zip(layers, (wide.fc1, wide.fc2), strict=True)
    ]

    def forward(x: Tensor, probs: Tensor) -> Tensor:
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            return multiply(x, probs)

    return Made(_trained(forward, wide, weights), lambda out: _read(out, rows, len(wide.sizes)))


Multiply = Callable[[Tensor, Tensor], Tensor]


def _engine_ops(te: Any, expert: Expert) -> tuple[list[Any], Multiply]:
    """A te.ops.Sequential of grouped linears and the activation that its fusions look for."""
    make = {"bias": False, "dtype": torch.bfloat16, "device": expert.x.device}
    groups, hidden, inner = len(expert.sizes), expert.x.shape[1], expert.fc2.shape[2]
    fc1 = te.ops.GroupedLinear(groups, hidden, 2 * inner, **make)
    fc2 = te.ops.GroupedLinear(groups, inner, hidden, **make)
    layers = te.ops.Sequential(fc1, te.ops.ScaledSwiGLU(), fc2)
    return [fc1, fc2], lambda x, probs: layers(x, expert.sizes, probs, expert.sizes)


def _engine_modules(te: Any, expert: Expert) -> tuple[list[Any], Multiply]:
    """Its GroupedLinear modules around a compiled activation."""
    make = {"bias": False, "params_dtype": torch.bfloat16, "device": expert.x.device}
    groups, hidden, inner = len(expert.sizes), expert.x.shape[1], expert.fc2.shape[2]
    fc1 = te.GroupedLinear(groups, hidden, 2 * inner, **make)
    fc2 = te.GroupedLinear(groups, inner, hidden, **make)
    splits, activation = expert.sizes.cpu(), torch.compile(_activation, dynamic=False)
    return [fc1, fc2], lambda x, probs: fc2(activation(fc1(x, splits), probs), splits)


def _engine_weights(layer: Any, weight: Tensor) -> list[Tensor]:
    """The weights of a layer, one a group, in place of those it began with."""
    made = [torch.nn.Parameter(each.detach()) for each in weight]
    for group, each in enumerate(made):
        setattr(layer, f"weight{group}", each)
    return list(made)


# ---- ops on rows: norms, softmax, cross entropy


def _quack_rows(kind: str, *operands: Any) -> Made | None:
    """quack-kernels 0.6.5; it compiles for every width, and gradients of norms for 2^i rows."""
    make = _QUACK_ROWS.get(kind)
    return make(*operands) if make else None


def _quack_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Made:
    norms: Any = importlib.import_module("quack.rmsnorm")
    return Made(lambda: norms.rmsnorm_fwd(x, weight, eps=eps, store_rstd=True), _take(0, 2))


def _quack_rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Made:
    norms: Any = importlib.import_module("quack.rmsnorm")
    return Made(lambda: norms.rmsnorm_bwd(x, weight, dy, rstd), _take(0, 1))


def _quack_residual_rms_norm(x: Tensor, weight: Tensor, residual: Tensor, eps: float) -> Made:
    norms: Any = importlib.import_module("quack.rmsnorm")
    words: dict[str, Any] = {"residual": residual, "eps": eps, "store_rstd": True}
    return Made(lambda: norms.rmsnorm_fwd(x, weight, **words), _take(0, 1, 2))


def _quack_residual_rms_norm_backward(
    dy: Tensor, dh: Tensor, h: Tensor, weight: Tensor, rstd: Tensor
) -> Made:
    """dx is one tensor, of x and of the residual."""
    norms: Any = importlib.import_module("quack.rmsnorm")
    words: dict[str, Any] = {"dresidual_out": dh, "has_residual": True}
    return Made(lambda: norms.rmsnorm_bwd(h, weight, dy, rstd, **words), _take(0, 1, 3))


def _quack_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Made:
    """Weight and bias in fp32, which is all it takes."""
    norms: Any = importlib.import_module("quack.rmsnorm")
    vectors, words = (weight.float(), bias.float()), {"return_rstd": True, "return_mean": True}
    return Made(lambda: norms.layernorm_fwd(x, *vectors, eps, **words), _take(0, 2, 1))


def _quack_layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> Made:
    norms: Any = importlib.import_module("quack.rmsnorm")
    return Made(lambda: norms.layernorm_bwd(x, weight, dy, rstd, mean), _take(0, 1, 2))


def _quack_softmax(x: Tensor, scale: float) -> Made:
    """Of scores that were scaled before, as it has no scale."""
    ops: Any = importlib.import_module("quack.softmax")
    scores = scale * x
    return Made(lambda: ops.softmax_fwd(scores), _alone)


def _quack_softmax_backward(dy: Tensor, y: Tensor, scale: float) -> Made:
    ops: Any = importlib.import_module("quack.softmax")
    gradient = scale * dy
    return Made(lambda: ops.softmax_bwd(gradient, y), _alone)


def _quack_cross_entropy(x: Tensor, targets: Tensor) -> Made:
    ops: Any = importlib.import_module("quack.cross_entropy")
    return Made(lambda: ops.cross_entropy_fwd(x, targets, return_lse=True), _take(0, 1))


def _quack_cross_entropy_backward(
    dloss: Tensor, x: Tensor, targets: Tensor, logsumexp: Tensor
) -> Made:
    ops: Any = importlib.import_module("quack.cross_entropy")
    return Made(lambda: ops.cross_entropy_bwd(x, targets, dloss, logsumexp), _alone)


def _alone(out: Tensor) -> Results:
    return (out,)


def _take(*places: int) -> Callable[[Any], Results]:
    """Those of several results that are compared, in this order."""
    return lambda out: tuple(out[place] for place in places)


_QUACK_ROWS: Mapping[str, Callable[..., Made]] = {
    "rms_norm forward": _quack_rms_norm,
    "rms_norm backward": _quack_rms_norm_backward,
    "residual_rms_norm forward": _quack_residual_rms_norm,
    "residual_rms_norm backward": _quack_residual_rms_norm_backward,
    "layer_norm forward": _quack_layer_norm,
    "layer_norm backward": _quack_layer_norm_backward,
    "softmax forward": _quack_softmax,
    "softmax backward": _quack_softmax_backward,
    "cross_entropy forward": _quack_cross_entropy,
    "cross_entropy backward": _quack_cross_entropy_backward,
}


# ---- linear layers that ranks share


def _userbuffers(split: str, x: Tensor, weight: Tensor, group: Any) -> Made:
    """transformer-engine 2.20, te.Linear whose product overlaps with what ranks send; where there
    is no multicast it wants UB_SKIPMC=1.  A process has one such layer.
    """
    te: Any = importlib.import_module("transformer_engine.pytorch")
    base: Any = importlib.import_module("transformer_engine.pytorch.module.base")
    (outputs, inputs), ranks = weight.shape, torch.distributed.get_world_size(group)
    gathers = split == "column"
    moved = (len(x) * ranks, inputs) if gathers else (len(x), outputs)
    base.initialize_ub(
        [*moved],
        ranks,
        quantization_modes=[base.UserBufferQuantizationMode.NONE],
        dtype=weight.dtype,
        bootstrap_backend="nccl",
    )
    layer = te.Linear(
        *((inputs, outputs * ranks) if gathers else (inputs * ranks, outputs)),
        bias=False,
        params_dtype=weight.dtype,
        device=x.device,
        parallel_mode=split,
        sequence_parallel=True,
        tp_group=group,
        ub_overlap_ag=gathers,
        ub_overlap_rs=not gathers,
        ub_name="qkv" if gathers else "proj",
    )
    layer.weight.data.copy_(weight)

    def run() -> Tensor:
        with torch.no_grad():
            y: Tensor = layer(x)
        return y

    return Made(run)


# ---- who there is

_DEEP_GEMM = ("deep_gemm", "git+https://github.com/deepseek-ai/DeepGEMM")
_TRANSFORMER_ENGINE = ("transformer_engine.pytorch", "transformer-engine[pytorch]")
PEERS: Mapping[str, Peer] = {
    "QuACK": Peer("quack", "quack-kernels", _quack),
    "TransformerEngine": Peer(*_TRANSFORMER_ENGINE, _transformer_engine),
    "DeepGEMM": Peer(*_DEEP_GEMM, _deep_gemm),
}
SCALED: Mapping[str, Peer] = {"DeepGEMM": Peer(*_DEEP_GEMM, _deep_gemm_scaled, tolerance=6e-2)}
ROWS: Mapping[str, Peer] = {"QuACK": Peer("quack", "quack-kernels", _quack_rows, tolerance=2e-2)}
_RECIPES = {
    "TransformerEngine": "",
    "TransformerEngine fp8_delayed": "DelayedScaling",
    "TransformerEngine fp8_current": "Float8CurrentScaling",
    "TransformerEngine fp8_block": "Float8BlockScaling",
}
SHARED: Mapping[str, Peer] = {
    "TransformerEngine userbuffers": Peer(*_TRANSFORMER_ENGINE, _userbuffers, tolerance=2e-2)
}
MLPS: Mapping[str, Peer] = {
    **{
        name: Peer(
            *_TRANSFORMER_ENGINE,
            partial(_engine_mlp, recipe=recipe),
            tolerance=2e-1 if recipe else 2e-2,
        )
        for name, recipe in _RECIPES.items()
    },
    "torchao fp8_rowwise": Peer("torchao", "torchao", _torchao, tolerance=2e-1),
}


def installed(peers: Mapping[str, Peer] = PEERS) -> dict[str, Peer]:
    """Those that import; a line on stderr for each that does not."""
    found = {}
    for name, peer in peers.items():
        try:
            importlib.import_module(peer.module)
        except Exception as error:
            missing = importlib.util.find_spec(peer.module.partition(".")[0]) is None
            why = f"not installed (pip install {peer.install})" if missing else f"import: {error}"
            _say(f"{name} is left out: {why}")
        else:
            found[name] = peer
    return found


# ---- calls that were checked


def calls(
    peers: Mapping[str, Peer],
    kind: str,
    sizes: Tensor,
    operands: Sequence[tuple[Tensor, Tensor, Tensor]],
    expected: Tensor,
) -> dict[str, list[Call]]:
    """Each library's calls of a GEMM, one per set of operands, where the first is right."""

    def make(peer: Peer) -> list[Made | None]:
        return [peer.make(kind, sizes, *each) for each in operands]

    return _checked(peers, kind, make, expected)


def scaled_calls(
    peers: Mapping[str, Peer], kind: str, sizes: Tensor, tokens: int, n: int, k: int
) -> dict[str, Call]:
    """Each library's call of an FP8 GEMM with block scales, of normal operands made here."""
    x, dy = common.normal(tokens, k), common.normal(tokens, n)
    weight = common.normal(len(sizes), n, k, scale=k**-0.5)
    ends = sizes.cumsum(0).to(torch.int32)
    expected = {
        "fprop": lambda: torch._grouped_mm(x, weight.mT, offs=ends),
        "dgrad": lambda: torch._grouped_mm(dy, weight, offs=ends),
        "wgrad": lambda: torch._grouped_mm(dy.t(), x, offs=ends),
    }[kind]()
    found = calls(peers, kind, sizes, [(x, weight, dy)], expected)
    return {name: runs[0] for name, runs in found.items()}


def mlp_steps(peers: Mapping[str, Peer], expert: Expert, expected: Results) -> dict[str, Call]:
    """Each library's forward and backward of an expert MLP.

    Args:
        expected: y, and the gradients of x, fc1, fc2 and probs.
    """
    found = _checked(peers, "the expert MLP", lambda peer: [peer.make(expert)], expected)
    return {name: steps[0] for name, steps in found.items()}


def row_calls(
    peers: Mapping[str, Peer], kind: str, operands: Sequence[Any], expected: Results
) -> dict[str, Call]:
    """Each library's call of an op on rows.

    Args:
        kind: module and direction, such as "rms_norm forward".
        operands: as our op has them, less the gradients that are asked for.
        expected: all results of our op.
    """

    def make(peer: Peer) -> list[Made | None]:
        return [peer.make(kind, *operands)]

    found = _checked(peers, kind, make, expected)
    return {name: runs[0] for name, runs in found.items()}


def shared_calls(
    peers: Mapping[str, Peer], split: str, x: Tensor, weight: Tensor, group: Any, expected: Tensor
) -> dict[str, Call]:
    """Each library's call of a linear layer that ranks share, where it is right on this rank.

    Args:
        split: "column", whose tokens are gathered, or "row", whose sums are scattered.
        x: this rank's tokens, or all of them.
        weight: this rank's part.
        group: the ranks.
        expected: y of this rank.
    """

    def make(peer: Peer) -> list[Made | None]:
        return [peer.make(split, x, weight, group)]

    found = _checked(peers, f"{split} parallel layers", make, expected)
    return {name: runs[0] for name, runs in found.items()}


def _checked(
    peers: Mapping[str, Peer],
    what: str,
    make: Callable[[Peer], Sequence[Made | None]],
    expected: Tensor | Results,
) -> dict[str, list[Call]]:
    """The calls of those libraries whose first result is right."""
    found = {}
    for name, peer in peers.items():
        try:
            made = [each for each in make(peer) if each is not None]
            if not made:
                continue
            error = _distance(made[0].read(made[0].run()), expected)
        except Exception as problem:
            _say(f"{name} is left out of {what}: {type(problem).__name__}: {problem}")
            continue
        if error <= peer.tolerance:
            found[name] = [each.run for each in made]
        else:
            _say(f"{name} is left out of {what}: it is off by {error:.2e}")
    return found


def _distance(got: Tensor | Results, expected: Tensor | Results) -> float:
    """The largest relative Frobenius distance of a tensor from the one expected in its place."""
    if isinstance(got, Tensor) or isinstance(expected, Tensor):
        got, expected = (got,), (expected,)  # type: ignore[assignment]
    pairs = zip(got, expected, strict=True)
    errors = [(a.float() - b.float()).norm() / b.float().norm() for a, b in pairs]
    return float(torch.stack(errors).max())


def _say(text: str) -> None:
    print(text, file=sys.stderr)
