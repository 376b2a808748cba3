"""Kernels of norms and of their gradients on the CPU: every shape of a row, against float64."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .launches import launches
from .quantize_harness import CSRC, Buffer, Kernels, Long, Pointer, address

KINDS = ("rms", "layer", "l2")
PARTS = 132
EPS = 1e-3
SIZES = [
    (0, 64), (1, 8), (70, 64), (9, 72), (5, 256), (33, 264), (5, 520), (133, 1024), (3, 1032),
    (11, 2048), (3, 2056), (5, 4104), (3, 8200), (2, 16384), (2, 16392), (1, 32776), (9, 65536),
]  # fmt: skip
"""Rows and columns: both sides of where rows go to larger teams, more rows than a block has."""


class _Norm(ctypes.Structure):
    _fields_ = [
        ("x", Pointer), ("weight", Pointer), ("bias", Pointer), ("y", Pointer),
        ("mean", Pointer), ("rstd", Pointer), ("rows", Long), ("columns", Long),
        ("eps", ctypes.c_float), ("zero_centered", ctypes.c_bool), ("kind", ctypes.c_int),
    ]  # fmt: skip


class _AddNorm(ctypes.Structure):
    _fields_ = [("norm", _Norm), ("add", Pointer), ("total", Pointer)]


class _NormGrad(ctypes.Structure):
    _fields_ = [
        ("x", Pointer), ("dy", Pointer), ("weight", Pointer), ("mean", Pointer),
        ("rstd", Pointer), ("add", Pointer), ("dx", Pointer), ("dweight", Pointer),
        ("dbias", Pointer), ("partials", Pointer), ("parts", Long), ("rows", Long),
        ("columns", Long), ("zero_centered", ctypes.c_bool), ("kind", ctypes.c_int),
    ]  # fmt: skip


def _with_fixed_memory(folder: Path) -> Path:
    """The kernels' folder, where memory that a launch sizes has the most that it can."""
    shutil.copytree(CSRC / "fusegen", folder / "fusegen")
    header = folder / "fusegen" / "norm" / "norm_grad.cuh"
    text = header.read_text()
    sized = "extern __shared__ uint4 shared[];"
    assert text.count(sized) == 1
    most = "shared_bytes<Ring, S>(Ring::kMostStages, centred)"
    fixed = f"__shared__ uint4 shared[{most} / sizeof(uint4)];"
    header.write_text(text.replace(sized, fixed))
    return folder


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    folder = _with_fixed_memory(tmp_path_factory.mktemp("norm"))
    arguments = {
        "norm": "NormArguments",
        "add_norm": "AddNormArguments",
        "norm_grad": "NormGradArguments",
    }
    return launches(folder, "norm", **arguments)


@pytest.fixture(scope="module")
def made_again(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """Gradients as they are for later architectures than Hopper, and for Ada."""
    folder = _with_fixed_memory(tmp_path_factory.mktemp("norm_made_again"))
    return launches(folder, "norm", "1200", norm_grad="NormGradArguments")


@dataclass
class Case:
    """Operands of a norm, and what float64 gives of them.

    Rows have a large mean, which their squares would drown in.
    """

    kind: str
    rows: int
    columns: int
    dtype: torch.dtype
    weighted: bool = True
    zero_centered: bool = False

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(self.rows + self.columns)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        self.x = (drawn(self.rows, self.columns) + 3 * drawn(self.rows, 1)).to(self.dtype)
        self.dy = drawn(self.rows, self.columns).to(self.dtype)
        given = self.weighted and self.kind != "l2"
        self.weight = drawn(self.columns).to(self.dtype) if given else None
        self.bias = drawn(self.columns).to(self.dtype) if given and self.kind == "layer" else None

    @property
    def half(self) -> int:
        return int(self.dtype is torch.float16)

    @property
    def places(self) -> dict[str, object]:
        return {
            "rows": self.rows,
            "columns": self.columns,
            "zero_centered": self.zero_centered,
            "kind": KINDS.index(self.kind),
        }

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and rstd in float64, one for each row."""
        x = self.x.double()
        mean = x.mean(1) if self.kind == "layer" else x.new_zeros(self.rows)
        squares = (x - mean[:, None]).square()
        each = squares.sum(1) if self.kind == "l2" else squares.mean(1)
        return mean, (each + EPS).rsqrt()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The norm in float64, in whose place autograd differentiates it."""
        mean = x.mean(1, keepdim=True) if self.kind == "layer" else 0.0
        squares = (x - mean).square()
        each = (squares.sum if self.kind == "l2" else squares.mean)(1, keepdim=True)
        return (x - mean) * (each + EPS).rsqrt() * (weight + float(self.zero_centered)) + bias

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        ones = torch.ones(self.columns) - float(self.zero_centered)
        weight = ones if self.weight is None else self.weight
        bias = torch.zeros(self.columns) if self.bias is None else self.bias
        x, weight, bias = (each.double().requires_grad_() for each in (self.x, weight, bias))
        return x, weight, bias


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype, terms: Tensor | None = None) -> None:
    """Within one rounding to the type, and a few of fp32 of the terms that were added."""
    unit = 2**-8 if dtype is torch.bfloat16 else 2**-11
    bound = unit * wanted.abs() + 2e-6 * (wanted.abs().amax() if terms is None else terms)
    bound = bound + (2**-24 if dtype is torch.float16 else 0)
    assert ((found.double() - wanted).abs() <= bound).all()


