"""Whole pointwise kernels, as generated, on the CPU: pieces of rows, tails, halves and row sums."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusegen import api

from .quantize_harness import CSRC, HERE, ROOT, UNWRITTEN, Buffer, Long, Pointer, address

KERNELS = ROOT / "generated" / "sm_90a" / "csrc" / "kernels"
UNITS = tuple(
    f"pointwise_{op}_{direction}"
    for op in ("silu", "swiglu", "scaled_swiglu")
    for direction in ("forward", "backward")
)
ALTERNATING = tuple(
    name.replace("_forward", "_interleaved_32_forward").replace(
        "_backward", "_interleaved_32_backward"
    )
    for name in UNITS
    if "swiglu" in name
)
# Of chains with groups whose first op reads rows that belong to none.
GROUPED = {
    f"grouped_pointwise_{op}_backward": item
    for op, item in (
        ("qgelu", "{op: qgelu, as: act, dims: {D: H}}"),
        ("scaled_swiglu", "{op: scaled_swiglu, as: act, with: {scales: probs}, dims: {D: H}}"),
    )
}
# Of modules with several readers, several results, and operands that all rows share.
CHAINS = {
    "pointwise_add_3": "three_readers",
    "pointwise_add_2_float32_float32_float32": "weighted_twice",
    "pointwise_fork_forward": "fork",
    "pointwise_fork_backward": "fork",
    "pointwise_scale_columns_without_dshift_backward": "scale_columns",
}
SPECS = HERE.parent / "chains" / "specs"
# Of a row: one vector, one lane's worth, what a warp loads at once and its neighbours, many pieces.
COLUMNS = (1, 7, 8, 256, 512, 520, 1016, 1024, 1032, 2056)
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("operands", Pointer * 8),
        ("results", Pointer * 8),
        ("scalars", ctypes.c_float * 8),
        ("rows", Long),
        ("columns", Long),
        ("group_sizes", Pointer),
        ("groups", Long),
        ("clears", ctypes.c_bool),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every kernel unit, each compiled by itself, behind C functions of its kernels' names."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "this test compiles C++: install g++"
    folder = tmp_path_factory.mktemp("pointwise_kernels")
    kernels = dict.fromkeys(UNITS, KERNELS)
    kernels |= dict.fromkeys(ALTERNATING, _alternating_kernels(folder))
    kernels |= {name: _grouped_kernels(folder / name, item) for name, item in GROUPED.items()}
    kernels["grouped_pointwise_add_2"] = _grouped_sums(folder / "grouped_sums")
    modules = tuple(dict.fromkeys(CHAINS.values()))
    kernels |= dict.fromkeys(CHAINS, _kernels_of(folder / "chains", modules, SPECS))
    flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    flags += ["-Wno-unknown-pragmas", *(f"-I{each}" for each in (HERE / "cuda_on_cpu", CSRC))]
    objects = []
    for name, where in kernels.items():
        source = folder / f"{name}.cpp"
        source.write_text(f'#include "{where / name}.cu"\n{_functions(name)}')
        objects.append(str(source.with_suffix(".o")))
        subprocess.run([compiler, *flags, "-c", str(source), "-o", objects[-1]], check=True)
    output = folder / "kernels.so"
    subprocess.run([compiler, "-shared", *objects, "-o", str(output)], check=True)
    return ctypes.CDLL(str(output))


def _functions(unit: str) -> str:
    """A C function for the kernel of each element type."""
    names = (f"{unit}_{dtype}" for dtype in ("bfloat16", "float16"))
    return "".join(
        f'extern "C" int {name}(const fusegen::PointwiseArguments* in) {{\n'
        f"  fusegen::Stream stream;\n  return fusegen_sm_90a::{name}(*in, stream).code;\n}}\n"
        for name in names
    )


def _alternating_kernels(folder: Path) -> Path:
    """Where units are of modules whose gate and up alternate, which no committed bundle has."""
    for module in ("swiglu", "scaled_swiglu"):
        request = api.Request(
            out=folder,
            archs=("sm_90a",),
            modules=(module,),
            recipes=("bf16",),
            options=("interleaved_32",),
            namespace="fusegen",
        )
        api.generate(request, api.Policy.WRITE)
    return folder / "sm_90a" / "csrc" / "kernels"


def _grouped_kernels(folder: Path, item: str) -> Path:
    """Where units are of a module whose first op is an activation, and its second one grouped."""
    specs = folder / "specs" / "modules"
    specs.mkdir(parents=True)
    width = "2 * H" if "swiglu" in item else "H"
    probs = "  probs: {shape: [T], dtype: float32}\n" if "probs" in item else ""
    (specs / "toy.yaml").write_text(
        "edition: 2\nmodule: toy\nclass: Toy\nsummary: rows in groups\n"
        "dims: {T: tokens, E: num_groups, H: hidden}\ninputs:\n"
        f"  x: {{shape: [T, {width}]}}\n"
        "  split_sizes: {shape: [E], dtype: int64}\n"
        f"{probs}chain:\n  - {item}\n  - {{op: grouped_linear, as: fc, dims: {{K: H, N: H}}}}\n"
    )
    return _kernels_of(folder, ("toy",), folder / "specs")


def _grouped_sums(folder: Path) -> Path:
    """Where units are of experts whose gradients are added by a kernel of its own."""
    return _kernels_of(folder, ("residual_experts",), SPECS, no_fusions=("grouped_linear_add",))


def _kernels_of(
    folder: Path, modules: tuple[str, ...], specs: Path, no_fusions: tuple[str, ...] = ()
) -> Path:
    """Where units are of modules that a folder of specs has."""
    request = api.Request(
        out=folder,
        archs=("sm_90a",),
        modules=modules,
        recipes=("bf16",),
        namespace="fusegen",
        folders=api.Folders(specs=(specs,)),
        no_fusions=no_fusions,
    )
    api.generate(request, api.Policy.WRITE)
    return folder / "sm_90a" / "csrc" / "kernels"


def _run(
    library: ctypes.CDLL,
    name: str,
    operands: list[Tensor],
    results: list[Buffer | None],
    columns: int,
    splits: Tensor | None = None,
    clears: bool = True,
) -> None:
    """One launch; an operand or result stands once for each half that the kernel names."""
    arguments = _Arguments(rows=operands[0].shape[0], columns=columns, clears=clears)
    if splits is not None:
        arguments.group_sizes, arguments.groups = address(splits), len(splits)
    for i, operand in enumerate(operands):
        arguments.operands[i] = address(operand)
    for i, result in enumerate(results):
        arguments.results[i] = address(result)
    assert getattr(library, name)(ctypes.byref(arguments)) == 0


def _close(buffer: Buffer, wanted: Tensor, dtype: torch.dtype, bound: Tensor | None = None) -> None:
    """Within two roundings of `dtype`, or of sums of magnitudes `bound`; nothing left unwritten."""
    found = buffer.bytes().view(dtype).reshape(wanted.shape).double()
    error = (found - wanted).abs()
    slack = EPSILON.get(dtype, 2.0**-16) * (wanted.abs() if bound is None else bound)
    assert (error <= slack + 1e-7).all(), float((error - slack).max())


def _tensors(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(columns)
    x = torch.randn(rows, columns, generator=rng) * 3
    dy = torch.randn(rows, columns, generator=rng)
    return x.to(dtype), dy.to(dtype), torch.rand(rows, generator=rng)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bfloat16", "float16"))
@pytest.mark.parametrize("columns", COLUMNS)
def test_whole_tensors(library: ctypes.CDLL, columns: int, dtype: torch.dtype) -> None:
    """One long row, whatever its shape: 3 rows of an odd number have a tail in their midst."""
    x, dy, _ = _tensors(3, columns, dtype)
    suffix = str(dtype).removeprefix("torch.")
    wide = x.double().requires_grad_()
    y = torch.nn.functional.silu(wide)
    y.backward(dy.double())
    assert wide.grad is not None
    for direction, operands, wanted in (
        ("forward", [x], y.detach()),
        ("backward", [dy, x], wide.grad),
    ):
        result = Buffer(2 * x.numel(), "cpu")
        _run(library, f"pointwise_silu_{direction}_{suffix}", operands, [result], columns)
        _close(result, wanted, dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bfloat16", "float16"))
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("op", ("swiglu", "scaled_swiglu"))
def test_halves(library: ctypes.CDLL, op: str, columns: int, dtype: torch.dtype) -> None:
    x, _, scales = _tensors(11, 2 * columns, dtype)
    _, dy, _ = _tensors(11, columns, dtype)
    suffix = str(dtype).removeprefix("torch.")
    scaled = op == "scaled_swiglu"
    wide = x.double().requires_grad_()
    gate, up = wide.chunk(2, dim=1)
    act = torch.nn.functional.silu(gate) * up
    y = act * scales.double()[:, None] if scaled else act
    y.backward(dy.double())
    assert wide.grad is not None
    result, dx, dscales = (Buffer(n, "cpu") for n in (2 * dy.numel(), 2 * x.numel(), 4 * 11))
    extra = [scales] if scaled else []
    _run(library, f"pointwise_{op}_forward_{suffix}", [x, x, *extra], [result], columns)
    _close(result, y.detach(), dtype)
    sums = [dscales] if scaled else []
    name = f"pointwise_{op}_backward_{suffix}"
    _run(library, name, [dy, x, x, *extra], [dx, dx, *sums], columns)
    _close(dx, wide.grad, dtype)
    if scaled:
        terms = dy.double() * act.detach()
        _close(dscales, terms.sum(1), torch.float32, terms.abs().sum(1))
        _run(library, name, [dy, x, x, *extra], [None, None, dscales], columns)
        _close(dscales, terms.sum(1), torch.float32, terms.abs().sum(1))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bfloat16", "float16"))
@pytest.mark.parametrize("columns", (32, 512, 1056))
@pytest.mark.parametrize("op", ("swiglu", "scaled_swiglu"))
def test_halves_that_alternate(
    library: ctypes.CDLL, op: str, columns: int, dtype: torch.dtype
) -> None:
    """The bits of whole halves, in other places."""
    x, _, scales = _tensors(11, 2 * columns, dtype)
    _, dy, _ = _tensors(11, columns, dtype)
    suffix = str(dtype).removeprefix("torch.")
    scaled = op == "scaled_swiglu"
    extra = [scales] if scaled else []

    def alternate(t: Tensor) -> Tensor:
        return t.unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1).contiguous()

    found = []
    for word, given in (("", x), ("interleaved_32_", alternate(x))):
        y, dx, dscales = (Buffer(n, "cpu") for n in (2 * dy.numel(), 2 * x.numel(), 4 * 11))
        sums = [dscales] if scaled else []
        _run(
            library, f"pointwise_{op}_{word}forward_{suffix}", [given, given, *extra], [y], columns
        )
        name = f"pointwise_{op}_{word}backward_{suffix}"
        _run(library, name, [dy, given, given, *extra], [dx, dx, *sums], columns)
        found.append((y.bytes(), dx.bytes().view(dtype).reshape(x.shape), dscales.bytes()))
    (y, dx, dscales), (other, dother, dothers) = found
    assert torch.equal(y, other) and torch.equal(dscales, dothers)
    assert torch.equal(alternate(dx).view(torch.int16), dother.view(torch.int16))


# Of 11 rows: some, none, all, more than there are, in more groups than a warp has lanes.
SPLITS = ([2, 0, 5], [0, 0], [4, 7], [-3, 9, 2**62], [0] * 70 + [1] * 6)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("columns", (7, 8, 520, 1032))
def test_rows_past_the_groups(library: ctypes.CDLL, columns: int, splits: list[int]) -> None:
    """Zero, whatever they hold, and the others as the kernel without groups has them."""
    sizes = torch.tensor(splits)
    used = min(sum(max(size, 0) for size in splits), 11)
    x, dy, scales = _tensors(11, columns, torch.bfloat16)
    wide, *_ = _tensors(11, 2 * columns, torch.bfloat16)
    for tensor in (x, wide, dy, scales):
        tensor[used:] = float("nan")
    dx = Buffer(2 * x.numel(), "cpu")
    _run(library, "grouped_pointwise_qgelu_backward_bfloat16", [dy, x], [dx], columns, sizes)
    leaf = x.double().requires_grad_()
    (leaf * torch.sigmoid(1.702 * leaf)).backward(dy.double())
    assert leaf.grad is not None
    leaf.grad[used:] = 0.0
    _close(dx, leaf.grad, torch.bfloat16)
    operands, found = [dy, wide, wide, scales], []
    for word in ("", "grouped_"):
        dx, sums = Buffer(2 * wide.numel(), "cpu"), Buffer(4 * 11, "cpu")
        name = f"{word}pointwise_scaled_swiglu_backward_bfloat16"
        _run(library, name, operands, [dx, dx, sums], columns, sizes if word else None)
        halves = dx.bytes().view(torch.bfloat16).reshape(wide.shape)
        found.append((halves, sums.bytes().view(torch.float32)))
    for plain, grouped in zip(*found, strict=True):
        assert torch.equal(plain[:used], grouped[:used])
        assert not grouped[used:].any()


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_rows_that_are_left(library: ctypes.CDLL, splits: list[int]) -> None:
    """They have the bytes that they had, and the others those of a kernel that clears."""
    sizes, columns = torch.tensor(splits), 520
    used = min(sum(max(size, 0) for size in splits), 11)
    x, *_ = _tensors(11, 2 * columns, torch.bfloat16)
    _, dy, scales = _tensors(11, columns, torch.bfloat16)
    found = []
    for clears in (True, False):
        dx, sums = Buffer(2 * x.numel(), "cpu"), Buffer(4 * 11, "cpu")
        name = "grouped_pointwise_scaled_swiglu_backward_bfloat16"
        _run(library, name, [dy, x, x, scales], [dx, dx, sums], columns, sizes, clears)
        found.append((dx.bytes().reshape(11, -1), sums.bytes().reshape(11, -1)))
    for cleared, left in zip(*found, strict=True):
        assert torch.equal(cleared[:used], left[:used])
        assert (left[used:] == UNWRITTEN).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bfloat16", "float16"))
@pytest.mark.parametrize("columns", (7, 512, 1032))
def test_sums(library: ctypes.CDLL, columns: int, dtype: torch.dtype) -> None:
    """In fp32 from left to right, rounded once: the same bits in any order of the compiler's."""
    parts = [_tensors(5, columns + i, dtype)[0][:, :columns].contiguous() for i in range(3)]
    parts[1] *= 2.0**-9  # lost, were it rounded before the third is added
    suffix = str(dtype).removeprefix("torch.")
    out = Buffer(2 * parts[0].numel(), "cpu")
    _run(library, f"pointwise_add_3_{suffix}", parts, [out], columns)
    wanted = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
    assert torch.equal(out.bytes().view(dtype).reshape(wanted.shape), wanted)
    wide = [part.float() for part in parts[:2]]
    out = Buffer(4 * wide[0].numel(), "cpu")
    name = f"pointwise_add_2_float32_float32_float32_{suffix}"
    _run(library, name, wide, [out], columns)
    assert torch.equal(out.bytes().view(torch.float32).reshape(wanted.shape), wide[0] + wide[1])


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_sums_past_the_groups(library: ctypes.CDLL, splits: list[int]) -> None:
    sizes, columns = torch.tensor(splits), 520
    used = min(sum(max(size, 0) for size in splits), 11)
    a, b, _ = _tensors(11, columns, torch.bfloat16)
    a[used:] = float("nan")
    out = Buffer(2 * a.numel(), "cpu")
    _run(library, "grouped_pointwise_add_2_bfloat16", [a, b], [out], columns, sizes)
    found = out.bytes().view(torch.bfloat16).reshape(a.shape)
    assert torch.equal(found[:used], (a.float() + b.float()).bfloat16()[:used])
    assert not found[used:].any()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bfloat16", "float16"))
