"""Other libraries' calls in the benchmarks, against stand-ins that check what those ask for."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fusegen.commands import bench

torch: Any = importlib.import_module("torch")
SIZES = (3, 0, 130, 59)
TOKENS, N, K = sum(SIZES), 256, 384
ALIGNMENT = 128


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    benchmarks = bench.find()
    monkeypatch.setattr(benchmarks.module("common"), "DEVICE", "cpu")
    torch.manual_seed(0)
    return benchmarks.module("peers")


@pytest.fixture
def operands() -> Any:
    x, dy = torch.randn(TOKENS, K), torch.randn(TOKENS, N)
    weight = torch.randn(len(SIZES), N, K)
    return torch.tensor(SIZES), *(each.bfloat16() for each in (x, weight, dy))


def gemms(sizes: Any, x: Any, weight: Any, dy: Any) -> dict[str, Any]:
    """In fp32."""
    splits = sizes.tolist()
    groups = list(zip(torch.split(x, splits), torch.split(dy, splits), weight, strict=True))
    wgrad = torch.stack([b.float().t() @ a.float() for a, b, _ in groups])
    return {
        "fprop": torch.cat([a.float() @ w.float().t() for a, _, w in groups]),
        "dgrad": torch.cat([b.float() @ w.float() for _, b, w in groups]),
        "wgrad": wgrad,
        "wgrad, added": wgrad,
    }


# ---- DeepGEMM


def values(codes: Any, scales: Any, tokens: int, columns: int) -> Any:
    """Of codes [M, N] with a scale for each block of tokens x columns."""
    wide = scales.repeat_interleave(tokens, 0).repeat_interleave(columns, 1)
    return codes.float() * wide[: codes.shape[0], : codes.shape[1]]


def blocks(x: Any, tokens: int, columns: int) -> tuple[Any, Any]:
    """e4m3 codes and scales of blocks."""
    rows, width = x.shape[0] // tokens, x.shape[1] // columns
    tiles = x.float().view(rows, tokens, width, columns)
    scales = tiles.abs().amax((1, 3)).clamp(1e-4) / 448
    codes = tiles / scales[:, None, :, None]
    return codes.to(torch.float8_e4m3fn).view(x.shape), scales


def tokens_of(layout: Any, group: int) -> Any:
    """Rows of a group, which is aligned."""
    (rows,) = torch.where(layout == group)
    assert not len(rows) or int(rows[0]) % ALIGNMENT == 0
    return rows


def deep_gemm() -> Any:
    def nt(a: Any, b: Any, out: Any, layout: Any) -> None:
        assert a.is_contiguous() and layout.dtype == torch.int32 and len(layout) == len(a)
        assert a.dtype == out.dtype == torch.bfloat16
        for group, weight in enumerate(b):
            rows = tokens_of(layout, group)
            out[rows] = (a[rows].float() @ weight.float().t()).to(out.dtype)

    def scaled(a: Any, b: Any, out: Any, layout: Any) -> None:
        (a_codes, a_scales), (b_codes, b_scales) = a, b
        assert a_scales.t().is_contiguous(), "scales of a token lie apart, those of tokens together"
        assert b_codes.is_contiguous() and out.shape == (len(a_codes), b_codes.shape[1])
        wide = values(a_codes, a_scales, 1, 128)
        weights = zip(b_codes, b_scales, strict=True)
        for group, (codes, scales) in enumerate(weights):
            rows = tokens_of(layout, group)
            out[rows] = (wide[rows] @ values(codes, scales, 128, 128).t()).to(out.dtype)

    def check_added(d: Any, ks: list[int], lengths: Any, c: Any) -> None:
        assert all(k % ALIGNMENT == 0 for k in ks) and lengths.dtype == torch.int32
        assert lengths.tolist() == ks and len(ks) == len(d)
        assert d.dtype == torch.float32 and c.data_ptr() == d.data_ptr()

    def tn_added(a: Any, b: Any, d: Any, ks: list[int], lengths: Any, c: Any) -> None:
        check_added(d, ks, lengths, c)
        assert len(a) == len(b) == sum(ks) and a.is_contiguous() and b.is_contiguous()
        for total, own, other in zip(d, torch.split(a, ks), torch.split(b, ks), strict=True):
            total += own.float().t() @ other.float()

    def nt_added(a: Any, b: Any, d: Any, ks: list[int], lengths: Any, c: Any) -> None:
        check_added(d, ks, lengths, c)
        groups = []
        for (codes, scales), width in ((a, d.shape[1]), (b, d.shape[2])):
            assert scales.shape == (width, sum(ks) // 128)
            own = torch.split(codes, [width * k for k in ks])
            own_scales = torch.split(scales, [k // 128 for k in ks], 1)
            groups.append(
                [
                    values(each.view(width, -1), scale, 1, 128) if each.numel() else None
                    for each, scale in zip(own, own_scales, strict=True)
                ]
            )
        for total, left, right in zip(d, *groups, strict=True):
            if left is not None:
                total += left @ right.t()

    return SimpleNamespace(
        get_mk_alignment_for_contiguous_layout=lambda: ALIGNMENT,
        get_mn_major_tma_aligned_tensor=lambda scales: scales.t().contiguous().t(),
        per_token_cast_to_fp8=lambda x, power_of_2: blocks(x, 1, 128),
        per_channel_cast_to_fp8=lambda x, power_of_2: blocks(x, 128, 1),
        per_block_cast_to_fp8=lambda x, power_of_2: blocks(x, 128, 128),
        m_grouped_bf16_gemm_nt_contiguous=nt,
        m_grouped_bf16_gemm_nn_contiguous=lambda a, b, out, layout: nt(a, b.mT, out, layout),
        m_grouped_fp8_gemm_nt_contiguous=scaled,
        k_grouped_bf16_gemm_tn_contiguous=tn_added,
        k_grouped_fp8_gemm_nt_contiguous=nt_added,
    )


@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad", "wgrad, added"])
def test_gemms_of_deep_gemm(
    peers: Any, operands: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm())
    expected = gemms(*operands)[kind]
    sizes, *sets = operands
    found = peers.calls({"DeepGEMM": peers.PEERS["DeepGEMM"]}, kind, sizes, [sets], expected)
    assert set(found) == (set() if kind == "wgrad" else {"DeepGEMM"})


@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
def test_gemms_of_deep_gemm_in_fp8(peers: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm())
    found = peers.scaled_calls(peers.SCALED, kind, torch.tensor(SIZES), TOKENS, N, K)
    assert set(found) == {"DeepGEMM"}
    run = found["DeepGEMM"]
    assert run().dtype == (torch.float32 if kind == "wgrad" else torch.bfloat16)


# ---- QuACK


def quack() -> Any:
    def gemm(
        a: Any, b: Any, *, cu_seqlens_m: Any = None, cu_seqlens_k: Any = None, tuned: bool
    ) -> Any:
        begins = (cu_seqlens_m if cu_seqlens_k is None else cu_seqlens_k).tolist()
        pairs = list(pairwise(begins))
        if cu_seqlens_k is None:
            gemms = [a[i:j].float() @ w.float() for (i, j), w in zip(pairs, b, strict=True)]
            return torch.cat(gemms).to(a.dtype)
        return torch.stack([a[:, i:j].float() @ b[i:j].float() for i, j in pairs])

    def add(a: Any, b: Any, out: Any, *, cu_seqlens_k: Any, tuned: bool) -> None:
        assert out.dtype == torch.float32
        out += gemm(a, b, cu_seqlens_k=cu_seqlens_k, tuned=tuned)

    return SimpleNamespace(gemm=gemm, gemm_add_inplace=add)


@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad", "wgrad, added"])
def test_gemms_of_quack(
    peers: Any, operands: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", quack())
    expected = gemms(*operands)[kind]
    sizes, *sets = operands
    found = peers.calls({"QuACK": peers.PEERS["QuACK"]}, kind, sizes, [sets], expected)
    assert set(found) == {"QuACK"}
    run = found["QuACK"][0]
    after = run()
    again = after.clone() if kind == "wgrad, added" else None
    assert again is None or not torch.equal(run(), again), "what is added to grows"


# ---- QuACK's ops on rows, with its parameters by name and place

ROWS, WIDTH = 24, 64
EPS = 1e-5


def statistics_of(x: Any) -> Any:
    return torch.rsqrt(x.float().square().mean(-1) + EPS)


def rms_norm(x: Any, weight: Any) -> Any:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, EPS)


def gradients(function: Any, leaves: Any, dy: Any) -> Any:
    leaves = [each.detach().requires_grad_() for each in leaves]
    return torch.autograd.grad(function(*leaves), leaves, dy)


def quack_norms() -> Any:
    def rmsnorm_fwd(
        x: Any,
        weight: Any = None,
        bias: Any = None,
        residual: Any = None,
        *,
        eps: float,
        store_rstd: bool,
    ) -> Any:
        assert bias is None and store_rstd and eps == EPS
        total = x if residual is None else x + residual
        return rms_norm(total, weight), total, statistics_of(total)

    def rmsnorm_bwd(
        x: Any,
        weight: Any,
        dout: Any,
        rstd: Any,
        dresidual_out: Any = None,
        has_bias: bool = False,
        has_residual: bool = False,
    ) -> Any:
        assert torch.equal(rstd, statistics_of(x)) and not has_bias
        assert has_residual == (dresidual_out is not None)
        dx, dweight = gradients(rms_norm, (x, weight), dout)
        dx = dx if dresidual_out is None else dx + dresidual_out
        return dx, dweight, None, dx if has_residual else None

    def layernorm_fwd(
        x: Any, weight: Any, bias: Any, eps: float, return_rstd: bool, return_mean: bool
    ) -> Any:
        assert weight.dtype == bias.dtype == torch.float32 and return_rstd and return_mean
        y = layer_norm(x.float(), weight, bias).to(x.dtype)
        return y, statistics_of(x - x.float().mean(-1, keepdim=True)), x.float().mean(-1)

    def layernorm_bwd(
        x: Any, weight: Any, dout: Any, rstd: Any, mean: Any, has_bias: bool = True
    ) -> Any:
        assert has_bias and torch.equal(mean, x.float().mean(-1)) and rstd.shape == mean.shape
        return gradients(layer_norm, (x, weight, torch.zeros_like(weight)), dout)

    return SimpleNamespace(
        rmsnorm_fwd=rmsnorm_fwd,
        rmsnorm_bwd=rmsnorm_bwd,
        layernorm_fwd=layernorm_fwd,
        layernorm_bwd=layernorm_bwd,
    )


def quack_losses() -> Any:
    def cross_entropy_fwd(x: Any, target: Any, *, return_lse: bool) -> Any:
        assert return_lse
        loss = torch.nn.functional.cross_entropy(x.float(), target, reduction="none")
        return loss, x.float().logsumexp(-1)

    def cross_entropy_bwd(x: Any, target: Any, dloss: Any, lse: Any) -> Any:
        hit = torch.nn.functional.one_hot(target, x.shape[-1])
        return (dloss[:, None] * ((x.float() - lse[:, None]).exp() - hit)).to(x.dtype)

    return SimpleNamespace(cross_entropy_fwd=cross_entropy_fwd, cross_entropy_bwd=cross_entropy_bwd)


def quack_softmax() -> Any:
    def softmax_bwd(dy: Any, y: Any) -> Any:
        dot = (dy.float() * y.float()).sum(-1, keepdim=True)
        return (y.float() * (dy.float() - dot)).to(y.dtype)

    return SimpleNamespace(
        softmax_fwd=lambda x: x.float().softmax(-1).to(x.dtype), softmax_bwd=softmax_bwd
    )


@pytest.fixture
def rows(peers: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Benchmarks of ops on rows beside QuACK: their rows by case, once with contenders."""
    benchmarks = bench.find()
    common, bandwidth = benchmarks.module("common"), benchmarks.module("bandwidth")
    modules = {
        "rmsnorm": quack_norms(),
        "softmax": quack_softmax(),
        "cross_entropy": quack_losses(),
    }
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"quack.{name}", module)
    monkeypatch.setattr(bandwidth, "_installed", lambda: peers.ROWS)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(common, "compare", lambda them: {name: [2.0] for name in them})

    def measured(module: str, function: str, **sizes: Any) -> dict[str, set[str]]:
        for name, value in sizes.items():
            monkeypatch.setattr(benchmarks.module(module), name, value)
        found: dict[str, set[str]] = {}
        for row in common.outcomes(getattr(benchmarks.module(module), function)(quick=True)):
            assert not isinstance(row, common.Failure), row.error
            found.setdefault(row.case, set()).add(row.contender)
        return found

    return measured