def norm(
    kernels: Kernels,
    case: Case,
    *,
    statistics: bool = True,
    add: Tensor | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """A norm, and its statistics; of x plus something, with the sum where that is wanted."""
    y = torch.empty_like(case.x)
    mean, rstd = (Buffer(4 * case.rows, "cpu") if statistics else None for _ in range(2))
    arguments = _Norm(
        x=address(case.x), weight=address(case.weight), bias=address(case.bias), y=address(y),
        mean=address(mean), rstd=address(rstd), eps=EPS, **case.places,
    )  # fmt: skip
    if add is None:
        kernels.call("run_norm", case.half, arguments)
    else:
        sums = _AddNorm(norm=arguments, add=address(add), total=address(total))
        kernels.call("run_add_norm", case.half, sums)
    return (y, mean.floats(), rstd.floats()) if mean and rstd else (y,)


def gradients(
    kernels: Kernels,
    case: Case,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    add: Tensor | None = None,
) -> list[Tensor | None]:
    mean, rstd = (each.float() for each in case.statistics())
    made = (
        torch.full_like(case.x, torch.nan),
        *(torch.full((case.columns,), torch.nan).to(case.dtype) for _ in range(2)),
    )
    kinds = (True, case.kind != "l2", case.kind == "layer")
    asked = [a and b for a, b in zip(wanted, kinds, strict=True)]
    given = [each if a else None for each, a in zip(made, asked, strict=True)]
    sums = sum(asked[1:])
    partials = Buffer(4 * PARTS * sums * case.columns, "cpu") if sums else None
    arguments = _NormGrad(
        x=address(case.x), dy=address(case.dy), weight=address(case.weight),
        mean=address(mean) if case.kind == "layer" else None, rstd=address(rstd),
        add=address(add), dx=address(given[0]), dweight=address(given[1]), dbias=address(given[2]),
        partials=address(partials), parts=PARTS if sums else 0, **case.places,
    )  # fmt: skip
    kernels.call("run_norm_grad", case.half, arguments)
    if partials:
        partials.bytes()  # checks its guards
    return given


DTYPES = pytest.mark.parametrize(
    "dtype", (torch.bfloat16, torch.float16), ids=("bfloat16", "float16")
)


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_forward(
    kernels: Kernels, kind: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    case = Case(kind, rows, columns, dtype, zero_centered=rows % 2 == 0 and kind != "l2")
    y, mean, rstd = norm(kernels, case)
    wanted = case.statistics()
    if kind == "layer":
        torch.testing.assert_close(mean.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rstd.double(), wanted[1], rtol=1e-5, atol=0)
    if rows:
        close(y, case.forward(*case.leaves()).detach(), dtype)
    assert torch.equal(norm(kernels, case, statistics=False)[0], y)


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients(
    kernels: Kernels, kind: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    case = Case(kind, rows, columns, dtype, zero_centered=rows % 2 == 0 and kind != "l2")
    leaves = case.leaves()
    case.forward(*leaves).backward(case.dy.double())
    found = gradients(kernels, case)
    for result, leaf in zip(found, leaves, strict=True):
        if result is not None and result.numel():
            assert leaf.grad is not None
            close(result, leaf.grad, dtype)
    again = gradients(kernels, case)
    for first, second in zip(found, again, strict=True):
        assert first is second is None or torch.equal(first, second)


@pytest.mark.parametrize("memory", (99, 163))
@pytest.mark.parametrize("adds", (False, True))
@pytest.mark.parametrize("columns", (512, 2048, 16384))
@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_a_gpu_with_less_shared_memory_gives_the_same_bits(
    kernels: Kernels,
    kind: str,
    columns: int,
    adds: bool,
    memory: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer rows are under way; sums that do not fit beside one are made on their own."""
    case = Case(kind, 300 if columns == 16384 else 37, columns, torch.bfloat16)
    add = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(7)).to(case.dtype)
    add = add if adds else None
    wanted = gradients(kernels, case, add=add)
    monkeypatch.setenv("FUSEGEN_TEST_CTA_BYTES", str(memory * 1024))
    for found, same in zip(gradients(kernels, case, add=add), wanted, strict=True):
        assert found is same is None or torch.equal(found, same)


@pytest.mark.parametrize("adds", (False, True))
@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_products_that_are_made_again_are_the_same_bits(
    kernels: Kernels, made_again: Kernels, kind: str, adds: bool
) -> None:
    for rows, columns in ((33, 264), (3, 2056), (2, 16384)):
        case = Case(kind, rows, columns, torch.bfloat16)
        add = case.dy.flip(0).contiguous() if adds else None
        wanted = gradients(kernels, case, add=add)
        for found, same in zip(gradients(made_again, case, add=add), wanted, strict=True):
            assert found is same is None or torch.equal(found, same)


@pytest.mark.parametrize("columns", (72, 2048, 16392))
@pytest.mark.parametrize(
    "wanted",
    [(True, False, False), (False, True, False), (False, False, True), (True, False, True)],
)
def test_what_nobody_asked_for_is_not_needed(
    kernels: Kernels, wanted: tuple[bool, bool, bool], columns: int
) -> None:
    case = Case("layer", 11, columns, torch.bfloat16)
    everything = gradients(kernels, case)
    for own, full, asked in zip(gradients(kernels, case, wanted), everything, wanted, strict=True):
        assert (own is None) != asked
        assert own is None or torch.equal(own, full)


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_the_norm_of_a_sum(
    kernels: Kernels, kind: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    """The bits of a step that adds and one that norms what the first one stored."""
    case = Case(kind, rows, columns, dtype, zero_centered=rows % 2 == 0)
    add = torch.randn(rows, columns, generator=torch.Generator().manual_seed(7)).to(dtype)
    total = torch.full_like(add, torch.nan)
    found = norm(kernels, case, add=add, total=total)
    alone = norm(kernels, case, statistics=False, add=add)
    case.x = (case.x.float() + add.float()).to(dtype)
    assert torch.equal(total, case.x)
    apart = norm(kernels, case)
    assert torch.equal(alone[0], apart[0])
    assert torch.equal(found[0], apart[0]) and torch.equal(found[2], apart[2])
    assert kind == "rms" or torch.equal(found[1], apart[1])


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_to_the_gradient(
    kernels: Kernels, kind: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    """The bits of a step that adds it afterwards; sums over rows do not know of it."""
    case = Case(kind, rows, columns, dtype, zero_centered=rows % 2 == 0 and kind != "l2")
    add = torch.randn(rows, columns, generator=torch.Generator().manual_seed(7)).to(dtype)
    apart, found = gradients(kernels, case), gradients(kernels, case, add=add)
    assert apart[0] is not None and found[0] is not None
    assert torch.equal(found[0], (apart[0].float() + add.float()).to(dtype))
    for own, other in zip(found[1:], apart[1:], strict=True):
        assert own is other is None or torch.equal(own, other)
    sums = gradients(kernels, case, (False, True, True), add)
    assert sums[0] is None
    for own, other in zip(sums[1:], apart[1:], strict=True):
        assert own is other is None or torch.equal(own, other)


@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_without_a_weight_rows_are_only_normed(kernels: Kernels, kind: str) -> None:
    case = Case(kind, 5, 264, torch.bfloat16, weighted=False)
    close(norm(kernels, case)[0], case.forward(*case.leaves()).detach(), case.dtype)
    leaves = case.leaves()
    case.forward(*leaves).backward(case.dy.double())
    assert leaves[0].grad is not None
    close(gradients(kernels, case)[0], leaves[0].grad, case.dtype)


def test_a_large_mean_costs_the_variance_nothing(kernels: Kernels) -> None:
    """The difference of two means of squares would have no correct digit."""
    case = Case("layer", 4, 1024, torch.float16)
    case.x = (case.x / 4 + 2048).round().to(torch.float16)
    _, _, rstd = norm(kernels, case)
    torch.testing.assert_close(rstd.double(), case.statistics()[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("columns", "said"), [(12, "a multiple of 8"), (0, "a multiple"), (65544, "<= 65536")]
)
def test_a_width_that_no_kernel_has_is_refused(kernels: Kernels, columns: int, said: str) -> None:
    case = Case("rms", 1, 8, torch.bfloat16)
    case.columns = columns
    for run in (norm, gradients):
        with pytest.raises(AssertionError, match=said):
            run(kernels, case)
