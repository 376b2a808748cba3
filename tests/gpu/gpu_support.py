"""What the GPU tests share: cases, random operands, exact results, comparisons, kernel names.

Under `FUSEGEN_TEST_DEVICE=cpu` everything lies on the CPU and the costly cases are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from bundles import DEVICE, load_cell
from torch import Tensor

cuda: Any = torch.cuda  # its classes carry no types
DTYPES = (torch.bfloat16, torch.float16)

# One rounding to the result's type costs half a unit in the last place of every element, 2^-9 and
# 2^-12 at most; the rest is room for sums in fp32.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
# Chains round between their GEMMs too.
CHAIN_TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4}

GUARD = 4096  # elements of NaN on both sides of every operand

# Tokens, choices, experts, hidden and intermediate: every tile of kernels of whole layers has some.
LAYERS = (
    (310, 4, 8, 264, 136),
    (1030, 4, 8, 264, 136),
    (2100, 4, 8, 520, 200),
    (2100, 4, 8, 520, 648),
)


@dataclass(frozen=True)
class Case:
    """Sizes of one grouped GEMM; splits as given, not clamped."""

    name: str
    tokens: int
    k: int
    n: int
    splits: tuple[int, ...]

    @property
    def groups(self) -> int:
        return len(self.splits)

    @property
    def work(self) -> int:
        """Multiply-adds of one GEMM."""
        return self.tokens * self.k * self.n


def dirichlet(groups: int, tokens: int, concentration: float = 8.0, seed: int = 0) -> list[int]:
    """Ragged group sizes that add up to `tokens`, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    # A Dirichlet draw is a normalised row of gamma draws; torch has no seeded gamma on its own.
    alpha = torch.full((groups,), concentration, dtype=torch.float64)
    draws = torch._standard_gamma(alpha, generator=generator)
    sizes = (draws / draws.sum() * tokens).floor().long()
    sizes[int(sizes.argmax())] += tokens - sizes.sum()
    return [int(size) for size in sizes]


def ragged(name: str, groups: int, tokens: int, k: int, n: int, concentration: float = 1.0) -> Case:
    """A case whose groups fill all tokens."""
    return Case(name, tokens, k, n, tuple(dirichlet(groups, tokens, concentration)))


