"""The demo against a stand-in bundle: same contract as a generated one, other arithmetic."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fusegen.demo import experiment
from fusegen.demo import model as demo_model
from fusegen.demo import run as demo
from fusegen.demo.experiment import DemoConfig, DemoError

TINY = DemoConfig(
    hidden=32,
    intermediate=16,
    experts=4,
    top_k=2,
    layers=1,
    heads=2,
    context=32,
    batch=2,
    steps=3,
    learning_rate=1e-2,
    held_out_batches=2,
)

ROUTER = """
import torch
from torch import nn

class MixtralRouter(nn.Module):
    def __init__(self, hidden, num_experts, aux_coefficient=0.0, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden, device=device, dtype=dtype))
        self.aux_coefficient = aux_coefficient

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        probabilities = (x.to(wide) @ self.weight.to(wide).T).softmax(-1)
        ids = probabilities.argsort(-1, descending=True)[:, :2]
        probs = probabilities.gather(-1, ids)
        counts = ids.flatten().bincount(minlength=len(self.weight))
        share = counts / ids.numel()
        aux = self.aux_coefficient * len(self.weight) * (share * probabilities.mean(0)).sum()
        return probs / probs.sum(-1, keepdim=True), aux, aux * 0, ids.to(torch.int32), counts
"""

STAND_IN = """
import torch
from torch import nn
from ._activation import weighted_swiglu

class _Linear(nn.Module):
    def __init__(self, *shape, device, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

class MoELayer(nn.Module):
    def __init__(self, num_experts, hidden, intermediate, bias=False, device=None, dtype=None):
        super().__init__()
        self.fc1 = _Linear(num_experts, 2 * intermediate, hidden, device=device, dtype=dtype)
        self.fc2 = _Linear(num_experts, hidden, intermediate, device=device, dtype=dtype)

    def forward(self, x, probs, ids, counts):
        # Every expert on every token, then a selection: unlike the demo's own loop over slices.
        weights = torch.zeros(len(x), len(counts), dtype=probs.dtype).scatter(1, ids.long(), probs)
        h = torch.einsum("th,eih->tei", x, self.fc1.weight)
        a = weighted_swiglu(h, weights[:, :, None]).to(x.dtype)
        return torch.einsum("tei,ehi->th", a, self.fc2.weight)
"""

ACTIVATION = """
import torch

def weighted_swiglu(h, probs):
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up * probs
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "_activation.py").write_text(ACTIVATION)
    (folder / "router_mixtral__bf16.py").write_text(ROUTER)
    (folder / "moe_layer__bf16.py").write_text(STAND_IN)
    return folder


def _moe(factory: demo_model.LayerFactory) -> nn.Module:
    moe = factory(replace(TINY, hidden=8, intermediate=6), "cpu").double()
    demo_model.initialise(moe, seed=1)
    return moe


def _dense(moe: nn.Module, x: Tensor) -> Tensor:
    """Every expert on every token, weighted by its probability or by zero; no sorting."""
    probabilities = (x @ moe.get_parameter("router.weight").T).softmax(dim=1)
    kept = probabilities >= probabilities.sort(dim=1, descending=True).values[:, 1:2]
    weights = probabilities * kept / (probabilities * kept).sum(dim=1, keepdim=True)
    fc1 = moe.get_parameter("experts.fc1.weight")
    fc2 = moe.get_parameter("experts.fc2.weight")
    gate, up = torch.einsum("nh,eih->nei", x, fc1).chunk(2, dim=2)
    return torch.einsum("nei,ehi,ne->nh", functional.silu(gate) * up, fc2, weights)


def test_corpus_is_deterministic_and_split_by_file(tmp_path: Path) -> None:
    for index in reversed(range(20)):
        (tmp_path / f"m{index:02d}.py").write_text(f"file {index:02d}")
    (tmp_path / "notes.txt").write_text("not Python")
    corpus = experiment.load_corpus(tmp_path)
    assert corpus.files == 20
    assert corpus.held_out == b"file 09\nfile 19"
    assert corpus.train.startswith(b"file 00\nfile 01\n")
    assert corpus.train.count(b"file") == 18
    assert experiment.load_corpus() == experiment.load_corpus()


