"""An earlier revision's bundle beside this one's: equal bits, and the ratio of their times.

Of every cell that both have, modules with the same parameters compute the same steps, so that all
between the caller and the kernels is compared.  The earlier bundle is made by `make before
REVISION=...`; its ops have a namespace of their own, and both lie in one process.

    fprop           without gradients
    dgrad, wgrad    backward of one forward, for x alone or for the parameters alone
    step            forward and backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import pointwise
import shapes
import torch
from common import OURS, Case, Outcome
from torch import Tensor, nn

BEFORE = common.ROOT / "build" / "before"
REVISION = BEFORE / "REVISION"
MAIN_GRAD = "main_grad"
LINEAR_SIZES = ((8192, 8192, 8192), (16384, 4096, 14336))
QUANTIZED = (16384, 8192)
QUICK_ROWS, QUICK_COLUMNS = 192, 256

Call = Callable[[], Any]
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Layer:
    """One module on inputs of one shape.

    Attributes:
        name: of the module's spec.
        shape: what a case is called after.
        sizes: arguments of the class.
        inputs: what it takes; the first one is x.
    """

    name: str
    shape: str
    sizes: tuple[int, ...]
    inputs: Inputs


def _experts(expert: shapes.Expert) -> Iterator[Layer]:
    splits = shapes.splits(expert.groups, expert.tokens)
    probs = torch.rand(expert.tokens, device=common.DEVICE)
    for each in expert.gemms():
        x = common.normal(each.tokens, each.k)
        yield Layer("grouped_linear", each.name, (each.groups, each.k, each.n), (x, splits))
    x = common.normal(expert.tokens, expert.hidden)
    sizes = (expert.groups, expert.hidden, expert.intermediate)
    yield Layer("grouped_mlp", expert.name, sizes, (x, splits, probs))


def _dense(tokens: int, n: int, k: int) -> Iterator[Layer]:
    yield Layer("linear", f"{tokens}x{n}x{k}", (k, n), (common.normal(tokens, k),))


def _rows(rows: int, columns: int) -> Iterator[Layer]:
    """Modules without parameters."""
    yield Layer("quantize", f"{rows}x{columns}", (), (common.normal(rows, columns),))
    for each in pointwise.ACTIVATIONS:
        x = common.normal(rows, columns * (2 if each.gated else 1))
        scales = [torch.rand(rows, device=common.DEVICE)] if any(each.row_bytes) else []
        yield Layer(each.name, f"{rows}x{columns}", (), (x, *scales))


def layers(*, quick: bool) -> Iterator[Callable[[], Iterator[Layer]]]:
    """What makes the layers that are measured, a few at a time: their inputs are large."""
    for expert in [shapes.SMALL] if quick else shapes.EXPERTS:
        yield partial(_experts, expert)
    for sizes in [(128, 128, 256)] if quick else LINEAR_SIZES:
        yield partial(_dense, *sizes)
    yield partial(_rows, *((QUICK_ROWS, QUICK_COLUMNS) if quick else QUANTIZED))


def _class_of(package: Any, cell: str) -> type[nn.Module]:
    """The one module class of a cell."""
    loaded = common.bundles.load_cell(package, cell)
    found = [
        each
        for each in vars(loaded).values()
        if isinstance(each, type)
        and issubclass(each, nn.Module)
        and each.__module__ == loaded.__name__
        and hasattr(each, "describe")
    ]
    (module,) = found
    return module


def _module(package: Any, cell: str, layer: Layer) -> nn.Module:
    """Random parameters, the same for all revisions; buffers for gradients where it wants them."""
    torch.manual_seed(3)
    device = {"device": common.DEVICE} if layer.sizes else {}
    module = _class_of(package, cell)(*layer.sizes, **device).to(common.DEVICE)  # state, too
    for parameter in module.parameters() if MAIN_GRAD in cell else ():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
    refresh = getattr(module, "refresh_weights", None)
    if refresh is not None:
        refresh()
    return module


def _fprop(module: nn.Module, inputs: Inputs, dy: Tensor) -> Call:
    def call() -> Any:
        with torch.no_grad():
            return module(*inputs)

    return call


def _gradients(y: Tensor, leaves: Sequence[Tensor], dy: Tensor) -> Call:
    return partial(torch.autograd.grad, y, leaves, dy, retain_graph=True, allow_unused=True)


def _dgrad(module: nn.Module, inputs: Inputs, dy: Tensor) -> Call:
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    x = inputs[0].detach().requires_grad_()
    return _gradients(module(x, *inputs[1:]), [x], dy)


def _wgrad(module: nn.Module, inputs: Inputs, dy: Tensor) -> Call:
    return _gradients(module(*inputs), list(module.parameters()), dy)


def _step(module: nn.Module, inputs: Inputs, dy: Tensor) -> Call:
    x = inputs[0].detach().requires_grad_()
    leaves = [x, *module.parameters()]
    return lambda: torch.autograd.grad(module(x, *inputs[1:]), leaves, dy, allow_unused=True)


PARTS: Mapping[str, Callable[[nn.Module, Inputs, Tensor], Call]] = {
    "fprop": _fprop,
    "dgrad": _dgrad,
    "wgrad": _wgrad,
    "step": _step,
}


def _parts_of(layer: Layer) -> tuple[str, ...]:
    """An MLP's gradients are measured as one; that of `quantize` is its dy."""
    parts = {"grouped_mlp": ("fprop", "step"), "quantize": ("fprop",)}
    return parts.get(layer.name, ("fprop", "dgrad", "wgrad") if layer.sizes else ("fprop", "dgrad"))


