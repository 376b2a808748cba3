"""Quantised tensors from module to module: the bits of plain modules, and formats told apart."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusegen.ir.naming import Cell

from .loading import class_of, load_cells

pytestmark = pytest.mark.usefixtures("fresh_compiler")

TAKES, GIVES = "quantized_input", "quantized_output"
RECIPES = ("fp8_block", "fp8_delayed", "mxfp8", "nvfp4")
CELLS = (
    Cell("rms_norm", "bf16"),
    *(
        Cell(module, recipe, options)
        for recipe in RECIPES
        for module, options in (
            ("linear", ()),
            ("linear", (TAKES,)),
            ("linear", (TAKES, GIVES)),
            ("rms_norm", (GIVES,)),
            ("grouped_linear", ()),
            ("grouped_linear", (TAKES,)),
            ("grouped_linear", (GIVES,)),
        )
    ),
)
ROWS, WIDTH = 48, 64
SPLITS = (20, 0, 12, 9)

Given = Callable[..., Any]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    return load_cells("quantized_tensors", tmp_path_factory.mktemp("quantized"), CELLS)


def layer(bundle: str, module: str, recipe: str, *options: str) -> Any:
    """A module of one width, always of the same weights."""
    made = class_of(bundle, str(Cell(module, recipe, options)))
    torch.manual_seed(3)
    match module:
        case "rms_norm":
            return made(WIDTH)
        case "linear":
            return made(WIDTH, WIDTH, bias=True)
        case _:
            return made(len(SPLITS), WIDTH, WIDTH)


def trained(function: Given, layers: list[nn.Module], steps: int = 2) -> list[Tensor]:
    """Results and gradients of some steps, in which states of delayed scaling move on."""
    found: list[Tensor] = []
    for step in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        x.requires_grad_()
        y = function(x)
        leaves = [x, *(p for each in layers for p in each.parameters())]
        found += [y, *torch.autograd.grad(y.float().square().sum(), leaves)]
    return found


def agree(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), number


@pytest.mark.parametrize("compile_it", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_norm_feeds_linears(bundle: str, recipe: str, compile_it: bool) -> None:
    """Two readers of one tensor, which plain modules quantise twice."""
    norm, plain = layer(bundle, "rms_norm", "bf16"), layer(bundle, "linear", recipe)
    gives, takes = layer(bundle, "rms_norm", recipe, GIVES), layer(bundle, "linear", recipe, TAKES)
    others = layer(bundle, "linear", recipe), layer(bundle, "linear", recipe, TAKES)

    def with_copies(x: Tensor) -> Tensor:
        copies = gives(x)
        return takes(copies) + others[1](copies) * 2

    def without(x: Tensor) -> Tensor:
        rows = norm(x)
        return plain(rows) + others[0](rows) * 2

    run = torch.compile(with_copies, fullgraph=True, backend="aot_eager") if compile_it else None
    agree(
        trained(run or with_copies, [gives, takes, others[1]]),
        trained(without, [norm, plain, others[0]]),
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_feeds_another(bundle: str, recipe: str) -> None:
    first, second = layer(bundle, "linear", recipe, TAKES, GIVES), layer(bundle, "linear", recipe)
    then = layer(bundle, "linear", recipe, TAKES)
    plain = layer(bundle, "linear", recipe)
    agree(
        trained(lambda x: then(first(x)), [first, then]),
        trained(lambda x: second(plain(x)), [plain, second]),
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_in_groups(bundle: str, recipe: str) -> None:
    """Whoever quantises them knows the groups."""
    sizes = torch.tensor(SPLITS)
    first, then = (layer(bundle, "grouped_linear", recipe, word) for word in (GIVES, TAKES))
    plain, second = (layer(bundle, "grouped_linear", recipe) for _ in range(2))
    agree(
        trained(lambda x: then(first(x, sizes), sizes), [first, then]),
        trained(lambda x: second(plain(x, sizes), sizes), [plain, second]),
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_formats_are_refused(bundle: str, recipe: str) -> None:
    takes = layer(bundle, "linear", recipe, TAKES)
    x = torch.randn(ROWS, WIDTH).bfloat16()
    for other in RECIPES:
        copies = layer(bundle, "rms_norm", other, GIVES)(x)
        if other == recipe:
            takes(copies)
            continue
        with pytest.raises(
            RuntimeError, match=f"copies in format '{recipe} input, rows, .*{other}"
        ):
            takes(copies)
    sizes = torch.tensor(SPLITS)
    grouped = layer(bundle, "grouped_linear", recipe, TAKES)
    with pytest.raises(RuntimeError, match=r"rows in groups, .* got .* rows, "):
        grouped(layer(bundle, "rms_norm", recipe, GIVES)(x), sizes)
    with pytest.raises(RuntimeError, match=r"rows, .* got .* rows in groups, "):
        takes(grouped.quantize_input(x, sizes))


def test_other_groups_are_refused(bundle: str) -> None:
    """Copies of groups lie as their sizes say; equal sizes in another tensor are as good."""
    takes = layer(bundle, "grouped_linear", "mxfp8", TAKES)
    x, sizes = torch.randn(ROWS, WIDTH).bfloat16(), torch.tensor(SPLITS)
    copies = takes.quantize_input(x, sizes)
    assert torch.equal(takes(copies, sizes.to(torch.int32)), takes(x, sizes))
    with pytest.raises(RuntimeError, match="the group sizes that the copies were made for"):
        takes(copies, torch.tensor(SPLITS[::-1]))


def test_copies_of_another_bundle_are_taken(bundle: str, tmp_path: Path) -> None:
    """Each bundle has a class of its own for them; the format says what they are."""
    cells = (Cell("rms_norm", "fp8_block", (GIVES,)),)
    other = load_cells("another_quantized", tmp_path, cells)
    x = torch.randn(ROWS, WIDTH).bfloat16()
    copies = layer(other, "rms_norm", "fp8_block", GIVES)(x)
    own = importlib.import_module(f"{bundle}._quantized_tensors").QuantizedTensor
    assert not isinstance(copies, own)
    takes = layer(bundle, "linear", "fp8_block", TAKES)
    given = layer(bundle, "rms_norm", "fp8_block", GIVES)(x)
    assert torch.equal(takes(copies), takes(given))


def test_autocast_leaves_what_has_no_memory(bundle: str) -> None:
    takes = layer(bundle, "linear", "fp8_block", TAKES).float()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        copies = takes.quantize_input(x)
        assert copies.tensor.dtype == torch.bfloat16
        y = takes(copies)
        assert torch.equal(y, takes(x))
    (dx,) = torch.autograd.grad(y.float().sum(), x)
    assert dx.dtype == torch.float32 and dx.any()


def test_checkpoints_make_the_copies_again(bundle: str) -> None:
    gives, takes = (
        layer(bundle, module, "fp8_block", word)
        for module, word in (("rms_norm", GIVES), ("linear", TAKES))
    )

    def block(x: Tensor) -> Tensor:
        return takes(gives(x))

    def again(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    agree(trained(again, [gives, takes]), trained(block, [gives, takes]))


def test_a_graph_is_let_go_of(bundle: str) -> None:
    """Copies hold codes and scales, and no row of 16 bits."""
    takes = layer(bundle, "linear", "fp8_block", TAKES)
    copies = takes.quantize_input(torch.randn(ROWS, WIDTH).bfloat16())
    held = [each for each in copies if isinstance(each, Tensor)]
    assert sum(each.untyped_storage().nbytes() for each in held) < 2 * ROWS * WIDTH * 1.6
    assert copies.tensor.untyped_storage().nbytes() == 2
