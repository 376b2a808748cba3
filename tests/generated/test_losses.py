"""Softmax and cross entropy of the CPU bundle: against PyTorch, and where tensors are odd."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fusegen.ir.naming import Cell

from .loading import load_cells, run_generated_tests, write_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

MODULES = (
    *("softmax", "causal_softmax", "masked_softmax", "biased_softmax", "cross_entropy"),
    *("lm_head_loss", "linear_cross_entropy"),
)
GENERATED = (
    Cell("biased_softmax", "bf16"),
    Cell("lm_head_loss", "bf16"),
    Cell("lm_head_loss", "bf16", ("add_to_main_grad",)),
    Cell("lm_head_loss", "fp8_block"),
    Cell("lm_head_loss", "fp8_delayed", ("delayed_wgrad",)),
    Cell("lm_head_loss", "fp8_delayed", ("reduced_amax",)),
    Cell("linear_cross_entropy", "bf16"),
    Cell("linear_cross_entropy", "bf16", ("add_to_main_grad",)),
    Cell("linear_cross_entropy", "bf16", ("write_16_bit_main_grad",)),
)
"""Cells of no committed bundle; losses are fp32 where logits and gradients are not."""
DTYPES = (torch.bfloat16, torch.float16)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
SCALE = 0.25


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Modules of the bundle by name."""
    folder = tmp_path_factory.mktemp("losses")
    name = load_cells("losses", folder, [Cell(module, "bf16") for module in MODULES])
    return {module: importlib.import_module(f"{name}.{module}__bf16") for module in MODULES}


def test_generated_tests_pass(tmp_path: Path) -> None:
    run_generated_tests(write_cells("losses_alone", "cpu", tmp_path, GENERATED))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=rng)).to(dtype)


def exact(scores: Tensor) -> Tensor:
    """PyTorch's softmax; zeros where every score is -inf."""
    return functional.softmax(scores, -1).masked_fill((scores == -torch.inf).all(-1, True), 0.0)


def check_softmax(function: Any, x: Tensor, left_out: Tensor, *others: Tensor) -> Tensor:
    """Result and gradient of a function that scales x and leaves something out, given the others.

    The gradient reads the rounded result, so its error is bounded by what that lost.
    """
    leaf = x.clone().requires_grad_()
    y = function(leaf, *others, scale=SCALE)
    dy = random(*x.shape, dtype=x.dtype, seed=1)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    wide = x.double().requires_grad_()
    expected = exact((SCALE * wide).masked_fill(left_out, -torch.inf))
    (gradient,) = torch.autograd.grad(expected.nan_to_num(), wide, dy.double())
    unit = ROUNDING[x.dtype]
    assert y.dtype == dx.dtype == x.dtype
    assert ((y - expected).abs() <= 1.01 * unit * expected + 1e-7).all()
    bound = 32 * SCALE * unit * expected  # 2 roundings of factors below 16
    assert ((dx - gradient.nan_to_num()).abs() <= bound + 1e-7).all()
    empty = left_out.expand_as(x).all(-1)
    assert not y[empty].any() and not dx[empty].any()
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40,), (5, 40), (2, 3, 4, 8), (0, 16)])
def test_softmax(cells: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    check_softmax(cells["softmax"].softmax, x, torch.zeros(shape, dtype=torch.bool))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 8), (2, 3, 5, 16), (2, 12, 8)])
def test_causal_softmax(cells: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of more queries than keys, the first have nothing to attend to."""
    queries, keys = shape[-2:]
    left_out = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    check_softmax(cells["causal_softmax"].causal_softmax, random(*shape, dtype=dtype), left_out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_softmax_takes_booleans_as_bytes(cells: dict[str, Any], dtype: torch.dtype) -> None:
    x = random(2, 3, 4, 16, dtype=dtype)
    mask = torch.rand(2, 4, 16, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[1, 2] = True
    function = cells["masked_softmax"].masked_softmax
    y = check_softmax(function, x, mask.unsqueeze(1), mask.view(torch.uint8))
    bias = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
    assert torch.equal(y, cells["biased_softmax"].biased_softmax(x, bias, scale=SCALE))


def test_a_mask_of_keys_is_a_view(cells: dict[str, Any]) -> None:
    """[B, D] for all heads and queries: every row of a batch is another head's of one query."""
    x, mask = random(2, 3, 4, 16), torch.zeros(2, 16, dtype=torch.uint8)
    mask[1, 5:] = 1
    function = cells["masked_softmax"].masked_softmax
    y = function(x.view(2, 12, 1, 16), mask.unsqueeze(1)).view_as(x)
    wanted = exact(x.double().masked_fill(mask.bool()[:, None, None], -torch.inf))
    assert ((y - wanted).abs() <= 1.01 * 2**-8 * wanted).all()


@pytest.mark.parametrize("module", ["softmax", "causal_softmax"])
def test_rows_of_infinities_and_nan(cells: dict[str, Any], module: str) -> None:
    x = random(3, 8, 8)
    x[0, 7] = -torch.inf
    x[1, 7, 3] = torch.nan
    x[2, 7, 3] = torch.inf
    y = getattr(cells[module], module)(x)
    assert not y[0, 7].any()
    assert y[1, 7].isnan().all() and y[2, 7].isnan().all()
    assert y[:, :7].isfinite().all()


# ---- cross entropy


def logits(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(columns)
    return random(rows, columns, dtype=dtype), torch.randint(columns, (rows,), generator=rng)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 5])
