"""What each recipe costs in accuracy: writes the tables of errors in docs/numerics.md.

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
BEGIN = "<!-- errors: written by benchmarks/numerics.py -->"
END = "<!-- end of errors -->"
SPLITS = (700, 0, 333, 400)  # ragged, one group empty, rows left over


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


def tables(specs: SpecSet, bundle: ModuleType) -> str:
    """The tables of errors."""
    lines = [f"{TOKENS} tokens in {GROUPS} ragged groups, every width {WIDTH}.", ""]
    lines += ["| recipe | | y | dx | dweight |", "|---|---|---|---|---|"]
    mlp = ["| recipe | y | dx | dfc1_weight | dfc2_weight |", "|---|---|---|---|---|"]
    for name, recipe in specs.recipes.items():
        row = " | ".join(f"{value:.2e}" for value in linear_errors(bundle, name))
        lines.append(f"| `{name}` | {recipe.summary} | {row} |")
        row = " | ".join(f"{value:.2e}" for value in mlp_errors(bundle, name))
        mlp.append(f"| `{name}` | {row} |")
    return "\n".join([*lines, "", "The whole expert MLP:", "", *mlp])


def main() -> None:
    """Measure and write."""
    page = ROOT / "docs" / "numerics.md"
    head, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    if not tail:
        sys.exit(f"{page} has no lines {BEGIN} and {END} for the tables")
    text = tables(load([builtin_specs()]), load_bundle(BUNDLE))
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
