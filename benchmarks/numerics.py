"""What each recipe costs in accuracy: writes docs/numerics.md.

    python benchmarks/numerics.py            # needs no GPU: the reference is normative

Relative Frobenius errors of a grouped linear layer and of an expert MLP against the unquantised
result in float64 of the same bfloat16 inputs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from fusegen.checks.load import load
from fusegen.publish.paths import builtin_specs
from fusegen.spec.load import SpecSet

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / "generated" / "cpu"
TOKENS, GROUPS, WIDTH = 1500, 4, 512
SPLITS = (700, 0, 333, 400)  # ragged, one group empty, rows left over

INTRODUCTION = """\
# What a recipe costs

Written by `python benchmarks/numerics.py`.  Relative Frobenius errors against the unquantised
result in float64 of the same bfloat16 inputs, of the reference that every kernel must match;
{tokens} tokens in {groups} ragged groups, every width {width}.  Inputs: normal values with a few
channels ten times larger, as activations have; weights and gradients normal.

bfloat16 itself costs about 1.7e-3, one rounding of the result; the quantised recipes add what their
formats cannot hold.  A gradient pays for both of its operands.
"""

ENDS = """\
# Where numbers end

**Saturated gradients.**  Slopes of `sigmoid` and `tanh` are not computed as a difference from one,
which is 0 in fp32 from 17 and 9 on: they are `e / (1 + e)^2` with `e = exp(-|x|)`, and
`4 e / (1 + e)^2` with `e = exp(-2 |x|)`.  Where an activation saturates, beyond 4, every gradient
is right to 2^-16 of itself before it is rounded to 16 bits; nearer to 0, where slopes change their
sign, to a few units of fp32 in the largest of its terms.

**Limits of one operand are taken.**  Where one factor of an activation vanishes and another grows,
both functions of the same operand, the product is its limit: `silu`, `gelu` and
`x * tanh(softplus(x))` (mish) give 0 at -inf, and so do their gradients.  PyTorch computes
`-inf * 0` there and gives NaN.  Across operands the arithmetic is IEEE's: 0 of a gate times
infinity of the other half is NaN, and so is the result of NaN.

**NVFP4's transform** multiplies by a quarter before it adds, which is exact, so its sums overflow
only where the result leaves bfloat16, which takes elements of 2^126 and more.  That result is
infinite, and with it the amax of its group: scale 1, and a gradient of the weight that is not
finite, as after any other overflow.

**Emulated GEMMs decode to bfloat16.**  A code times a power of two is exact there, and so is
E2M1 times a scale in E4M3.  Other fp32 scales, of blocks, rows or tensors, round each element once,
1.5e-3 rms: a result in bfloat16 is within 3e-3 of the exact result of the copies, where its own
rounding takes 1.7e-3, and one in fp32 within 2.5e-3.  Sums are kept in fp32 whatever less a recipe
allows.  The reference multiplies the copies as they are, without that rounding.

**Gradients of several readers** are added by one step: in fp32, from left to right, the caller's
first where the module returns the tensor, then those of the ops that read it, the last one first.
The sum is rounded once, to the type of the tensor; each part was rounded before, as the gradient of
its reader.  Up to eight parts are one sum.

**Operands that all rows share** get a term of each element, rounded to 16 bits as any gradient is,
and the sum of these over all rows: in fp32, in the fixed order of every such sum, rounded
once.  A term that is the incoming gradient itself is not written again.
"""


def load_bundle(folder: Path) -> ModuleType:
    """The committed CPU bundle, by path."""
    spec = importlib.util.spec_from_file_location(
        "numerics_bundle", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["numerics_bundle"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["numerics_bundle"])
    return sys.modules["numerics_bundle"]


def activations(tokens: int, width: int) -> Tensor:
    """Normal values; every 64th channel is ten times larger."""
    scale = torch.ones(width)
    scale[::64] = 10.0
    return (torch.randn(tokens, width) * scale).bfloat16()


def relative(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius error in float64."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def errors(module: ModuleType, layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> list[float]:
    """Errors of the result and of the gradients of input and parameters."""
    exact_forward = getattr(module.reference, "exact", None) or module.reference.forward
    x = inputs[0].clone().requires_grad_()
    states = layer.state_dict()
    if "rng_state" in states:
        states["rng_state"].copy_(torch.tensor([7, 0]))
    for _ in range(2 if any("amax" in name for name in states) else 1):
        y = layer(x, *inputs[1:])  # a history needs a step before its scale means anything
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
        leaves = [x, *layer.parameters()]
        gradients = torch.autograd.grad(y, leaves, dy)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    splits, rest = inputs[1], [value.double() for value in inputs[2:]]
    biases = [None] * (len(wide) - 1)
    flags = [] if hasattr(module.reference, "exact") else [True] * (5 if rest else 0)
    result = exact_forward(*wide, splits, *rest, *biases, *flags)
    exact = result[0] if isinstance(result, tuple) else result
    expected = torch.autograd.grad(exact, wide, dy.double())
    return [
        relative(y.detach(), exact.detach()),
        *(relative(g, e) for g, e in zip(gradients, expected, strict=True)),
    ]


def linear_errors(bundle: ModuleType, recipe: str) -> list[float]:
    """fprop, dgrad, wgrad of a grouped linear layer."""
    module = importlib.import_module(f".grouped_linear__{recipe}", bundle.__name__)
    torch.manual_seed(0)
    layer = module.GroupedLinear(GROUPS, WIDTH, WIDTH)
    return errors(module, layer, (activations(TOKENS, WIDTH), torch.tensor(SPLITS)))


def mlp_errors(bundle: ModuleType, recipe: str) -> list[float]:
    """y, dx, dfc1, dfc2 of an expert MLP."""
    module = importlib.import_module(f".grouped_mlp__{recipe}", bundle.__name__)
    torch.manual_seed(0)
    layer = module.GroupedMLP(GROUPS, WIDTH, WIDTH)
    probs = torch.rand(TOKENS)
    return errors(module, layer, (activations(TOKENS, WIDTH), torch.tensor(SPLITS), probs))


def page(specs: SpecSet, bundle: ModuleType) -> str:
    """docs/numerics.md."""
    lines = [INTRODUCTION.format(tokens=TOKENS, groups=GROUPS, width=WIDTH)]
    lines += ["| recipe | | y | dx | dweight |", "|---|---|---|---|---|"]
    mlp = ["| recipe | y | dx | dfc1_weight | dfc2_weight |", "|---|---|---|---|---|"]
    for name, recipe in specs.recipes.items():
        row = " | ".join(f"{value:.2e}" for value in linear_errors(bundle, name))
        lines.append(f"| `{name}` | {recipe.summary} | {row} |")
        row = " | ".join(f"{value:.2e}" for value in mlp_errors(bundle, name))
        mlp.append(f"| `{name}` | {row} |")
    return "\n".join([*lines, "", "The whole expert MLP:", "", *mlp, "", ENDS])


def main() -> None:
    """Measure and write."""
    target = ROOT / "docs" / "numerics.md"
    text = page(load([builtin_specs()]), load_bundle(BUNDLE))
    target.write_text(text, encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
