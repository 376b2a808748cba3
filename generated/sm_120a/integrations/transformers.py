"""Experts in models of Hugging Face transformers 5, run by cells of this bundle.

    from <this package>.integrations.transformers import register, swap

    swap(model, "grouped_mlp__bf16")  # a model that is there

    model = AutoModelForCausalLM.from_pretrained(  # or where it is made
        name, dtype=torch.bfloat16, experts_implementation=register("grouped_mlp__bf16")
    )

Models keep their classes, parameters and checkpoints; only what runs their experts is another
function, by transformers' `ExpertsInterface`.  Before a cell runs experts their activation is
compared with the cell's own, which is one activation, whatever the model's configuration says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from operator import attrgetter

import torch
from torch import Tensor, nn

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError(f"experts of models: needs transformers 5 or newer: {error}") from error

from .. import _library
from . import _expert_checks as checks
from . import _routing as routing
from ._expert_cell import Cell, Experts
from ._experts import CELLS

STATE = "fusegen_state"
"""The submodule of experts that holds what a recipe keeps between calls."""


def register(cell: str) -> str:
    """Make a cell known to transformers, once or more often.

    Args:
        cell: name of one in `CELLS` that keeps no state.

    Returns:
        its name as an ``experts_implementation``.

    Raises:
        ValueError: there is no such cell, or it keeps state; the message says what to do.
    """
    found = _cell(cell)
    if found.states:
        raise ValueError(
            f"{cell}: expected a cell without state, got one that keeps {_and(found.states)} for "
            f"every layer; make the model first, then: swap(model, {cell!r})"
        )
    return _made_known(found)


def swap(model: nn.Module, cell: str) -> nn.Module:
    """Run all experts of a model by a cell.

    Parameters stay as they are.  Where the recipe keeps state, each layer of experts gets a
    submodule for it, which state dicts have, too; one that is there from an earlier call stays.

    Args:
        model: any module with layers of transformers' experts, wrapped or not.
        cell: name of one in `CELLS`.

    Returns:
        the model.

    Raises:
        ValueError: there is no such cell.
        RuntimeError: the cell computes something else than the experts do, or there are none.
    """
    found = _cell(cell)
    layers: list[Experts] = [layer for layer in model.modules() if checks.are_experts(layer)]
    if not layers:
        raise RuntimeError(
            f"{cell}: {type(model).__name__}: expected layers of experts that dispatch by "
            "transformers' ExpertsInterface, got none; make the cell's module a part of the model"
        )
    for layer in layers:
        checks.check(layer, found)
    implementation = _made_known(found)
    for layer in layers:
        _keep_state(layer, found)
        layer.config._experts_implementation = implementation
    return model


def _cell(name: str) -> Cell:
    if name not in CELLS:
        raise ValueError(
            f"{name}: expected a cell of {_library.FOLDER} that runs experts, which are "
            f"{', '.join(CELLS)}; write another one: "
            "fusegen generate --module MODULE --recipe RECIPE"
        )
    return CELLS[name]


def _made_known(cell: Cell) -> str:
    run = functools.partial(_run, cell, getattr(cell.module, cell.function), cell.module_class)
    ALL_EXPERTS_FUNCTIONS.register(cell.implementation, run)
    return cell.implementation


def _run(
    cell: Cell,
    function: Callable[..., Tensor],
    module_class: type[nn.Module],
    experts: Experts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The forward of experts, as transformers calls it.

    Args:
        cell: that runs it.
        function, module_class: of the cell.
        experts: the layer.
        hidden_states: [tokens, hidden].
        top_k_index: [tokens, k] integers: experts of each token.  One past the last expert is
            somebody else's, as under expert parallelism, and adds nothing.
        top_k_weights: [tokens, k]: what each is weighted by.

    Returns:
        [tokens, hidden], of the type of hidden_states.
    """
    checks.check(experts, cell)
    # Asked for once: where a wrapper makes a parameter, such as PEFT, it makes it each time.
    weights = [getattr(experts, name) for name in checks.names_of(experts)]
    checks.check_call(
        checks.place(experts, cell), weights, hidden_states, top_k_index, top_k_weights
    )
    dtype = _library.autocast_dtype(hidden_states) or hidden_states.dtype
    names = checks.names_of(experts) if experts.has_bias else ()
    biases = [getattr(experts, f"{name}_bias") for name in names]
    top_k = top_k_index.shape[1]
    chosen, order = top_k_index.flatten().sort(stable=True)
    inverse = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.numel(), device=order.device)
    )
    groups = torch.arange(experts.num_experts, device=chosen.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen, groups, right=True)
    split_sizes = ends.diff(prepend=ends.new_zeros(1))
    y = function(
        routing.Spread.apply(hidden_states, order, inverse, top_k, dtype),
        *_by_outputs(experts, weights, dtype, transposed=experts.is_transposed),
        split_sizes,
        top_k_weights.flatten().gather(0, order).float(),
        *_by_outputs(experts, biases, dtype, transposed=False),
        **{scalar.keyword: value for scalar, value in cell.given(experts) if scalar.keyword},
        **_states(cell, module_class, experts),
    )
    return routing.Gather.apply(y, order, inverse, top_k, hidden_states.dtype)


def _by_outputs(
    experts: Experts, tensors: list[Tensor], dtype: torch.dtype, *, transposed: bool
) -> Iterator[Tensor]:
    """Weights or biases as cells read them: of one type, a row per output, gate before up.

    Where experts have them otherwise these are copies, and gradients are copied back.
    """
    for index, tensor in enumerate(tensors):
        rows = tensor.to(dtype)
        if transposed:
            rows = rows.transpose(1, 2)
        if index == 0 and experts.has_gate and not experts.is_concatenated:
            rows = rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        yield rows.contiguous()


def _states(cell: Cell, module_class: type[nn.Module], experts: Experts) -> dict[str, Tensor]:
    if not cell.states:
        return {}
    held = getattr(experts, STATE, None)
    if not isinstance(held, module_class):
        raise RuntimeError(
            f"{checks.place(experts, cell)}: expected a layer with {_and(cell.states)}, got one "
            f"without; call swap(model, {cell.name!r})"
        )
    return {keyword: attrgetter(path)(held) for keyword, path in cell.states}


def _keep_state(experts: Experts, cell: Cell) -> None:
    """Give a layer the state of a cell, and take that of another one from it."""
    held = getattr(experts, STATE, None)
    if cell.states and not isinstance(held, cell.module_class):
        device = getattr(experts, checks.names_of(experts)[0]).device
        # Shapes of states depend on the number of groups alone, so the smallest module has them.
        sizes = {cell.groups: experts.num_experts, **dict.fromkeys(cell.sizes, 1)}
        held = cell.module_class(**sizes, device=device)
        for part in held.modules():
            for name in list(part._parameters):
                part.register_parameter(name, None)
        experts.add_module(STATE, held)
    elif not cell.states and held is not None:
        delattr(experts, STATE)


def _and(states: tuple[tuple[str, str], ...]) -> str:
    return " and ".join(keyword for keyword, _ in states)