@pytest.mark.parametrize("columns", (7, 512, 1032))
def test_several_results(library: ctypes.CDLL, columns: int, dtype: torch.dtype) -> None:
    """Two results of one pass, and terms of what all rows share; each may be left out."""
    x, dopen, _ = _tensors(5, columns, dtype)
    _, dclosed, _ = _tensors(5, columns + 1, dtype)
    dclosed = dclosed[:, :columns].contiguous()
    scale = (_tensors(1, columns + 2, dtype)[1][0, :columns]).contiguous()
    suffix = str(dtype).removeprefix("torch.")
    leaves = x.double().requires_grad_(), scale.double().expand_as(x).clone().requires_grad_()
    product = leaves[0] * leaves[1]
    wanted = product, leaves[0] * torch.sigmoid(product)
    gradients = torch.autograd.grad(wanted, leaves, (dopen.double(), dclosed.double()))
    size = 2 * x.numel()
    found = Buffer(size, "cpu"), Buffer(size, "cpu")
    _run(library, f"pointwise_fork_forward_{suffix}", [x, scale], [*found], columns)
    for buffer, each in zip(found, wanted, strict=True):
        _close(buffer, each.detach(), dtype)
    operands = [dopen, dclosed, x, scale]
    found = Buffer(size, "cpu"), Buffer(size, "cpu")
    _run(library, f"pointwise_fork_backward_{suffix}", operands, [*found], columns)
    sizes = [a.abs() * b.abs() for a, b in ((scale, dopen), (x, dopen))]
    for buffer, each, first in zip(found, gradients, sizes, strict=True):
        _close(buffer, each, dtype, 4 * (first.double() + dclosed.double().abs() * (1 + x.abs())))
    alone = Buffer(size, "cpu")
    _run(library, f"pointwise_fork_backward_{suffix}", operands, [None, alone], columns)
    assert torch.equal(alone.bytes(), found[1].bytes())


def test_terms_of_a_scale(library: ctypes.CDLL) -> None:
    x, dy, _ = _tensors(5, 520, torch.bfloat16)
    scale = dy[0].contiguous()
    dx, terms = Buffer(2 * x.numel(), "cpu"), Buffer(2 * x.numel(), "cpu")
    name = "pointwise_scale_columns_without_dshift_backward_bfloat16"
    _run(library, name, [dy, x, scale], [dx, terms], 520)
    _close(dx, dy.double() * scale.double(), torch.bfloat16)
    _close(terms, dy.double() * x.double(), torch.bfloat16)