def _results(module: nn.Module, call: Call) -> list[Tensor]:
    """What a call gives, and what it leaves in buffers and in gradients of parameters."""
    given = call()
    tensors = [given] if isinstance(given, Tensor) else [each for each in given if each is not None]
    kept = [value for _, value in sorted(module.state_dict().items())]
    grads = (getattr(each, MAIN_GRAD, None) for each in module.parameters())
    return [*tensors, *kept, *(each for each in grads if each is not None)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _require_equal(case: str, earlier: Sequence[Tensor], now: Sequence[Tensor]) -> None:
    """Refuse to time what computes something else.

    Raises:
        SystemExit: a bit differs.
    """
    if len(earlier) != len(now):
        raise SystemExit(f"{case}: {len(now)} results, of the earlier revision {len(earlier)}")
    for index, (old, new) in enumerate(zip(earlier, now, strict=True)):
        if old.shape != new.shape or not torch.equal(_bits(old), _bits(new)):
            raise SystemExit(f"{case}: result {index} has other bits than the earlier revision's")


def _measure(
    case: str, cell: str, layer: Layer, part: str, packages: Mapping[str, Any]
) -> list[Outcome]:
    """Check that both give the same bits, twice, so that kept state takes part; then time them."""
    calls, results = {}, []
    for name, package in packages.items():
        module = _module(package, cell, layer)
        with torch.no_grad():
            y = module(*layer.inputs)
        torch.manual_seed(5)
        call = PARTS[part](module, layer.inputs, torch.randn_like(y))
        results.append([*_results(module, call), *_results(module, call)])
        calls[name] = call
    _require_equal(case, *results)
    results.clear()
    samples = common.compare({name: partial(_again, call) for name, call in calls.items()})
    return [common.row(case, name, "ms", times) for name, times in samples.items()]


def _again(call: Call, _: int) -> Any:
    return call()


def earlier(package: Any) -> dict[str, Any]:
    """An earlier revision's bundle of a package's architecture by its name, where there is one."""
    folder = BEFORE / Path(package.__path__[0]).name
    if not (folder / "__init__.py").exists():
        return {}
    name = f"revision {REVISION.read_text('utf-8').strip()}"
    return {name: common.bundles.load_bundle(folder, "bundle_before")}


def revisions(*, quick: bool = False) -> Iterator[Case]:
    """Every part of every cell that both revisions have.

    Raises:
        SystemExit: there is no bundle of an earlier revision.
    """
    package = common.bundle()
    ours = Path(package.__path__[0])
    packages = {**earlier(package), OURS: package}
    folder = BEFORE / ours.name
    if len(packages) == 1:
        raise SystemExit(
            f"no bundle in build/before/{ours.name}; make one: make before REVISION=.."
        )
    for made in layers(quick=quick):
        for layer in made():
            for cell in common.bundles.cells_of(ours, layer.name, choices=True):
                if cell == "quantize__bf16" or not (folder / f"{cell}.py").exists():
                    continue
                for part in _parts_of(layer):
                    case = f"{cell.replace('__', ' ')}, {layer.shape} {part}"
                    yield Case(case, partial(_measure, case, cell, layer, part, packages))
        torch.cuda.empty_cache()