TORCH = {"fusegen", "torch", "torch compiled", "copy"}
EAGER = {"fusegen", "torch eager", "torch compiled", "copy"}


def test_norms_stand_beside_quack_where_it_is_asked(rows: Any) -> None:
    module = bench.find().module("norms")
    size = (ROWS, WIDTH)
    asked = [replace(each, beside_quack=(size,)) for each in module.NORMS]
    sizes = {"QUICK_SIZES": (size, (ROWS, 2 * WIDTH))}
    found = rows("norms", "norms", NORMS=asked, **sizes)
    residual = replace(module.RESIDUAL, beside_quack=(size,))
    found |= rows("norms", "residual_norms", RESIDUAL=residual)
    for norm in ("rms_norm", "layer_norm", "residual_rms_norm"):
        for direction in ("forward", "backward"):
            case = f"{norm} {direction} {ROWS} x"
            assert found[f"{case} {WIDTH}"] == TORCH | {"QuACK"}
            assert found[f"{case} {2 * WIDTH}"] == TORCH
    assert found[f"l2_normalization forward {ROWS} x {WIDTH}"] == TORCH, "it has none"


def test_softmax_and_losses_stand_beside_quack(rows: Any) -> None:
    size = (ROWS, WIDTH)
    sizes = {"QUICK_ROWS": (size,), "QUICK_LOGITS": (size,), "BESIDE_QUACK": (size,)}
    found = rows("softmax", "softmax", **sizes)
    for op in ("softmax", "cross_entropy"):
        for direction in ("forward", "backward"):
            assert found[f"{op} {ROWS}x{WIDTH} {direction}"] == EAGER | {"QuACK"}
    assert found["causal_softmax forward"] == found["masked_softmax forward"] == EAGER