def test_corpus_without_sources_says_where_and_what(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=rf"{tmp_path}: expected at least 10 .* got 0; run"):
        experiment.load_corpus(tmp_path)


def test_batches_depend_on_seed_and_step_alone() -> None:
    corpus = experiment.load_corpus()
    data = demo_model.Batches(corpus, TINY, "cpu", seed=3)
    again = demo_model.Batches(corpus, TINY, "cpu", seed=3)
    tokens, targets = data.train(7)
    again.train(0)
    assert torch.equal(tokens, again.train(7)[0])
    assert not torch.equal(tokens, data.train(8)[0])
    assert not torch.equal(tokens, demo_model.Batches(corpus, TINY, "cpu", seed=4).train(7)[0])
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.shape == (TINY.batch, TINY.context)
    for row in tokens:
        assert bytes(row.tolist()) in corpus.train
    for tokens, _ in data.held_out():
        assert all(bytes(row.tolist()) in corpus.held_out for row in tokens)


def test_routing_is_ragged_sorted_and_complete() -> None:
    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    logits[:, 4] = -100.0
    routing = demo_model.route(logits, top_k=2)
    sizes = routing.split_sizes.tolist()
    assert sum(sizes) == 100
    assert sizes[4] == 0
    assert len(set(sizes[:4])) > 1
    assert any(size % 8 for size in sizes)
    chosen = logits.topk(2, dim=1).indices.reshape(-1)[routing.order]
    assert chosen.tolist() == [e for e, size in enumerate(sizes) for _ in range(size)]
    assert torch.equal(routing.order[routing.inverse], torch.arange(100))
    by_token = routing.probs[routing.inverse].view(50, 2)
    torch.testing.assert_close(by_token.sum(dim=1), torch.ones(50))


def test_balance_is_one_when_even_and_grows_when_not() -> None:
    even = demo_model.route(torch.eye(4).repeat(3, 1) * 50, top_k=1)
    skewed = demo_model.route(torch.eye(4)[:1].repeat(12, 1) * 50, top_k=1)
    assert even.balance.item() == pytest.approx(1.0)
    assert skewed.balance.item() == pytest.approx(4.0)


@pytest.mark.parametrize("source", ["plain", "bundle"])
def test_mixture_equals_dense_computation_in_float64(source: str, bundle: Path) -> None:
    plain = source == "plain"
    moe = _moe(demo_model.PlainLayer if plain else demo_model.load_layer(bundle, "cpu"))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    dy = torch.randn(40, 8, dtype=torch.float64, generator=generator)
    names = ["router.weight", "experts.fc1.weight", "experts.fc2.weight"]
    leaves = [x, *(moe.get_parameter(name) for name in names)]
    y, _ = moe(x)
    expected = _dense(moe, x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected, leaves, dy)
    for got, want in zip(torch.autograd.grad(y, leaves, dy), wanted, strict=True):
        assert want.norm() > 0.1
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_small_updates_survive_in_bfloat16() -> None:
    model = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    optimiser = demo_model.MasterAdamW(model, steps=1000, peak=1e-3)
    for _ in range(200):
        model.weight.grad = torch.ones_like(model.weight)
        optimiser.step()
    # Each update is far below the spacing of bfloat16 at 1.0, which is 2^-8 below and 2^-7 above.
    fallen = sum(1e-3 * demo_model.schedule(step, 1000) for step in range(200))
    assert model.weight.float().mean().item() == pytest.approx(1.0 - fallen, abs=2**-8)


