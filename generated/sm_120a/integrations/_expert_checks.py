"""Whether a cell of this bundle computes what experts of a model do."""

from __future__ import annotations

import importlib
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .. import _library
from . import _experts
from ._expert_cell import Cell, Experts


def are_experts(layer: nn.Module) -> bool:
    """Whether transformers' decorator made the class dispatch."""
    return all(hasattr(layer, name) for name in ("is_concatenated", "is_transposed", "_apply_gate"))


def names_of(experts: Experts) -> tuple[str, str]:
    """Names of both weights."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def place(experts: Experts, cell: Cell) -> str:
    """What an error begins with."""
    return f"{cell.name}: {type(experts).__name__}"


_CHECKED: dict[str, WeakSet[Experts]] = {name: WeakSet() for name in _experts.CELLS}
"""Layers that each cell can run."""


@torch.compiler.assume_constant_result
def check(experts: Experts, cell: Cell) -> None:
    """Raise where the cell does not compute what the experts do; once for each layer.

    Compilers run it when they trace.
    """
    if experts in _CHECKED[cell.name]:
        return
    refusal = _refusal(experts, cell)
    if refusal:
        raise RuntimeError(f"{place(experts, cell)}: {refusal}{_fitting(experts)}")
    _CHECKED[cell.name].add(experts)


def _refusal(experts: Experts, cell: Cell) -> str:
    """What the cell cannot compute of these experts, for people; empty where it can."""
    if getattr(experts, "has_post_expert_norm", False):  # which older releases do not have
        return "expected no norm behind each expert, got one"
    if cell.gated != experts.has_gate:
        return f"expected an activation {_gate(cell.gated)}, got one {_gate(experts.has_gate)}"
    if experts.has_bias and not _takes_biases(cell):
        return (
            "expected experts without biases, got some, of which the router weights the last one; "
            "generate the module with: --option scaled_bias"
        )
    error = _activation_error(experts, cell)
    if not error <= _LARGEST_ERROR:  # or NaN
        return (
            f"expected the activation {cell.formula}, got one that differs from it by up to "
            f"{error:.2%}; a variant of the module's spec may have another one"
        )
    return ""


def _gate(gated: bool) -> str:
    return "with a gate" if gated else "without a gate"


def _takes_biases(cell: Cell) -> bool:
    """Whether it adds biases as transformers does: the last one weighted as what it is added to."""
    return cell.biased and cell.weighted_bias


def _fitting(experts: Experts) -> str:
    """The cells of this bundle that compute what experts do, for people."""
    fitting = [name for name, cell in _experts.CELLS.items() if not _refusal(experts, cell)]
    found = f"run them by {' or '.join(fitting)}" if fitting else "no cell of this bundle fits"
    return f"; {found}"


_LARGEST_ERROR = 1e-6
"""Of an activation in float64, of which some models compute parts in fp32."""


@torch.no_grad()
def _activation_error(experts: Experts, cell: Cell) -> float:
    """The largest difference of the two activations, relative to 1 + what the cell computes.

    Two columns of each half tell the order of the columns, too.
    """
    weight = getattr(experts, names_of(experts)[1])
    device = torch.device("cpu") if weight.is_meta else weight.device
    large = 2.0 ** torch.arange(4, 11, device=device, dtype=torch.float64)
    near = torch.linspace(-12.0, 12.0, 97, device=device, dtype=torch.float64)
    values = torch.cat([-large, near, large])
    columns = [values.roll(shift) for shift in ((0, 29, 53, 83) if cell.gated else (0, 29))]
    ours = torch.stack(columns, dim=1)
    reference = importlib.import_module(f"..reference.{cell.name}", __package__)
    scalars = (value for _, value in cell.given(experts))
    expected = getattr(reference, cell.activation)(ours, torch.ones_like(values).float(), *scalars)
    theirs = (
        ours if experts.is_concatenated else ours.unflatten(1, (2, 2)).transpose(1, 2).flatten(1)
    )
    with torch.autocast(device.type, enabled=False):
        found = experts._apply_gate(theirs) if experts.has_gate else experts.act_fn(ours)
    return ((found - expected).abs() / (1 + expected.abs())).amax().item()


_OWN_TYPES = (torch.bfloat16, torch.float16)


def check_call(
    where: str, weights: list[Tensor], x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> None:
    """Raise where a tensor of a call does not fit; what the op itself checks is left to it."""
    shape = tuple(top_k_index.shape)
    fits = x.dim() == len(shape) == 2 and shape[0] == x.shape[0]
    if not fits or top_k_weights.shape != shape:
        raise RuntimeError(
            f"{where}: expected hidden_states [tokens, hidden], top_k_index and top_k_weights "
            f"[tokens, k], got {tuple(x.shape)}, {shape}, {tuple(top_k_weights.shape)}"
        )
    if top_k_index.is_floating_point() or not top_k_weights.is_floating_point():
        raise RuntimeError(
            f"{where}: expected integers in top_k_index and floating point in top_k_weights, got "
            f"{top_k_index.dtype} and {top_k_weights.dtype}"
        )
    cast = _library.autocast_dtype(x) is not None
    for weight in weights:
        own = weight.dtype == x.dtype and weight.dtype in _OWN_TYPES
        if not own and not (cast and weight.dtype in (*_OWN_TYPES, torch.float32)):
            raise RuntimeError(
                f"{where}: expected hidden_states and weights in bfloat16 or all in float16, got "
                f"{x.dtype} and {weight.dtype}; load the model with dtype=torch.bfloat16, or keep "
                "its parameters in float32 and call it under "
                f'torch.autocast("{x.device.type}", torch.bfloat16)'
            )