# ---- TransformerEngine and torchao


@pytest.fixture
def expert(peers: Any) -> Any:
    hidden, inner = 32, 48
    return peers.Expert(
        sizes=torch.tensor(SIZES),
        x=torch.randn(TOKENS, hidden).bfloat16(),
        fc1=torch.randn(len(SIZES), 2 * inner, hidden).bfloat16() * hidden**-0.5,
        fc2=torch.randn(len(SIZES), hidden, inner).bfloat16() * inner**-0.5,
        probs=torch.rand(TOKENS),
        dy=torch.randn(TOKENS, hidden).bfloat16(),
    )


def trained(expert: Any) -> tuple[Any, ...]:
    """y and the gradients, group by group."""
    leaves = [each.detach().requires_grad_() for each in (expert.x, expert.fc1, expert.fc2)]
    leaves.append(expert.probs.detach().requires_grad_())
    x, fc1, fc2, probs = leaves
    splits, out = expert.sizes.tolist(), []
    parts = zip(torch.split(x, splits), torch.split(probs, splits), fc1, fc2, strict=True)
    for tokens, weights, up, down in parts:
        gate, value = (tokens @ up.t()).float().chunk(2, -1)
        a = torch.nn.functional.silu(gate) * value * weights[:, None]
        out.append(a.to(x.dtype) @ down.t())
    y = torch.cat(out)
    return (y.detach(), *torch.autograd.grad(y, leaves, expert.dy))