def test_schedule_rises_then_falls_to_a_tenth() -> None:
    rates = [demo_model.schedule(step, 100) for step in range(101)]
    top = round(100 * demo_model.WARMUP)
    assert rates[0] == pytest.approx(1 / top)
    assert rates[:top] == sorted(rates[:top])
    assert max(rates) == pytest.approx(1.0) == rates[top]
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.slow
def test_demo_end_to_end(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plots" / "demo.png"
    result = demo.run_demo(bundle, "cpu", steps=3, output=output, config=TINY)
    assert output.read_bytes().startswith(b"\x89PNG")
    assert [step.number for step in result.steps] == [1, 2, 3]
    losses = [s.loss for step in result.steps for s in (step.plain, step.generated)]
    assert all(math.isfinite(loss) and 0.0 < loss < 8.0 for loss in losses)
    assert losses[0] == pytest.approx(math.log(256), abs=1.0)
    assert losses[-2] < losses[0]
    assert result.largest_difference < 0.02
    assert result.probe.gradient_difference < 0.02
    assert abs(result.plain.held_out_loss - result.generated.held_out_loss) < 0.02
    assert result.plain.saved_mib > 0.0
    captured = capsys.readouterr()
    assert "held-out loss" in captured.out
    assert "step    3" in captured.err


@pytest.mark.slow
def test_json_is_the_only_output(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo.png"
    result = demo.run_demo(bundle, "cpu", steps=1, output=output, config=TINY, as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert data["steps"][0]["plain"]["loss"] == result.steps[0].plain.loss
    assert data["plot"] == str(output)


def test_time_limit_ends_the_run(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo.png"
    result = demo.run_demo(bundle, "cpu", steps=50, output=output, config=TINY, time_limit_s=0.0)
    assert len(result.steps) == 1
    assert "after 1 of 50 steps" in capsys.readouterr().out


def test_a_wrong_module_is_seen(bundle: Path, tmp_path: Path) -> None:
    source = STAND_IN.replace("weights[:, :, None]", "(weights > 0)[:, :, None]")
    (bundle / "moe_layer__bf16.py").write_text(source)
    result = demo.run_demo(bundle, "cpu", steps=1, output=tmp_path / "demo.png", config=TINY)
    assert result.probe.gradient_difference > 0.5


def test_missing_matplotlib_is_said(
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    result = demo.run_demo(bundle, "cpu", steps=1, output=tmp_path / "demo.png", config=TINY)
    assert result.plot is None
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("module", r"moe_layer__bf16\.py: expected a file of a generated bundle.*--arch cpu"),
        ("class", r"moe_layer__bf16\.py: expected a class MoELayer, got none"),
        ("parameter", r"MixtralRouter and MoELayer: expected the parameters router\.weight"),
        ("gradient", r"expected a gradient for blocks\.0\.moe\.experts\.fc2\.weight, got none"),
        ("finite", r"expected a finite gradient for .* got a relative difference of nan"),
    ],
)
def test_broken_bundle_is_named(damage: str, message: str, bundle: Path, tmp_path: Path) -> None:
    path = bundle / "moe_layer__bf16.py"
    replacements = {
        "class": ("class MoELayer", "class Other"),
        "parameter": ("fc2", "down"),
        "gradient": ("a, self.fc2.weight)", "a, self.fc2.weight.data)"),
        "finite": ('"th,eih->tei", x,', '"th,eih->tei", x * float("nan"),'),
    }
    if damage == "module":
        path.unlink()
    else:
        old, new = replacements[damage]
        assert old in STAND_IN
        path.write_text(STAND_IN.replace(old, new))
    with pytest.raises(DemoError, match=message):
        demo.run_demo(bundle, "cpu", steps=1, output=tmp_path / "demo.png", config=TINY)


@pytest.mark.parametrize(
    ("steps", "name", "message"),
    [
        (0, "demo.png", r"--steps: expected at least 1, got 0"),
        (1, "demo.gif", r"demo\.gif: expected a picture ending in \.png"),
    ],
)
def test_bad_arguments(steps: int, name: str, message: str, bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=message):
        demo.run_demo(bundle, "cpu", steps=steps, output=tmp_path / name, config=TINY)


def test_the_router_has_two_choices(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"DemoConfig\.top_k: expected 2, got 3"):
        demo.run_demo(bundle, "cpu", output=tmp_path / "demo.png", config=replace(TINY, top_k=3))


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DemoError, match=r"expected a CUDA GPU, .* run: fusegen demo --arch cpu"):
        demo_model.check_device("cuda", "sm_90a")


@pytest.mark.parametrize(("field", "value"), [("hidden", 0), ("heads", 3), ("top_k", 9)])
def test_config_refuses_impossible_sizes(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"DemoConfig\.{field}: expected"):
        replace(experiment.CPU_CONFIG, **{field: value})


def test_importing_the_verb_imports_no_torch() -> None:
    code = (
        "import sys, fusegen.demo.run; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