def bounds(splits: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    """First and last row of every group: negative sizes count as 0, offsets end at `tokens`."""
    found, start = [], 0
    for size in splits:
        end = min(start + max(size, 0), tokens)
        found.append((start, end))
        start = end
    return found


def grouped_cases() -> list[Case]:
    """Ragged, empty, single, short and out-of-range groups; odd widths."""
    largest = 2**63 - 1
    cases = [
        *(ragged(f"E{groups}", groups, 2111, 136, 200) for groups in (1, 2, 7, 64, 128, 512)),
        *(ragged(f"T{tokens}", 3, tokens, 136, 200) for tokens in (1, 7, 4096)),
        Case("T0", 0, 136, 200, (0, 0, 0)),
        Case("giant", 3000, 200, 520, (0, 0, 3000, 0)),
        Case("first", 300, 256, 256, (300, *[0] * 40)),
        Case("all_empty", 300, 264, 392, (0,) * 5),
        Case("tiny", 66, 72, 264, tuple(group % 4 for group in range(44))),
        Case("ones", 512, 72, 264, (1,) * 512),
        Case("tile_edges", 1280, 264, 264, (127, 128, 129, 63, 64, 65, 1, 255, 256, 192)),
        Case("short", 1500, 264, 392, (300, 0, 111, 7, 482)),
        Case("negative", 900, 264, 136, (100, -5, 300, -(2**62), 200, 0, -1, 77)),
        Case("oversized", 900, 264, 136, (100, 50, 2**62, 2**62, largest, 5)),
        Case("all_oversized", 900, 136, 136, (largest,) * 70),
        ragged("big", 40, 20000, 1032, 1544),
    ]
    widths = (8, 24, 72, 136, 200, 1032)
    cases += [
        ragged(f"K{k}N{n}", 6, 700, k, n) for k, n in zip(widths, reversed(widths), strict=True)
    ]
    cases += [ragged(f"square{width}", 5, 600, width, width) for width in widths]
    return [case for case in cases if DEVICE != "cpu" or case.work < 3e8]


# ---- operands


def randn(shape: Sequence[int], dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Normal values on the device of the tests; the same for the same seed."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(dtype)


def guarded(tensor: Tensor) -> Tensor:
    """The same values between stretches of NaN, so that a read past them shows in the result."""
    buffer = tensor.new_full((tensor.numel() + 2 * GUARD,), float("nan"))
    inner = buffer[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    inner.copy_(tensor)
    return inner


def misaligned(tensor: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16 bytes."""
    buffer = tensor.new_empty(tensor.numel() + 1)
    buffer[1:].copy_(tensor.flatten())
    return buffer[1:].view(tensor.shape)


def strided(tensor: Tensor) -> Tensor:
    """The same values, no two of them adjacent."""
    return torch.stack((tensor, torch.full_like(tensor, 7)), dim=-1)[..., 0]


def splits_tensor(splits: Sequence[int]) -> Tensor:
    return torch.tensor(list(splits), dtype=torch.int64, device=DEVICE)


Operands = dict[str, Tensor]


def grouped_linear_operands(case: Case, dtype: torch.dtype, bias: bool = True) -> Operands:
    """Arguments of grouped_linear by name, with NaN around every floating one."""
    operands = {
        "x": randn((case.tokens, case.k), dtype, 1),
        "weight": randn((case.groups, case.n, case.k), dtype, 2, case.k**-0.5),
    }
    if bias:
        operands["bias"] = randn((case.groups, case.n), dtype, 3, 4.0)
    return {name: guarded(value) for name, value in operands.items()} | {
        "split_sizes": splits_tensor(case.splits)
    }


def grouped_mlp_operands(case: Case, dtype: torch.dtype, bias: bool = True) -> Operands:
    """Arguments of grouped_mlp by name: hidden = k, intermediate = n."""
    hidden, inner, groups = case.k, case.n, case.groups
    operands = {
        "x": randn((case.tokens, hidden), dtype, 1),
        "fc1_weight": randn((groups, 2 * inner, hidden), dtype, 2, hidden**-0.5),
        "fc2_weight": randn((groups, hidden, inner), dtype, 3, inner**-0.5),
        "probs": randn((case.tokens,), torch.float32, 4).sigmoid(),
    }
    if bias:
        operands["fc1_bias"] = randn((groups, 2 * inner), dtype, 5)
        operands["fc2_bias"] = randn((groups, hidden), dtype, 6)
    return {name: guarded(value) for name, value in operands.items()} | {
        "split_sizes": splits_tensor(case.splits)
    }


# ---- calls


def floating(operands: Operands) -> list[str]:
    """Names of what a gradient can be asked for."""
    return [name for name, value in operands.items() if value.is_floating_point()]


def forward_backward(
    function: Callable[..., Tensor], operands: Operands, dy: Tensor
) -> dict[str, Tensor]:
    """The result as "y" and every gradient by its operand's name."""
    names = floating(operands)
    leaves = {name: operands[name].detach().requires_grad_() for name in names}
    y = function(**{**operands, **leaves})
    gradients = torch.autograd.grad(y, list(leaves.values()), dy, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(names, gradients, strict=True))}


def function_of(bundle: ModuleType, name: str) -> Callable[..., Tensor]:
    """The functional form of a module under recipe bf16."""
    function: Callable[..., Tensor] = getattr(load_cell(bundle, f"{name}__bf16"), name)
    return function


def op_of(bundle: ModuleType, name: str) -> Callable[..., Any]:
    """An op of the bundle, such as grouped_linear__bf16_backward; its cell is loaded first."""
    load_cell(bundle, name.rpartition("_")[0])
    namespace = load_cell(bundle, "_library").NAMESPACE
    overload: Callable[..., Any] = getattr(getattr(torch.ops, namespace), name).default
    return overload


def has_op(bundle: ModuleType, name: str) -> bool:
    """Whether the bundle has such an op: directions that collectives cut are several."""
    load_cell(bundle, name.rpartition("_")[0])
    return hasattr(getattr(torch.ops, load_cell(bundle, "_library").NAMESPACE), name)


# ---- exact results


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x weight^T + bias."""
    y = x @ weight.transpose(-1, -2)
    return y if bias is None else y + bias


def exact_grouped_linear(
    x: Tensor, weight: Tensor, split_sizes: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The GEMM's result, group by group; rows past the groups are zero."""
    rows = bounds(split_sizes.tolist(), x.shape[0])
    used = rows[-1][1]
    sizes = [*(end - start for start, end in rows), x.shape[0] - used]
    *parts, rest = torch.split_with_sizes(x, sizes)
    biases = [None] * len(rows) if bias is None else bias.unbind()
    y = [
        exact_linear(part, weight_g, bias_g)
        for part, weight_g, bias_g in zip(parts, weight.unbind(), biases, strict=True)
        if len(part)
    ]
    return torch.cat([*y, rest.new_zeros(len(rest), weight.shape[1])])


def exact_grouped_mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    split_sizes: Tensor,
    probs: Tensor,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
) -> Tensor:
    """fc2(silu(gate) * up * probs), gate and up the halves of fc1(x)."""
    a = _swiglu(exact_grouped_linear(x, fc1_weight, split_sizes, fc1_bias)) * probs[:, None]
    return exact_grouped_linear(a, fc2_weight, split_sizes, fc2_bias)


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def summands_of_probs(operands: Operands, dy: Tensor) -> Tensor:
    """What the gradient of grouped_mlp's probs adds up per token, [T, F] in float64.

    Its terms are rounded one by one, so their norm is what an error stays in proportion to. The sum
    is as large only where little cancels; that of one token may be 70 times smaller.
    """
    wide = {key: value.double() for key, value in operands.items() if key != "split_sizes"}
    splits = operands["split_sizes"]
    h = exact_grouped_linear(wide["x"], wide["fc1_weight"], splits, wide.get("fc1_bias"))
    da = exact_grouped_linear(dy.double(), wide["fc2_weight"].transpose(1, 2), splits)
    return _swiglu(h) * da


EXACT: dict[str, Callable[..., Tensor]] = {
    "linear": exact_linear,
    "grouped_linear": exact_grouped_linear,
    "grouped_mlp": exact_grouped_mlp,
}


def exact(name: str, operands: Operands, dy: Tensor) -> dict[str, Tensor]:
    """Result and gradients in float64, by autograd of the formulas above."""
    wide = {
        key: value.double() if value.is_floating_point() else value
        for key, value in operands.items()
    }
    names = floating(wide)
    leaves = {key: wide[key].detach().requires_grad_() for key in names}
    y = EXACT[name](**{**wide, **leaves})
    if not y.requires_grad:  # no group has a row, so nothing was read
        return {"y": y, **{key: torch.zeros_like(wide[key]) for key in names}}
    gradients = torch.autograd.grad(y, list(leaves.values()), dy.double(), materialize_grads=True)
    return {"y": y.detach(), **dict(zip(names, gradients, strict=True))}


# ---- comparisons


def relative_error(got: Tensor, expected: Tensor, scale: float | None = None) -> float:
    """Frobenius error relative to `scale`, or to the expected values; infinite where anything is
    not finite or the shapes differ.
    """
    if got.shape != expected.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    scale = float(expected.norm()) if scale is None else scale
    error = float((got.double() - expected).norm())
    return error / scale if scale > 0 else error


def worst_row(got: Tensor, expected: Tensor) -> float:
    """The largest relative error of any row of the last dimension, each by itself.

    An error in one row of thousands would not show in the whole. Rounding to a subnormal number,
    whose step does not shrink with it, is allowed for.
    """
    if got.shape != expected.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    if got.numel() == 0:
        return 0.0
    missed, wanted = (got.double() - expected).norm(dim=-1), expected.norm(dim=-1)
    step = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    missed = (missed - step / 2 * got.shape[-1] ** 0.5).clamp(min=0)
    return float(torch.where(wanted > 0, missed / wanted, missed).max())


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit, NaN included."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        same = torch.equal(got[name].contiguous().view(torch.uint8), bytes_of(value))
        assert same, f"{name} differs"


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bits, for comparisons that know NaN and -0."""
    return torch.atleast_1d(tensor.contiguous()).view(torch.uint8)


def first_line(call: Callable[[], object]) -> str:
    """The first line of the RuntimeError that the call raises; empty if it raises none."""
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""