class Grouped(torch.nn.Module):  # type: ignore[misc, name-defined]
    """One linear a group, as TransformerEngine names its weights."""

    def __init__(self, groups: int, k: int, n: int, **words: Any) -> None:
        super().__init__()
        assert words.pop("bias") is False and words.pop("device") == torch.device("cpu")
        assert [*words.values()] == [torch.bfloat16]
        self.groups = groups
        for group in range(groups):
            self.register_parameter(f"weight{group}", torch.nn.Parameter(torch.zeros(n, k)))

    def forward(self, x: Any, splits: Any) -> Any:
        parts = zip(torch.split(x, splits.tolist()), range(self.groups), strict=True)
        return torch.cat([part @ getattr(self, f"weight{group}").t() for part, group in parts])


class Activation(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, h: Any, probs: Any) -> Any:
        gate, up = h.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up * probs[:, None]).to(h.dtype)


class Sequential(torch.nn.Sequential):  # type: ignore[misc, name-defined]
    def forward(self, x: Any, *extra: Any) -> Any:
        for layer, more in zip(self, extra, strict=True):
            x = layer(x, more)
        return x


def stand_in(monkeypatch: pytest.MonkeyPatch, entered: list[Any]) -> None:
    def autocast(*, enabled: bool, recipe: Any) -> Any:
        entered.append((enabled, recipe))
        return nullcontext()

    class Checked(Grouped):
        def forward(self, x: Any, splits: Any) -> Any:
            enabled, _ = entered[-1]
            assert not enabled or all(size % 16 == 0 for size in splits.tolist())
            return super().forward(x, splits)

    ops = SimpleNamespace(GroupedLinear=Checked, ScaledSwiGLU=Activation, Sequential=Sequential)
    te = ModuleType("transformer_engine.pytorch")
    te.__dict__.update(ops=ops, GroupedLinear=Checked, autocast=autocast)
    recipes = SimpleNamespace(
        DelayedScaling=lambda: "delayed",
        Float8CurrentScaling=lambda: "current",
        Float8BlockScaling=lambda: "block",
    )
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te)
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipes)