def test_cross_entropy(
    cells: dict[str, Any],
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
) -> None:
    x, targets = logits(12, 40, dtype)
    targets[[2, 5]] = ignore_index
    layer = cells["cross_entropy"].CrossEntropy(
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss
    )
    leaf, dloss = x.clone().requires_grad_(), torch.randn(12)
    loss = layer(leaf, targets)
    (dx,) = torch.autograd.grad(loss, leaf, dloss)
    wide = x.double().requires_grad_()
    wanted = functional.cross_entropy(
        wide, targets, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    ) + z_loss * wide.logsumexp(-1).square() * (targets != ignore_index)
    (expected,) = torch.autograd.grad(wanted, wide, dloss.double())
    assert loss.dtype == torch.float32 and dx.dtype == dtype
    assert ((loss - wanted).abs() <= 1e-5).all()
    assert ((dx - expected).abs() <= ROUNDING[dtype] * expected.abs() + 1e-6).all()
    assert not loss[[2, 5]].any() and not dx[[2, 5]].any()


def test_ignored_rows_are_not_read(cells: dict[str, Any]) -> None:
    x, targets = logits(3, 16, torch.bfloat16)
    x[1], targets[1] = torch.nan, -100
    leaf = x.requires_grad_()
    loss = cells["cross_entropy"].cross_entropy(leaf, targets)
    (dx,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.isfinite().all() and loss[1] == 0.0
    assert dx.isfinite().all() and not dx[1].any()


@pytest.mark.parametrize("target", [-1, 16, 2**40])
def test_a_target_that_is_no_column_is_not_silent(cells: dict[str, Any], target: int) -> None:
    x, targets = logits(3, 16, torch.bfloat16)
    targets[1] = target
    leaf = x.requires_grad_()
    loss = cells["cross_entropy"].cross_entropy(leaf, targets)
    (dx,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.isnan().tolist() == [False, True, False]
    assert dx.isnan().all(1).tolist() == [False, True, False]
    assert dx[[0, 2]].isfinite().all()


def test_a_loss_keeps_what_it_was_given_and_one_number_a_row(cells: dict[str, Any]) -> None:
    x, targets = logits(4, 16, torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = cells["cross_entropy"].cross_entropy(x.requires_grad_(), targets)
    assert loss.grad_fn is not None
    assert {(tuple(each.shape), each.dtype) for each in kept} == {
        ((4, 16), torch.bfloat16),
        ((4,), torch.int64),
        ((4,), torch.float32),
    }
    assert len(kept) == 3


# ---- a head and its loss, without logits


def heads(cells: dict[str, Any], hidden: int, vocabulary: int, **scalars: float) -> tuple[Any, Any]:
    """A head that keeps its logits, without a bias, and one that does not, of one weight."""
    words = {f"loss_{name}": value for name, value in scalars.items()}
    kept = cells["lm_head_loss"].LmHeadLoss(hidden, vocabulary, bias=False, **words)
    chunked = cells["linear_cross_entropy"].LinearCrossEntropy(hidden, vocabulary, **scalars)
    chunked.weight.data.copy_(kept.head.weight.data)
    return kept, chunked


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 70),
    hidden=st.integers(1, 6).map(lambda n: 8 * n),
    vocabulary=st.integers(1, 12).map(lambda n: 8 * n),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    ignored=st.lists(st.integers(0, 69)),
    dtype=st.sampled_from(DTYPES),
)
def test_a_head_without_logits_gives_what_one_with_them_gives(
    cells: dict[str, Any],
    rows: int,
    hidden: int,
    vocabulary: int,
    label_smoothing: float,
    z_loss: float,
    ignored: list[int],
    dtype: torch.dtype,
) -> None:
    """Bit for bit: rows do not know of each other, and a sum in fp32 is rounded once in both."""
    pair = heads(cells, hidden, vocabulary, label_smoothing=label_smoothing, z_loss=z_loss)
    x, targets = random(rows, hidden, dtype=dtype), torch.arange(rows) % vocabulary
    targets[[row for row in ignored if row < rows]] = -100
    found = []
    for layer in pair:
        leaf, layer = x.clone().requires_grad_(), layer.to(dtype)
        loss = layer(leaf, targets)
        found.append((loss, *torch.autograd.grad(loss, (leaf, *layer.parameters()), loss * 0 + 1)))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_head_without_logits_keeps_one_number_a_row(cells: dict[str, Any]) -> None:
    _, layer = heads(cells, 16, 40)
    x, targets = random(6, 16).requires_grad_(), torch.arange(6)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = layer.bfloat16()(x, targets)
    assert loss.grad_fn is not None
    assert sorted(tuple(each.shape) for each in kept) == [(6,), (6,), (6, 16), (40, 16)]


def test_a_head_without_logits_compiles_for_any_number_of_rows(cells: dict[str, Any]) -> None:
    _, layer = heads(cells, 16, 40)
    layer = layer.bfloat16()
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (5, 7, 64):
        x, targets = random(rows, 16), torch.arange(rows) % 40
        results = []
        for each in (layer, compiled):
            leaf = x.clone().requires_grad_()
            loss = each(leaf, targets)
            results.append((loss, *torch.autograd.grad(loss.sum(), (leaf, layer.weight))))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