def test_expert_mlps(peers: Any, expert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded where a library wants it, in order of tokens and with a gradient per linear after."""
    entered: list[Any] = []
    stand_in(monkeypatch, entered)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)

    def gemm(a: Any, b: Any, ends: Any, *, pad_token_groups_for_grouped_mm: bool) -> Any:
        assert not pad_token_groups_for_grouped_mm and ends.dtype == torch.int32
        assert not any(end % 16 for end in ends.tolist())
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        return torch.cat([own @ w for own, w in zip(torch.split(a, sizes), b, strict=True)])

    ao = SimpleNamespace(_to_fp8_rowwise_then_scaled_grouped_mm=gemm)
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training.fp8_grouped_mm", ao)
    steps = peers.mlp_steps(peers.MLPS, expert, trained(expert))
    assert [*steps] == [*peers.MLPS]
    assert [*dict.fromkeys(entered)] == [
        (False, None),
        (True, "delayed"),
        (True, "current"),
        (True, "block"),
    ]
    recipes = {name.partition(" ")[2] or "bf16" for name in peers.MLPS}
    assert recipes <= bench.find().module("labels").RECIPES.keys()


def test_a_wrong_gradient_leaves_an_mlp_out(
    peers: Any, expert: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, [])
    y, dx, dfc1, dfc2, dprobs = trained(expert)
    name = "TransformerEngine"
    chosen = {name: peers.MLPS[name]}
    assert peers.mlp_steps(chosen, expert, (y, dx, dfc1, 1.1 * dfc2, dprobs)) == {}
    assert f"{name} is left out of the expert MLP: it is off by" in capsys.readouterr().err
    assert (
        peers.mlp_steps(chosen, expert, (y, dx, dfc1, dfc2, torch.full_like(dprobs, torch.nan)))
        == {}
    )
    assert set(peers.mlp_steps(chosen, expert, (y, dx, dfc1, dfc2, dprobs))) == {name}
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "transformer_engine.pytorch")
        patch.setattr(peers, "_engine_ops", lambda *given: 1 // 0)
        assert peers.mlp_steps(chosen, expert, (y,)) == {}


def test_a_library_that_breaks_at_import_is_left_out(
    peers: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "breaks_at_import.py").write_text("raise OSError('libcuda is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = peers.Peer("breaks_at_import", "it", lambda: None)
    assert peers.installed({"it": broken}) == {}
    assert "it is left out: import: libcuda is missing" in capsys.readouterr().err


# ---- layers that ranks share


RANKS = 2


class Userbuffers:
    """One buffer of a process, and a layer that sends through it.  The other ranks do what this one
    does, on the same operands.
    """

    def __init__(self) -> None:
        self.buffer: tuple[int, ...] = ()

    def initialize_ub(
        self,
        shape: list[int],
        tp_size: int,
        quantization_modes: list[str],
        dtype: Any,
        bootstrap_backend: str,
    ) -> None:
        assert (tp_size, quantization_modes) == (RANKS, ["16 bits"])
        assert dtype == torch.bfloat16 and bootstrap_backend == "nccl"
        assert not self.buffer, "a process has one"
        self.buffer = tuple(shape)

    def linear(self, inputs: int, outputs: int, **words: Any) -> Any:
        userbuffers, split = self, words["parallel_mode"]
        ways = words["ub_overlap_ag"], words["ub_overlap_rs"]
        assert (split, words["ub_name"], ways) in (
            ("column", "qkv", (True, False)),
            ("row", "proj", (False, True)),
        )
        assert words["sequence_parallel"] and words["bias"] is False and self.buffer
        assert words["params_dtype"] == torch.bfloat16 and words["tp_group"] == "the ranks"

        class Linear(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                part = (1, RANKS) if split == "row" else (RANKS, 1)
                own = torch.zeros(outputs // part[0], inputs // part[1], dtype=torch.bfloat16)
                self.weight = torch.nn.Parameter(own)

            def forward(self, x: Any) -> Any:
                assert not torch.is_grad_enabled()
                every = torch.cat([x] * RANKS) if split == "column" else x
                y = every @ self.weight.t()
                assert userbuffers.buffer == (every if split == "column" else y).shape
                return y if split == "column" else RANKS * y[: len(y) // RANKS]

        return Linear()


@pytest.mark.parametrize("split", ["column", "row"])
def test_layers_over_userbuffers(
    peers: Any,
    split: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Sizes of the whole layer, this rank's part of the weight, and a buffer of what is sent."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: RANKS)
    x, weight = (torch.randn(*shape).bfloat16() for shape in ((8, 32), (48, 32)))
    y = torch.cat([x] * RANKS) @ weight.t() if split == "column" else RANKS * (x @ weight.t())[:4]

    def found(expected: Any) -> Any:
        once = Userbuffers()
        te = ModuleType("transformer_engine.pytorch")
        te.__dict__.update(Linear=once.linear)
        modes = SimpleNamespace(NONE="16 bits")
        base = SimpleNamespace(initialize_ub=once.initialize_ub, UserBufferQuantizationMode=modes)
        monkeypatch.setitem(sys.modules, te.__name__, te)
        monkeypatch.setitem(sys.modules, f"{te.__name__}.module.base", base)
        return peers.shared_calls(peers.SHARED, split, x, weight, "the ranks", expected)

    (run,) = found(y).values()
    assert torch.equal(run(), y)
    assert found(1.1 * y) == {}
    assert "is left out" in capsys.readouterr().err
